"""Loss and scores of DimeNet++.   B structures, N atoms."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.models.dimenet.config import ObjectiveConfig
from hpcai.models.dimenet.graph import Graph

_ENERGY_TOLERANCE, _FORCE_TOLERANCE = 0.02, 0.03  # eV and eV/angstrom: limits of energy and forces within threshold, EFwT (OC20)


class Batch(NamedTuple):
    """A batch of structures with their labels."""

    energy: Tensor  # [B] eV, float64: total energies are large and their differences small
    forces: Tensor  # [N, 3] eV/angstrom
    free: Tensor  # [N] 1: free; 0: fixed, or padding
    graph: Graph


def counted(batch: Batch) -> Tensor:
    """Return the numbers of free atoms and of structures.   [2]"""
    return torch.stack((batch.free.sum(), batch.free.new_full((), len(batch.energy))))


def loss(
    model: Any, batch: Batch, cfg: ObjectiveConfig = ObjectiveConfig(), counts: Tensor | None = None,  # noqa: B008 immutable
) -> dict[str, Any]:  # fmt: skip
    """Return the sum of |dF| over directions, averaged over free atoms, plus the mean |dE|, both in units of the network and
    weighted (MLPerf HPC: 50 and 0). ``counts`` [2]: Free atoms and structures to divide by; None: those of the batch."""
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
    """Return sums and counts: ``force_mae``, the metric of MLPerf HPC (target 0.036 eV/angstrom), mean |dF| over free atoms and
    directions; ``force_cosine``, mean cosine of the angle between predicted and true forces; ``energy_mae``; ``within``, the
    fraction of structures with an energy error up to 0.02 eV and all force errors up to 0.03 eV/angstrom. Baselines are
    ``force_zero``, the MAE of zero forces, and ``energy_mean``, that of the mean energy."""
    energy, forces = model.to_physical(batch.graph, model(batch.graph))
    free, graph, count = batch.free[:, None], batch.graph, len(batch.energy)
    force_error, energy_error = (forces - batch.forces).abs() * free, (energy - batch.energy).abs()
    cosine = torch.nn.functional.cosine_similarity(forces, batch.forces, 1, 1e-12)
    max_force_error = force_error.amax(1)[graph.members[:-1]].amax(1)  # empty slots point to the padding atom
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
    """Return rows for plots: true and predicted energies [B, 2], eV; elements [A] and forces [A, 2, 3] of free atoms, eV/angstrom.
    """
    energy, forces = model.to_physical(batch.graph, model(batch.graph))
    free = batch.free > 0
    return {
        "energy": torch.stack((batch.energy, energy), 1),
        "forces": torch.stack((batch.forces, forces), 1)[free],
        "numbers": batch.graph.numbers[free].to(torch.uint8),
    }
