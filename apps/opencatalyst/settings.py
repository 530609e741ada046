"""Settings of an OpenCatalyst run. No torch here."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveInt
from hpcai.models.dimenet import DimeNetConfig, ObjectiveConfig
from hpcai.settings import LoaderConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig

STD = 2.887317180633545  # eV: of the adsorption energies of OC20's training split, and what the benchmark divides forces by


class DataConfig(LoaderConfig):
    """Frames on disk, as ``data_prep.opencatalyst`` makes them, and how they are read."""

    directory: Path = Path("datasets/opencatalyst")
    """folder with train/, validation/ and statistics.json"""
    batch: PositiveInt = 256
    """frames per optimizer step, over all copies"""
    evaluation_batch: PositiveInt = 1024
    """frames per evaluation batch, over all copies"""
    balance: Literal["none", "frames", "triplets"] = "triplets"
    """how a batch is dealt to the copies of the model: as it comes; equally many frames, with triplets (pairs of neighbouring
    edges) as even as that allows; or triplets as even as can be, with more or fewer frames"""
    shapes: Literal["exact", "few"] = "exact"
    """few: sizes of batches are rounded up to steps of a tenth, so that there are few of them, which compiled code and CUDA Graphs
    need"""
    pictures: NonNegativeInt = 1000
    """validation frames of which the report compares energies and forces with what the model says"""


class Config(RunConfig):
    """An OpenCatalyst run. The defaults are those of MLPerf HPC's reference at a global batch of 256: 18 to 21 epochs over 2
    million frames to a force MAE of 0.036 eV/angstrom."""

    model: DimeNetConfig = DimeNetConfig(angles="detached", mean=-0.7554450631141663, scale=STD)
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    step: StepConfig = StepConfig(
        optimizer="adamw",
        lr=4e-4,
        weight_decay=0.01,
        decay_names=("*",),
        schedule=ScheduleConfig(
            unit="steps", warmup=31_252, start=0.8e-4, decay="steps", decay_at=(125_008, 187_512, 250_016),
            decay_to=(0.1, 0.01, 0.001),
        ),
    )
    train: TrainConfig = TrainConfig(epochs=30, metric="force_mae", target=0.036)
    report: ReportConfig = ReportConfig(directory=Path("runs/opencatalyst"))

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data, step = self.data, self.step
        if data.reader in ("dali", "gds"):
            raise ValueError(f"data.reader is {data.reader}, which has no frames of different sizes; take auto, direct or hdf5")
        if data.shapes == "few" and data.balance == "triplets":
            raise ValueError("data.shapes is few, but data.balance triplets gives copies more or fewer frames; set it to frames")
        if data.shards > 1 and data.balance != "none":
            raise ValueError(f"data.shards is {data.shards}, but data.balance {data.balance} deals over all; set it to none")
        if step.capture in ("forward", "whole") and data.shapes == "exact":
            raise ValueError(f"step.capture is {step.capture}, which needs data.shapes few and data.balance frames or none")
        if step.accumulate > 1 and data.balance == "triplets":
            raise ValueError(f"step.accumulate is {step.accumulate}: micro-batches need data.balance frames or none")
        return self
