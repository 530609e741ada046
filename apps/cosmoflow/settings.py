"""Settings of a CosmoFlow run. It imports no torch."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from hpcai.config import PositiveInt
from hpcai.models.cosmoflow import CosmoFlowConfig
from hpcai.settings import Depth, Height, LoaderConfig, MeshConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Universes on disk, from ``data_prep.cosmoflow``, and how they are read."""

    directory: Path = Path("datasets/cosmoflow")
    """folder with train/ and validation/"""
    batch: PositiveInt = 64
    """universes per optimizer step, over all ranks"""
    evaluation_batch: PositiveInt = 64
    """universes per evaluation batch, over all ranks"""
    whiten: bool = False
    """whiten the redshift channels of the input by statistics.json (not in the MLPerf codes)"""
    turn: bool = False
    """permute and flip each cube by one of its 48 symmetries, at random in every epoch (not in the MLPerf codes)"""


class AxesConfig(MeshConfig, Depth, Height):
    """The mesh: model replicas, each of which may be sharded along the depth and the height of its universe."""


class Config(RunConfig):
    """A CosmoFlow run. The defaults are those of MLPerf HPC's reference at a global batch of 64."""

    model: CosmoFlowConfig = CosmoFlowConfig()
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    step: StepConfig = StepConfig(
        optimizer="sgd", lr=1e-3, momentum=0.9, decay_names=("dense1.weight", "dense2.weight"),
        schedule=ScheduleConfig(
            warmup=4, start=1e-3, decay="steps", decay_at=(32, 64), decay_to=(0.25, 0.125), held=True, late=True
        ),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(epochs=128, metric="mae", target=0.124)
    report: ReportConfig = ReportConfig(directory=Path("runs/cosmoflow"))

    @model_validator(mode="after")
    def _one_regulariser(self) -> Self:
        if self.step.weight_decay and self.model.dropout:
            advice = "the MLPerf HPC rules allow one of them: set the other to 0"
            raise ValueError(f"step.weight_decay is {self.step.weight_decay:g} and model.dropout {self.model.dropout:g}; {advice}")
        return self
