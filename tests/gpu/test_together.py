"""The parts of a run together: `fit` never waits for the GPU; readers, pinned copies, capture and evaluation change nothing."""

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
from tests.gpu.machine import DEVICE, GRAPH, ON_GPU, nothing_waits, precisely

COUNT, SHAPE = 24, (16, 16, 16, 2)


def value(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 100, SHAPE).astype(np.int16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("volumes")
    for index in range(COUNT):
        np.save(folder / f"{index:03d}.npy", value(index))
    return sorted(folder.glob("*.npy"))


class Volumes:
    """Volumes by a reader; their target is their number."""

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
        # A bias before batch norm has a gradient of rounding alone, of which LAMB makes a whole step.
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


def new_step(**words: Any) -> Step:
    torch.backends.cudnn.deterministic = True
    precisely()
    torch.manual_seed(0)
    return Step(Network(), loss, StepConfig(ema_decay=0.9, clip=1.0, **words), dist.single_process(DEVICE), graph=GRAPH)


def ready(files: list[Path], batches: int = 6, size: int = 4) -> list[dict[str, torch.Tensor]]:
    rows = [np.arange(size * i, size * i + size) % COUNT for i in range(batches)]
    return [
        {"volume": torch.from_numpy(np.stack([value(i) for i in row])).to(DEVICE),
         "target": torch.from_numpy(row.astype(np.float32) / COUNT).to(DEVICE)} for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("capture", ["none", "forward", "whole"])
@pytest.mark.parametrize("compare", [None, 2])
def test_fit_never_waits_for_the_gpu(files: list[Path], capture: str, compare: int | None) -> None:
    """Reports are on their way while the next step runs, from the first step to the last word."""
    step, data = new_step(capture=capture), ready(files)
    for _ in range(3):  # libraries choose their algorithms, and graphs are recorded
        step(data[0])
    cfg = TrainConfig(steps=14, report_every=3, replica_check_every=compare)
    with nothing_waits():
        found = fit(step, data, cfg)
    assert found.reason == "finished" and [report.step for report in found.reports] == [3, 6, 9, 12, 14]
    assert all(np.isfinite(report["loss"]) for report in found.reports)


@pytest.fixture
def sources(files: list[Path]) -> Iterator[Any]:
    """Loaders over the direct reader: pinned memory, of which little is kept, so that it is soon written again."""
    made: list[Loader] = []

    def loader(name: str, **words: Any) -> Loader:
        reader = Reader("auto", threads=3, memory=MemoryPool(max_unused=1 << 16, pin=DEVICE if ON_GPU else None))
        made.append(Loader(Volumes(files, reader), 4, dist.single_process(DEVICE), name=name, workers=3, prefetch=1 << 19, **words))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def results(found: Result) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [report.values for report in found.reports], [report.values for report in found.evaluations]


def alike(found: Result, expected: Result) -> None:
    for ours, theirs in zip(results(found), results(expected), strict=True):
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs):
            assert a == pytest.approx(b, rel=2e-4)


@pytest.mark.parametrize("words", [{"capture": "whole"}, {"capture": "whole", "optimizer": "lamb"}, {"capture": "auto"}], ids=str)
def test_a_loader_capture_and_evaluation_beside_it_are_the_plain_run(sources: Any, tmp_path: Path, words: dict[str, Any]) -> None:
    """Three epochs with a checkpoint in each, against one batch after the other, eagerly, evaluated while training waits."""
    plain = {name: value for name, value in words.items() if name != "capture"}
    cfg = TrainConfig(epochs=3, report_every=2)
    held = {"shuffle": False, "last_batch": "keep"}
    expected = fit(new_step(**plain), sources("train", seed=3), cfg, validation=sources("held", **held), evaluate=metric)
    cfg = TrainConfig(epochs=3, report_every=2, evaluate="background")
    step = new_step(**words)
    run = Run("", None, step.mesh)
    run.checkpoints = Checkpoints(tmp_path, CheckpointConfig(every_steps=4), step.mesh)
    found = fit(step, sources("train", seed=3), cfg, validation=sources("held", **held), evaluate=metric, run=run)
    alike(found, expected)
    assert len(results(found)[1]) == 3
    again = new_step(**words)
    progress = Checkpoints(tmp_path, CheckpointConfig(), again.mesh).resume(again)
    assert isinstance(progress, Progress) and progress.step == 3 * COUNT // 4
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
