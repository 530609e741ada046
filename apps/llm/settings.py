"""Settings of a language model's run. No torch here."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from hpcai.models.llm import LLMConfig, LoRAConfig
from hpcai.settings import Context, LoaderConfig, MeshConfig, Pipeline, ReportConfig, RunConfig, StepConfig, Tensor, TrainConfig


class DataConfig(LoaderConfig):
    """Rows of tokens on disk, as ``data_prep.text`` makes them, and how they are read."""

    directory: Path = Path("datasets/llm")
    """folder with train/, validation/, text.json and tokenizer.json"""
    blend: dict[str, PositiveFloat] = {}
    """further folders, of the same tokenizer and with rows as long, each with its weight: how many of its rows are read for one of
    `directory`'s; their validation rows are not read"""
    batch: PositiveInt = 128
    """rows per optimizer step, over all copies"""
    evaluation_batch: PositiveInt = 128
    """rows per evaluation batch, over all copies"""
    epoch: PositiveInt | None = None
    """rows between two evaluations; null: as many as there are"""
    validation_rows: PositiveInt | None = None
    """the first validation rows, which alone are evaluated; null: all"""
    documents: Literal["apart", "joined"] = "apart"
    """apart: a token sees those of its own document; joined: all before it in its row"""
    learn: Literal["all", "answers"] = "all"
    """answers: of chats, and of prompts with answers, the answers alone"""
    judge: Literal["all", "answers"] = "all"
    """which tokens of validation rows count"""
    pictures: NonNegativeInt = 512
    """validation rows of which the report compares bits per byte with gzip and xz, and some of which the model continues"""


class StartConfig(Settings):
    """Weights that training begins with, instead of random ones."""

    weights: Path | None = None
    """folder as Hugging Face has it, such as Llama's, or a safetensors file of ours"""


class AxesConfig(MeshConfig, Pipeline, Context, Tensor):
    """The axes of the processes: copies of the model, cut over ``pipeline``, ``context`` and ``tensor``."""


class StagesConfig(Settings):
    """How micro-batches go through the stages of ``mesh.pipeline``."""

    schedule: Literal["gpipe", "1f1b", "zero-bubble", "zero-bubble-v"] = "1f1b"
    per_rank: PositiveInt = 1
    """stages of each process"""


class Config(RunConfig):
    """A run of a language model. The defaults are Llama 2 7B, from random weights."""

    model: LLMConfig = LLMConfig()
    """a default gives way to what start.weights has, and without them vocabulary and positions to those of the data"""
    lora: LoRAConfig | None = None
    """adapters, which alone are trained then"""
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    stages: StagesConfig = StagesConfig()
    start: StartConfig = StartConfig()
    step: StepConfig = StepConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, decay_names=("*_proj.*weight",), clip=1.0)
    train: TrainConfig = TrainConfig(steps=1000, metric="loss")
    report: ReportConfig = ReportConfig(directory=Path("runs/llm"))
    benchmark: Literal["llama2_70b_lora", "llama31_8b"] | None = None
    """the benchmark of MLPerf whose log is written where report.sinks has mlperf"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data = self.data
        if data.reader in ("dali", "gds"):
            raise ValueError(f"data.reader is {data.reader}, which has no rows with more or fewer ends; take auto, direct or hdf5")
        if data.blend and data.shards > 1:
            raise ValueError(f"data.shards is {data.shards}, but a blend is drawn from all of its folders; set it to 1")
        if data.epoch is not None and data.epoch < data.batch:
            raise ValueError(f"data.epoch is {data.epoch}, less than one batch of {data.batch} rows (data.batch)")
        if data.epoch is not None and data.shards > 1:
            raise ValueError(f"data.epoch is {data.epoch}, but shards are read to their ends; set it to null, or data.shards to 1")
        if self.lora is not None and self.start.weights is None:
            raise ValueError("lora is given, but start.weights is null: adapters of random weights; name the folder of a model")
        if "mlperf" in self.report.sinks and self.benchmark is None:
            raise ValueError("report.sinks has mlperf, but benchmark is null; say which of MLPerf's this is")
        return self
