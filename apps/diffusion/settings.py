"""Settings of a diffusion run. No torch here."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from hpcai.config import Positive
from hpcai.models.diffusion import DiffusionConfig
from hpcai.settings import LoaderConfig, MeshConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Fields on disk, as ``data_prep.fields`` makes them, and how they are read."""

    directory: Path = Path("datasets/fields")
    """folder with train/ and validation/"""
    batch: Positive = 64
    """samples per optimizer step, over all processes"""
    evaluation_batch: Positive = 64
    """samples per evaluation batch, over all processes"""
    turn: bool = True
    """shift each sample at random along periodic dims, anew in every epoch; where all dims are periodic and alike also turn it"""
    drawn: Annotated[int, Field(ge=0)] = 16
    """validation samples for whose conditions the trained model draws ensembles"""
    members: Annotated[int, Field(ge=2)] = 16
    """of each ensemble"""


class AxesConfig(MeshConfig):
    """Copies of the model."""


class Config(RunConfig):
    """A diffusion run on fields."""

    model: DiffusionConfig = DiffusionConfig()
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    step: StepConfig = StepConfig(
        optimizer="adamw", lr=1e-3, betas=(0.9, 0.99), clip=1.0, average=0.999,
        schedule=ScheduleConfig(unit="steps", warmup=100, decay="cosine", floor=0.02),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(steps=100_000, metric="loss")
    report: ReportConfig = ReportConfig(directory=Path("runs/diffusion"))
