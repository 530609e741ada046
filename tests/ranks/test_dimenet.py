"""DimeNet++ on replicas with batches of different sizes: training equals that of one process with all structures."""

from functools import partial

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

SIZES = [3, 5, 1, 4, 2, 6, 3]
SHARES = {1: [7], 2: [5, 2], 4: [1, 3, 1, 2]}  # structures of each replica


def batch(parts: list[tuple[int, Structure]]) -> Batch:
    """Return a batch whose energies, forces and free atoms depend only on the numbers of its structures."""
    energy, forces, free = [], [], []
    for number, part in parts:
        generator, count = torch.Generator().manual_seed(number), len(part.positions)
        energy.append(torch.randn(1, generator=generator, dtype=torch.float64))
        forces.append(torch.randn(count, 3, generator=generator, dtype=torch.float64))
        free.append((torch.arange(count) != number % count).double() if count > 1 else torch.ones(1, dtype=torch.float64))
    graph = collate([part for _, part in parts])
    rest = torch.zeros(1, 3, dtype=torch.float64)
    return Batch(torch.cat(energy), torch.cat([*forces, rest]), torch.cat([*free, rest[:, 0]]), graph)


def new_step_and_batch(mesh: Mesh, shares: list[int]) -> tuple[Step, Batch]:
    """Return a step, and the batch of this rank."""
    structures = [(number, random_structure(number, count=count)) for number, count in enumerate(SIZES)]
    first = sum(shares[: mesh["replicate"].rank])
    own = batch(structures[first : first + shares[mesh["replicate"].rank]])
    model, cfg = parallelize(random_network(), mesh), StepConfig(optimizer="sgd", precision="fp64")
    return Step(model, partial(loss, cfg=ObjectiveConfig(force=2, energy=1)), cfg, mesh, counts=counted), own


def train(mesh: Mesh, shares: list[int]) -> dict[str, torch.Tensor]:
    step, own = new_step_and_batch(mesh, shares)
    values = [step(own, 1e-4)["loss"] for _ in range(3)]
    return {"loss": torch.stack(values).numpy(), **{name: t.numpy() for name, t in step.model.state_dict().items()}}  # type: ignore[dict-item]


def reported_loss(mesh: Mesh, shares: list[int]) -> float:
    """Return the loss that a run reports."""
    step, own = new_step_and_batch(mesh, shares)
    return fit(step, [own], TrainConfig(steps=1, report_every=1)).reports[-1]["loss"]


def test_replicas_have_equal_weight_in_the_report() -> None:
    expected = reported_loss(dist.single_process(torch.device("cpu")), [7])
    assert on_ranks({"replicate": 2}, reported_loss, [5, 2]) == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_uneven_replicas_equal_one_process(replicas: int) -> None:
    expected = train(dist.single_process(torch.device("cpu")), [7])
    ranks = on_ranks({"replicate": replicas}, train, SHARES[replicas])
    mean = sum(torch.from_numpy(rank["loss"]) for rank in ranks) / replicas  # type: ignore[arg-type]
    torch.testing.assert_close(mean, torch.from_numpy(expected.pop("loss")), rtol=1e-10, atol=0)
    for rank in ranks:
        assert {"loss", *expected} == set(rank), "checkpoint keys"
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(rank[name]), torch.from_numpy(tensor), rtol=1e-9, atol=1e-11, msg=name)
