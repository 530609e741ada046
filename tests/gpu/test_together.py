"""`fit` never waits for the GPU; loaders, pinned memory, capture and background evaluation do not change its results."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.data.loader import Loader
from hpcai.settings import CheckpointConfig, StepConfig, TrainConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from hpcai.train.loop import fit
from hpcai.train.run import Result, Run
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, GRAPH, disable_tf32, forbid_synchronization
from tests.gpu.volumes import Volumes, make_volume

COUNT, SHAPE = 24, (16, 16, 16, 2)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before batch norm has a gradient of rounding errors, which LAMB would scale to a full step.
        self.conv, self.norm, self.out = nn.Conv3d(2, 8, 3, 2, bias=False), nn.BatchNorm3d(8), nn.Linear(8, 1)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        x = counts.float().log1p().permute(0, 4, 1, 2, 3)
        x = torch.dropout(torch.relu(self.norm(self.conv(x))), 0.3, self.training)
        return self.out(x.mean((2, 3, 4)))[:, 0]


def errors(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["volume"]) - batch["index"] / COUNT


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    error = errors(model, batch)
    return {"loss": error.square().mean(), "worst": error.detach().abs().amax()}


def metric(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    error = errors(model, batch)
    return {"mae": (error.abs().sum(), len(error))}


def new_step(**overrides: Any) -> Step:
    torch.backends.cudnn.deterministic = True
    disable_tf32()
    torch.manual_seed(0)
    return Step(Network(), loss, StepConfig(ema_decay=0.9, clip=1.0, **overrides), dist.single_process(DEVICE), graph=GRAPH)


def load_batches() -> list[dict[str, torch.Tensor]]:
    volumes = torch.from_numpy(np.stack([make_volume(index, SHAPE) for index in range(COUNT)])).to(DEVICE)
    return [{"volume": part, "index": rows} for part, rows in zip(volumes.split(4), torch.arange(COUNT, device=DEVICE).split(4))]


@pytest.mark.parametrize("capture", ["none", "forward", "whole"])
@pytest.mark.parametrize("compare", [None, 2])
def test_fit_never_waits_for_the_gpu(capture: str, compare: int | None) -> None:
    """Reports are copied to the host during the next step, from the first step to the end."""
    step, batches = new_step(capture=capture), load_batches()
    for _ in range(3):  # libraries select algorithms, and graphs are captured
        step(batches[0])
    cfg = TrainConfig(steps=14, report_every=3, replica_check_every=compare)
    with forbid_synchronization():
        result = fit(step, batches, cfg)
    assert result.reason == "finished" and [report.step for report in result.reports] == [3, 6, 9, 12, 14]
    assert all(np.isfinite(report["loss"]) for report in result.reports)


@pytest.fixture
def sources(files: list[Path]) -> Iterator[Any]:
    with ExitStack() as stack:

        def loader(name: str, **kwargs: Any) -> Loader:
            source = Volumes(files, DEVICE, threads=3, max_unused=1 << 16)
            mesh = dist.single_process(DEVICE)
            return stack.enter_context(Loader(source, 4, mesh, name=name, workers=3, prefetch=1 << 19, **kwargs))

        yield loader


def logged_values(result: Result) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [report.values for report in result.reports], [report.values for report in result.evaluations]


def check_same(actual: Result, expected: Result) -> None:
    for actual_reports, expected_reports in zip(logged_values(actual), logged_values(expected), strict=True):
        assert len(actual_reports) == len(expected_reports) > 0
        for a, b in zip(actual_reports, expected_reports):
            assert a == pytest.approx(b, rel=2e-4)


@pytest.mark.parametrize("kwargs", [{"capture": "whole"}, {"capture": "whole", "optimizer": "lamb"}, {"capture": "auto"}], ids=str)
def test_a_loader_capture_and_evaluation_beside_it_are_the_plain_run(sources: Any, tmp_path: Path, kwargs: dict[str, Any]) -> None:
    """Three epochs with checkpoints and background evaluation equal an eager run that is evaluated inline."""
    uncaptured = {name: value for name, value in kwargs.items() if name != "capture"}
    cfg = TrainConfig(epochs=3, report_every=2)
    order = {"shuffle": False, "last_batch": "keep"}
    expected = fit(new_step(**uncaptured), sources("train", seed=3), cfg, validation=sources("held", **order), evaluate=metric)
    cfg = TrainConfig(epochs=3, report_every=2, evaluate="background")
    step = new_step(**kwargs)
    run = Run("", None, step.mesh)
    run.checkpoints = Checkpoints(tmp_path, CheckpointConfig(every_steps=4), step.mesh)
    actual = fit(step, sources("train", seed=3), cfg, validation=sources("held", **order), evaluate=metric, run=run)
    check_same(actual, expected)
    assert len(logged_values(actual)[1]) == 3
    resumed = new_step(**kwargs)
    progress = Checkpoints(tmp_path, CheckpointConfig(), resumed.mesh).resume(resumed)
    assert isinstance(progress, Progress) and progress.step == 3 * COUNT // 4
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
