"""Structures and what is known of them, from and to PyTorch Geometric's ``Data`` and ASE's ``Atoms``.   N atoms, E edges"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.lazy import import_optional
from hpcai.models.dimenet.fields import fields
from hpcai.models.dimenet.graph import Sizes, Structure, atoms, join
from hpcai.models.dimenet.objective import Batch


class Frame(NamedTuple):
    """A structure with its labels, if it has any."""

    structure: Structure
    energy: float | None  # eV
    forces: NDArray[np.floating] | None  # [N, 3] eV/angstrom
    free: NDArray[np.floating]  # [N] 1: may move


def frames(source: Any, *, cutoff: float = 6.0, most: int | None = 50, where: str = "frames") -> list[Frame]:
    """Structures with neighbours, energies, forces and which atoms are held, from PyTorch Geometric's ``Data`` or ``Batch``, ASE's
    ``Atoms``, or a sequence of them. ``cutoff`` and ``most`` are those of the model. Raises DataError (see ``fields`` and
    ``atoms``), which names the structure and the field."""
    made = []
    for one in fields(source, where):
        structure = atoms(one.numbers, one.positions, one.cell, one.pbc, cutoff=cutoff, most=most, where=one.where)
        made.append(Frame(structure, one.energy, one.forces, 1 - one.fixed))
    return made


def batch_of(frames: Sequence[Frame], least: Sizes = Sizes()) -> Batch:  # noqa: B008 immutable
    """The frames as ``loss`` and ``score`` read them, padded to ``least``. Raises DataError for one without energy or forces."""
    for k, frame in enumerate(frames):
        if frame.energy is None or frame.forces is None:
            missing = "energy" if frame.energy is None else "forces"
            raise DataError(f"frame {k} has no {missing}; expected both: put them into {missing}, or into ASE's calculator")
    graph = join([frame.structure for frame in frames], least)
    rest = len(graph.numbers) - sum(len(frame.free) for frame in frames)
    forces, free = np.concatenate([frame.forces for frame in frames]), np.concatenate([frame.free for frame in frames])
    energy = torch.tensor([frame.energy for frame in frames], dtype=torch.float64)
    forces, free = np.pad(forces, [(0, rest), (0, 0)]), np.pad(free, (0, rest)).astype(np.float32)
    return Batch(energy, torch.from_numpy(forces), torch.from_numpy(free), graph)


def to_data(given: Structure | Frame | Sequence[Structure | Frame], found: Any = None) -> Any:
    """PyTorch Geometric's ``Data``, or a ``Batch`` of several, under the names of fairchem, and ``z`` that its own models read.

    ``found``: what ``energy_and_forces`` says of them; otherwise a frame's own labels. Edges lead from row 0 of ``edge_index``
    [2, E] to row 1; ``cell_offsets`` [E, 3] are whole cells, ``distances`` [E] angstrom. Numbers keep their precision.
    """
    geometric = import_optional("torch_geometric.data", "Data need", "peers")
    made = [geometric.Data(**_tensors(frame)) for frame in _labelled(given, found)]
    return made[0] if isinstance(given, Structure | Frame) else geometric.Batch.from_data_list(made)


def to_ase(given: Structure | Frame | Sequence[Structure | Frame], found: Any = None) -> Any:
    """ASE's ``Atoms``, or a list of several, whose calculator holds energy and forces, if they are known, and whose held atoms are
    fixed; ``found`` as for ``to_data``."""
    ase = import_optional("ase", "Atoms need", "opencatalyst")
    calculators, constraints = import_module("ase.calculators.singlepoint"), import_module("ase.constraints")
    made = []
    for frame in _labelled(given, found):
        one, (cell, pbc) = frame.structure, _box(frame.structure)
        one = ase.Atoms(one.numbers, one.positions, cell=cell, pbc=pbc)
        if not frame.free.all():
            one.set_constraint(constraints.FixAtoms(mask=frame.free == 0))
        known = {name: value for name in ("energy", "forces") if (value := getattr(frame, name)) is not None}
        one.calc = calculators.SinglePointCalculator(one, **known) if known else None
        made.append(one)
    return made[0] if isinstance(given, Structure | Frame) else made


def _labelled(given: Any, found: Any) -> list[Frame]:
    """Each structure with what is known of it."""
    if isinstance(given, Structure | Frame):
        given, found = [given], None if found is None else [found]
    framed = [one if isinstance(one, Frame) else Frame(one, None, None, np.ones(len(one.numbers))) for one in given]
    if found is None:
        return framed
    if len(found) != len(framed):
        raise DataError(f"{len(found)} pairs of energy and forces for {len(framed)} structures, expected one for each")
    for k, (frame, (_, forces)) in enumerate(zip(framed, found)):
        wanted = frame.structure.positions.shape
        if np.shape(forces) != wanted:
            raise DataError(f"structure {k}: forces {np.shape(forces)}, expected {wanted}; give what the model says of these atoms")
    return [frame._replace(energy=float(energy), forces=np.asarray(forces)) for frame, (energy, forces) in zip(framed, found)]


def _box(structure: Structure) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    if structure.cell is None or structure.pbc is None:
        raise DataError("a structure that does not know its cell; expected one that was made by atoms(...) or frames(...)")
    return structure.cell, structure.pbc


def _tensors(frame: Frame) -> dict[str, Any]:
    one, (cell, pbc) = frame.structure, _box(frame.structure)
    vector = one.positions[one.other] - one.positions[one.centre] + one.shift
    offsets = np.rint(one.shift @ np.linalg.pinv(np.where(pbc[:, None], cell, 0.0)))
    arrays = {
        "pos": one.positions, "cell": cell[None], "pbc": pbc[None], "atomic_numbers": one.numbers, "z": one.numbers,
        "edge_index": np.stack([one.other, one.centre]), "cell_offsets": offsets, "distances": np.sqrt((vector**2).sum(1)),
        "fixed": 1 - frame.free, "energy": None if frame.energy is None else np.array([frame.energy]), "forces": frame.forces,
    }  # fmt: skip
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items() if array is not None}
    return tensors | {"natoms": len(one.numbers), "neighbors": len(one.centre)}
