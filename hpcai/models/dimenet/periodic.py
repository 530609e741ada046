"""Neighbour lists of atoms, with all periodic images.   N atoms, E edges; lengths in angstrom

An edge is an image of atom j nearer to atom i than the cutoff. The rows of a cell are its lattice vectors.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcai.errors import DataError
from hpcai.lazy import import_optional

TIE = 1e-4  # between equal distances; float32 rounds those of a slab by 1e-6, and bonds differ by more
NEAREST = 1e-3  # least distance of two atoms
SEARCH = 1.0  # cutoff of the search for atoms that are too near: at 1e-3 vesin takes seventy times as long
FARTHEST = 1e4  # largest coordinate of an atom
FLAT = 1e-6  # least volume of a cell, as a share of that of a box with the same sides
MOST_EDGES = 2e8  # edges in one list, which take 12 GB

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Neighbours(NamedTuple):
    """Edges from j to i, ordered by i, distance, j and offset."""

    centre: Ints  # i, ascending   [E]
    other: Ints  # j   [E]
    offset: NDArray[np.int32]  # S, whole cells between the image of j and j as given   [E, 3]
    vector: Floats  # r_j + S @ cell - r_i   [E, 3]
    distance: Floats  # its length   [E]


def neighbours(
    positions: ArrayLike, cell: ArrayLike, pbc: ArrayLike, cutoff: float, most: int | None = None, where: str = "atoms"
) -> Neighbours:
    """All pairs nearer than the cutoff, as ASE's ``neighbor_list`` finds them; of each i only the ``most`` nearest.

    positions [N, 3] as given: atoms may lie outside the cell; cell [3, 3], of which the rows of directions that are not periodic
    do not matter; pbc [3]. Neighbours of i whose distances follow one another by less than 1e-4 are equally far, and then come by
    j and offset: but for gaps of just that size, order and choice are the same on every machine, in float32 and in float64. (The
    benchmark cuts at the 50 nearest after an unstable sort, so that there chance decides between ties.) Raises DataError where
    more than 2e8 edges are expected.
    """
    r, box, periodic = np.asarray(positions, np.float64), np.asarray(cell, np.float64), np.asarray(pbc, bool)
    whole = _complete(box, periodic)
    _refuse_too_many(r, whole, periodic, cutoff, where)
    i, j, offset = _search(r, whole, periodic, cutoff)
    # The length of these very vectors counts: rounding decides about a pair at the cutoff as it does in ASE.
    vector = r[j] - r[i] + offset @ np.where(periodic[:, None], box, 0.0)
    distance = np.sqrt((vector * vector).sum(1))
    near = np.argsort(i * (2 * cutoff) + distance)  # one key for both, rounded by far less than a tie
    level = np.empty(len(i), np.int64)
    level[near] = np.cumsum((np.diff(distance[near], prepend=-1.0) > TIE) | (np.diff(i[near], prepend=-1) > 0))
    order = np.lexsort((_pack(offset), j, level))
    order = order[distance[order] < cutoff]
    if most is not None:
        rank = np.arange(len(order)) - np.searchsorted(i[order], i[order])
        order = order[rank < most]
    return Neighbours(i[order], j[order], offset[order], vector[order], distance[order])


def reverse(found: Neighbours, atoms: int) -> Ints:
    """The reverse of each edge: the one from i to j with offset -S, or -1 where the cut at ``most`` left that out.   [E]"""
    there, back = found.centre * atoms + found.other, found.other * atoms + found.centre
    pair, shift = np.concatenate([there, back]), _pack(np.concatenate([found.offset, -found.offset]))
    order = np.lexsort((shift, pair))  # stable: an edge comes just before the turned edge that equals it
    pair, shift = pair[order], shift[order]
    same = np.flatnonzero((pair[1:] == pair[:-1]) & (shift[1:] == shift[:-1]))
    turned = np.full(len(there), -1, np.int64)
    turned[order[same + 1] - len(there)] = order[same]
    return turned


def count_triplets(found: Neighbours, atoms: int) -> int:
    """Paths k -> j -> i along two edges, without those that return to the very atom that they came from."""
    degree = np.bincount(found.centre, minlength=atoms)
    return int(degree[found.other].sum() - (reverse(found, atoms) >= 0).sum())


def check(
    numbers: ArrayLike, positions: ArrayLike, cell: ArrayLike, pbc: ArrayLike, where: str = "atoms", cutoff: float = SEARCH
) -> tuple[Ints, Floats, Floats, Bools]:
    """Atoms as arrays [N], [N, 3], [3, 3], [3]. DataError with ``where`` in front for shapes that do not fit, no atom, numbers
    other than 1..118, values that are not finite, positions beyond 1e4, cells that are flat or left-handed where any direction
    is periodic, atoms or images closer than 1e-3, and more than 2e8 edges within the cutoff."""
    try:
        z, r, box, p = (np.asarray(given, np.float64) for given in (numbers, positions, cell, pbc))
    except (TypeError, ValueError) as problem:
        raise DataError(f"{where}: {problem}; give arrays of numbers") from problem
    n = len(z) if z.ndim else 0
    for name, array, shape in ("numbers", z, (n,)), ("positions", r, (n, 3)), ("cell", box, (3, 3)), ("pbc", p, (3,)):
        if array.shape != shape or not n:
            wanted = f"{list(shape)}" if n else "[N] for one atom or more"
            raise DataError(f"{where}: {name} has shape {list(array.shape)}, expected {wanted}; correct or leave out the structure")
    for name, array, right, expected in (
        ("numbers", z, (z == np.rint(z)) & (z >= 1) & (z <= 118), "an atomic number from 1 to 118; correct the structure"),
        ("pbc", p, (p == 0) | (p == 1), "true or false, one for each direction"),
        ("cell", box, np.isfinite(box), "a finite number; put zeros where a direction is not periodic"),
        ("positions", r, np.abs(r) <= FARTHEST, f"at most {FARTHEST:g} angstrom; check the units, or wrap the atoms"),
    ):
        for place in np.argwhere(~right)[:1].tolist():
            raise DataError(f"{where}: {name}{place} is {array[tuple(place)]:g}, expected {expected}")
    periodic = p.astype(bool)
    whole = _complete(box, periodic | box.any(1))
    share = np.linalg.det(whole) / max(np.prod(np.linalg.norm(whole, axis=1)), 1e-300)
    if periodic.any() and share < FLAT:
        found, advice = ("is left-handed", "swap two vectors") if share < -FLAT else ("has no volume", "correct it, or unset pbc")
        raise DataError(f"{where}: cell {box.tolist()} {found}, expected three independent, right-handed vectors; {advice}")
    _refuse_too_many(r, _complete(box, periodic), periodic, cutoff, where)
    near = neighbours(r, box, periodic, SEARCH, where=where)
    for k in np.flatnonzero(near.distance < NEAREST)[:1]:
        pair = f"atoms {near.centre[k]} and {near.other[k]} (offset {near.offset[k].tolist()})"
        raise DataError(f"{where}: {pair} are {near.distance[k]:.1e} angstrom apart, expected {NEAREST:g} or more; remove one")
    return z.astype(np.int64), r, box, periodic


def _complete(cell: Floats, periodic: Bools) -> Floats:
    """The cell with unit vectors, at right angles to all others, in the directions that are not periodic.   [3, 3]"""
    whole, free = cell.copy(), np.flatnonzero(~periodic)
    whole[free] = np.linalg.svd(cell[periodic])[2][periodic.sum() :] if periodic.any() else np.eye(3)
    if len(free) and np.linalg.det(whole) < 0:
        whole[free[0]] *= -1
    return whole


def _search(r: Floats, box: Floats, periodic: Bools, cutoff: float) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """i [E], j [E] and S [E, 3] of all pairs within the cutoff, and perhaps a few just beyond, in any order."""
    vesin = import_optional("vesin", "neighbour lists need", "opencatalyst")
    search = vesin.NeighborList(cutoff=cutoff * (1 + 1e-9), full_list=True, n_threads=1)
    i, j, offset = search.compute(r, box, periodic, "ijS")
    return i.astype(np.int64), j.astype(np.int64), offset.astype(np.int32)


def _pack(offset: NDArray[np.int32]) -> Ints:
    """One number for each offset, in their order.   [E, 3] -> [E]"""
    x, y, z = (axis - axis.min(initial=0) for axis in offset.T.astype(np.int64))
    return (x * (y.max(initial=0) + 1) + y) * (z.max(initial=0) + 1) + z


def _refuse_too_many(r: Floats, whole: Floats, periodic: Bools, cutoff: float, where: str) -> None:
    """Refuse before memory is spent. N * N / V * 4/3 pi c^3 edges are expected; V counts the room that the atoms take along
    directions that are not periodic."""
    room = np.where(periodic, 1.0, np.ptp(r @ whole.T, axis=0) + cutoff) if len(r) else np.ones(3)
    volume = abs(float(np.linalg.det(whole))) * float(np.prod(room))
    edges = len(r) ** 2 / max(volume, 1e-300) * 4 / 3 * np.pi * cutoff**3
    if edges > MOST_EDGES:
        found = f"{len(r)} atoms in {volume:.2g} cubic angstrom have about {edges:.1e} neighbours within {cutoff:g}"
        raise DataError(f"{where}: {found}, expected {MOST_EDGES:.0e} at most; check the units of the cell, or lessen the cutoff")
