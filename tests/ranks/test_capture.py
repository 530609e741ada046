"""Processes of which one cannot capture its step."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.tape import Tape


class Refusing(Tape):
    def record(self, function: Any) -> Any:
        super().record(function)
        raise RuntimeError("out of memory")


def trained(mesh: Mesh, capture: str, refuses: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.manual_seed(0)
    graph = Refusing if refuses and mesh.rank == 1 else Tape
    cfg = StepConfig(capture=capture, optimizer="adamw", accumulate=2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    step = Step(model, lambda model, x: {"loss": model(x).square().mean()}, cfg, mesh, graph=graph)
    for i in range(3):
        step(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + mesh.rank)), 1e-2)
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}, step.news()


@pytest.mark.parametrize("world", [2, 4])
def test_where_one_process_cannot_capture_all_run_uncaptured(world: int) -> None:
    every = on_ranks({"replicate": world}, trained, "auto", True)
    captured = on_ranks({"replicate": world}, trained, "whole", False)
    for rank, (weights, told) in enumerate(every):
        (text,) = told
        assert ("out of memory" if rank == 1 else "another process cannot capture") in text
        assert all(torch.equal(weights[name], captured[rank][0][name]) for name in weights)
