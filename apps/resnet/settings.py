"""Settings of a ResNet run. It imports no torch."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveFloat, PositiveInt
from hpcai.models.resnet import ResNetConfig
from hpcai.settings import LoaderConfig, MeshConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Encoded images on disk, from ``data_prep.images`` or ``data_prep.galaxies``, and how they are read."""

    directory: Path = Path("datasets/imagenet")
    """folder with train/, validation/ and statistics.json"""
    batch: PositiveInt = 256
    """images per optimizer step, over all ranks"""
    evaluation_batch: PositiveInt = 256
    """images per evaluation batch, over all ranks"""
    pictures: NonNegativeInt = 500
    """validation images in the report: the first ones drawn, all for the calibration"""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    """smallest and largest area of a random crop, as a fraction of the image"""
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    """smallest and largest ratio of width to height of a random crop"""
    flip: bool = True
    """flip images at random, from left to right"""
    rotate90: bool = False
    """rotate images by a random multiple of 90 degrees, if they have no preferred direction"""

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for name, (low, high), most in (("scale", self.scale, 1.0), ("ratio", self.ratio, float("inf"))):
            if not low <= high <= most:
                raise ValueError(f"{name} is {low:g} to {high:g}; expected a rising range" + (" up to 1" if most == 1 else ""))
        return self


class Config(RunConfig):
    """A ResNet run. The defaults are those of torchvision's first recipe: SGD at a global batch of 256 for 90 epochs."""

    model: ResNetConfig = ResNetConfig()
    batchnorm_group: PositiveInt = 1
    """neighbouring replicas whose batch norms share their statistics"""
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    step: StepConfig = StepConfig(
        optimizer="sgd", lr=0.1, weight_decay=1e-4, decay_names=("*",),
        schedule=ScheduleConfig(decay="steps", decay_at=(30, 60), decay_to=(0.1, 0.01)),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(epochs=90, metric="accuracy", target=0.759, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/resnet"))
