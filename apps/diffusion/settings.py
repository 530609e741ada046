"""Settings of a diffusion run. No torch here."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeInt, PositiveInt, Rate, Settings
from hpcai.models.diffusion import DiffusionConfig
from hpcai.settings import (
    Depth,
    Height,
    LoaderConfig,
    MeshConfig,
    ReportConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
    Tensor,
    TrainConfig,
)


class DataConfig(LoaderConfig):
    """Fields on disk, as ``data_prep.fields`` makes them, or latents, as ``data_prep.latents`` does, and how they are read."""

    directory: Path = Path("datasets/fields")
    """folder with train/ and validation/"""
    batch: PositiveInt = 64
    """samples per optimizer step, over all processes"""
    evaluation_batch: PositiveInt = 64
    """samples per evaluation batch, over all processes"""
    evaluation_place: Rate = 0.5
    """where in each eighth of the times validation samples are measured: in its middle, or at its beginning (0, MLPerf's Flux.1)"""
    epoch: PositiveInt | None = None
    """samples between two evaluations; null: as many as there are"""
    turn: bool = True
    """shift each field at random along periodic dims, anew in every epoch; where all dims are periodic and alike also turn it"""
    drawn: NonNegativeInt = 16
    """validation samples for whose conditions the trained model draws ensembles"""
    members: Annotated[int, Field(ge=2)] = 16
    """of each ensemble"""
    scored: Annotated[int, Field(ge=2)] | None = None
    """members that every evaluation draws for each validation sample, for the CRPS, spread over skill, power and values; null: it
    measures the loss alone, and costs a forward pass"""
    vae: Path | None = None
    """folder of the autoencoder that made latents, with which the report shows images"""


class StartConfig(Settings):
    """Weights that training begins with, instead of random ones."""

    weights: Path | None = None
    """folder of a network as diffusers has it, such as a U-Net's, or a file or folder of ours"""


class AxesConfig(MeshConfig, Depth, Height, Tensor):
    """Copies of the model; samples of a U-Net are cut over ``depth`` (volumes) and ``height``, a transformer over ``tensor``."""


class Config(RunConfig):
    """A diffusion run on fields or latents."""

    model: DiffusionConfig = DiffusionConfig()
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    start: StartConfig = StartConfig()
    step: StepConfig = StepConfig(
        optimizer="adamw", lr=1e-3, betas=(0.9, 0.99), clip=1.0, ema_decay=0.999,
        schedule=ScheduleConfig(unit="steps", warmup=100, decay="cosine", floor=0.02),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(steps=100_000, metric="loss")
    report: ReportConfig = ReportConfig(directory=Path("runs/diffusion"))
    benchmark: Literal["stable_diffusion", "flux1"] | None = None
    """the benchmark of MLPerf whose log is written where report.sinks has mlperf"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data = self.data
        if data.epoch is not None and data.epoch < data.batch:
            raise ValueError(f"data.epoch is {data.epoch}, less than one batch of {data.batch} samples (data.batch)")
        if data.epoch is not None and data.shards > 1:
            raise ValueError(f"data.epoch is {data.epoch}, but shards are read to their ends; set it to null, or data.shards to 1")
        if "mlperf" in self.report.sinks and self.benchmark is None:
            raise ValueError("report.sinks has mlperf, but benchmark is null; say which of MLPerf's this is")
        if self.benchmark == "flux1" and data.evaluation_place != 0:
            raise ValueError(f"data.evaluation_place is {data.evaluation_place:g}, but MLPerf's flux1 has 0; set it to 0")
        return self
