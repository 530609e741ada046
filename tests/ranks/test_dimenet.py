"""DimeNet++ on several copies with batches of different size: gradients are those of one process that has all structures."""

from typing import Any

import pytest
import torch

from hpcai import dist
from hpcai.dist.mesh import Mesh
from hpcai.models.dimenet import Batch, ObjectiveConfig, collate, counted, loss, parallelize
from hpcai.models.dimenet.graph import Structure
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train import Step, fit
from tests.atoms import random_network, random_structure
from tests.ranks.launch import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [3, 5, 1, 4, 2, 6, 3]
SHARES = {1: [7], 2: [5, 2], 4: [1, 3, 1, 2]}  # structures of each copy


def batch(parts: list[tuple[int, Structure]]) -> Batch:
    """A batch whose energies, forces and free atoms follow from the structures' numbers alone."""
    energy, forces, free = [], [], []
    for number, part in parts:
        generator, count = torch.Generator().manual_seed(number), len(part.positions)
        energy.append(torch.randn(1, generator=generator, dtype=torch.float64))
        forces.append(torch.randn(count, 3, generator=generator, dtype=torch.float64))
        free.append((torch.arange(count) != number % count).double() if count > 1 else torch.ones(1, dtype=torch.float64))
    graph = collate([part for _, part in parts])
    rest = torch.zeros(1, 3, dtype=torch.float64)
    return Batch(torch.cat(energy), torch.cat([*forces, rest]), torch.cat([*free, rest[:, 0]]), graph)


def prepared(mesh: Mesh, shares: list[int]) -> tuple[Step, Batch]:
    """A step, and the structures of this rank."""
    every = [(number, random_structure(number, count=count)) for number, count in enumerate(SIZES)]
    first = sum(shares[: mesh["replicate"].rank])
    mine = batch(every[first : first + shares[mesh["replicate"].rank]])
    model, cfg = parallelize(random_network(), mesh), StepConfig(optimizer="sgd", precision="fp64")
    return Step(model, both, cfg, mesh, counts=counted), mine


def trained(mesh: Mesh, shares: list[int]) -> dict[str, torch.Tensor]:
    step, mine = prepared(mesh, shares)
    values = [step(mine, 1e-4)["loss"] for _ in range(3)]
    return {"loss": torch.stack(values).numpy(), **{name: t.numpy() for name, t in step.model.state_dict().items()}}  # type: ignore[dict-item]


def reported(mesh: Mesh, shares: list[int]) -> float:
    """The loss that a run reports."""
    step, mine = prepared(mesh, shares)
    return fit(step, [mine], TrainConfig(steps=1, report_every=1)).reports[-1]["loss"]


def test_replicas_have_equal_weight_in_the_report() -> None:
    expected = reported(dist.single_process(torch.device("cpu")), [7])
    assert on_ranks({"replicate": 2}, reported, [5, 2]) == pytest.approx([expected] * 2, rel=1e-12)


def both(model: Any, given: Batch, **words: Any) -> dict[str, Any]:
    return loss(model, given, ObjectiveConfig(force=2, energy=1), **words)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_uneven_replicas_are_one_process(copies: int) -> None:
    expected = trained(dist.single_process(torch.device("cpu")), [7])
    found = on_ranks({"replicate": copies}, trained, SHARES[copies])
    mean = sum(torch.from_numpy(rank["loss"]) for rank in found) / copies  # type: ignore[arg-type]
    torch.testing.assert_close(mean, torch.from_numpy(expected.pop("loss")), rtol=1e-10, atol=0)
    for rank in found:
        assert {"loss", *expected} == set(rank), "checkpoint keys"
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(rank[name]), torch.from_numpy(tensor), rtol=1e-9, atol=1e-11, msg=name)
