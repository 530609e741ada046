"""The twenty amino acids: names, atoms, rigid groups, ideal geometry and stereochemistry, as tables by residue type.

Residue types are numbered in the order of ``RESTYPES``; 20 is X, an unknown one. In alignments 21 is a gap and 22 a masked letter.
(HHblits numbers the twenty by letter instead, A C D E ...; no table here does.) Atoms are indexed in two ways: atom37, the same
names for all residues, and atom14, names per residue type. An X has no atoms and no geometry; it has the backbone and psi groups,
so that its frames are known where its atoms are. All arrays are read-only.
"""

import math
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESTYPES = "ARNDCQEGHILKMFPSTWYV"  # sorted by three-letter name
UNKNOWN, GAP, MASKED = 20, 21, 22
_GEOMETRY = tomllib.loads(Path(__file__).with_name("residues.toml").read_text(encoding="utf-8"))
RESNAMES = tuple(_GEOMETRY["atoms"])
ATOM_TYPES = tuple(_GEOMETRY["atom37"].split())
ATOM_ORDER = {name: place for place, name in enumerate(ATOM_TYPES)}
VAN_DER_WAALS = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}  # radii, angstrom

# From one residue to the next: mean and standard deviation.
C_N_LENGTH = (1.329, 0.014), (1.341, 0.016)  # angstrom; the second if the next residue is proline
COS_CA_C_N = -0.4473, 0.0311
COS_C_N_CA = -0.5203, 0.0353


class _Residue(NamedTuple):
    chain: list[str]  # of the chi angles, from N
    group: dict[str, int]
    position: dict[str, NDArray[np.float64]]


def _parse_cells(text: str) -> list[list[str]]:
    return [cell.split() for cell in text.split(",")]


def _parse_residues() -> Iterator[_Residue]:
    for residue, text in _GEOMETRY["atoms"].items():
        cells, chain = _parse_cells(text), ["N", "CA", "CB", *_GEOMETRY["chi"].get(residue, "").split()]
        group = {name: int(number) for name, number, *_ in cells}
        yield _Residue(chain, group, {name: np.array(xyz, float) for name, _, *xyz in cells})
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
        first, second = (_GEOMETRY["ambiguous"].get(name, "").split()[start::2] for start in (0, 1))
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
    for residue, text in _GEOMETRY["stereo"].items():
        cells = _parse_cells(text)
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
