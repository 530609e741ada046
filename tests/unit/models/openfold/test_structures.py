"""Protein chains of mmCIF files, written row by row, and round trips of predicted chains."""

import gzip
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.openfold.residues import ATOM_TYPES, RESTYPES
from hpcai.models.openfold.structures import Chain, read_structure, write_structure
from tests.reference_data import DATA

gemmi = pytest.importorskip("gemmi", reason="gemmi is not installed: structures are NOT tested")
N, CA, CD, SD, NH1, NH2 = (ATOM_TYPES.index(name) for name in ("N", "CA", "CD", "SD", "NH1", "NH2"))
HEAD = (DATA / "openfold/formats/head.cif").read_text()
SMALL = """
    A H 2 GLY N . 1 2 3 1 10 1 / A H 2 GLY CA . 2 2 3 1 11 1 / B D 1 DA P . 0 0 0 1 1 1 / C H . HOH O . 5 5 5 1 1 1
    A H 2 GLY C . 9 9 9 1 10 2"""


def entry(atoms: str, residues: str = "ALA GLY", canonical: str = "?") -> str:
    """Return an mmCIF text. An atom has: label chain, author's chain, residue, name, atom, altloc, x y z, occupancy, B, model."""
    rows = [f"1 {number} {name}" for number, names in enumerate(residues.split(), 1) for name in names.split("/")]
    words = [atom.split() for atom in atoms.replace("\n", " / ").split(" / ") if atom.strip()]
    lines = [f"ATOM {id} X {row[2].replace('.', '99')} {' '.join(row)}" for id, row in enumerate(words)]
    return HEAD.format(canonical=canonical, residues="\n".join(rows)) + "\n".join(lines) + "\n"


def pdb(*residues: str) -> str:
    """Return PDB records of chain A. A residue has: number and insertion code, name, x of its N."""
    split = [residue.split() for residue in residues]
    atoms = [(f"{number} "[:5] if number[-1] != "A" else number, name, float(x) + 1.2 * k, atom)
             for number, name, x in split for k, atom in enumerate(("N", "CA", "C"))]  # fmt: skip
    return "".join(f"HETATM{n:5d}  {atom:3} {name:>3} A{number:>5}   {x:8.3f}   0.000   0.000  1.00 {n:5.2f}\n"
                   for n, (number, name, x, atom) in enumerate(atoms, 1))  # fmt: skip


def read(folder: Path, text: str, chain: str | None = "H") -> Chain:
    (folder / "1abc.cif").write_text(text)
    return read_structure(folder / "1abc.cif", chain).chains["H"]


def test_a_chain_includes_residues_without_atoms(tmp_path: Path) -> None:
    chain = read(tmp_path, entry(SMALL), None)
    assert (chain.name, chain.sequence, chain.aatype.tolist()) == ("1abc_H", "AG", [RESTYPES.index("A"), RESTYPES.index("G")])
    assert chain.mask.sum(1).tolist() == [0, 2] and chain.positions[1, [N, CA]].tolist() == [[1, 2, 3], [2, 2, 3]]
    assert chain.bfactors[1, [N, CA]].tolist() == [10, 11] and not chain.positions[0].any()
    assert (chain.resolution, chain.release, chain.method) == (1.95, date(2009, 12, 31), "x-ray diffraction")
    assert [array.dtype for array in (chain.aatype, chain.positions, chain.mask)] == [np.int64, np.float32, np.float32]
    (tmp_path / "2abc.cif.gz").write_bytes(gzip.compress(entry(SMALL).encode()))
    assert read_structure(tmp_path / "2abc.cif.gz").chains["H"].name == "2abc_H"


def test_alternate_locations_are_selected_by_occupancy_then_order(tmp_path: Path) -> None:
    chain = read(tmp_path, entry("""
        A H 1 ALA N  A 1 0 0 0.3 1 1 / A H 1 ALA N  B 2 0 0 0.7 2 1
        A H 1 ALA CA A 3 0 0 0.5 3 1 / A H 1 ALA CA B 4 0 0 0.5 4 1"""))
    assert chain.positions[0, [N, CA], 0].tolist() == [2, 3] and chain.bfactors[0, [N, CA]].tolist() == [2, 3]


def test_microheterogeneity_uses_the_first_residue(tmp_path: Path) -> None:
    chain = read(tmp_path, entry("""
        A H 1 SER CA A 1 0 0 0.4 1 1 / A H 1 THR CA B 2 0 0 0.6 1 1 / A H 2 GLY CA . 3 0 0 1 1 1""", "SER/THR GLY"))
    assert chain.sequence == "SG" and chain.positions[:, CA, 0].tolist() == [1, 3]


def test_modified_residues_have_the_letter_of_their_parent(tmp_path: Path) -> None:
    residues, atoms = "MSE PCA SEC UNK M3L DAL", "A H 1 MSE SE . 7 0 0 1 1 1 / A H 6 DAL CA . 1 0 0 1 1 1"
    chain = read(tmp_path, entry(atoms, residues, "MQUXKA"))
    assert chain.sequence == "MQXXKA" and chain.positions[0, SD, 0] == 7
    assert read(tmp_path, entry(atoms, residues, "MEXXTYGA")).sequence == "MEXXKA"  # a sequence of another length: gemmi's letters


def test_the_nitrogens_of_arginine_are_named_by_their_distance(tmp_path: Path) -> None:
    chain = read(tmp_path, entry("""
        A H 1 ARG CD . 0 0 0 1 1 1 / A H 1 ARG NH1 . 4 0 0 1 4 1 / A H 1 ARG NH2 . 3 0 0 1 3 1
        A H 2 ARG CD . 0 0 0 1 1 1 / A H 2 ARG NH1 . 3 0 0 1 3 1 / A H 2 ARG NH2 . 4 0 0 1 4 1
        A H 3 ARG NH1 . 4 0 0 1 4 1 / A H 3 ARG NH2 . 3 0 0 1 3 1""", "ARG ARG ARG"))
    assert chain.positions[:, [CD, NH1, NH2], 0].tolist() == [[0, 3, 4], [0, 3, 4], [0, 4, 3]]
    assert chain.bfactors[:, [NH1, NH2]].tolist() == [[3, 4], [3, 4], [4, 3]]


@pytest.mark.parametrize(("text", "chain", "message"), [
    (entry(SMALL)[:-3], None, r"not a complete file: (string:)?\d+:.*Wrong number of values in loop _atom_site"),
    (entry(SMALL), "A", "chain 'A' is not there; the protein chains are H"),
    (entry(SMALL + "\nA H 1 GLY N . 1 2 3 1 1 1"), None, "residue 1 of chain 1abc_H is GLY in _atom_site and ALA in _ent"),
    (entry(SMALL + "\nA H 1 ALA N . 1 nan 3 1 1 1"), None, r"atom N of residue 1 of chain 1abc_H is at \[1.0, nan, 3.0\]"),
    (entry(SMALL).replace("type_symbol", "symbol"), None, "_atom_site lacks columns; expected id, type_symbol, .* as in the PDB"),
    ("<!DOCTYPE html>", None, "neither mmCIF nor PDB with atoms .it seems to be an HTML page.; leave it out"),
    (">q\nAC\n", None, ".it seems to be FASTA or A3M.; leave it out"),
    ("data_r1abcsf\n_cell.length_a 1\n", None, "no atoms ._atom_site. in 1 blocks of mmCIF; leave it out"),
    (pdb("1 ALA 0").replace("   1.200", "********"), None, r"line 2: an atom is at '\*{8}   0.000   0.000', expected three"),
    (pdb("1 MET 0", "9999 GLY 9", "2 GLY 30", "9 ALA 99"), None, "A skip 10,003 residues before 9 ALA, expected 9,999"),
    ("SEQRES   1 A    2  ALA MET\n" + pdb("1 MET 0", "2 GLY 3.7"), None, "residue 2 GLY of chain A is not in SEQRES"),
])  # fmt: skip
def test_a_broken_file_raises(tmp_path: Path, text: str, chain: str | None, message: str) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/1abc.cif: .*{message}"):
        read(tmp_path, text, chain)


CHAIN = pdb("5 MET 0", "6 MSE 3.7", "6A GLY 7.4", "9 LYS 20", "20 VAL 23.7") + "TER\n" + pdb("90 GOL 50", "91 HOH 60")
RECORDS = ("EXPDTA    SOLUTION NMR\nREVDAT   2   01-JAN-03 1ABC    1\nREVDAT   1   17-FEB-99 1ABC    0\n"
           "REMARK   2 RESOLUTION.    2.10 ANGSTROMS.\nSEQRES   1 A    8  ALA MET MSE GLY SER SER LYS VAL\n")  # fmt: skip


def test_pdb_files_have_their_seqres_or_the_residues_of_their_atoms(tmp_path: Path) -> None:
    for name, data in {
        "pdb1abc.ent": CHAIN.encode(), "1abc.pdb": b"\xef\xbb\xbf" + CHAIN.replace("\n", "\r\n").encode(),
        "1abc.cif": gzip.compress(CHAIN.encode()), "1abc.pdb.gz": gzip.compress(b"MODEL 1\n%bENDMDL\nMODEL 2\n" % CHAIN.encode()),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
        entry = read_structure(tmp_path / name)
        chain = entry.chains["A"]
        assert (chain.name, chain.sequence) == ("1abc_A", "MMGXXKV"), "2 of 7 and 8; 10 to 19 are bonded, so that none is missing"
        assert chain.mask.sum(1).tolist() == [3, 3, 3, 0, 0, 3, 3] and chain.bfactors[0, N] == 1
        assert chain.positions[6, N, 0] == np.float32(23.7)
        assert entry.notes == (f"{tmp_path}/{name}: chain A has no sequence: its 5 residues with atoms, 2 X by their numbers",)
    (tmp_path / "1abc.pdb").write_text(RECORDS + CHAIN)
    chain = read_structure(tmp_path / "1abc.pdb").chains["A"]
    assert (chain.sequence, chain.resolution, chain.release, chain.method) == ("AMMGSSKV", 2.1, date(1999, 2, 17), "solution nmr")
    assert chain.mask.sum(1).tolist() == [0, 3, 3, 3, 0, 0, 3, 3]


def test_mmcif_without_sequences_has_the_residues_of_its_atoms(tmp_path: Path) -> None:
    (tmp_path / "1abc.pdb").write_text(CHAIN)
    gemmi.read_structure(str(tmp_path / "1abc.pdb")).make_mmcif_document(gemmi.MmcifOutputGroups(False, atoms=True)).write_file(
        str(tmp_path / "1abc.cif"))  # fmt: skip
    pdb, mmcif = (read_structure(tmp_path / f"1abc.{kind}").chains["A"] for kind in ("pdb", "cif"))
    assert pdb.sequence == mmcif.sequence == "MMGXXKV" and np.array_equal(pdb.positions, mmcif.positions)
    complete = entry(SMALL)
    asym, atoms = "loop_\n_struct_asym.id\n_struct_asym.entity_id\nA 1\nB 2\nC 3\n", entry("A H 2 GLY N . 1 2 3 1 10 1")
    assert read(tmp_path, atoms.replace(asym, "").replace("pdbx_PDB_model_num", "label_entity_id")).sequence == "AG"
    first = read(tmp_path, "data_global\n_journal.year 2000\n" + complete)
    assert first.sequence == "AG" and np.array_equal(first.positions, read(tmp_path, complete).positions)
    read(tmp_path, complete + complete.replace("data_1ABC", "data_2ABC"))
    assert "2 blocks with atoms, the first" in read_structure(tmp_path / "1abc.cif").notes[0]


def predicted() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = (rng.random((21, 37)) < 0.6).astype(np.float32)
    mask[3] = 0
    return np.arange(21), rng.normal(0, 50, (21, 37, 3)).astype(np.float32), mask, rng.uniform(0, 100, 21).astype(np.float32)


@pytest.mark.parametrize("suffix", [".cif", ".pdb"])
def test_a_prediction_is_read_again_by_gemmi(tmp_path: Path, suffix: str) -> None:
    aatype, positions, mask, plddt = predicted()
    write_structure(tmp_path / f"p{suffix}", aatype, positions, mask, plddt, chain="Q")
    ours = read_structure(tmp_path / f"p{suffix}").chains["Q"]
    assert np.array_equal(ours.mask[:20], mask[:20]) and np.allclose(ours.bfactors, plddt[:, None] * ours.mask, atol=0.01)
    chain = gemmi.read_structure(str(tmp_path / f"p{suffix}"))[0]["Q"]
    assert [residue.seqid.num for residue in chain] == [index + 1 for index in range(21) if index != 3]
    for residue in chain:
        index = residue.seqid.num - 1
        assert [atom.name for atom in residue] == [ATOM_TYPES[number] for number in np.flatnonzero(mask[index])]
        assert np.abs([[*atom.pos] for atom in residue] - positions[index][mask[index] > 0]).max() <= 0.001
        assert np.abs(np.array([atom.b_iso for atom in residue]) - plddt[index]).max() <= 0.01
        assert all(atom.element.name == atom.name[0] for atom in residue)


def test_invalid_structures_are_not_written(tmp_path: Path) -> None:
    aatype, positions, mask, plddt = predicted()
    cases = [
        ("p.ent", {}, "ends in '.ent', expected .cif or .pdb"),
        ("p.cif", {"aatype": aatype + 1}, "expected integers .N. from 0 to 20"),
        ("p.cif", {"positions": positions[:, :14]}, r"positions of shape \(21, 14, 3\), expected \(21, 37, 3\)"),
        ("p.cif", {"mask": 0 * mask}, "no atoms"),
        ("p.cif", {"positions": np.where(np.arange(21)[:, None, None] == 6, np.nan, positions)}, "an atom of residue 7 has"),
        ("p.cif", {"chain": "A B"}, "a chain named 'A B'"), ("p.pdb", {"chain": "AA"}, "chain 'AA', .*; write .cif"),
        ("p.pdb", {"positions": positions * 1000}, "coordinates from -.*; PDB has columns for"),
    ]  # fmt: skip
    for name, change, message in cases:
        with pytest.raises(DataError, match=f"^{tmp_path}/{name}: .*{message}"):
            write_structure(tmp_path / name, **{"aatype": aatype, "positions": positions, "mask": mask, "bfactors": plddt} | change)
    assert not list(tmp_path.iterdir())
