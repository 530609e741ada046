"""Neighbour lists of atoms, with all periodic images.   N atoms, E edges; lengths in angstrom

An edge is an image of atom j nearer to atom i than the cutoff. The rows of a cell are its lattice vectors.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcai.errors import DataError
from hpcai.lazy import import_optional

TIE_TOLERANCE = 1e-4  # between equal distances; float32 rounds those of a slab by 1e-6, and bonds differ by more
MIN_DISTANCE = 1e-3  # least distance of two atoms
SEARCH_CUTOFF = 1.0  # cutoff of the search for atoms that are too near: at 1e-3 vesin takes seventy times as long
MAX_COORDINATE = 1e4  # largest coordinate of an atom
FLAT = 1e-6  # least volume of a cell, as a share of that of a box with the same sides
MAX_EDGES = 2e8  # edges in one list, which take 12 GB

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class NeighbourList(NamedTuple):
    """Edges from j to i, ordered by i, distance, j and offset."""

    centre: Ints  # i, ascending   [E]
    neighbour: Ints  # j   [E]
    offset: NDArray[np.int32]  # S, whole cells between the image of j and j as given   [E, 3]
    vector: Floats  # r_j + S @ cell - r_i   [E, 3]
    distance: Floats  # its length   [E]


def neighbour_list(
    positions: ArrayLike, cell: ArrayLike, pbc: ArrayLike, cutoff: float, most: int | None = None, where: str = "atoms"
) -> NeighbourList:
    """All pairs nearer than the cutoff, as ASE's ``neighbor_list`` finds them; of each i only the ``most`` nearest.

    positions [N, 3] as given: atoms may lie outside the cell; cell [3, 3], of which the rows of directions that are not periodic
    do not matter; pbc [3]. Neighbours of i whose distances follow one another by less than 1e-4 are equally far, and then come by
    j and offset: but for gaps of just that size, order and choice are the same on every machine, in float32 and in float64. (The
    benchmark cuts at the 50 nearest after an unstable sort, so that there chance decides between ties.) Raises DataError where
    more than 2e8 edges are expected.
    """
    r, box, periodic = np.asarray(positions, np.float64), np.asarray(cell, np.float64), np.asarray(pbc, bool)
    complete = _complete_cell(box, periodic)
    _check_edge_count(r, complete, periodic, cutoff, where)
    i, j, offset = _search(r, complete, periodic, cutoff)
    # The length of these very vectors counts: rounding decides about a pair at the cutoff as it does in ASE.
    vector = r[j] - r[i] + offset @ np.where(periodic[:, None], box, 0.0)
    distance = np.sqrt((vector * vector).sum(1))
    near = np.argsort(i * (2 * cutoff) + distance)  # one key for both, rounded by far less than a tie
    level = np.empty(len(i), np.int64)
    level[near] = np.cumsum((np.diff(distance[near], prepend=-1.0) > TIE_TOLERANCE) | (np.diff(i[near], prepend=-1) > 0))
    order = np.lexsort((_encode_offsets(offset), j, level))
    order = order[distance[order] < cutoff]
    if most is not None:
        rank = np.arange(len(order)) - np.searchsorted(i[order], i[order])
        order = order[rank < most]
    return NeighbourList(i[order], j[order], offset[order], vector[order], distance[order])


def find_reverse_edges(edges: NeighbourList, atoms: int) -> Ints:
    """The reverse of each edge: the one from i to j with offset -S, or -1 where the cut at ``most`` left that out.   [E]"""
    forward, backward = edges.centre * atoms + edges.neighbour, edges.neighbour * atoms + edges.centre
    pair, shift = np.concatenate([forward, backward]), _encode_offsets(np.concatenate([edges.offset, -edges.offset]))
    order = np.lexsort((shift, pair))  # stable: an edge comes just before the turned edge that equals it
    pair, shift = pair[order], shift[order]
    same = np.flatnonzero((pair[1:] == pair[:-1]) & (shift[1:] == shift[:-1]))
    reverse = np.full(len(forward), -1, np.int64)
    reverse[order[same + 1] - len(forward)] = order[same]
    return reverse


def count_triplets(edges: NeighbourList, atoms: int) -> int:
    """Paths k -> j -> i along two edges, without those that return to the very atom that they came from."""
    degree = np.bincount(edges.centre, minlength=atoms)
    return int(degree[edges.neighbour].sum() - (find_reverse_edges(edges, atoms) >= 0).sum())


def check_atoms(
    numbers: ArrayLike, positions: ArrayLike, cell: ArrayLike, pbc: ArrayLike, where: str = "atoms", cutoff: float = SEARCH_CUTOFF
) -> tuple[Ints, Floats, Floats, Bools]:
    """Atoms as arrays [N], [N, 3], [3, 3], [3]. DataError with ``where`` in front for shapes that do not fit, no atom, numbers
    other than 1..118, values that are not finite, positions beyond 1e4, cells that are flat or left-handed where any direction
    is periodic, atoms or images closer than 1e-3, and more than 2e8 edges within the cutoff."""
    try:
        z, r, box, p = (np.asarray(values, np.float64) for values in (numbers, positions, cell, pbc))
    except (TypeError, ValueError) as problem:
        raise DataError(f"{where}: {problem}; give arrays of numbers") from problem
    n = len(z) if z.ndim else 0
    for name, array, shape in ("numbers", z, (n,)), ("positions", r, (n, 3)), ("cell", box, (3, 3)), ("pbc", p, (3,)):
        if array.shape != shape or not n:
            sizes = f"{list(shape)}" if n else "[N] for one atom or more"
            raise DataError(f"{where}: {name} has shape {list(array.shape)}, expected {sizes}; correct or leave out the structure")
    for name, array, valid, expected in (
        ("numbers", z, (z == np.rint(z)) & (z >= 1) & (z <= 118), "an atomic number from 1 to 118; correct the structure"),
        ("pbc", p, (p == 0) | (p == 1), "true or false, one for each direction"),
        ("cell", box, np.isfinite(box), "a finite number; put zeros where a direction is not periodic"),
        ("positions", r, np.abs(r) <= MAX_COORDINATE, f"at most {MAX_COORDINATE:g} angstrom; check the units, or wrap the atoms"),
    ):
        for index in np.argwhere(~valid)[:1].tolist():
            raise DataError(f"{where}: {name}{index} is {array[tuple(index)]:g}, expected {expected}")
    periodic = p.astype(bool)
    complete = _complete_cell(box, periodic | box.any(1))
    volume = np.linalg.det(complete) / max(np.prod(np.linalg.norm(complete, axis=1)), 1e-300)
    if periodic.any() and volume < FLAT:
        fault, advice = ("is left-handed", "swap two vectors") if volume < -FLAT else ("has no volume", "correct it, or unset pbc")
        raise DataError(f"{where}: cell {box.tolist()} {fault}, expected three independent, right-handed vectors; {advice}")
    _check_edge_count(r, _complete_cell(box, periodic), periodic, cutoff, where)
    near = neighbour_list(r, box, periodic, SEARCH_CUTOFF, where=where)
    for k in np.flatnonzero(near.distance < MIN_DISTANCE)[:1]:
        pair = f"atoms {near.centre[k]} and {near.neighbour[k]} (offset {near.offset[k].tolist()})"
        raise DataError(f"{where}: {pair} are {near.distance[k]:.1e} angstrom apart, expected {MIN_DISTANCE:g} or more; remove one")
    return z.astype(np.int64), r, box, periodic


def _complete_cell(cell: Floats, periodic: Bools) -> Floats:
    """The cell with unit vectors, at right angles to all others, in the directions that are not periodic.   [3, 3]"""
    complete, free = cell.copy(), np.flatnonzero(~periodic)
    complete[free] = np.linalg.svd(cell[periodic])[2][periodic.sum() :] if periodic.any() else np.eye(3)
    if len(free) and np.linalg.det(complete) < 0:
        complete[free[0]] *= -1
    return complete


def _search(r: Floats, box: Floats, periodic: Bools, cutoff: float) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """i [E], j [E] and S [E, 3] of all pairs within the cutoff, and perhaps a few just beyond, in any order."""
    vesin = import_optional("vesin", "neighbour lists need", "opencatalyst")
    search = vesin.NeighborList(cutoff=cutoff * (1 + 1e-9), full_list=True, n_threads=1)
    i, j, offset = search.compute(r, box, periodic, "ijS")
    return i.astype(np.int64), j.astype(np.int64), offset.astype(np.int32)


def _encode_offsets(offset: NDArray[np.int32]) -> Ints:
    """One number for each offset, in their order.   [E, 3] -> [E]"""
    x, y, z = (axis - axis.min(initial=0) for axis in offset.T.astype(np.int64))
    return (x * (y.max(initial=0) + 1) + y) * (z.max(initial=0) + 1) + z


def _check_edge_count(r: Floats, cell: Floats, periodic: Bools, cutoff: float, where: str) -> None:
    """Refuse before memory is spent. N * N / V * 4/3 pi c^3 edges are expected; V counts the room that the atoms take along
    directions that are not periodic."""
    extents = np.where(periodic, 1.0, np.ptp(r @ cell.T, axis=0) + cutoff) if len(r) else np.ones(3)
    volume = abs(float(np.linalg.det(cell))) * float(np.prod(extents))
    edges = len(r) ** 2 / max(volume, 1e-300) * 4 / 3 * np.pi * cutoff**3
    if edges > MAX_EDGES:
        found = f"{len(r)} atoms in {volume:.2g} cubic angstrom have about {edges:.1e} neighbours within {cutoff:g}"
        raise DataError(f"{where}: {found}, expected {MAX_EDGES:.0e} at most; check the units of the cell, or lessen the cutoff")
