"""Random numbers of initial weights and of dropout."""

import torch
from torch import nn

from hpcai import dist, train
from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from tests.ranks.launch import on_ranks


def draw_weights_and_masks(mesh: Mesh, skip: int = 0) -> tuple[list[float], list[list[float]]]:
    """Return the initial weights, and dropout masks of 32 elements for three steps except the first ``skip``."""
    with train.seeds(7):
        model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    masks: list[list[float]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        masks.append(model[1](torch.ones(32)).tolist())  # type: ignore[operator]
        return {"loss": model[0](batch).mean()}  # type: ignore[operator]

    step = train.Step(model, loss, StepConfig(precision="fp32"), mesh)
    weights, step.count = [w for p in model.parameters() for w in p.flatten().tolist()], skip
    for _ in range(3 - skip):
        step(torch.ones(1, 2))
        torch.rand(5)  # as an evaluation may
    return weights, masks


def test_replicas_have_equal_initial_weights_and_their_own_random_numbers_in_each_step() -> None:
    (weights, dropout), (other_weights, other_dropout) = on_ranks({"replicate": 2}, draw_weights_and_masks)
    assert weights == other_weights and len({str(masks) for masks in dropout + other_dropout}) == 6
    assert draw_weights_and_masks(dist.single_process()) == (weights, dropout), "one replica always draws the same"
    assert draw_weights_and_masks(dist.single_process(), 2)[1] == dropout[2:], "masks depend on the number of the step alone"
    first, second = (masks for _, masks in on_ranks({"depth": 2}, draw_weights_and_masks))
    assert first == second == dropout, "ranks of one replica draw the same"
