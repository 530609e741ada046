"""DLRM on a GPU: losses of the CPU, and captured steps equal to eager ones."""

from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.models import dlrm
from hpcai.settings import StepConfig
from tests.gpu.device import DEVICE, GPU, GRAPH, cuda_only, disable_tf32, forbid_synchronization

CFG = dlrm.DLRMConfig(rows=(1000, 37, 200_000), hotness=(4, 1, 20), dim=32, bottom=(64, 32), cross_rank=16, top=(64, 1))


def new_step(device: str, **overrides: Any) -> train.Step:
    torch.manual_seed(0)
    cfg, mesh = StepConfig(optimizer="adagrad", eps=1e-8, **overrides), dist.single_process(torch.device(device))
    return train.Step(dlrm.DLRM(CFG), dlrm.loss, cfg, mesh, graph=GRAPH)


def make_batch(device: torch.device, seed: int) -> dlrm.Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = [(n * torch.rand(64, most, generator=draw) ** 4).int() for n, most in zip(CFG.rows, CFG.hotness)]
    ids[2][:, 10:] = torch.where(torch.rand(64, 10, generator=draw) < 0.5, -1, ids[2][:, 10:])
    label = (torch.rand(64, generator=draw) < 0.3).float()
    return dlrm.Batch(*(x.to(device) for x in (torch.randn(64, 13, generator=draw), torch.cat(ids, 1), label)))


def train_losses(step: train.Step) -> list[float]:
    return [float(step(make_batch(step.mesh.device, i), 1e-2)["loss"]) for i in range(5)]


def test_the_gpu_trains_as_the_cpu_does() -> None:
    disable_tf32()
    assert train_losses(new_step(GPU)) == pytest.approx(train_losses(new_step("cpu")), rel=1e-3)


@cuda_only
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager(precision: str) -> None:
    eager, captured = (new_step(GPU, precision=precision, capture=mode) for mode in ("none", "whole"))
    assert train_losses(captured) == pytest.approx(train_losses(eager), rel=1e-4 if precision == "fp32" else 1e-2)


def test_the_host_does_not_wait() -> None:
    model, batch = dlrm.DLRM(CFG).to(DEVICE), make_batch(DEVICE, 0)
    with forbid_synchronization():
        dlrm.loss(model, batch)["loss"].backward()
