"""Captured steps on several ranks: each records its own graphs, independently of the others."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from hpcai.train.capture import _WARMUP_STEPS as WARM
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph
from tests.ranks.launch import on_ranks

STEPS = 4 * WARM + 2


class FailingGraph(CPUGraph):
    def capture(self, function: Any) -> Any:
        super().capture(function)
        raise RuntimeError("out of memory")


def train(mesh: Mesh, capture: str, fails: bool, shard: str = "none") -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """Return weights, the number of recorded shapes, and news after steps whose shapes are new on one rank at a time. ``capture``
    "none" runs the same steps uncaptured."""
    torch.manual_seed(0)
    cfg = StepConfig(capture="whole" if capture == "none" else capture, optimizer="adamw", accumulate=2, shard=shard, clip=0.1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    graph = FailingGraph if fails and mesh.rank == 1 else CPUGraph
    step = Step(model, lambda model, x: {"loss": model(x).square().mean()}, cfg, mesh, graph=graph)
    if capture == "none":
        step._capture = None
    for i in range(STEPS):
        count = 8 if mesh.rank == 1 and i > WARM and i % 2 else 4
        step(torch.randn(count, 6, generator=torch.Generator().manual_seed(10 * i + mesh.rank)), 1e-2)
    recorded = step._capture.recorded() if step._capture else 0
    news = [text for text in step.news() if "recorded in" not in text]
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}, recorded, news


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_shape_that_is_new_on_one_rank_alone_disturbs_no_all_reduce(world: int, shard: str) -> None:
    uncaptured = on_ranks({"replicate": world}, train, "none", False, shard)
    for rank, (weights, recorded, news) in enumerate(on_ranks({"replicate": world}, train, "whole", False, shard)):
        assert recorded == (2 if rank == 1 else 1) and not news
        assert all(torch.equal(weights[name], uncaptured[rank][0][name]) for name in weights)


def test_a_rank_that_cannot_capture_runs_uncaptured_and_all_ranks_report_it() -> None:
    uncaptured = on_ranks({"replicate": 2}, train, "none", False)
    for rank, (weights, recorded, news) in enumerate(on_ranks({"replicate": 2}, train, "auto", True)):
        assert recorded == (0 if rank == 1 else 1)
        assert len(news) == 1 and news[0].startswith("rank 1: step.capture: ") and "out of memory" in news[0]
        assert all(torch.equal(weights[name], uncaptured[rank][0][name]) for name in weights)
