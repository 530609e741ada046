"""Settings of a RetinaNet run. It imports no torch."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveInt
from hpcai.models.retinanet import RetinaNetConfig
from hpcai.settings import Height, LoaderConfig, MeshConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Images with objects on disk, from ``data_prep.coco`` or ``data_prep.survey``, and how they are read."""

    directory: Path = Path("datasets/openimages")
    """folder with train/ and validation/"""
    batch: PositiveInt = 256
    """images per optimizer step, over all ranks"""
    evaluation_batch: PositiveInt = 256
    """images per evaluation batch, over all ranks"""
    pictures: NonNegativeInt = 100
    """validation images in the report: the first ones drawn, all for the curves"""
    objects: PositiveInt | None = None
    """boxes to which each image is padded; null: a power of two, at least 8, that fits the batch"""
    flip: bool = True
    """flip images at random, from left to right"""
    rotate90: bool = False
    """rotate images by a random multiple of 90 degrees, if they have no preferred direction"""

    @model_validator(mode="after")
    def _decodes(self) -> Self:
        if self.reader in ("dali", "gds"):
            raise ValueError(f"reader is {self.reader}, but boxes are resized with their images on the CPU; set another reader")
        return self


class AxesConfig(MeshConfig, Height):
    """Images may be sharded."""


class Config(RunConfig):
    """A RetinaNet run. The defaults are those of the reference of MLPerf at a global batch of 256."""

    model: RetinaNetConfig = RetinaNetConfig()
    backbone: Path | None = None
    """weights of a classifier, ResNet or ResNeXt (torchvision, timm, hpcai), with which the backbone starts; null: random ones"""
    batchnorm_group: PositiveInt = 1
    """neighbouring replicas whose batch norms share their statistics (model.norm: batch)"""
    scoring_cores: tuple[NonNegativeInt, ...] = ()
    """cores of the process that scores detections; empty: those of the first rank"""
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    step: StepConfig = StepConfig(optimizer="adam", lr=1e-4, schedule=ScheduleConfig(warmup=1, start=1e-7))
    train: TrainConfig = TrainConfig(epochs=8, metric="ap", target=0.34, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/retinanet"))

    @model_validator(mode="after")
    def _images_fit(self) -> Self:
        fixed, (height, width) = self.model.resize == "fixed", self.model.size
        if self.data.rotate90 and not (fixed and height == width):
            raise ValueError(f"data.rotate90 needs squares; model.resize is {self.model.resize}, model.size {[height, width]}")
        if self.mesh.height > 1 and not fixed:
            raise ValueError(f"mesh.height is {self.mesh.height}, which needs images of one size; set model.resize=fixed")
        return self
