"""Neighbour lists of atoms, with all periodic images.   N atoms, E edges; lengths in angstrom

An edge is an image of atom j within the cutoff of atom i. The rows of a cell are its lattice vectors.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcai.arrays import describe_fill_values, to_array, warn
from hpcai.errors import DataError
from hpcai.lazy import import_optional

TIE = 1e-4  # between equal distances: float32 rounds distances by 1e-6, and different bonds differ by more
MIN_DISTANCE = 1e-3  # least distance of two atoms
MIN_BOND = 0.4  # of most atoms to a neighbour: bonds are longer than 0.7 angstrom, and in nm shorter than 0.4
SEARCH_CUTOFF = 1.0  # cutoff of the search for atoms that are too close: at 1e-3 vesin takes seventy times as long
MAX_COORDINATE = 1e4  # largest coordinate of an atom
FLAT = 1e-6  # minimum volume of a cell, relative to a box with the same sides
MAX_EDGES = 2e8  # edges in one list, which take 12 GB

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class NeighbourList(NamedTuple):
    """Edges from j to i, sorted by i, distance, j and offset."""

    centre: Ints  # i, ascending   [E]
    neighbour: Ints  # j   [E]
    offset: NDArray[np.int32]  # S, cells between j and its image   [E, 3]
    vector: Floats  # r_j + S @ cell - r_i   [E, 3]
    distance: Floats  # its length   [E]


def neighbour_list(
    positions: ArrayLike, cell: ArrayLike, pbc: ArrayLike, cutoff: float, most: int | None = None, where: str = "atoms"
) -> NeighbourList:
    """Return all pairs within the cutoff, as ASE's ``neighbor_list`` does; for each i only the ``most`` nearest.

    Atoms of ``positions`` [N, 3] may lie outside the cell; rows of ``cell`` [3, 3] along directions without ``pbc`` [3] are
    ignored. Neighbours of i whose sorted distances differ by less than 1e-4 each count as equally far, and are sorted by j and
    offset: except for gaps of exactly that size, order and selection are the same on every machine, in float32 and in float64. (The
    benchmark cuts at the 50 nearest after an unstable sort, which breaks ties at random.) Raises DataError if more than 2e8 edges
    are expected.
    """
    r, box, periodic = np.asarray(positions, np.float64), np.asarray(cell, np.float64), np.asarray(pbc, bool)
    complete = _complete_cell(box, periodic)
    _check_edge_count(r, complete, periodic, cutoff, where)
    vesin = import_optional("vesin", "neighbour lists need", "opencatalyst")
    search = vesin.NeighborList(cutoff=cutoff * (1 + 1e-9), full_list=True, n_threads=1)  # possibly with a few just beyond
    i, j, offset = search.compute(r, complete, periodic, "ijS")
    i, j, offset = i.astype(np.int64), j.astype(np.int64), offset.astype(np.int32)
    # The cutoff is applied to the lengths of these vectors, so that rounding decides about a pair at the cutoff as in ASE.
    vector = r[j] - r[i] + offset @ np.where(periodic[:, None], box, 0.0)
    distance = np.sqrt((vector * vector).sum(1))
    ranked = np.argsort(i * (2 * cutoff) + distance)  # one key for both, rounded by far less than a tie
    level = np.empty(len(i), np.int64)
    level[ranked] = np.cumsum((np.diff(distance[ranked], prepend=-1.0) > TIE) | (np.diff(i[ranked], prepend=-1) > 0))
    # A left-handed cell gives the order of the right-handed one, whose first two vectors are these exchanged.
    axes = [1, 0, 2] if np.linalg.det(box) < 0 else [0, 1, 2]
    order = np.lexsort((_encode_offsets(offset[:, axes]), j, level))
    order = order[distance[order] < cutoff]
    if most is not None:
        rank = np.arange(len(order)) - np.searchsorted(i[order], i[order])
        order = order[rank < most]
    return NeighbourList(i[order], j[order], offset[order], vector[order], distance[order])


def find_reverse_edges(edges: NeighbourList, atoms: int) -> Ints:
    """Return the index of the reverse of each edge, from i to j with offset -S, or -1 if it was cut off by ``most``.   [E]"""
    forward, backward = edges.centre * atoms + edges.neighbour, edges.neighbour * atoms + edges.centre
    pair, shift = np.concatenate([forward, backward]), _encode_offsets(np.concatenate([edges.offset, -edges.offset]))
    order = np.lexsort((shift, pair))  # stable: an edge precedes the reversed edge that equals it
    pair, shift = pair[order], shift[order]
    same = np.flatnonzero((pair[1:] == pair[:-1]) & (shift[1:] == shift[:-1]))
    reverse = np.full(len(forward), -1, np.int64)
    reverse[order[same + 1] - len(forward)] = order[same]
    return reverse


def count_triplets(edges: NeighbourList, atoms: int) -> int:
    """Return the number of paths k -> j -> i along two edges, except those with k the atom i itself."""
    degree = np.bincount(edges.centre, minlength=atoms)
    return int(degree[edges.neighbour].sum() - (find_reverse_edges(edges, atoms) >= 0).sum())


def check_atoms(
    numbers: ArrayLike, positions: ArrayLike, cell: ArrayLike, pbc: ArrayLike, where: str = "atoms", cutoff: float = SEARCH_CUTOFF
) -> tuple[Ints, Floats, Floats, Bools]:
    """Return atoms as arrays [N], [N, 3], [3, 3], [3]. Raises DataError, with ``where``, for wrong shapes, no atoms, atomic numbers
    outside 1..118, values that are not finite, coordinates above 1e4, a flat cell if any direction is periodic,
    atoms or images closer than 1e-3, or more than 2e8 edges. Logs a warning if most atoms are too close to another one."""
    try:
        named = zip(("numbers", "positions", "cell", "pbc"), (numbers, positions, cell, pbc))
        z, r, box, p = (np.asarray(to_array(values, name), np.float64) for name, values in named)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{where}: {problem}; expected numeric arrays") from problem
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
            raise DataError(f"{where}: {name}{index} is {array[tuple(index)]:g}, expected {expected}{describe_fill_values(array)}")
    periodic = p.astype(bool)
    complete = _complete_cell(box, periodic | box.any(1))
    volume = abs(np.linalg.det(complete)) / max(np.prod(np.linalg.norm(complete, axis=1)), 1e-300)
    if periodic.any() and volume < FLAT:
        raise DataError(f"{where}: cell {box.tolist()} has no volume, expected three independent vectors; correct it, or unset pbc")
    _check_edge_count(r, _complete_cell(box, periodic), periodic, cutoff, where)
    pairs = neighbour_list(r, box, periodic, SEARCH_CUTOFF, where=where)
    for k in np.flatnonzero(pairs.distance < MIN_DISTANCE)[:1]:
        text = f"atoms {pairs.centre[k]} and {pairs.neighbour[k]} (offset {pairs.offset[k].tolist()})"
        raise DataError(f"{where}: {text} are {pairs.distance[k]:.1e} angstrom apart, expected {MIN_DISTANCE:g} or more; drop one")
    if 2 * (close := len(np.unique(pairs.centre[pairs.distance < MIN_BOND]))) > n:
        text = "%s: %d of %d atoms have a neighbour within %g angstrom; expected bonds over 0.7; are positions in nm or fractions?"
        warn(text, where, close, n, MIN_BOND)
    return z.astype(np.int64), r, box, periodic


def _complete_cell(cell: Floats, periodic: Bools) -> Floats:
    """Replace the vectors of non-periodic directions by unit vectors orthogonal to all others.   [3, 3]"""
    complete, free = cell.copy(), np.flatnonzero(~periodic)
    complete[free] = np.linalg.svd(cell[periodic])[2][periodic.sum() :] if periodic.any() else np.eye(3)
    if len(free) and np.linalg.det(complete) < 0:
        complete[free[0]] *= -1
    return complete


def _encode_offsets(offset: NDArray[np.int32]) -> Ints:
    """Encode each offset as one integer, preserving their order.   [E, 3] -> [E]"""
    x, y, z = (axis - axis.min(initial=0) for axis in offset.T.astype(np.int64))
    return (x * (y.max(initial=0) + 1) + y) * (z.max(initial=0) + 1) + z


def _check_edge_count(r: Floats, cell: Floats, periodic: Bools, cutoff: float, where: str) -> None:
    """Raise DataError before memory is allocated. N * N / V * 4/3 pi c^3 edges are expected; along directions that are not
    periodic, V uses the extent of the atoms."""
    extents = np.where(periodic, 1.0, np.ptp(r @ cell.T, axis=0) + cutoff) if len(r) else np.ones(3)
    volume = abs(float(np.linalg.det(cell))) * float(np.prod(extents))
    edges = len(r) ** 2 / max(volume, 1e-300) * 4 / 3 * np.pi * cutoff**3
    if edges > MAX_EDGES:
        fault = f"{len(r)} atoms in {volume:.2g} cubic angstrom have about {edges:.1e} neighbours within {cutoff:g}"
        raise DataError(f"{where}: {fault}, expected {MAX_EDGES:.0e} at most; check the units of the cell, or lessen the cutoff")
