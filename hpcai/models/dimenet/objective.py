"""The loss that trains DimeNet++, and its scores.   B structures, N atoms."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.models.dimenet.config import ObjectiveConfig
from hpcai.models.dimenet.graph import Graph

_ENERGY_TOLERANCE, _FORCE_TOLERANCE = 0.02, 0.03  # eV and eV/angstrom within which a structure counts as right (OC20)


class Batch(NamedTuple):
    """Structures, what they were found to be, and which of their atoms count."""

    energy: Tensor  # [B] eV, float64: total energies are large and their differences small
    forces: Tensor  # [N, 3] eV/angstrom
    free: Tensor  # [N] 1: may move; 0: is held fast, or is none
    graph: Graph


def counted(batch: Batch) -> Tensor:
    """Free atoms, and structures.   [2]"""
    return torch.stack((batch.free.sum(), batch.free.new_full((), len(batch.energy))))


def loss(
    model: Any, batch: Batch, cfg: ObjectiveConfig = ObjectiveConfig(), counts: Tensor | None = None,  # noqa: B008 immutable
) -> dict[str, Any]:  # fmt: skip
    """Sum of |dF| over free atoms and directions, for each free atom, and mean |dE|, both in the model's units and times their
    weights (MLPerf HPC: 50 and 0). ``counts`` [2]: the free atoms and structures that they are divided by; None: the batch's."""
    prediction, scale = model(batch.graph), model.scale
    atoms, structures = counted(batch) if counts is None else counts
    force = ((prediction.forces - batch.forces / scale).abs() * batch.free[:, None]).sum()
    target = (batch.energy - model.offset(batch.graph)) / scale
    energy = (prediction.energy - target.to(prediction.energy.dtype)).abs().sum()
    value = cfg.force * force / atoms + cfg.energy * energy / structures
    return {
        "loss": value,
        "force_mae": (scale * force.detach(), 3 * batch.free.sum()),
        "energy_mae": (scale * energy.detach(), len(batch.energy)),
    }


def score(model: Any, batch: Batch) -> dict[str, tuple[Tensor, Any]]:
    """``force_mae``, the metric of MLPerf HPC (target 0.036 eV/angstrom): mean |dF| over free atoms and directions.
    ``force_cosine``: mean cosine of the angle between forces. ``energy_mae``. ``within``: share of the structures whose energy is
    right to 0.02 eV and every force to 0.03 eV/angstrom. Two others show what is had for nothing: ``force_zero``, the MAE of no
    force at all, and ``energy_mean``, that of the mean energy."""
    energy, forces = model.to_physical(batch.graph, model(batch.graph))
    free, graph, count = batch.free[:, None], batch.graph, len(batch.energy)
    force_error, energy_error = (forces - batch.forces).abs() * free, (energy - batch.energy).abs()
    cosine = torch.nn.functional.cosine_similarity(forces, batch.forces, 1, 1e-12)
    max_force_error = force_error.amax(1)[graph.members[:-1]].amax(1)  # an empty place names an atom that is none
    atoms = batch.free.sum()
    return {
        "force_mae": (force_error.sum(), 3 * atoms),
        "force_cosine": ((cosine * batch.free).sum(), atoms),
        "energy_mae": (energy_error.sum(), count),
        "within": (((energy_error <= _ENERGY_TOLERANCE) & (max_force_error <= _FORCE_TOLERANCE)).sum(), count),
        "force_zero": ((batch.forces.abs() * free).sum(), 3 * atoms),
        "energy_mean": ((batch.energy - model.offset(graph)).abs().sum(), count),
    }


def pairs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Rows for pictures: true and predicted energies [B, 2] in eV; the element [A] of every free atom and its forces [A, 2, 3] in
    eV/angstrom."""
    energy, forces = model.to_physical(batch.graph, model(batch.graph))
    free = batch.free > 0
    return {
        "energy": torch.stack((batch.energy, energy), 1),
        "forces": torch.stack((batch.forces, forces), 1)[free],
        "numbers": batch.graph.numbers[free].to(torch.uint8),
    }
