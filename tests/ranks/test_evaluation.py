"""Metrics and predictions do not depend on the number of processes, however uneven their parts."""

import numpy as np
import pytest
import torch
from torch import nn

from hpcai.data import Loader
from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from hpcai.train import Step, evaluate, predict
from tests.numbers import Numbers
from tests.ranks.launch import on_ranks


class Rows(Numbers):
    def sample(self, index: int, epoch: int) -> torch.Tensor:
        return torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def measured(mesh: Mesh, count: int, batch: int) -> tuple[dict[str, float], list[list[float]]]:
    torch.manual_seed(0)
    step = Step(nn.Linear(3, 2), lambda m, b: {"loss": m(b).mean()}, StepConfig(precision="fp64"), mesh)
    loader = Loader(Rows(count), batch, mesh, name="v", shuffle=False, last="keep")
    values = evaluate(step, lambda m, b: {"mean": m(b).mean(), "rms": (m(b).square().sum(), 2 * len(b))}, loader)
    return values, predict(step, lambda m, b: {"y": m(b)}, loader)["y"].tolist()


@pytest.mark.parametrize("count, batch", [(13, 4), (5, 8), (17, 16), (8, 2)])
def test_cut_equals_whole(count: int, batch: int) -> None:
    values, rows = on_ranks({"replicate": 1}, measured, count, batch)[0]
    assert len(rows) == count
    for axes in ({"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}):
        for found, again in on_ranks(axes, measured, count, batch):
            assert found == pytest.approx(values, rel=1e-12)
            if batch >= axes["replicate"]:
                assert np.allclose(sorted(again), sorted(rows), rtol=1e-12)
