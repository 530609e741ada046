"""Settings of a diffusion run. It imports no torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai import settings
from hpcai.config import NonNegativeInt, PositiveInt, Rate, Settings
from hpcai.models.diffusion import DiffusionConfig, DiffusionLoRAConfig


class DataConfig(settings.LoaderConfig):
    """Fields on disk, from ``data_prep.fields``, or latents, from ``data_prep.latents``, and how they are read."""

    directory: Path = Path("datasets/fields")
    """folder with train/ and validation/"""
    batch: PositiveInt = 64
    """samples per optimizer step, over all ranks"""
    evaluation_batch: PositiveInt = 64
    """samples per evaluation batch, over all ranks"""
    evaluation_place: Rate = 0.5
    """position within each eighth of the times at which validation samples are scored: 0.5, its middle, or 0 (MLPerf's Flux.1)"""
    epoch: PositiveInt | None = None
    """samples between two evaluations; null: all samples"""
    turn: bool = True
    """shift each field at random along periodic dims in every epoch; if all dims are periodic and equal, also permute and flip"""
    drawn: NonNegativeInt = 16
    """validation samples for which the trained model generates ensembles"""
    members: Annotated[int, Field(ge=2)] = 16
    """of each ensemble"""
    leads: PositiveInt = 8
    """of trajectories: lead times of forecasts, each from the one before; training has the first"""
    scored: Annotated[int, Field(ge=2)] | None = None
    """members that every evaluation generates for each validation sample, for CRPS, spread over skill, power and values; null: only
    the loss, for one forward pass"""
    vae: Path | None = None
    """folder of the autoencoder of the latents, for images in the report"""


class StartConfig(Settings):
    """Initial weights, instead of random ones."""

    weights: Path | None = None
    """folder of a network in diffusers' format, such as a U-Net's, or a file or folder of hpcai"""
    mean: Path | None = None
    """run with model.objective.prediction_type=regression; the model then generates the residual of its prediction"""


class AxesConfig(settings.MeshConfig, settings.Depth, settings.Height, settings.Tensor):
    """The mesh: replicas; samples of a U-Net are sharded over ``depth`` (volumes) and ``height``, a transformer over ``tensor``."""


class Config(settings.RunConfig):
    """A diffusion run on fields or latents."""

    model: DiffusionConfig = DiffusionConfig()
    lora: DiffusionLoRAConfig | None = None
    """adapters; only they are trained"""
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    start: StartConfig = StartConfig()
    step: settings.StepConfig = settings.StepConfig(
        optimizer="adamw", lr=1e-3, betas=(0.9, 0.99), clip=1.0, ema_decay=0.999,
        schedule=settings.ScheduleConfig(unit="steps", warmup=100, decay="cosine", floor=0.02),
    )  # fmt: skip
    train: settings.TrainConfig = settings.TrainConfig(steps=100_000, metric="loss")
    report: settings.ReportConfig = settings.ReportConfig(directory=Path("runs/diffusion"))
    benchmark: Literal["stable_diffusion", "flux1"] | None = None
    """the MLPerf benchmark whose log is written if report.sinks has mlperf"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data = self.data
        if data.epoch is not None and data.epoch < data.batch:
            raise ValueError(f"data.epoch is {data.epoch}, less than one batch of {data.batch} samples (data.batch)")
        if data.epoch is not None and data.shards > 1:
            raise ValueError(f"data.epoch is {data.epoch}, but shards are read to their ends; set it to null, or data.shards to 1")
        if self.lora is not None and self.start.mean is not None:
            raise ValueError("lora is given beside start.mean, which has layers of the same names; train without one of them")
        if self.lora is not None and self.start.weights is None:
            raise ValueError("lora is given, but start.weights is null: adapters of random weights; name the folder of a network")
        if "mlperf" in self.report.sinks and self.benchmark is None:
            raise ValueError("report.sinks has mlperf, but benchmark is null; set it to the MLPerf benchmark of this run")
        if self.benchmark == "flux1" and data.evaluation_place != 0:
            raise ValueError(f"data.evaluation_place is {data.evaluation_place:g}, but MLPerf's flux1 has 0; set it to 0")
        return self
