"""Read protein chains from mmCIF and PDB files, and write predicted chains to them.

A chain has all residues of its SEQRES record, including those without coordinates. A file without sequences (of a prediction, a
refinement, an editor) has the residues of its atoms, and X where residue numbers skip some. Parsing is by gemmi, with the same
result as the public OpenFold's by Biopython.
"""

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
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
_CATEGORIES = ("_atom_site.", "_entity_poly_seq.", "_entity_poly.", "_struct_asym.", "_chem_comp.", "_exptl.",
               "_pdbx_audit_revision_history.", *(tag.split(".")[0] + "." for tag in _RESOLUTION_TAGS))  # fmt: skip
_SITE_TAGS = ("label_asym_id", "auth_asym_id", "label_seq_id", "label_comp_id", "label_atom_id", "Cartn_x", "Cartn_y", "Cartn_z")
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
    """Residue names by number, several for microheterogeneity; the first is that of the sequence."""

    residues: dict[int, list[str]]
    canonical: str


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
        block = blocks[0] if blocks else _gemmi().cif.Block("PDB")
        tables = {name: block.get_mmcif_category(name) for name in _CATEGORIES}  # missing values are None or False
        site = tables["_atom_site."]
        has_chains = tables["_struct_asym."] or "label_entity_id" in site
        if not (tables["_entity_poly_seq."] and has_chains and {*_SITE_TAGS} <= {*site}):
            structure = _gemmi().make_structure_from_block(blocks[0]) if blocks else _gemmi().read_pdb_string(data)
            tables |= ({} if blocks else _pdb_metadata(structure, data, path)) | _make_tables(structure, path, notes)
    except (ValueError, RuntimeError, OSError, IndexError, EOFError, zlib.error) as problem:
        if isinstance(problem, DataError):
            raise
        text = " ".join(str(problem).removeprefix("data:").split())
        raise DataError(f"{path}: not a complete file: {text}; fetch it again, or leave it out") from problem
    if len(blocks) > 1:
        notes.append(f"{path}: {len(blocks)} blocks with atoms, the first of them is read")
    metadata = _read_metadata(tables, path)
    polymers = _polymers(tables, path)
    site, names = tables["_atom_site."], dict[str, str]()  # the authors' name of every chain in the first model
    rows: dict[str, list[int]] = defaultdict(list)  # of each protein there
    asyms, authors, *_ = _columns(site, "_atom_site.", _SITE_TAGS, path)
    models = site.get("pdbx_PDB_model_num") or [None] * len(asyms)
    for row, (label, author, model) in enumerate(zip(asyms, authors, models)):
        if model == models[0]:
            names[label] = author or label
            if label in polymers:
                rows[label].append(row)
    if not rows:
        text = f"{len(polymers)} protein chains in _entity_poly_seq, none with atoms" if polymers else "no protein chain"
        raise DataError(f"{path}: {text}; expected at least one with coordinates")
    labels: dict[str, str] = {}
    for label in rows:                  # Polymers may share the authors' name, such as a peptide bound to its own chain.
        if names[label] not in labels or len(polymers[label].residues) > len(polymers[labels[names[label]]].residues):
            labels[names[label]] = label
    if chain is not None and chain not in labels:
        text = "is not a protein" if chain in names.values() else "is not there"
        raise DataError(f"{path}: chain {chain!r} {text}; the protein chains are {', '.join(sorted(labels))}")
    stem = entry_name(path) or path.name
    chains = {
        author: _build_chain(f"{stem}_{author}", polymers[label], site, rows[label], metadata, path)
        for author, label in labels.items() if chain in (None, author)
    }  # fmt: skip
    return Entry(chains, tuple(notes))


read_mmcif = read_structure                     # the name of earlier versions


def _make_tables(structure: Any, path: Path, notes: list[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the categories of polymers and their atoms for a file without sequences, or with those of SEQRES."""
    while len(structure) > 1:
        del structure[1]
    structure.add_entity_types(True)
    structure.assign_subchains(True)
    structure.ensure_entities()
    structure.assign_label_seq_id()
    sequences, asyms, site = list[tuple[str, int, str]](), list[str](), list[tuple[Any, ...]]()
    for chain in structure[0] if len(structure) else []:
        polymer, name = chain.get_polymer(), chain.name or "A"
        if not len(polymer):
            continue
        label, entity = polymer[0].subchain, structure.get_entity_of(polymer)
        asyms.append(label)
        if entity and entity.full_sequence:
            residues, numbers = list(entity.full_sequence), [residue.label_seq for residue in polymer]
            if None in numbers:
                residue = polymer[numbers.index(None)]
                raise DataError(f"{path}: residue {residue.seqid} {residue.name} of chain {name} is not in SEQRES; {_ADVICE}")
        else:
            residues, numbers = _number_by_atoms(polymer, name, path, notes)
        sequences += [(label, n, option) for n, names in enumerate(residues, 1) for option in names.split(",")]
        site += [(label, name, str(n), residue.name, atom.name, *map(repr, atom.pos.tolist()), repr(atom.occ), repr(atom.b_iso))
                 for residue, n in zip(polymer, numbers) for atom in residue]  # fmt: skip
    if not site:
        raise DataError(f"{path}: no polymer of amino acids or nucleotides with atoms; {_ADVICE}")
    return {
        "_atom_site.": dict(zip((*_SITE_TAGS, "occupancy", "B_iso_or_equiv"), map(list, zip(*site)))),
        "_entity_poly_seq.": dict(zip(("entity_id", "num", "mon_id"), map(list, zip(*sequences)))),
        "_struct_asym.": {"id": asyms, "entity_id": asyms}, "_entity_poly.": {},
    }  # fmt: skip


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


def _pdb_metadata(structure: Any, data: bytes, path: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the categories of resolution, method and release. Raises DataError for coordinates that gemmi would read as 0."""
    for number, line in enumerate(data.splitlines(), 1):
        if line[:6] in (b"ATOM  ", b"HETATM") and not re.fullmatch(rb"(?: *-?\d+\.\d* *){3}", line[30:54]):
            text = f"line {number}: an atom is at {line[30:54].decode('ascii', 'replace')!r}, expected three numbers"
            raise DataError(f"{path}: {text}; {_ADVICE}")
    revisions = re.findall(rb"^REVDAT.{7}(\d\d-[A-Z]{3}-\d\d)", data, re.MULTILINE)
    days = [datetime.strptime(day.decode(), "%d-%b-%y").date().isoformat() for day in revisions]
    method = dict(structure.info).get("_exptl.method")
    return {
        "_refine.": {"ls_d_res_high": [str(structure.resolution)]}, "_exptl.": {"method": [method]},
        "_pdbx_audit_revision_history.": {"revision_date": days},
    }  # fmt: skip


def _columns(table: dict[str, list[Any]], category: str, tags: Iterable[str], path: Path) -> list[list[Any]]:
    missing = [tag for tag in tags if tag not in table]
    if missing:
        raise DataError(f"{path}: no {category}{missing[0]}, expected an entry with sequences and atoms as in the PDB; {_ADVICE}")
    return [table[tag] for tag in tags]


def _read_metadata(tables: dict[str, dict[str, list[Any]]], path: Path) -> tuple[float | None, date | None, str]:
    resolution = None
    for category, tag in (name.split(".") for name in _RESOLUTION_TAGS):
        value = next(iter(tables[category + "."].get(tag, [])), None)
        number = _gemmi().cif.as_number(value) if value else math.nan
        if math.isfinite(number) and number > 0:
            resolution = number
            break
    days = [day for day in tables["_pdbx_audit_revision_history."].get("revision_date", []) if day]
    try:
        release = date.fromisoformat(min(days)) if days else None
    except ValueError as problem:
        text = f"_pdbx_audit_revision_history.revision_date {min(days)!r}"
        raise DataError(f"{path}: {text}, expected a day such as 2018-05-30; {_ADVICE}") from problem
    return resolution, release, ",".join(method.lower() for method in tables["_exptl."].get("method", []) if method)


def _polymers(tables: dict[str, dict[str, list[Any]]], path: Path) -> dict[str, _Polymer]:
    """Return the proteins by label_asym_id: polymers with at least one peptide residue."""
    residues: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    entities, numbers, monomers = _columns(tables["_entity_poly_seq."], "_entity_poly_seq.", ("entity_id", "num", "mon_id"), path)
    for entity, number, monomer in zip(entities, numbers, monomers):
        residues[entity][_parse_int(number, "_entity_poly_seq.num", path)].append(monomer or "UNK")
    types = {name: str(kind).lower() for name, kind in zip(*(tables["_chem_comp."].get(tag, []) for tag in ("id", "type")))}

    def is_peptide(monomer: str) -> bool:
        return "peptide" in types.get(monomer, "") or _gemmi().find_tabulated_residue(monomer).is_amino_acid()

    peptides = {name for name in set(monomers) if name and is_peptide(name)}
    canonical = dict(zip(*(tables["_entity_poly."].get(tag, []) for tag in ("entity_id", "pdbx_seq_one_letter_code_can"))))
    if "id" in tables["_struct_asym."]:
        labels, owners = _columns(tables["_struct_asym."], "_struct_asym.", ("id", "entity_id"), path)
    else:
        labels, owners = _columns(tables["_atom_site."], "_atom_site.", ("label_asym_id", "label_entity_id"), path)
    return {
        label: _Polymer(residues[entity], "".join((canonical.get(entity) or "").split())) for label, entity in zip(labels, owners)
        if entity in residues and any(name in peptides for names in residues[entity].values() for name in names)
    }  # fmt: skip


def _build_chain(name: str, polymer: _Polymer, site: dict[str, list[Any]], rows: list[int],
           metadata: tuple[float | None, date | None, str], path: Path) -> Chain:  # fmt: skip
    order = {number: index for index, number in enumerate(sorted(polymer.residues))}
    sequence = _sequence(polymer)
    number, monomers, atoms, *xyz = (site[tag] for tag in _SITE_TAGS[2:])
    occupancy, bfactor = (site.get(tag) or [None] * len(atoms) for tag in ("occupancy", "B_iso_or_equiv"))
    as_number = _gemmi().cif.as_number
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for row in rows:
        if not number[row]:             # a ligand with the name of the chain
            continue
        seq, monomer = _parse_int(number[row], "_atom_site.label_seq_id", path), monomers[row]
        names = polymer.residues.get(seq)
        if names is None:
            text = f"residue {seq} of chain {name} has atoms, its sequence goes from {min(order)} to {max(order)}"
            raise DataError(f"{path}: {text}; {_ADVICE}")
        if monomer not in names:
            text = f"residue {seq} of chain {name} is {monomer} in _atom_site and {' or '.join(names)} in _entity_poly_seq"
            raise DataError(f"{path}: {text}; {_ADVICE}")
        atom_index = ATOM_ORDER.get("SD" if monomer == "MSE" and atoms[row] == "SE" else atoms[row])
        if atom_index is None or monomer != names[0]:
            continue
        occupancy_value = as_number(occupancy[row]) if occupancy[row] else 1.0
        if (order[seq], atom_index) not in best or occupancy_value > best[order[seq], atom_index][0]:
            best[order[seq], atom_index] = occupancy_value, row
    positions, mask = np.zeros((len(order), len(ATOM_TYPES), 3), np.float32), np.zeros((len(order), len(ATOM_TYPES)), np.float32)
    bfactors = np.zeros_like(mask)
    if best:
        index = tuple(np.array(list(best)).T)
        taken = [row for _, row in best.values()]
        coordinates = np.array([[as_number(axis[row]) if axis[row] else math.nan for axis in xyz] for row in taken])
        if not (np.abs(coordinates) < np.finfo(np.float32).max).all():
            row = taken[int(np.argmax(~(np.abs(coordinates) < np.finfo(np.float32).max).all(1)))]
            text = f"atom {atoms[row]} of residue {number[row]} of chain {name} is at {[axis[row] or '?' for axis in xyz]}"
            raise DataError(f"{path}: {text}, expected three numbers; {_ADVICE}")
        positions[index], mask[index] = coordinates, 1
        bfactors[index] = np.nan_to_num([as_number(bfactor[row]) if bfactor[row] else 0.0 for row in taken], posinf=0.0, neginf=0.0)
    cd, nh1, nh2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
    for row in (index for seq, index in order.items() if polymer.residues[seq][0] == "ARG"):  # NH1 is the one nearer to CD
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
    canonical = polymer.canonical if len(polymer.canonical) == len(polymer.residues) else "X" * len(polymer.residues)
    for (_, names), letter_from_pdb in zip(sorted(polymer.residues.items()), canonical):
        tabulated = _gemmi().find_tabulated_residue(names[0])
        tabulated_letter = tabulated.one_letter_code.upper() if tabulated.is_amino_acid() else "X"
        letter = RESTYPE_3TO1.get(names[0]) or (letter_from_pdb if letter_from_pdb in RESTYPE_ORDER else tabulated_letter)
        letters.append(letter if letter in RESTYPE_ORDER else "X")
    return "".join(letters)


def _parse_int(value: Any, tag: str, path: Path) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise DataError(f"{path}: {tag} {value or '?'!r}, expected an integer; {_ADVICE}") from None


# ---- writing


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
