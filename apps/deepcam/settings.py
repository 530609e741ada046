"""Settings of a DeepCAM run. It imports no torch."""

from pathlib import Path

from hpcai.config import NonNegativeInt, PositiveInt
from hpcai.models.deepcam import DeepCamConfig
from hpcai.settings import Height, LoaderConfig, MeshConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Maps on disk, from ``data_prep.deepcam``, and how they are read."""

    directory: Path = Path("datasets/deepcam")
    """folder with train/, validation/ and statistics.json"""
    batch: PositiveInt = 128
    """maps per optimizer step, over all ranks"""
    evaluation_batch: PositiveInt = 128
    """maps per evaluation batch, over all ranks"""
    pictures: NonNegativeInt = 6
    """validation maps in the report, with true and predicted masks"""


class AxesConfig(MeshConfig, Height):
    """The mesh: model replicas, each of which may be sharded along the height of its map."""


class Config(RunConfig):
    """A DeepCAM run. The defaults are those of MLPerf HPC at a global batch of 128: six to eight epochs to an IoU of 0.82."""

    model: DeepCamConfig = DeepCamConfig()
    batchnorm_group: PositiveInt = 1
    """neighbouring replicas whose batch norms share their statistics, such as those of one node"""
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    step: StepConfig = StepConfig(
        optimizer="lamb", lr=1.55e-3, eps=1e-6, weight_decay=0.01, decay_names=("*",), clip=1.0,
        schedule=ScheduleConfig(unit="steps", decay="cosine", length=9000, first_step=1, late=True, after_warmup=True),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(epochs=16, metric="iou", target=0.82, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/deepcam"))
