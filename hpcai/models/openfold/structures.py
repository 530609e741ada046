"""Read protein chains from mmCIF and PDB files, and write predicted chains to them.

A chain has all residues of its SEQRES record, including those without coordinates. A file without sequences (of a prediction, a
refinement, an editor) has the residues of its atoms, and X where residue numbers skip some. Parsing is by gemmi, with the same
result as the public OpenFold's by Biopython.
"""

import math
import re
import zlib
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcai.errors import DataError
from hpcai.gzip_file import read_decompressed
from hpcai.lazy import import_optional
from hpcai.models.openfold.alignments import BYTE_ORDER_MARK, guess_format
from hpcai.models.openfold.residues import ATOM_ORDER, ATOM_TYPES, RESNAMES, RESTYPES, UNKNOWN

_ADVICE = "correct it, or leave it out"
RESTYPE_ORDER = {letter: number for number, letter in enumerate(RESTYPES)}
RESTYPE_3TO1 = dict(zip(RESNAMES, RESTYPES))
# The first of these that is a number is used; NMR has none.
_RESOLUTION_TAGS = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
_COLUMNS = "id, type_symbol, label_alt_id, label_asym_id, Cartn_x, Cartn_y and Cartn_z"
PDB_RESIDUES, PDB_RANGE = 9999, (-999.999, 9999.999)      # limits of the format's columns; angstrom
MAX_SKIPPED = 9999                                        # residues of a chain that only numbers tell
_BOND = 2.0                                               # angstrom between C and N of neighbours, at most
_ENTRY_NAME = re.compile(r"(?:pdb(?=\w{4}\.ent))?([^.].*?)\.(?:cif|mmcif|pdb|ent)(?:\.gz)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One protein chain of N residues.

    name                    the file and the chain as the authors name it: "5zyh_A"
    sequence                one letter for each residue, modified ones by their parents, X for others
    aatype     [N]          the same as integers
    positions  [N, 37, 3]   angstrom, 0 for masked atoms
    mask       [N, 37]      1 for atoms in the file
    bfactors   [N, 37]      square angstrom; pLDDT of predictions
    resolution              angstrom, None if the method has none
    release                 day of the oldest revision
    method                  "x-ray diffraction"
    """

    name: str
    sequence: str
    aatype: NDArray[np.int64]
    positions: NDArray[np.float32]
    mask: NDArray[np.float32]
    bfactors: NDArray[np.float32]
    resolution: float | None
    release: date | None
    method: str


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The protein chains of a file, by the authors' names, and what was assumed about it."""

    chains: dict[str, Chain]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Polymer:
    """``names`` of the residues of a sequence, several for microheterogeneity, the first of which is that of the sequence;
    gemmi's ``residues`` with atoms, and their numbers from 1; ``canonical``: letters by the PDB, or nothing."""

    chain: str
    names: list[list[str]]
    residues: list[tuple[int, Any]]
    canonical: str = ""


def _gemmi() -> Any:
    return import_optional("gemmi", "structures need", "openfold")


def entry_name(path: Path) -> str | None:
    """Return the entry of a structure's file: 1abc of 1abc.cif, 1abc.pdb.gz or pdb1abc.ent. None for a file of another kind, and
    names that begin with a dot."""
    match = _ENTRY_NAME.fullmatch(path.name)
    return match[1] if match else None


def list_structures(folder: Path) -> list[Path]:
    """Return the files of structures at any depth, mmCIF before PDB, otherwise sorted; files and folders that begin with a dot are
    skipped."""
    paths = (path for path in folder.rglob("*") if entry_name(path) and path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(visible, key=lambda path: ("cif" not in path.name[-7:].lower(), path))


def read_blocks(path: Path) -> tuple[list[Any], bytes]:
    """Return the blocks with atoms, none for a PDB file, and the content."""
    gemmi, data = _gemmi(), read_decompressed(path).removeprefix(BYTE_ORDER_MARK)
    if not data.strip():
        raise DataError(f"{path}: empty, expected mmCIF or PDB; fetch it again, or leave it out")
    if "mmCIF" in guess_format(data):
        document = gemmi.cif.read_string(data)
        blocks = [block for block in document if block.find_mmcif_category("_atom_site.").tags]
        if not blocks:
            raise DataError(f"{path}: no atoms (_atom_site) in {len(document)} blocks of mmCIF; leave it out")
        return blocks, data
    if not re.search(rb"^(?:ATOM  |HETATM).{24}[ \d.-]{24}", data, re.MULTILINE):
        raise DataError(f"{path}: neither mmCIF nor PDB with atoms{guess_format(data)}; leave it out")
    return [], data


def read_structure(path: Path, chain: str | None = None) -> Entry:
    """Read the protein chains of an mmCIF or PDB file, also by gzip, or only ``chain``, from the first model.

    The content determines the format. Of an atom's alternate locations the one with the highest occupancy is used, the first of
    equals. Selenium of MSE is stored as SD, and NH1 of arginine is the one nearer to CD. Raises DataError for a truncated file, a
    chain that is missing or no protein, atoms outside the sequence or different from it, and coordinates that are not numbers.
    """
    path, notes = Path(path), list[str]()
    try:
        blocks, data = read_blocks(path)
        for tag in ("comp_id", "atom_id") if blocks else ():  # gemmi would prefer the names of the authors
            if {f"label_{tag}", f"auth_{tag}"} <= blocks[0].get_mmcif_category("_atom_site.").keys():
                blocks[0].find_loop(f"_atom_site.auth_{tag}").get_loop().remove_column(f"_atom_site.auth_{tag}")
        structure = _gemmi().make_structure_from_block(blocks[0]) if blocks else _gemmi().read_pdb_string(data)
        metadata = _read_metadata(blocks[0], path) if blocks else _pdb_metadata(structure, data, path)
        if not len(structure):
            raise DataError(f"{path}: _atom_site lacks columns; expected {_COLUMNS} as in the PDB; {_ADVICE}")
        while len(structure) > 1:
            del structure[1]
        polymers = _polymers(structure, blocks[0]) if blocks else []
    except (ValueError, RuntimeError, OSError, IndexError, EOFError, zlib.error) as problem:
        if isinstance(problem, DataError):
            raise
        text = " ".join(str(problem).removeprefix("data:").split())
        raise DataError(f"{path}: not a complete file: {text}; fetch it again, or leave it out") from problem
    if len(blocks) > 1:
        notes.append(f"{path}: {len(blocks)} blocks with atoms, the first of them is read")
    polymers = polymers or _polymers_by_atoms(structure, path, notes)
    types = dict(zip(*_columns(blocks[0], "_chem_comp.", "id", "type"))) if blocks else {}

    def is_peptide(name: str) -> bool:
        return "peptide" in str(types.get(name)).lower() or _gemmi().find_tabulated_residue(name).is_amino_acid()

    proteins: dict[str, _Polymer] = {}
    for polymer in polymers:
        if any(is_peptide(name) for names in polymer.names for name in names):
            # Polymers may share the authors' name, such as a peptide bound to its own chain.
            proteins[polymer.chain] = max(proteins.get(polymer.chain, polymer), polymer, key=lambda each: len(each.names))
    if not proteins:
        raise DataError(f"{path}: no protein chain with coordinates, expected at least one")
    if chain is not None and chain not in proteins:
        text = "is not a protein" if any(chain == each.name for each in structure[0]) else "is not there"
        raise DataError(f"{path}: chain {chain!r} {text}; the protein chains are {', '.join(sorted(proteins))}")
    stem = entry_name(path) or path.name
    selected = proteins if chain is None else {chain: proteins[chain]}
    return Entry({name: _build_chain(f"{stem}_{name}", each, metadata, path) for name, each in selected.items()}, tuple(notes))


def _polymers(structure: Any, block: Any) -> list[_Polymer]:
    """Return the polymers of mmCIF with a sequence and atoms, in the order of their atoms."""
    sequences: dict[str, dict[int, list[str]]] = {}
    for entity, number, name in zip(*_columns(block, "_entity_poly_seq.", "entity_id", "num", "mon_id")):
        sequences.setdefault(entity, {}).setdefault(int(number), []).append(name or "UNK")
    canonical = dict(zip(*_columns(block, "_entity_poly.", "entity_id", "pdbx_seq_one_letter_code_can")))
    entities = dict(zip(*_columns(block, "_struct_asym.", "id", "entity_id")))
    polymers: dict[str, _Polymer] = {}
    for chain in structure[0]:
        for residue in chain:
            entity, label = entities.get(residue.subchain, residue.entity_id), residue.subchain
            if entity not in sequences or residue.label_seq is None:    # a ligand may have the name of the chain
                continue
            if label not in polymers:
                names = [options for _, options in sorted(sequences[entity].items())]
                polymers[label] = _Polymer(chain.name, names, [], "".join((canonical.get(entity) or "").split()))
            polymers[label].residues.append((residue.label_seq, residue))
    return list(polymers.values())


def _polymers_by_atoms(structure: Any, path: Path, notes: list[str]) -> list[_Polymer]:
    """Return the polymers of a file without sequences, or with those of SEQRES."""
    structure.add_entity_types(True)
    structure.assign_subchains(True)
    structure.ensure_entities()
    structure.assign_label_seq_id()
    polymers: list[_Polymer] = []
    for chain in structure[0]:
        residues, chain.name = chain.get_polymer(), chain.name or "A"
        if not len(residues):
            continue
        entity = structure.get_entity_of(residues)
        if entity and entity.full_sequence:
            names, numbers = list(entity.full_sequence), [residue.label_seq for residue in residues]
            if None in numbers:
                residue = residues[numbers.index(None)]
                raise DataError(f"{path}: residue {residue.seqid} {residue.name} of chain {chain.name} is not in SEQRES; {_ADVICE}")
        else:
            names, numbers = _number_by_atoms(residues, chain.name, path, notes)
        polymers.append(_Polymer(chain.name, [name.split(",") for name in names], list(zip(numbers, residues))))
    if not polymers:
        raise DataError(f"{path}: no polymer of amino acids or nucleotides with atoms; {_ADVICE}")
    return polymers


def _number_by_atoms(polymer: Any, name: str, path: Path, notes: list[str]) -> tuple[list[str], list[int]]:
    """Return the residues of a polymer, UNK for each one that the numbers skip without a bond, and the number of each from 1."""
    residues, numbers, previous, skipped = list[str](), list[int](), None, 0
    for residue in polymer:
        if previous is not None and residue.seqid == previous.seqid:    # microheterogeneity
            residues[-1] += f",{residue.name}"
        else:
            gap = 0 if previous is None or _bonded(previous, residue) else max(0, residue.seqid.num - previous.seqid.num - 1)
            if (skipped := skipped + gap) > MAX_SKIPPED:
                text = f"numbers of chain {name} skip {skipped:,} residues before {residue.seqid} {residue.name}"
                raise DataError(f"{path}: {text}, expected {MAX_SKIPPED:,} at most; {_ADVICE}")
            residues += ["UNK"] * gap + [residue.name]
        numbers.append(len(residues))
        previous = residue
    notes.append(f"{path}: chain {name} has no sequence: its {len(polymer)} residues with atoms, {skipped} X by their numbers")
    return residues, numbers


def _bonded(residue: Any, following: Any) -> bool:
    c, n = residue.find_atom("C", "*"), following.find_atom("N", "*")
    return bool(c and n and c.pos.dist(n.pos) < _BOND)


def _pdb_metadata(structure: Any, data: bytes, path: Path) -> tuple[float | None, date | None, str]:
    """Return resolution, release and method. Raises DataError for coordinates that gemmi would read as 0."""
    for number, line in enumerate(data.splitlines(), 1):
        if line[:6] in (b"ATOM  ", b"HETATM") and not re.fullmatch(rb"(?: *-?\d+\.\d* *){3}", line[30:54]):
            text = f"line {number}: an atom is at {line[30:54].decode('ascii', 'replace')!r}, expected three numbers"
            raise DataError(f"{path}: {text}; {_ADVICE}")
    revisions = re.findall(rb"^REVDAT.{7}(\d\d-[A-Z]{3}-\d\d)", data, re.MULTILINE)
    days = [datetime.strptime(day.decode(), "%d-%b-%y").date() for day in revisions]
    return structure.resolution or None, min(days, default=None), dict(structure.info).get("_exptl.method", "").lower()


def _columns(block: Any, category: str, *tags: str) -> list[list[Any]]:
    """Return columns of a category of mmCIF, empty ones if it lacks them. Missing values are None or False."""
    table = block.get_mmcif_category(category)
    return [table.get(tag, []) for tag in tags]


def _read_metadata(block: Any, path: Path) -> tuple[float | None, date | None, str]:
    resolution = None
    for category, tag in (name.split(".") for name in _RESOLUTION_TAGS):
        value = next(iter(_columns(block, f"{category}.", tag)[0]), None)
        number = _gemmi().cif.as_number(value) if value else math.nan
        if math.isfinite(number) and number > 0:
            resolution = number
            break
    days = [day for day in _columns(block, "_pdbx_audit_revision_history.", "revision_date")[0] if day]
    try:
        release = date.fromisoformat(min(days)) if days else None
    except ValueError as problem:
        text = f"_pdbx_audit_revision_history.revision_date {min(days)!r}"
        raise DataError(f"{path}: {text}, expected a day such as 2018-05-30; {_ADVICE}") from problem
    methods = _columns(block, "_exptl.", "method")[0]
    return resolution, release, ",".join(method.lower() for method in methods if method)


def _build_chain(name: str, polymer: _Polymer, metadata: tuple[float | None, date | None, str], path: Path) -> Chain:
    shape, sequence = (len(polymer.names), len(ATOM_TYPES)), _sequence(polymer)
    positions, (mask, bfactors) = np.zeros((*shape, 3), np.float32), np.zeros((2, *shape), np.float32)
    occupancies = np.full(shape, -np.inf)
    for number, residue in polymer.residues:
        if not 1 <= number <= len(polymer.names):
            text = f"residue {number} of chain {name} has atoms, its sequence goes from 1 to {len(polymer.names)}"
            raise DataError(f"{path}: {text}; {_ADVICE}")
        names = polymer.names[number - 1]
        if residue.name not in names:
            text = f"residue {number} of chain {name} is {residue.name} in _atom_site and {' or '.join(names)} in _entity_poly_seq"
            raise DataError(f"{path}: {text}; {_ADVICE}")
        for atom in residue if residue.name == names[0] else ():
            column = ATOM_ORDER.get("SD" if (residue.name, atom.name) == ("MSE", "SE") else atom.name)
            if column is None or atom.occ <= occupancies[number - 1, column]:
                continue
            at, xyz = (number - 1, column), atom.pos.tolist()
            if not all(abs(x) < np.finfo(np.float32).max for x in xyz):
                text = f"atom {atom.name} of residue {number} of chain {name} is at {xyz}, expected three numbers"
                raise DataError(f"{path}: {text}; {_ADVICE}")
            positions[at], mask[at], occupancies[at] = xyz, 1, atom.occ
            bfactors[at] = atom.b_iso if math.isfinite(atom.b_iso) else 0
    cd, nh1, nh2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
    for row in (index for index, names in enumerate(polymer.names) if names[0] == "ARG"):  # NH1 is the one nearer to CD
        to_nh1, to_nh2 = (np.linalg.norm(positions[row, nh] - positions[row, cd]) for nh in (nh1, nh2))
        if mask[row, [cd, nh1, nh2]].all() and to_nh1 > to_nh2:
            for array in (positions, mask, bfactors):
                array[row, [nh1, nh2]] = array[row, [nh2, nh1]]
    aatype = np.array([RESTYPE_ORDER.get(letter, UNKNOWN) for letter in sequence], np.int64)
    return Chain(name, sequence, aatype, positions, mask, bfactors, *metadata)


def _sequence(polymer: _Polymer) -> str:
    """Return the sequence. Modified residues have the letters of the PDB, otherwise gemmi's. The PDB's text has several letters for
    a chromophore, and then a wrong length."""
    letters = []
    canonical = polymer.canonical if len(polymer.canonical) == len(polymer.names) else "X" * len(polymer.names)
    for names, letter_from_pdb in zip(polymer.names, canonical):
        tabulated = _gemmi().find_tabulated_residue(names[0])
        tabulated_letter = tabulated.one_letter_code.upper() if tabulated.is_amino_acid() else "X"
        letter = RESTYPE_3TO1.get(names[0]) or (letter_from_pdb if letter_from_pdb in RESTYPE_ORDER else tabulated_letter)
        letters.append(letter if letter in RESTYPE_ORDER else "X")
    return "".join(letters)


def write_structure(path: Path, aatype: ArrayLike, positions: ArrayLike, mask: ArrayLike, bfactors: ArrayLike, *,
                    name: str = "model", chain: str = "A") -> None:  # fmt: skip
    """Write one chain as mmCIF or PDB, by the suffix .cif or .pdb, with residues numbered from 1.

    aatype [N], positions [N, 37, 3] in angstrom, mask [N, 37]; bfactors [N, 37], or [N] for all atoms of a residue, such as pLDDT.
    Raises DataError for wrong shapes, values that are not finite, and values outside the columns of the PDB format.
    """
    path = Path(path)
    types = np.asarray(aatype)
    xyz, present, b = np.asarray(positions, np.float64), np.asarray(mask) > 0, np.asarray(bfactors, np.float64)
    b = np.broadcast_to(b[:, None], present.shape) if b.ndim == 1 and len(b) == len(present) else b
    _check_writable(path, types, xyz, present, b, chain)
    module = _gemmi()
    structure, model, gemmi_chain = module.Structure(), module.Model(1), module.Chain(chain)
    structure.name = name
    names = [RESNAMES[number] if number < UNKNOWN else "UNK" for number in types.tolist()]
    for index, residue_name in enumerate(names):
        residue = module.Residue()
        residue.name, residue.seqid, residue.label_seq = residue_name, module.SeqId(index + 1, " "), index + 1
        residue.subchain, residue.entity_id, residue.entity_type, residue.het_flag = chain, "1", module.EntityType.Polymer, "A"
        for atom_index in np.flatnonzero(present[index]):
            atom = module.Atom()
            atom.name, atom.element, atom.occ = ATOM_TYPES[atom_index], module.Element(ATOM_TYPES[atom_index][0]), 1.0
            atom.pos, atom.b_iso = module.Position(*xyz[index, atom_index]), float(b[index, atom_index])
            residue.add_atom(atom)
        if len(residue):
            gemmi_chain.add_residue(residue)
    model.add_chain(gemmi_chain)
    structure.add_model(model)
    entity = module.Entity("1")
    entity.entity_type, entity.polymer_type = module.EntityType.Polymer, module.PolymerType.PeptideL
    entity.subchains, entity.full_sequence = [chain], names
    structure.entities.append(entity)
    structure.assign_serial_numbers()
    if path.suffix == ".cif":
        groups = module.MmcifOutputGroups(True)
        groups.cell = groups.symmetry = False               # a prediction is no crystal
        document = structure.make_mmcif_document(groups)
        for row in document[0].find("_chem_comp.", ["id", "type"]):     # readers recognise proteins by these
            row[1] = "'peptide linking'" if row[0] == "GLY" else "'L-peptide linking'"
        text = document.as_string()
    else:
        text = structure.make_pdb_string(module.PdbWriteOptions(cryst1_record=False))
    path.write_text(text, encoding="ascii")


def _check_writable(path: Path, types: NDArray[Any], xyz: NDArray[np.float64], present: NDArray[np.bool_], b: NDArray[np.float64],
            chain: str) -> None:  # fmt: skip
    length = len(types)
    shapes = {"positions": (xyz, (length, 37, 3)), "mask": (present, (length, 37)), "bfactors": (b, (length, 37))}
    if path.suffix not in (".cif", ".pdb"):
        raise DataError(f"{path}: ends in {path.suffix!r}, expected .cif or .pdb")
    if not re.fullmatch("[A-Za-z0-9]+", chain):
        raise DataError(f"{path}: a chain named {chain!r}, expected letters and digits")
    if types.ndim != 1 or types.dtype.kind not in "iu" or not ((types >= 0) & (types <= UNKNOWN)).all():
        raise DataError(f"{path}: aatype of {types.dtype} {types.shape}, expected integers [N] from 0 to {UNKNOWN}")
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise DataError(f"{path}: {name} of shape {array.shape}, expected {shape} for {length} residues")
    if not present.any():
        raise DataError(f"{path}: no atoms in the mask, expected at least one")
    if not (np.isfinite(xyz[present]).all() and np.isfinite(b[present]).all()):
        residue = int(np.argmax((present & ~(np.isfinite(xyz).all(2) & np.isfinite(b))).any(1))) + 1
        raise DataError(f"{path}: an atom of residue {residue} has a coordinate or B factor that is not finite")
    if path.suffix == ".pdb":
        low, high = PDB_RANGE
        if length > PDB_RESIDUES or len(chain) != 1 or not ((xyz[present] >= low) & (xyz[present] <= high)).all():
            text = f"{length} residues of chain {chain!r}, coordinates from {xyz[present].min():.3f} to {xyz[present].max():.3f}"
            raise DataError(f"{path}: {text}; PDB has columns for {PDB_RESIDUES}, one character,  {low} to {high}; write .cif")
