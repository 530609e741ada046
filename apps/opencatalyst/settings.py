"""Settings of an OpenCatalyst run. It imports no torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveInt
from hpcai.models.dimenet import DimeNetConfig, ObjectiveConfig
from hpcai.settings import LoaderConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, TrainConfig

STD = 2.887317180633545  # eV, of adsorption energies in OC20's training split; the benchmark also divides forces by it


class DataConfig(LoaderConfig):
    """Frames on disk, from ``data_prep.opencatalyst``, and how they are read."""

    directory: Path = Path("datasets/opencatalyst")
    """folder with train/, validation/ and statistics.json"""
    batch: PositiveInt = 256
    """frames per optimizer step, over all replicas"""
    evaluation_batch: PositiveInt = 1024
    """frames per evaluation batch, over all replicas"""
    balance: Literal["none", "frames", "triplets"] = "triplets"
    """assignment of a batch to replicas. none: in order; frames: equally many frames, with triplets (pairs of neighbouring edges)
    balanced as far as possible; triplets: balanced triplets, with unequal numbers of frames"""
    shapes: Literal["exact", "few"] = "exact"
    """few: pad batches to sizes in steps of 10 %, for the few shapes that compiled code and CUDA graphs need"""
    pictures: NonNegativeInt = 1000
    """validation frames in the report, with true and predicted energies and forces"""


class Config(RunConfig):
    """An OpenCatalyst run. The defaults are those of MLPerf HPC's reference at a global batch of 256: 18 to 21 epochs over 2
    million frames to a force MAE of 0.036 eV/angstrom."""

    model: DimeNetConfig = DimeNetConfig(angles="detached", mean=-0.7554450631141663, scale=STD)
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    step: StepConfig = StepConfig(
        optimizer="adamw", lr=4e-4, weight_decay=0.01, decay_names=("*",),
        schedule=ScheduleConfig(
            unit="steps", warmup=31_252, start=0.8e-4, decay="steps", decay_at=(125_008, 187_512, 250_016),
            decay_to=(0.1, 0.01, 0.001),
        ),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(epochs=30, metric="force_mae", target=0.036)
    report: ReportConfig = ReportConfig(directory=Path("runs/opencatalyst"))

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data, step = self.data, self.step
        if data.reader in ("dali", "gds"):
            raise ValueError(f"data.reader is {data.reader}, not for frames of various sizes; set it to auto, direct or hdf5")
        if data.shapes == "few" and data.balance == "triplets":
            raise ValueError("data.shapes is few, but data.balance triplets gives replicas unequal frame counts; set it to frames")
        if data.shards > 1 and data.balance != "none":
            raise ValueError(f"data.shards is {data.shards}, but data.balance {data.balance} assigns over all; set it to none")
        if step.capture in ("forward", "whole") and data.shapes == "exact":
            raise ValueError(f"step.capture is {step.capture}, which needs data.shapes few and data.balance frames or none")
        if step.accumulate > 1 and data.balance == "triplets":
            raise ValueError(f"step.accumulate is {step.accumulate}: micro-batches need data.balance frames or none")
        return self
