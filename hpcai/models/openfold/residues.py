"""The twenty amino acids: names, atoms, rigid groups, ideal geometry and stereochemistry, as tables by residue type.

Residue types are numbered in the order of ``RESTYPES``; 20 is X, an unknown one. In alignments 21 is a gap and 22 a masked letter.
(HHblits numbers the twenty by letter instead, A C D E ...; no table here does.) Atoms are indexed in two ways: atom37, the same
names for all residues, and atom14, names per residue type. An X has no atoms and no geometry; it has the backbone and psi groups,
so that its frames are known where its atoms are. All arrays are read-only.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESTYPES = "ARNDCQEGHILKMFPSTWYV"  # sorted by three-letter name
UNKNOWN, GAP, MASKED = 20, 21, 22
RESNAMES = (
    "ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE",
    "LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL",
)  # fmt: skip
ATOM_TYPES = (
    "N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1", "ND2", "OD1", "OD2", "SD",
    "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2", "NH1", "NH2", "OH", "CZ", "CZ2", "CZ3", "NZ", "OXT",
)  # fmt: skip
ATOM_ORDER = {name: place for place, name in enumerate(ATOM_TYPES)}
VAN_DER_WAALS = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}  # radii, angstrom

# From one residue to the next: mean and standard deviation.
C_N_LENGTH = (1.329, 0.014), (1.341, 0.016)  # angstrom; the second if the next residue is proline
COS_CA_C_N = -0.4473, 0.0311
COS_C_N_CA = -0.5203, 0.0353

# ---- sources: one line per residue, continued by indented lines

# The name is followed by the last atoms of chi1, chi2 ..., the angles along N, CA, CB and these. Then all atoms in the order of
# atom14: name, rigid group (0 backbone, 1 pre-omega, 2 phi, 3 psi, 4 to 7 chi1 to chi4; 1 and 2 have hydrogens only),
# position in the group's frame, in angstrom. A group rotates about x, the bond that ends at its origin; the last atom of its
# angle has z = 0 and y > 0. Values: AlphaFold 2, which increases the angle at proline's CD by 2 degrees.
_ATOMS = """
ALA: N 0 -0.525 1.363 0, CA 0 0 0 0, C 0 1.526 0 0, O 3 0.627 1.062 0, CB 0 -0.529 -0.774 -1.205
ARG CG CD NE CZ: N 0 -0.524 1.362 0, CA 0 0 0 0, C 0 1.525 0 0, O 3 0.626 1.062 0, CB 0 -0.524 -0.778 -1.209,
    CG 4 0.616 1.390 0, CD 5 0.564 1.414 0, NE 6 0.539 1.357 0, CZ 7 0.758 1.093 0, NH1 7 0.206 2.301 0, NH2 7 2.078 0.978 0
ASN CG OD1: N 0 -0.536 1.357 0, CA 0 0 0 0, C 0 1.526 0 0, O 3 0.625 1.062 0, CB 0 -0.531 -0.787 -1.200, CG 4 0.584 1.399 0,
    OD1 5 0.633 1.059 0, ND2 5 0.593 -1.188 0.001
ASP CG OD1: N 0 -0.525 1.362 0, CA 0 0 0 0, C 0 1.527 0 0, O 3 0.626 1.062 0, CB 0 -0.526 -0.778 -1.208, CG 4 0.593 1.398 0,
    OD1 5 0.610 1.091 0, OD2 5 0.592 -1.101 -0.003
CYS SG: N 0 -0.522 1.362 0, CA 0 0 0 0, C 0 1.524 0 0, O 3 0.625 1.062 0, CB 0 -0.519 -0.773 -1.212, SG 4 0.728 1.653 0
GLN CG CD OE1: N 0 -0.526 1.361 0, CA 0 0 0 0, C 0 1.526 0 0, O 3 0.626 1.062 0, CB 0 -0.525 -0.779 -1.207,
    CG 4 0.615 1.393 0, CD 5 0.587 1.399 0, OE1 6 0.634 1.060 0, NE2 6 0.593 -1.189 -0.001
GLU CG CD OE1: N 0 -0.528 1.361 0, CA 0 0 0 0, C 0 1.526 0 0, O 3 0.626 1.062 0, CB 0 -0.526 -0.781 -1.207,
    CG 4 0.615 1.392 0, CD 5 0.600 1.397 0, OE1 6 0.607 1.095 0, OE2 6 0.589 -1.104 -0.001
GLY: N 0 -0.572 1.337 0, CA 0 0 0 0, C 0 1.517 0 0, O 3 0.626 1.062 0
HIS CG ND1: N 0 -0.527 1.360 0, CA 0 0 0 0, C 0 1.525 0 0, O 3 0.625 1.063 0, CB 0 -0.525 -0.778 -1.208, CG 4 0.600 1.370 0,
    ND1 5 0.744 1.160 0, CD2 5 0.889 -1.021 0.003, CE1 5 2.030 0.851 0.002, NE2 5 2.145 -0.466 0.004
ILE CG1 CD1: N 0 -0.493 1.373 0, CA 0 0 0 0, C 0 1.527 0 0, O 3 0.627 1.062 0, CB 0 -0.536 -0.793 -1.213,
    CG1 4 0.534 1.437 0, CG2 4 0.540 -0.785 -1.199, CD1 5 0.619 1.391 0
LEU CG CD1: N 0 -0.520 1.363 0, CA 0 0 0 0, C 0 1.525 0 0, O 3 0.625 1.063 0, CB 0 -0.522 -0.773 -1.214, CG 4 0.678 1.371 0,
    CD1 5 0.530 1.430 0, CD2 5 0.535 -0.774 1.200
LYS CG CD CE NZ: N 0 -0.526 1.362 0, CA 0 0 0 0, C 0 1.526 0 0, O 3 0.626 1.062 0, CB 0 -0.524 -0.778 -1.208,
    CG 4 0.619 1.390 0, CD 5 0.559 1.417 0, CE 6 0.560 1.416 0, NZ 7 0.554 1.387 0
MET CG SD CE: N 0 -0.521 1.364 0, CA 0 0 0 0, C 0 1.525 0 0, O 3 0.625 1.062 0, CB 0 -0.523 -0.776 -1.210,
    CG 4 0.613 1.391 0, SD 5 0.703 1.695 0, CE 6 0.320 1.786 0
PHE CG CD1: N 0 -0.518 1.363 0, CA 0 0 0 0, C 0 1.524 0 0, O 3 0.626 1.062 0, CB 0 -0.525 -0.776 -1.212, CG 4 0.607 1.377 0,
    CD1 5 0.709 1.195 0, CD2 5 0.706 -1.196 0, CE1 5 2.102 1.198 0, CE2 5 2.098 -1.201 0, CZ 5 2.794 -0.003 -0.001
PRO CG CD: N 0 -0.566 1.351 0, CA 0 0 0 0, C 0 1.527 0 0, O 3 0.621 1.066 0, CB 0 -0.546 -0.611 -1.293, CG 4 0.382 1.445 0,
    CD 5 0.477 1.424 0
SER OG: N 0 -0.529 1.360 0, CA 0 0 0 0, C 0 1.525 0 0, O 3 0.626 1.062 0, CB 0 -0.518 -0.777 -1.211, OG 4 0.503 1.325 0
THR OG1: N 0 -0.517 1.364 0, CA 0 0 0 0, C 0 1.526 0 0, O 3 0.626 1.062 0, CB 0 -0.516 -0.793 -1.215, OG1 4 0.472 1.353 0,
    CG2 4 0.550 -0.718 -1.228
TRP CG CD1: N 0 -0.521 1.363 0, CA 0 0 0 0, C 0 1.525 0 0, O 3 0.627 1.062 0, CB 0 -0.523 -0.776 -1.212, CG 4 0.609 1.370 0,
    CD1 5 0.824 1.091 0, CD2 5 0.854 -1.148 -0.005, NE1 5 2.140 0.690 -0.004, CE2 5 2.186 -0.678 -0.007,
    CE3 5 0.622 -2.530 -0.007, CZ2 5 3.283 -1.543 -0.011, CZ3 5 1.715 -3.389 -0.011, CH2 5 3.028 -2.890 -0.013
TYR CG CD1: N 0 -0.522 1.362 0, CA 0 0 0 0, C 0 1.524 0 0, O 3 0.627 1.062 0, CB 0 -0.522 -0.776 -1.213, CG 4 0.607 1.382 0,
    CD1 5 0.716 1.195 0, CD2 5 0.713 -1.194 -0.001, CE1 5 2.107 1.200 -0.002, CE2 5 2.104 -1.201 -0.003,
    CZ 5 2.791 -0.001 -0.003, OH 5 4.168 -0.002 -0.005
VAL CG1: N 0 -0.494 1.373 0, CA 0 0 0 0, C 0 1.527 0 0, O 3 0.627 1.062 0, CB 0 -0.533 -0.795 -1.213, CG1 4 0.540 1.429 0,
    CG2 4 0.533 -0.776 1.203
"""

# Bonds (angstrom) and angles (degrees): mean and standard deviation, for all the names before them. ANY is the default of residues
# with these atoms and no values of their own. Values: OpenStructure's stereo_chemical_props.txt, which AlphaFold 2 uses.
_STEREO = """
ANY: N-CA 1.459 0.020, CA-C 1.525 0.026, C-O 1.229 0.019, CA-CB 1.535 0.022, N-CA-C 111.0 2.7, CA-C-O 120.1 2.1,
    N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0
ALA: CA-CB 1.520 0.021, N-CA-CB 110.1 1.4, CB-CA-C 110.1 1.5
ARG: CB-CG 1.521 0.027, CG-CD 1.515 0.025, CD-NE 1.460 0.017, NE-CZ CZ-NH1 CZ-NH2 1.326 0.013, CA-CB-CG 113.4 2.2,
    CB-CG-CD 111.6 2.6, CG-CD-NE 111.8 2.1, CD-NE-CZ 123.6 1.4, NE-CZ-NH1 NE-CZ-NH2 120.3 0.5, NH1-CZ-NH2 119.4 1.1
ASN: CA-CB 1.527 0.026, CB-CG 1.506 0.023, CG-OD1 1.235 0.022, CG-ND2 1.324 0.025, CA-CB-CG 113.4 2.2, CB-CG-ND2 116.7 2.4,
    CB-CG-OD1 121.6 2.0, ND2-CG-OD1 121.9 2.3
ASP: CB-CG 1.513 0.021, CG-OD1 CG-OD2 1.249 0.023, CA-CB-CG 113.4 2.2, CB-CG-OD1 CB-CG-OD2 118.3 0.9, OD1-CG-OD2 123.3 1.9
CYS: CA-CB 1.526 0.013, CB-SG 1.812 0.016, N-CA-CB 110.8 1.5, CB-CA-C 111.5 1.2, CA-CB-SG 114.2 1.1
GLN: CB-CG 1.521 0.027, CG-CD 1.506 0.023, CD-OE1 1.235 0.022, CD-NE2 1.324 0.025, CA-CB-CG 113.4 2.2, CB-CG-CD 111.6 2.6,
    CG-CD-OE1 121.6 2.0, CG-CD-NE2 116.7 2.4, OE1-CD-NE2 121.9 2.3
GLU: CB-CG 1.517 0.019, CG-CD 1.515 0.015, CD-OE1 CD-OE2 1.252 0.011, CA-CB-CG 113.4 2.2, CB-CG-CD 114.2 2.7,
    CG-CD-OE1 CG-CD-OE2 118.3 2.0, OE1-CD-OE2 123.3 1.2
GLY: N-CA 1.456 0.015, CA-C 1.514 0.016, C-O 1.232 0.016, N-CA-C 113.1 2.5, CA-C-O 120.6 1.8
HIS: CB-CG 1.492 0.016, CG-ND1 1.369 0.015, CG-CD2 1.353 0.017, ND1-CE1 1.343 0.025, CD2-NE2 1.415 0.021,
    CE1-NE2 1.322 0.023, CA-CB-CG 113.6 1.7, CB-CG-ND1 123.2 2.5, CB-CG-CD2 130.8 3.1, CG-ND1-CE1 108.2 1.4,
    ND1-CE1-NE2 109.9 2.2, CE1-NE2-CD2 106.6 2.5, NE2-CD2-CG 109.2 1.9, CD2-CG-ND1 106.0 1.4
ILE: CA-CB 1.544 0.023, CB-CG1 1.536 0.028, CB-CG2 1.524 0.031, CG1-CD1 1.500 0.069, N-CA-CB 110.8 2.3, CB-CA-C 111.6 2.0,
    CA-CB-CG1 111.0 1.9, CB-CG1-CD1 113.9 2.8, CA-CB-CG2 110.9 2.0, CG1-CB-CG2 111.4 2.2
LEU: CA-CB 1.533 0.023, CB-CG 1.521 0.029, CG-CD1 CG-CD2 1.514 0.037, N-CA-CB 110.4 2.0, CB-CA-C 110.2 1.9,
    CA-CB-CG 115.3 2.3, CB-CG-CD1 CB-CG-CD2 111.0 1.7, CD1-CG-CD2 110.5 3.0
LYS: CB-CG 1.521 0.027, CG-CD 1.520 0.034, CD-CE 1.508 0.025, CE-NZ 1.486 0.025, CA-CB-CG 113.4 2.2, CB-CG-CD 111.6 2.6,
    CG-CD-CE 111.9 3.0, CD-CE-NZ 111.7 2.3
MET: CB-CG 1.509 0.032, CG-SD 1.807 0.026, SD-CE 1.774 0.056, CA-CB-CG 113.3 1.7, CB-CG-SD 112.4 3.0, CG-SD-CE 100.2 1.6
PHE: CB-CG 1.509 0.017, CG-CD1 CG-CD2 1.383 0.015, CD1-CE1 CD2-CE2 1.388 0.020, CE1-CZ CE2-CZ 1.369 0.019,
    CA-CB-CG 113.9 2.4, CB-CG-CD1 CB-CG-CD2 120.8 0.7, CD1-CG-CD2 118.3 1.3, CG-CD1-CE1 CG-CD2-CE2 120.8 1.1,
    CD1-CE1-CZ CD2-CE2-CZ 120.1 1.2, CE1-CZ-CE2 120.0 1.8
PRO: CA-CB 1.531 0.020, CB-CG 1.495 0.050, CG-CD 1.502 0.033, CD-N 1.474 0.014, N-CA 1.468 0.017, CA-C 1.524 0.020,
    C-O 1.228 0.020, N-CA-CB 103.3 1.2, CB-CA-C 111.7 2.1, CA-CB-CG 104.8 1.9, CB-CG-CD 106.5 3.9, CG-CD-N 103.2 1.5,
    CA-N-CD 111.7 1.4, N-CA-C 112.1 2.6, CA-C-O 120.2 2.4
SER: CA-CB 1.525 0.015, CB-OG 1.418 0.013, N-CA-CB 110.5 1.5, CB-CA-C 110.1 1.9, CA-CB-OG 111.2 2.7
THR: CA-CB 1.529 0.026, CB-OG1 1.428 0.020, CB-CG2 1.519 0.033, N-CA-CB 110.3 1.9, CB-CA-C 111.6 2.7, CA-CB-OG1 109.0 2.1,
    CA-CB-CG2 112.4 1.4, OG1-CB-CG2 110.0 2.3
TRP: CB-CG 1.498 0.018, CG-CD1 1.363 0.014, CG-CD2 1.432 0.017, CD1-NE1 1.375 0.017, NE1-CE2 1.371 0.013,
    CD2-CE2 1.409 0.012, CD2-CE3 1.399 0.015, CE2-CZ2 1.393 0.017, CE3-CZ3 1.380 0.017, CZ2-CH2 1.369 0.019,
    CZ3-CH2 1.396 0.016, CA-CB-CG 113.7 1.9, CB-CG-CD1 127.0 1.3, CB-CG-CD2 126.6 1.3, CD1-CG-CD2 106.3 0.8,
    CG-CD1-NE1 110.1 1.0, CD1-NE1-CE2 109.0 0.9, NE1-CE2-CD2 107.3 1.0, CE2-CD2-CG 107.3 0.8, CG-CD2-CE3 133.9 0.9,
    NE1-CE2-CZ2 130.4 1.1, CE3-CD2-CE2 118.7 1.2, CD2-CE2-CZ2 122.3 1.2, CE2-CZ2-CH2 117.4 1.0, CZ2-CH2-CZ3 121.6 1.2,
    CH2-CZ3-CE3 121.2 1.1, CZ3-CE3-CD2 118.8 1.3
TYR: CB-CG 1.512 0.015, CG-CD1 CG-CD2 1.387 0.013, CD1-CE1 CD2-CE2 1.389 0.015, CE1-CZ CE2-CZ 1.381 0.013,
    CZ-OH 1.374 0.017, CA-CB-CG 113.4 1.9, CB-CG-CD1 CB-CG-CD2 121.0 0.6, CD1-CG-CD2 117.9 1.1,
    CG-CD1-CE1 CG-CD2-CE2 121.3 0.8, CD1-CE1-CZ CD2-CE2-CZ 119.8 0.9, CE1-CZ-CE2 119.8 1.6, CE1-CZ-OH CE2-CZ-OH 120.1 2.7
VAL: CA-CB 1.543 0.021, CB-CG1 CB-CG2 1.524 0.021, N-CA-CB 111.5 2.2, CB-CA-C 111.4 1.9, CA-CB-CG1 CA-CB-CG2 110.9 1.5,
    CG1-CB-CG2 110.9 1.6
"""

# Pairs of symmetric atoms, which a rotation of the last chi by 180 degrees exchanges.
_AMBIGUOUS_ATOMS = {"ASP": "OD1 OD2", "GLU": "OE1 OE2", "PHE": "CD1 CD2 CE1 CE2", "TYR": "CD1 CD2 CE1 CE2"}


class _Residue(NamedTuple):
    chain: list[str]  # of the chi angles, from N
    group: dict[str, int]
    position: dict[str, NDArray[np.float64]]


def _parse_lines(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    for line in text.strip().replace("\n ", " ").splitlines():
        head, cells = line.split(":")
        yield head.split(), [cell.split() for cell in cells.split(",")]


def _parse_residues() -> Iterator[_Residue]:
    for (_, *chain), cells in _parse_lines(_ATOMS):
        group = {name: int(number) for name, number, *_ in cells}
        yield _Residue(["N", "CA", "CB", *chain], group, {name: np.array(xyz, float) for name, _, *xyz in cells})
    yield _Residue([], {}, {})


def _constant(values: Any, dtype: Any = np.float32) -> NDArray[Any]:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


# ---- atoms

_RESIDUES = tuple(_parse_residues())
ATOM14_NAMES = tuple((*residue.group, *[""] * (14 - len(residue.group))) for residue in _RESIDUES)  # [21][14] "" for none
ATOM14_EXISTS = _constant([[name != "" for name in row] for row in ATOM14_NAMES])  # [21, 14]
ATOM37_EXISTS = _constant([[name in row for name in ATOM_TYPES] for row in ATOM14_NAMES])  # [21, 37] never OXT
ATOM14_TO_37 = _constant([[ATOM_ORDER.get(name, 0) for name in row] for row in ATOM14_NAMES], np.int64)  # [21, 14] 0 for none
ATOM37_TO_14 = _constant([[row.index(name) if name in row else 0 for name in ATOM_TYPES] for row in ATOM14_NAMES], np.int64)
ATOM14_RADIUS = _constant([[VAN_DER_WAALS.get(name[:1], 0) for name in row] for row in ATOM14_NAMES])  # [21, 14] angstrom


def _atom_swaps() -> Iterator[list[int]]:
    for name, row in zip((*RESNAMES, "X"), ATOM14_NAMES):
        first, second = (_AMBIGUOUS_ATOMS.get(name, "").split()[start::2] for start in (0, 1))
        swapped = dict(zip(first + second, second + first))
        yield [row.index(swapped[atom]) if atom in swapped else index for index, atom in enumerate(row)]


ATOM14_SWAP = _constant([*_atom_swaps()], np.int64)  # [21, 14] the index of an atom after renaming
ATOM14_AMBIGUOUS = _constant(np.arange(14) != ATOM14_SWAP)  # [21, 14]

# ---- angles and rigid groups


def _chi_atoms(chain: list[str], chi: int) -> list[int]:
    return [ATOM_ORDER[name] for name in chain[chi : chi + 4]] if chi + 4 <= len(chain) else [0] * 4


def _frame(origin: NDArray[np.float64], y: Any) -> NDArray[np.float64]:
    """Return a frame with x from the parent's origin to this one, and y in the half-plane of ``y``.   [4, 4]"""
    x = origin / np.linalg.norm(origin)
    y = y - x * (x @ y)
    y /= np.linalg.norm(y)
    frame = np.eye(4)
    frame[:3] = np.stack([x, y, np.cross(x, y), origin], 1)
    return frame


def _frames(residue: _Residue) -> NDArray[np.float64]:
    """Return frames in their parents. All parents have their origin at the first atom of the bond to the child: the backbone at CA,
    chi1 at CB and so on.   [8, 4, 4]"""
    frames, at = np.zeros((8, 4, 4)), residue.position
    if at:
        frames[:2] = np.eye(4)
        frames[2], frames[3] = _frame(at["N"], (1, 0, 0)), _frame(at["C"], -at["N"])
    for group, end in enumerate(residue.chain[2:-1], 4):
        frames[group] = _frame(at[end], at["N"] if group == 4 else (-1, 0, 0))
    return frames


CHI_ATOMS = _constant([[_chi_atoms(r.chain, chi) for chi in range(4)] for r in _RESIDUES], np.int64)  # [21, 4, 4] atom37 indices
CHI_EXISTS = _constant(CHI_ATOMS[..., 3] > 0)  # [21, 4]; N has index 0 and ends none
_last = np.arange(4) == CHI_EXISTS.sum(1, keepdims=True) - 1
CHI_PERIODIC = _constant(_last & ATOM14_AMBIGUOUS.any(1, keepdims=True))  # [21, 4] by 180 degrees
_backbone = np.array([[ATOM_ORDER[name] for name in names.split()] for names in ("C CA N", "N N N", "N N N", "CA C O")])
GROUP_BASE = _constant(  # [21, 8, 3] atom37 indices: on the negative x axis, the origin, on the side of y; backbone flipped later
    np.concatenate([np.broadcast_to(_backbone, (21, 4, 3)), CHI_ATOMS[..., 1:]], 1), np.int64
)
GROUP_EXISTS = _constant(np.concatenate([np.tile([1, 0, 0, 1], (21, 1)), CHI_EXISTS], 1))  # [21, 8]
GROUP_AMBIGUOUS = _constant(np.pad(CHI_PERIODIC, ((0, 0), (4, 0))))  # [21, 8]
GROUP_FRAME = _constant([_frames(residue) for residue in _RESIDUES])  # [21, 8, 4, 4] in the parent's, angle 0; zeros for none
ATOM14_GROUP = _constant([[residue.group.get(name, 0) for name in row] for residue, row in zip(_RESIDUES, ATOM14_NAMES)], np.int64)
ATOM14_POSITION = _constant(  # [21, 14, 3] in the frame of the atom's group, angstrom
    [[residue.position.get(name, np.zeros(3)) for name in row] for residue, row in zip(_RESIDUES, ATOM14_NAMES)]
)

# ---- distances within a residue


class Bounds(NamedTuple):
    """Distances in angstrom.   3 x [21, 14, 14]"""

    lower: NDArray[np.float32]
    upper: NDArray[np.float32]
    deviation: NDArray[np.float32]  # 0 unless the two are ends of a bond or an angle


def _mean_distances() -> Iterator[dict[tuple[str, str], tuple[float, float]]]:
    """Yield mean and deviation of distances across each residue's bonds and angles, errors taken as independent."""
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    for (residue,), cells in _parse_lines(_STEREO):
        figures[residue] = {name: (float(mean), float(deviation)) for *names, mean, deviation in cells for name in names}
    for residue, row in zip(RESNAMES, ATOM14_NAMES):
        by_atoms = {tuple(name.split("-")): figure for name, figure in (figures["ANY"] | figures[residue]).items()}
        bonds = {frozenset(names): figure for names, figure in by_atoms.items() if len(names) == 2}
        distances: dict[tuple[str, str], tuple[float, float]] = {}
        for names, (mean, deviation) in by_atoms.items():
            if not {*names} <= {*row}:
                continue
            if len(names) == 3:
                (p, dp), (q, dq) = (bonds[frozenset(pair)] for pair in (names[:2], names[1:]))
                angle, angle_deviation = math.radians(mean), math.radians(deviation)
                mean = math.sqrt(p * p + q * q - 2 * p * q * math.cos(angle))
                parts = (p - q * math.cos(angle)) * dp, (q - p * math.cos(angle)) * dq, p * q * math.sin(angle) * angle_deviation
                deviation = math.hypot(*parts) / mean
            distances[names[0], names[-1]] = mean, deviation
        yield distances


@lru_cache
def distance_bounds(tolerance: float, overlap: float) -> Bounds:
    """Return bounds on the distances between atoms of one residue.

    Across a bond or an angle: the mean plus and minus ``tolerance`` standard deviations. Otherwise: from the sum of the van der
    Waals radii less ``overlap`` angstrom to 1e10. All are 0 without such a pair.
    """
    pair = ATOM14_EXISTS[:, :, None] * ATOM14_EXISTS[:, None] * (1 - np.eye(14))
    lower, upper = pair * (ATOM14_RADIUS[:, :, None] + ATOM14_RADIUS[:, None] - overlap), pair * 1e10
    deviation = np.zeros_like(pair)
    for residue, (row, distances) in enumerate(zip(ATOM14_NAMES, _mean_distances())):
        for (first, second), (mean, sigma) in distances.items():
            i, j = row.index(first), row.index(second)
            both = residue, [i, j], [j, i]
            lower[both], upper[both], deviation[both] = mean - tolerance * sigma, mean + tolerance * sigma, sigma
    return Bounds(_constant(lower), _constant(upper), _constant(deviation))
