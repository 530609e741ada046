"""Settings of an R-GAT run. It imports no torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, NonNegativeInt, PositiveInt
from hpcai.models.rgat import RGATConfig
from hpcai.settings import LoaderConfig, ReportConfig, RunConfig, StepConfig, TrainConfig

FanOut = Annotated[int, Field(ge=-1)]


class DataConfig(LoaderConfig):
    """A graph on disk, from ``data_prep.igb``, and how it is read."""

    directory: Path = Path("datasets/igbh")
    """folder with graph.json"""
    batch: PositiveInt = 16384
    """papers per optimizer step, over all ranks"""
    papers: PositiveInt = 512
    """papers of one sub-graph, which one thread samples: batches are of whole sub-graphs"""
    fan_out: Annotated[tuple[FanOut, ...], Field(min_length=1)] = (15, 10, 5)
    """neighbours of each node in each relation, from the papers outwards; -1: all"""
    epoch: PositiveInt | None = None
    """papers between evaluations; null: all"""
    evaluation_batch: PositiveInt = 16384
    """papers per evaluation batch, over all ranks"""
    graph: Literal["mapped", "memory"] = "memory"
    """edges: mapped from files, or loaded into the memory of each process"""
    features: Literal["direct", "mapped", "sharded"] = "direct"
    """direct: read past the page cache, for each batch; mapped: through it; sharded: each replica holds a part on its device, and
    rows are sent to those that need them"""
    cache: NonNegativeFloat = 0.0
    """GB per process for features of the nodes with the most edges, with direct reads"""
    shapes: Literal["exact", "few"] = "exact"
    """few: pad batches to sizes in steps of 10 %, for the few shapes that compiled code and CUDA graphs need"""
    pictures: NonNegativeInt = 4000
    """validation papers in the report"""


class Config(RunConfig):
    """An R-GAT run. The defaults are those of MLPerf Training at a global batch of 16,384: 0.75 to 0.95 epochs to an accuracy of
    0.72."""

    model: RGATConfig = RGATConfig()
    data: DataConfig = DataConfig()
    step: StepConfig = StepConfig(optimizer="adam", lr=2e-3)
    train: TrainConfig = TrainConfig(epochs=20, metric="accuracy", target=0.72, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/rgat"))

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data = self.data
        if data.reader != "auto":
            raise ValueError(f"data.reader is {data.reader}, for files of samples; set it to auto, and data.features")
        if data.stage is not None:
            raise ValueError(f"data.stage is {data.stage}, but a graph is not staged; copy it beforehand, and set data.directory")
        if len(data.fan_out) != self.model.layers:
            raise ValueError(f"data.fan_out has {len(data.fan_out)} hops, the network {self.model.layers} layers; give as many")
        if data.features == "sharded" and (self.mesh.evaluate or self.train.evaluate != "wait"):
            raise ValueError("data.features sharded needs all ranks in a batch; set mesh.evaluate to 0 and train.evaluate to wait")
        if self.step.capture in ("forward", "whole") and data.shapes == "exact":
            raise ValueError(f"step.capture is {self.step.capture}, which needs data.shapes few")
        return self

    @model_validator(mode="after")
    def _has_whole_subgraphs(self) -> Self:
        data, parts = self.data, self.step.accumulate
        for name in ("batch", "evaluation_batch", "epoch"):
            if (value := getattr(data, name)) is not None and value % data.papers:
                raise ValueError(f"data.{name} is {value}; expected a multiple of data.papers, {data.papers}")
        if data.batch // data.papers % parts:
            subgraphs = data.batch // data.papers
            raise ValueError(f"data.batch has {subgraphs} sub-graphs for step.accumulate {parts}; lower data.papers")
        return self
