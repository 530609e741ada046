"""Settings of a 3D U-Net run. It imports no torch."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from hpcai import settings
from hpcai.config import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings, UnitInterval
from hpcai.models.unet3d import UNet3DConfig


class AugmentConfig(Settings):
    """Sampling and augmentation of crops. The defaults are those of the MLPerf reference."""

    foreground: UnitInterval = 0.4
    """fraction of crops that contain one of the two largest components of some class, if the volume has any; others are uniform"""
    flip: UnitInterval = 1 / 3
    """fraction of crops that are flipped, along each dim"""
    brighter: UnitInterval = 0.1
    """fraction of crops that are multiplied by a factor"""
    factor: tuple[float, float] = (1.7, 2.3)
    """smallest and largest factor: the reference samples from 0.7 to 1.3 and adds 1; NVIDIA's code does not add it"""
    noisy: UnitInterval = 0.1
    """fraction of crops with Gaussian noise"""
    noise: NonNegativeFloat = 0.1
    """largest standard deviation of the noise"""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.factor[0] > self.factor[1]:
            raise ValueError(f"factor is {self.factor[0]:g} to {self.factor[1]:g}; give the smaller one first")
        return self


class DataConfig(settings.LoaderConfig):
    """Volumes on disk, from ``data_prep.kits19``, and how they are read."""

    directory: Path = Path("datasets/kits19")
    """folder with train/ and validation/"""
    batch: PositiveInt = 56
    """crops per optimizer step, over all replicas"""
    repeat: PositiveInt = 1
    """crops of each volume in an epoch"""
    augment: AugmentConfig = AugmentConfig()
    window_group: PositiveInt = 1
    """neighbouring replicas that divide the windows of a validation volume: more than 1 if there are more replicas than volumes"""
    pictures: NonNegativeInt = 6
    """validation volumes in the report: a slice, with true and predicted classes"""


class AxesConfig(settings.MeshConfig, settings.Depth, settings.Height):
    """The mesh: model replicas, each of which may be sharded along the depth and the height of its volume."""


class Config(settings.RunConfig):
    """A 3D U-Net run. The defaults are those of MLPerf Training's KiTS19 benchmark at a global batch of 56 (168 volumes: 3 steps an
    epoch): about 360,000 crops to a mean dice of 0.908."""

    model: UNet3DConfig = UNet3DConfig()
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    step: settings.StepConfig = settings.StepConfig(
        optimizer="sgd", lr=2.0, nesterov=True, lr_in_momentum=False,
        schedule=settings.ScheduleConfig(unit="epochs", warmup=1000, start=1e-4, first_step=1, held=True),
    )  # fmt: skip
    train: settings.TrainConfig = settings.TrainConfig(
        epochs=10_000, evaluate_from=1000, evaluate_every=20, metric="mean_dice", target=0.908, better="higher", hopeless=0.1
    )
    checkpoint: settings.CheckpointConfig = settings.CheckpointConfig(every_steps=300)
    report: settings.ReportConfig = settings.ReportConfig(directory=Path("runs/unet3d"))

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.data.repeat > 1 and self.data.shards > 1:
            raise ValueError(f"data.repeat is {self.data.repeat} and data.shards {self.data.shards}; set one of them to 1")
        if self.data.reader == "dali":
            raise ValueError("data.reader is dali, which reads no volumes of different sizes; set another, such as auto or direct")
        if self.data.reader == "gds":
            raise ValueError("data.reader is gds, but crops are flipped on the CPU; set another, such as auto or direct")
        if self.data.window_group > 1 and self.train.evaluate == "background":
            fault = f"data.window_group is {self.data.window_group} and train.evaluate background"
            raise ValueError(f"{fault}: replicas that divide windows wait for each other; set one of them to 1 or wait")
        return self
