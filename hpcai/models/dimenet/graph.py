"""Atoms and their neighbours as a network sees them.   B structures, N atoms, E edges j -> i, K edges into an atom, L out of it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcai.errors import DataError
from hpcai.models.dimenet.config import DimeNetConfig
from hpcai.models.dimenet.fields import fields
from hpcai.models.dimenet.periodic import check, neighbours, reverse


class Graph(NamedTuple):
    """Structures side by side. The last structure, atom and edge, at least, are none: empty places of the tables name them."""

    members: Tensor  # [B + 1, M] atoms of each structure; the last structure is none, too
    positions: Tensor  # [N, 3] angstrom
    numbers: Tensor  # [N] of the elements
    structure: Tensor  # [N]
    centre: Tensor  # [E] i, ascending
    other: Tensor  # [E] j
    shift: Tensor  # [E, 3] angstrom, from atom j to its image that is near i
    incoming: Tensor  # [N, K] edges whose centre is this atom
    outgoing: Tensor  # [N, L] edges from this atom to others
    into: Tensor  # [E] place of an edge in `incoming`
    out_of: Tensor  # [E] and in `outgoing`
    reverse: Tensor  # [E] the edge i -> j over the same distance, or none

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Graph":
        return Graph(*(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self))


class Structure(NamedTuple):
    """One structure with its neighbours, as arrays."""

    positions: NDArray[np.floating]  # [N, 3] angstrom
    numbers: NDArray[np.integer]  # [N] of the elements
    centre: NDArray[np.integer]  # [E] i, ascending
    other: NDArray[np.integer]  # [E] j
    shift: NDArray[np.floating]  # [E, 3] angstrom
    reverse: NDArray[np.integer]  # [E] -1 where the edge i -> j is not kept
    cutoff: float
    most: int | None
    cell: NDArray[np.float64] | None = None  # [3, 3] angstrom
    pbc: NDArray[np.bool_] | None = None  # [3]


def atoms(
    numbers: Any, positions: Any = None, cell: Any = None, pbc: Any = None, *, cutoff: float = 6.0, most: int | None = 50,
    where: str = "atoms",
) -> Structure:  # fmt: skip
    """A structure and the neighbours of its atoms, through periodic images.

    numbers [N] of the elements, positions [N, 3] and cell [3, 3] in angstrom (rows are lattice vectors; None: no cell), pbc: for
    each lattice vector whether the structure repeats along it (None: along all of them, if there is a cell). Or ASE's ``Atoms`` or
    PyTorch Geometric's ``Data`` alone (see ``fields`` for its names). ``cutoff`` and ``most`` are those of the model. Raises
    DataError, with ``where``, for what cannot be (see ``periodic.check``) and for atoms none of which has a neighbour.
    """
    if not (cutoff > 0 and math.isfinite(cutoff)) or (most is not None and most < 1):
        raise DataError(f"{where}: cutoff {cutoff:g} and most {most}, expected a length above 0 (angstrom), and 1 or more, or None")
    if positions is None:
        given = fields(numbers, where, labels=False)
        if len(given) != 1:
            raise DataError(f"{where}: {len(given)} structures, expected one; read several with hpcai.models.dimenet.frames")
        numbers, positions, cell, pbc = given[0].numbers, given[0].positions, given[0].cell, given[0].pbc
    if pbc is None:
        pbc = [cell is not None] * 3
    z, r, box, periodic = check(numbers, positions, np.zeros((3, 3)) if cell is None else cell, pbc, where, cutoff)
    return _structure(z, r, box, periodic, cutoff, most, where)


def find(numbers: Any, positions: Any, cell: Any, pbc: Any, cfg: DimeNetConfig, where: str = "atoms") -> Structure:
    """``atoms`` for a model, of arrays that were checked when they were stored: positions keep their precision."""
    found = _structure(numbers, positions, cell, np.asarray(pbc, bool), cfg.cutoff, cfg.most, where)
    fits(found, cfg, where)
    return found


def _structure(z: Any, r: Any, box: Any, periodic: Any, cutoff: float, most: int | None, where: str) -> Structure:
    found = neighbours(r, box, periodic, cutoff, most, where)
    if not len(found.centre):
        raise DataError(f"{where}: no atom has a neighbour within {cutoff:g} angstrom; expected one at least; check the units")
    shift: NDArray[np.float64] = found.offset.astype(np.float64) @ np.where(periodic[:, None], box, 0.0)
    return Structure(r, z, found.centre, found.other, shift, reverse(found, len(z)), cutoff, most, np.asarray(box), periodic)


def fits(structure: Structure, cfg: DimeNetConfig, where: str = "a structure") -> None:
    """Raises DataError for a structure that is not for this network."""
    if not isinstance(structure, Structure):
        raise DataError(f"{where}: found {type(structure).__name__}, expected what hpcai.models.dimenet.atoms makes of it")
    if (structure.cutoff, structure.most) != (cfg.cutoff, cfg.most):
        raise DataError(
            f"{where} has neighbours within {structure.cutoff:g} angstrom, {structure.most} at most; the model expects "
            f"{cfg.cutoff:g} and {cfg.most}: atoms(..., cutoff={cfg.cutoff:g}, most={cfg.most})"
        )
    largest = int(structure.numbers.max())
    if largest >= cfg.elements:
        raise DataError(f"{where} has an atom of element {largest}; the model knows those up to {cfg.elements - 1}")


class Sizes(NamedTuple):
    """How many places a batch has at least, so that batches have few different shapes."""

    atoms: int = 0
    edges: int = 0
    incoming: int = 0
    outgoing: int = 0
    members: int = 0


def sizes(structures: Sequence[Structure]) -> Sizes:
    """The sizes of the graph that ``join`` makes of them without padding."""
    atoms = [len(structure.positions) for structure in structures]
    wide = [[np.bincount(row).max(initial=1) for row in (s.centre, s.other)] for s in structures]
    incoming, outgoing = (int(max(column)) for column in zip(*wide))
    return Sizes(sum(atoms) + 1, sum(len(s.centre) for s in structures) + 1, incoming, outgoing, max(atoms))


def join(structures: Sequence[Structure], least: Sizes = Sizes()) -> Graph:  # noqa: B008 immutable
    """Structures as one graph, padded to ``least``. What is none lies beyond the cutoff, and all its functions are 0."""
    count, edges = (np.array([len(getattr(s, name)) for s in structures]) for name in ("positions", "centre"))
    first = np.concatenate([[0], np.cumsum(count)])
    begin = np.concatenate([[0], np.cumsum(edges)])
    n, e = max(int(first[-1]) + 1, least.atoms), max(int(begin[-1]) + 1, least.edges)

    def column(name: str, size: int, more: NDArray[np.integer] | None = None, fill: float = 0) -> NDArray:
        parts = [getattr(s, name) for s in structures]
        if more is not None:
            parts = [np.where(part < 0, fill, part + add) for part, add in zip(parts, more)]
        whole = np.concatenate(parts)
        rest = np.full((size - len(whole), *whole.shape[1:]), fill, whole.dtype)
        return np.concatenate([whole, rest])

    centre, other = (column(name, e, first, n - 1).astype(np.int64) for name in ("centre", "other"))
    shift = column("shift", e)
    shift[begin[-1] :, 0] = 2 * structures[0].cutoff
    real = int(begin[-1])
    incoming, into = table(centre[:real], n, e, least.incoming)
    outgoing, out_of = table(other[:real], n, e, least.outgoing)
    structure = np.repeat(np.arange(len(structures)), count)
    members, _ = table(structure, len(structures) + 1, n, least.members)
    arrays = {
        "members": members, "positions": column("positions", n), "numbers": column("numbers", n).astype(np.int64),
        "structure": np.pad(structure, (0, n - len(structure)), constant_values=len(structures)), "centre": centre, "other": other,
        "shift": shift.astype(structures[0].positions.dtype), "incoming": incoming, "outgoing": outgoing, "into": into,
        "out_of": out_of, "reverse": column("reverse", e, begin, e - 1).astype(np.int64),
    }  # fmt: skip
    return Graph(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def table(row: NDArray[np.integer], rows: int, none: int, least: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers 0 ... M - 1 in the rows that ``row`` gives them, in order, and the place of each; the last of ``none`` is none.

    row [M] -> [rows, K], [none]
    """
    counts = np.bincount(row, minlength=rows)
    width = max(int(counts.max(initial=0)), least, 1)
    order = np.argsort(row, kind="stable")
    at = np.arange(len(row)) - (np.cumsum(counts) - counts)[row[order]]
    found = np.full((rows, width), none - 1)
    found[row[order], at] = order
    place = np.full(none, rows * width - 1)
    place[order] = row[order] * width + at
    return found, place
