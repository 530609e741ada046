"""Neighbour graphs of atoms.   B structures, N atoms, E edges j -> i, K edges into an atom, L edges out of one."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcai.errors import DataError
from hpcai.models.dimenet.config import DimeNetConfig
from hpcai.models.dimenet.fields import read_fields
from hpcai.models.dimenet.periodic import check_atoms, find_reverse_edges, neighbour_list


class Graph(NamedTuple):
    """A batch of structures. The last structure, atom and edge are padding; empty slots of the tables point to them."""

    members: Tensor  # [B + 1, M] atoms of each structure
    positions: Tensor  # [N, 3] angstrom
    numbers: Tensor  # [N] of the elements
    structure: Tensor  # [N]
    centre: Tensor  # [E] i, ascending
    neighbour: Tensor  # [E] j
    shift: Tensor  # [E, 3] angstrom, from atom j to its image that is near i
    incoming: Tensor  # [N, K] edges with this atom as their centre
    outgoing: Tensor  # [N, L] edges from this atom to others
    incoming_slot: Tensor  # [E] slot of an edge in `incoming`
    outgoing_slot: Tensor  # [E] slot of an edge in `outgoing`
    reverse: Tensor  # [E] the edge i -> j with the opposite vector, or padding

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Graph":
        return Graph(*(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self))


class Structure(NamedTuple):
    """The arrays of one structure with its neighbours."""

    positions: NDArray[np.floating]  # [N, 3] angstrom
    numbers: NDArray[np.integer]  # [N] of the elements
    centre: NDArray[np.integer]  # [E] i, ascending
    neighbour: NDArray[np.integer]  # [E] j
    shift: NDArray[np.floating]  # [E, 3] angstrom
    reverse: NDArray[np.integer]  # [E] -1 if the edge i -> j was cut off by `most`
    cutoff: float
    most: int | None
    cell: NDArray[np.float64]  # [3, 3] angstrom
    pbc: NDArray[np.bool_]  # [3]


def build_structure(
    numbers: Any, positions: Any = None, cell: Any = None, pbc: Any = None, *, cutoff: float = 6.0, most: int | None = 50,
    where: str = "atoms",
) -> Structure:  # fmt: skip
    """Return a structure with the neighbours of its atoms, through periodic images. ``cutoff`` and ``most`` are those of the model.

    ``numbers`` [N] are atomic numbers, ``positions`` [N, 3] and ``cell`` [3, 3], lattice vectors as rows, in angstrom (None: no
    cell); ``pbc`` [3]: whether the structure is periodic along each lattice vector (None: along all, if there is a cell). Or
    ``numbers`` is ASE's ``Atoms`` or PyTorch Geometric's ``Data`` (for its names see ``read_fields``). Raises DataError, with
    ``where``, for invalid atoms (see ``periodic.check_atoms``), or if no atom has a neighbour.
    """
    if not (cutoff > 0 and math.isfinite(cutoff)) or (most is not None and most < 1):
        raise DataError(f"{where}: cutoff {cutoff:g} and most {most}, expected a length above 0 (angstrom), and 1 or more, or None")
    if positions is None:
        structures = read_fields(numbers, where, labels=False)
        if len(structures) != 1:
            raise DataError(f"{where}: {len(structures)} structures, expected one; or use hpcai.models.dimenet.read_frames")
        numbers, positions, cell, pbc = structures[0].numbers, structures[0].positions, structures[0].cell, structures[0].pbc
    if pbc is None:
        pbc = [cell is not None] * 3
    z, r, box, periodic = check_atoms(numbers, positions, np.zeros((3, 3)) if cell is None else cell, pbc, where, cutoff)
    return _build_structure(z, r, box, periodic, cutoff, most, where)


def build_structure_for_model(
    numbers: Any, positions: Any, cell: Any, pbc: Any, cfg: DimeNetConfig, where: str = "atoms",
) -> Structure:  # fmt: skip
    """Return the structure for a model, from arrays that were checked when they were stored; their precision is kept."""
    structure = _build_structure(numbers, positions, cell, np.asarray(pbc, bool), cfg.cutoff, cfg.most, where)
    check_structure(structure, cfg, where)
    return structure


def _build_structure(z: Any, r: Any, cell: Any, periodic: Any, cutoff: float, most: int | None, where: str) -> Structure:
    edges = neighbour_list(r, cell, periodic, cutoff, most, where)
    if not len(edges.centre):
        raise DataError(f"{where}: no atom has a neighbour within {cutoff:g} angstrom; expected at least one; check the units")
    shift: NDArray[np.float64] = edges.offset.astype(np.float64) @ np.where(periodic[:, None], cell, 0.0)
    reverse = find_reverse_edges(edges, len(z))
    return Structure(r, z, edges.centre, edges.neighbour, shift, reverse, cutoff, most, np.asarray(cell), periodic)


def check_structure(structure: Structure, cfg: DimeNetConfig, where: str = "a structure") -> None:
    """Raise DataError if a structure does not fit the settings of a network."""
    if not isinstance(structure, Structure):
        raise DataError(f"{where}: is {type(structure).__name__}, expected a Structure from hpcai.models.dimenet.build_structure")
    if (structure.cutoff, structure.most) != (cfg.cutoff, cfg.most):
        advice = f"the model expects {cfg.cutoff:g} and {cfg.most}: build_structure(..., cutoff={cfg.cutoff:g}, most={cfg.most})"
        raise DataError(f"{where} has neighbours within {structure.cutoff:g} angstrom, {structure.most} at most; {advice}")
    largest = int(structure.numbers.max())
    if largest >= cfg.elements:
        raise DataError(f"{where} has an atom of element {largest}; the model has embeddings up to {cfg.elements - 1}")


class Sizes(NamedTuple):
    """Minimum sizes of a padded batch, so that batches have few different shapes."""

    atoms: int = 0
    edges: int = 0
    incoming: int = 0
    outgoing: int = 0
    members: int = 0


def graph_sizes(structures: Sequence[Structure]) -> Sizes:
    """Return the sizes of the unpadded batch of these structures."""
    atoms = [len(structure.positions) for structure in structures]
    widths = [[np.bincount(row).max(initial=1) for row in (s.centre, s.neighbour)] for s in structures]
    incoming, outgoing = (int(max(column)) for column in zip(*widths))
    return Sizes(sum(atoms) + 1, sum(len(s.centre) for s in structures) + 1, incoming, outgoing, max(atoms))


def collate(structures: Sequence[Structure], min_sizes: Sizes = Sizes()) -> Graph:  # noqa: B008 immutable
    """Concatenate structures into one graph, padded to ``min_sizes``. Padding edges are beyond the cutoff, so their basis is 0."""
    atom_counts, edge_counts = (np.array([len(getattr(s, name)) for s in structures]) for name in ("positions", "centre"))
    atom_start = np.concatenate([[0], np.cumsum(atom_counts)])
    edge_start = np.concatenate([[0], np.cumsum(edge_counts)])
    n, e = max(int(atom_start[-1]) + 1, min_sizes.atoms), max(int(edge_start[-1]) + 1, min_sizes.edges)

    def column(name: str, size: int, offsets: NDArray[np.integer] | None = None, fill: float = 0) -> NDArray:
        parts = [getattr(s, name) for s in structures]
        if offsets is not None:
            parts = [np.where(part < 0, fill, part + add) for part, add in zip(parts, offsets)]
        values = np.concatenate(parts)
        padding = np.full((size - len(values), *values.shape[1:]), fill, values.dtype)
        return np.concatenate([values, padding])

    centre, neighbour = (column(name, e, atom_start, n - 1).astype(np.int64) for name in ("centre", "neighbour"))
    shift = column("shift", e)
    shift[edge_start[-1] :, 0] = 2 * structures[0].cutoff
    real = int(edge_start[-1])
    incoming, incoming_slot = build_table(centre[:real], n, e, min_sizes.incoming)
    outgoing, outgoing_slot = build_table(neighbour[:real], n, e, min_sizes.outgoing)
    structure = np.repeat(np.arange(len(structures)), atom_counts)
    members, _ = build_table(structure, len(structures) + 1, n, min_sizes.members)
    arrays = {
        "members": members, "positions": column("positions", n), "numbers": column("numbers", n).astype(np.int64),
        "structure": np.pad(structure, (0, n - len(structure)), constant_values=len(structures)), "centre": centre,
        "neighbour": neighbour, "shift": shift.astype(structures[0].positions.dtype), "incoming": incoming, "outgoing": outgoing,
        "incoming_slot": incoming_slot, "outgoing_slot": outgoing_slot,
        "reverse": column("reverse", e, edge_start, e - 1).astype(np.int64),
    }  # fmt: skip
    return Graph(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def build_table(rows: NDArray[np.integer], n: int, padded: int, min_width: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List elements by row, in order, and the slot of each; empty slots hold ``padded`` - 1.   rows [M] -> [n, K], [padded]"""
    counts = np.bincount(rows, minlength=n)
    width = max(int(counts.max(initial=0)), min_width, 1)
    order = np.argsort(rows, kind="stable")
    position = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows[order]]
    table = np.full((n, width), padded - 1)
    table[rows[order], position] = order
    slots = np.full(padded, n * width - 1)
    slots[order] = rows[order] * width + position
    return table, slots
