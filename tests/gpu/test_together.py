"""`fit` never waits for the GPU; loaders, pinned memory, capture and background evaluation do not change its results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.data.direct import MemoryPool, Reader
from hpcai.data.layout import npy_layout
from hpcai.data.loader import Loader
from hpcai.settings import CheckpointConfig, StepConfig, TrainConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from hpcai.train.loop import fit
from hpcai.train.run import Result, Run
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, GRAPH, ON_GPU, disable_tf32, forbid_synchronization

COUNT, SHAPE = 24, (16, 16, 16, 2)


def make_volume(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 100, SHAPE).astype(np.int16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("volumes")
    for index in range(COUNT):
        np.save(folder / f"{index:03d}.npy", make_volume(index))
    return sorted(folder.glob("*.npy"))


class Volumes:
    """Volumes read from files; the target is the index."""

    def __init__(self, files: list[Path], reader: Any) -> None:
        self.layouts, self.reader = [npy_layout(path) for path in files], reader

    def __len__(self) -> int:
        return len(self.layouts)

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        return {"volume": self.layouts[index].read(self.reader), "target": np.float32(index / COUNT)}

    def describe(self, index: int) -> str:
        return self.layouts[index].path.name

    def close(self) -> None:
        self.reader.close()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before batch norm has a gradient of rounding errors, which LAMB would scale to a full step.
        self.conv, self.norm, self.out = nn.Conv3d(2, 8, 3, 2, bias=False), nn.BatchNorm3d(8), nn.Linear(8, 1)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        x = counts.float().log1p().permute(0, 4, 1, 2, 3)
        x = torch.dropout(torch.relu(self.norm(self.conv(x))), 0.3, self.training)
        return self.out(x.mean((2, 3, 4)))[:, 0]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    error = model(batch["volume"]) - batch["target"]
    return {"loss": error.square().mean(), "worst": error.detach().abs().amax()}


def metric(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    error = model(batch["volume"]) - batch["target"]
    return {"mae": (error.abs().sum(), len(error))}


def new_step(**overrides: Any) -> Step:
    torch.backends.cudnn.deterministic = True
    disable_tf32()
    torch.manual_seed(0)
    return Step(Network(), loss, StepConfig(ema_decay=0.9, clip=1.0, **overrides), dist.single_process(DEVICE), graph=GRAPH)


def load_batches(files: list[Path], count: int = 6, size: int = 4) -> list[dict[str, torch.Tensor]]:
    rows = [np.arange(size * i, size * i + size) % COUNT for i in range(count)]
    return [
        {"volume": torch.from_numpy(np.stack([make_volume(i) for i in row])).to(DEVICE),
         "target": torch.from_numpy(row.astype(np.float32) / COUNT).to(DEVICE)} for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("capture", ["none", "forward", "whole"])
@pytest.mark.parametrize("compare", [None, 2])
def test_fit_never_waits_for_the_gpu(files: list[Path], capture: str, compare: int | None) -> None:
    """Reports are copied to the host during the next step, from the first step to the end."""
    step, batches = new_step(capture=capture), load_batches(files)
    for _ in range(3):  # libraries select algorithms, and graphs are captured
        step(batches[0])
    cfg = TrainConfig(steps=14, report_every=3, replica_check_every=compare)
    with forbid_synchronization():
        result = fit(step, batches, cfg)
    assert result.reason == "finished" and [report.step for report in result.reports] == [3, 6, 9, 12, 14]
    assert all(np.isfinite(report["loss"]) for report in result.reports)


@pytest.fixture
def sources(files: list[Path]) -> Iterator[Any]:
    """Loaders with the direct reader and a small pool of pinned memory, so that it is soon reused."""
    loaders: list[Loader] = []

    def loader(name: str, **kwargs: Any) -> Loader:
        reader = Reader("auto", threads=3, memory=MemoryPool(max_unused=1 << 16, pin=DEVICE if ON_GPU else None))
        mesh = dist.single_process(DEVICE)
        loaders.append(Loader(Volumes(files, reader), 4, mesh, name=name, workers=3, prefetch=1 << 19, **kwargs))
        return loaders[-1]

    yield loader
    for each in loaders:
        each.close()


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
