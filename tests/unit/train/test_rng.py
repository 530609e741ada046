"""Seeds of a model and of its dropout."""

import torch
from torch import nn

from hpcai import dist, train
from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from tests.ranks.launch import on_ranks


def drawn(mesh: Mesh, skip: int = 0) -> tuple[list[float], list[list[float]]]:
    """Return the initial weights, and the dropout masks of 32 elements in three steps, without the first ``skip``."""
    with train.seeds(7):
        model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    kept: list[list[float]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        kept.append(model[1](torch.ones(32)).tolist())  # type: ignore[operator]
        return {"loss": model[0](batch).mean()}  # type: ignore[operator]

    step = train.Step(model, loss, StepConfig(precision="fp32"), mesh)
    weights, step.count = [w for p in model.parameters() for w in p.flatten().tolist()], skip
    for _ in range(3 - skip):
        step(torch.ones(1, 2))
        torch.rand(5)  # such as an evaluation draws
    return weights, kept


def test_replicas_have_equal_initial_weights_and_their_own_random_numbers_in_each_step() -> None:
    (weights, dropout), (again, other) = on_ranks({"replicate": 2}, drawn)
    assert weights == again and len({str(kept) for kept in dropout + other}) == 6
    assert drawn(dist.single_process()) == (weights, dropout), "those of one copy are always the same"
    assert drawn(dist.single_process(), 2)[1] == dropout[2:], "and follow from the number of the step alone"
    first, second = (kept for _, kept in on_ranks({"depth": 2}, drawn))
    assert first == second == dropout, "processes that hold a copy together draw alike"
