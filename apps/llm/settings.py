"""Settings of a language model's run. It imports no torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from hpcai.models.llm import AxesConfig, LLMConfig, LoRAConfig
from hpcai.settings import LoaderConfig, ReportConfig, RunConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Rows of tokens on disk, from ``data_prep.text``, and how they are read."""

    directory: Path = Path("datasets/llm")
    """folder with train/, validation/, text.json and tokenizer.json"""
    blend: dict[str, PositiveFloat] = {}
    """further folders with the same tokenizer and row length, each with a weight: the number of its rows per row of `directory`;
    their validation rows are not read"""
    batch: PositiveInt = 128
    """rows per optimizer step, over all replicas"""
    evaluation_batch: PositiveInt = 128
    """rows per evaluation batch, over all replicas"""
    epoch: PositiveInt | None = None
    """rows between two evaluations; null: all rows"""
    validation_rows: PositiveInt | None = None
    """number of validation rows to evaluate, from the first; null: all"""
    documents: Literal["apart", "joined"] = "apart"
    """apart: a token attends within its document; joined: to all before it in its row"""
    learn: Literal["all", "answers"] = "all"
    """tokens in the training loss; answers: those of the answers of chats and prompts only"""
    judge: Literal["all", "answers"] = "all"
    """tokens of validation rows that are scored"""
    pictures: NonNegativeInt = 512
    """validation rows for the report: their bits per byte beside gzip and xz, and continuations of some"""


class StartConfig(Settings):
    """Initial weights, instead of random ones."""

    weights: Path | None = None
    """folder in Hugging Face's format, such as Llama's, or a safetensors file of hpcai"""


class StagesConfig(Settings):
    """The schedule of pipeline stages over ``mesh.pipeline``."""

    schedule: Literal["gpipe", "1f1b", "zero-bubble", "zero-bubble-v"] = "1f1b"
    per_rank: PositiveInt = 1
    """stages of each rank"""


class Config(RunConfig):
    """A run of a language model. The defaults are Llama 2 7B, from random weights."""

    model: LLMConfig = LLMConfig()
    """defaults are replaced by the settings of start.weights, or without these by vocabulary and positions of the data"""
    lora: LoRAConfig | None = None
    """adapters; only they are trained"""
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    stages: StagesConfig = StagesConfig()
    start: StartConfig = StartConfig()
    step: StepConfig = StepConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, decay_names=("*_proj.*weight",), clip=1.0)
    train: TrainConfig = TrainConfig(steps=1000, metric="loss")
    report: ReportConfig = ReportConfig(directory=Path("runs/llm"))
    benchmark: Literal["llama2_70b_lora", "llama31_8b", "gpt_oss_20b", "deepseekv3_671b"] | None = None
    """the MLPerf benchmark whose log is written if report.sinks has mlperf"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data = self.data
        if data.reader in ("dali", "gds"):
            raise ValueError(f"data.reader is {data.reader}, not for rows with varying ends; set it to auto, direct or hdf5")
        if data.blend and data.shards > 1:
            raise ValueError(f"data.shards is {data.shards}, but a blend samples from all of its folders; set it to 1")
        if data.epoch is not None and data.epoch < data.batch:
            raise ValueError(f"data.epoch is {data.epoch}, less than one batch of {data.batch} rows (data.batch)")
        if data.epoch is not None and data.shards > 1:
            raise ValueError(f"data.epoch is {data.epoch}, but shards are read to their ends; set it to null, or data.shards to 1")
        if self.lora is not None and self.start.weights is None:
            raise ValueError("lora is given, but start.weights is null: adapters of random weights; name the folder of a model")
        if "mlperf" in self.report.sinks and self.benchmark is None:
            raise ValueError("report.sinks has mlperf, but benchmark is null; set it to the MLPerf benchmark of this run")
        return self
