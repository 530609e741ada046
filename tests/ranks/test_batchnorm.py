"""Batch norm over a group of replicas equals that of one process with all samples of the group."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.nn import BatchNorm
from hpcai.parallel.batchnorm import convert_sync_batchnorm
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

MESHES = [{"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}]
CASES = [(axes, group) for axes in MESHES for group in (1, 2, 4) if axes["replicate"] % group == 0]
STEPS = 3


class Network(nn.Module):
    """A network with batch norms of torch and of hpcai, with ReLU and sum, without weights, and without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.first = BatchNorm(8, relu=True)
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None))
        self.third = BatchNorm(8, relu=True)
        self.volume = nn.BatchNorm3d(8, affine=False)
        self.flat = nn.BatchNorm1d(8, track_running_stats=False)
        self.out = nn.Linear(8, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.conv(x))
        x = self.third(self.second(x), residual=x)
        x = self.volume(x[:, :, None])[:, :, 0]
        return self.out(self.flat(x.mean((2, 3)) + x.amax((2, 3))))


def new_model() -> Network:
    torch.manual_seed(0)
    model = Network().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3, 0.5)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = 3 + torch.randn(8, 3, 6, 5, generator=generator).double() * torch.arange(1, 9).view(8, 1, 1, 1)
    return x, torch.randn(8, 2, generator=generator).double()


def loss(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": (model(part[0]) - part[1]).square().mean()}


def train(mesh: Mesh, group: int, folder: str | None = None) -> dict[str, Any]:
    """Return weights and statistics of this rank, and those for evaluation; one process has the groups as micro-batches."""
    model, single = new_model(), mesh.world == 1
    model.flat.eval()
    names, tensors = list(model.state_dict()), [*model.parameters(), *model.buffers()]
    if not single:
        convert_sync_batchnorm(model, mesh, group)
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)), "none is a copy"
    assert model.second[1].training and not model.flat.training, "evaluation mode is kept"
    sum_gradients_over(model, mesh["depth"])
    cfg: dict[str, Any] = {"optimizer": "sgd", "precision": "fp64", "lr": 0.1, "clip": 1.0, "ema_decay": 0.5 if folder else None}
    step = Step(model, loss, StepConfig(**cfg, accumulate=group if single else 1), mesh)
    step._weight /= mesh["depth"].size
    axis = mesh["replicate"]
    for i in range(STEPS):
        x, y = batch(i)
        step((x.chunk(axis.size)[axis.rank], y.chunk(axis.size)[axis.rank]))
    assert list(model.state_dict()) == names, "state-dict keys are kept"
    if folder:
        Checkpoints(Path(folder), CheckpointConfig(), mesh, {}).save(step, Progress(STEPS))
    state = {n: t.detach().clone().numpy() for n, t in model.state_dict().items()}
    return {"state": state, "snapshot": {n: t.numpy() for n, t in step.snapshot().items()}}


@pytest.mark.parametrize(("axes", "group"), CASES, ids=str)
def test_a_group_equals_one_process_with_all_its_samples(axes: dict[str, int], group: int) -> None:
    groups = axes["replicate"] // group
    weights, ranks = train(Mesh({}), groups)["state"], on_ranks(axes, train, group)
    for rank in ranks:
        assert list(rank["state"]) == list(weights)
        for name, value in rank["state"].items():
            if groups == 1 or not re.search("running|num_batches", name):  # on one process all groups update the same statistics
                np.testing.assert_allclose(value, weights[name], rtol=1e-9, atol=1e-11, err_msg=name)
        for name, value in rank["snapshot"].items():  # for evaluation: the mean of all replicas
            mean = np.mean([other["state"][name] for other in ranks], axis=0)
            np.testing.assert_allclose(value, mean, rtol=1e-9, atol=1e-11, err_msg=name)
    statistics = {str(rank["state"]["first.running_mean"]) for rank in ranks}
    assert len(statistics) == groups, "each group has its own"


def resume(mesh: Mesh, folder: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    cfg = StepConfig(optimizer="sgd", precision="fp64", ema_decay=0.5)
    step = Step(convert_sync_batchnorm(new_model(), mesh, mesh["replicate"].size), loss, cfg, mesh)
    Checkpoints(Path(folder), CheckpointConfig(), mesh, {}).resume(step)
    live = {n: t.detach().clone().numpy() for n, t in step.model.state_dict().items()}
    return live, {n: t.numpy() for n, t in step.snapshot().items()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_checkpoint_holds_the_statistics_of_all_replicas_once(tmp_path: Path, replicas: int) -> None:
    saved = on_ranks({"replicate": 4}, train, 2, str(tmp_path))
    for live, averaged in on_ranks({"replicate": replicas}, resume, str(tmp_path)):
        for name in live:
            if "running" in name:
                mean = np.mean([rank["state"][name] for rank in saved], axis=0)
                np.testing.assert_allclose(live[name], mean, rtol=1e-12, err_msg=name)
                np.testing.assert_allclose(averaged[name], saved[0]["snapshot"][name], rtol=1e-12, err_msg=name)


def compare_uneven(mesh: Mesh, rows: list[int]) -> dict[str, Any]:
    axis = mesh["replicate"]
    generator = torch.Generator().manual_seed(0)
    x = 1e3 + torch.randn(sum(rows), 5, 4, 3, generator=generator).double()
    dy = torch.randn(x.shape, generator=generator).double()
    local = slice(sum(rows[: axis.rank]), sum(rows[: axis.rank + 1]))
    norm = BatchNorm(5, relu=True).double()
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    full = nn.BatchNorm2d(5).double()
    full.load_state_dict(norm.state_dict())
    a, b = x[local].clone().requires_grad_(), x.clone().requires_grad_()
    convert_sync_batchnorm(nn.Sequential(norm), mesh, axis.size)(a).backward(dy[local])
    torch.relu(full(b)).backward(dy)
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, b.grad[local], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(norm.running_var, full.running_var, rtol=1e-8, atol=0)
    torch.testing.assert_close(norm.running_mean, full.running_mean, rtol=1e-12, atol=0)
    parameters = (*norm.named_parameters(), *((f"full {name}", p) for name, p in full.named_parameters()))
    return {name: p.grad.numpy() for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("rows", [[3, 1], [1, 1, 4, 2]], ids=str)
def test_replicas_may_have_different_numbers_of_samples(rows: list[int]) -> None:
    ranks = on_ranks({"replicate": len(rows)}, compare_uneven, rows)
    for name in ("weight", "bias"):
        total = sum(rank[name] for rank in ranks)
        np.testing.assert_allclose(total, ranks[0][f"full {name}"], rtol=1e-7)


def count_synchronized(mesh: Mesh) -> int:
    model = convert_sync_batchnorm(new_model(), mesh, 2)
    return sum(not isinstance(norm.all_reduce, nn.Identity) for norm in model.modules() if isinstance(norm, BatchNorm))


def test_dedicated_evaluation_ranks_may_be_any_number() -> None:
    assert on_ranks({"replicate": 2, "evaluate": 1}, count_synchronized)[:2] == [5, 5]
