"""Settings of a DLRM run. It imports no torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from hpcai.models.dlrm import DLRMConfig
from hpcai.settings import LoaderConfig, ReportConfig, RunConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """A table of events on disk, from ``data_prep.events``, and how it is read."""

    directory: Path = Path("datasets/criteo")
    """folder with table.json"""
    batch: PositiveInt = 65536
    """events per optimizer step, over all ranks"""
    rows: PositiveInt = 1024
    """consecutive events that are read at once: batches are of whole blocks, and blocks are shuffled"""
    epoch: PositiveInt | None = None
    """events between evaluations; null: all"""
    evaluation_batch: PositiveInt = 262144
    """events per evaluation batch, over all ranks"""
    pictures: NonNegativeInt = 20000
    """validation events in the report"""


class TablesConfig(Settings):
    """Embedding tables on the ranks."""

    plan: Literal["auto", "replicated"] = "auto"
    """auto: tables are replicated, or sharded by tables, rows or columns, by traffic and memory; replicated: every rank has all"""
    memory: PositiveFloat | None = None
    """GB of each rank for tables and their states of Adagrad; null: 60 % of the memory that is free"""


class Config(RunConfig):
    """A DLRM run. The defaults are those of the reference of MLPerf Training at a global batch of 65,536: one epoch."""

    model: DLRMConfig = DLRMConfig()
    """dense_features, rows and hotness are those of the data"""
    tables: TablesConfig = TablesConfig()
    data: DataConfig = DataConfig()
    step: StepConfig = StepConfig(optimizer="adagrad", lr=4e-3, eps=1e-8)
    train: TrainConfig = TrainConfig(epochs=1, metric="auc", target=0.80275, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/dlrm"))

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data = self.data
        for name in ("batch", "evaluation_batch", "epoch"):
            if (value := getattr(data, name)) is not None and value % data.rows:
                raise ValueError(f"data.{name} is {value}; expected a multiple of data.rows, {data.rows}")
        if data.reader not in ("auto", "direct", "buffered"):
            raise ValueError(f"data.reader is {data.reader}, for files of samples; set it to auto, direct or buffered")
        if data.stage is not None:
            raise ValueError(f"data.stage is {data.stage}, but a table of events is not staged; copy it, and set data.directory")
        if self.mesh.evaluate and self.tables.plan == "auto":
            raise ValueError("ranks of mesh.evaluate would need all tables; set mesh.evaluate to 0, or tables.plan to replicated")
        return self
