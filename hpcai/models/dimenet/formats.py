"""Convert structures and labels from and to PyTorch Geometric's ``Data`` and ASE's ``Atoms``.   N atoms, E edges"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.lazy import import_optional
from hpcai.models.dimenet.fields import read_fields
from hpcai.models.dimenet.graph import Sizes, Structure, build_structure, collate
from hpcai.models.dimenet.objective import Batch


class Frame(NamedTuple):
    """A structure with its labels, if any."""

    structure: Structure
    energy: float | None  # eV
    forces: NDArray[np.floating] | None  # [N, 3] eV/angstrom
    free: NDArray[np.floating]  # [N] 1: free, 0: fixed


def read_frames(source: Any, *, cutoff: float = 6.0, most: int | None = 50, where: str = "frames") -> list[Frame]:
    """Return structures with neighbours, labels and free atoms, from PyTorch Geometric's ``Data`` or ``Batch``, ASE's ``Atoms``, or
    a sequence of them. ``cutoff`` and ``most`` are those of the model. Raises DataError, with structure and field, as
    ``read_fields`` and ``build_structure`` do."""
    frames = []
    for raw in read_fields(source, where):
        structure = build_structure(raw.numbers, raw.positions, raw.cell, raw.pbc, cutoff=cutoff, most=most, where=raw.where)
        frames.append(Frame(structure, raw.energy, raw.forces, 1 - raw.fixed))
    return frames


def make_batch(frames: Sequence[Frame], min_sizes: Sizes = Sizes()) -> Batch:  # noqa: B008 immutable
    """Return a batch for ``loss`` and ``score``, padded to ``min_sizes``. Raises DataError if a frame has no energy or forces."""
    for k, frame in enumerate(frames):
        if frame.energy is None or frame.forces is None:
            missing = "energy" if frame.energy is None else "forces"
            raise DataError(f"frame {k} has no {missing}; expected both: set {missing}, or ASE's calculator")
    graph = collate([frame.structure for frame in frames], min_sizes)
    padding = len(graph.numbers) - sum(len(frame.free) for frame in frames)
    forces, free = np.concatenate([frame.forces for frame in frames]), np.concatenate([frame.free for frame in frames])
    energy = torch.tensor([frame.energy for frame in frames], dtype=torch.float64)
    forces, free = np.pad(forces, [(0, padding), (0, 0)]), np.pad(free, (0, padding)).astype(np.float32)
    return Batch(energy, torch.from_numpy(forces), torch.from_numpy(free), graph)


def to_data(structures: Structure | Frame | Sequence[Structure | Frame], results: Any = None) -> Any:
    """Return PyTorch Geometric's ``Data``, or a ``Batch`` of several, under the names of fairchem, and ``z`` for PyG's own models.

    ``results``: The result of ``energy_and_forces``, instead of the labels of the frames. Edges lead from row 0 of ``edge_index``
    [2, E] to row 1; ``cell_offsets`` [E, 3] are numbers of cells, ``distances`` [E] angstrom. Dtypes are kept.
    """
    geometric = import_optional("torch_geometric.data", "Data need", "peers")
    data = [geometric.Data(**_tensors(frame)) for frame in _to_frames(structures, results)]
    return data[0] if isinstance(structures, Structure | Frame) else geometric.Batch.from_data_list(data)


def to_ase(structures: Structure | Frame | Sequence[Structure | Frame], results: Any = None) -> Any:
    """Return ASE's ``Atoms``, or a list of several, with ``FixAtoms`` for fixed atoms and a calculator that holds the known labels;
    ``results`` as for ``to_data``."""
    ase = import_optional("ase", "Atoms need", "opencatalyst")
    calculators, constraints = import_module("ase.calculators.singlepoint"), import_module("ase.constraints")
    converted = []
    for frame in _to_frames(structures, results):
        structure = frame.structure
        atoms = ase.Atoms(structure.numbers, structure.positions, cell=structure.cell, pbc=structure.pbc)
        if not frame.free.all():
            atoms.set_constraint(constraints.FixAtoms(mask=frame.free == 0))
        labels = {name: value for name in ("energy", "forces") if (value := getattr(frame, name)) is not None}
        atoms.calc = calculators.SinglePointCalculator(atoms, **labels) if labels else None
        converted.append(atoms)
    return converted[0] if isinstance(structures, Structure | Frame) else converted


def _to_frames(structures: Any, results: Any) -> list[Frame]:
    """Return frames with the labels of ``results``, or with their own."""
    if isinstance(structures, Structure | Frame):
        structures, results = [structures], None if results is None else [results]
    frames = [item if isinstance(item, Frame) else Frame(item, None, None, np.ones(len(item.numbers))) for item in structures]
    if results is None:
        return frames
    if len(results) != len(frames):
        raise DataError(f"{len(results)} pairs of energy and forces for {len(frames)} structures, expected one for each")
    for k, (frame, (_, forces)) in enumerate(zip(frames, results)):
        expected = frame.structure.positions.shape
        if np.shape(forces) != expected:
            raise DataError(f"structure {k}: forces {np.shape(forces)}, expected {expected}; give the forces on these atoms")
    return [frame._replace(energy=float(energy), forces=np.asarray(forces)) for frame, (energy, forces) in zip(frames, results)]


def _tensors(frame: Frame) -> dict[str, Any]:
    s = frame.structure
    vector = s.positions[s.neighbour] - s.positions[s.centre] + s.shift
    offsets = np.rint(s.shift @ np.linalg.pinv(np.where(s.pbc[:, None], s.cell, 0.0)))
    arrays = {
        "pos": s.positions, "cell": s.cell[None], "pbc": s.pbc[None], "atomic_numbers": s.numbers, "z": s.numbers,
        "edge_index": np.stack([s.neighbour, s.centre]), "cell_offsets": offsets, "distances": np.sqrt((vector**2).sum(1)),
        "fixed": 1 - frame.free, "energy": None if frame.energy is None else np.array([frame.energy]), "forces": frame.forces,
    }  # fmt: skip
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items() if array is not None}
    return tensors | {"natoms": len(s.numbers), "neighbors": len(s.centre)}
