"""A run in ready order that stops anywhere resumes on another number of ranks: each sample is trained on once per epoch."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import train
from hpcai.config import Settings
from hpcai.data import Loader
from hpcai.dist.mesh import Mesh
from hpcai.settings import CheckpointConfig, ReportConfig, StepConfig, TrainConfig
from tests.index_source import IndexSource
from tests.ranks.launch import on_ranks

COUNT, BATCH = 48, 8


class Config(Settings):
    report: ReportConfig
    checkpoint: CheckpointConfig = CheckpointConfig(every_steps=2)
    model: int = 1


class Late(IndexSource):
    """Two samples of the first epoch are late."""

    def sample(self, index: int, epoch: int) -> Any:
        if epoch == 0 and index in (7, 30):
            time.sleep(0.3)
        return torch.tensor([float(index)], dtype=torch.float64)


def run_leg(mesh: Mesh, folder: Path, steps: int) -> list[tuple[int, int]]:
    """Train, and return the samples of this rank as (step, index)."""
    samples: list[tuple[int, int]] = []
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        samples.extend((step.count, int(x)) for x in batch[:, 0])
        time.sleep(0.02)
        return {"loss": model(batch / COUNT).square().mean()}

    step = train.Step(nn.Linear(1, 1), loss, StepConfig(optimizer="sgd", precision="fp64"), mesh)
    cfg = Config(report=ReportConfig(directory=folder, sinks=()))
    with train.Run("t", cfg, mesh) as run, Loader(Late(COUNT), BATCH, mesh, name="train", order="ready", seed=3) as loader:
        train.fit(step, loader, TrainConfig(steps=steps), run=run)
    return samples


@pytest.mark.parametrize("sizes", [(1, 4, 2), (4, 2, 1)], ids=str)
def test_each_sample_once_an_epoch(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    samples: list[tuple[int, int]] = []
    for size, steps in zip(sizes, (2, 5, 12)):
        for part in on_ranks({"replicate": size}, run_leg, tmp_path / "run", steps):
            samples += part
    assert len(samples) == 12 * BATCH
    first = [index for step, index in samples if step < 6]
    assert sorted(first) == list(range(COUNT)) and sorted(i for s, i in samples if s >= 6) == list(range(COUNT))
    assert {7, 30} & {index for step, index in samples if 2 <= step < 6}, "late samples are trained on after a stop"
