"""Settings of a BERT run. It imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpcai.config import NonNegativeInt, PositiveInt, Settings
from hpcai.models.bert import BertConfig
from hpcai.settings import LoaderConfig, MeshConfig, ReportConfig, RunConfig, ScheduleConfig, StepConfig, Tensor, TrainConfig


class DataConfig(LoaderConfig):
    """Packed rows on disk, from ``data_prep.bert``, and how they are read."""

    directory: Path = Path("datasets/bert")
    """folder with train/ and validation/, and families/ of simulated proteins"""
    batch: PositiveInt = 384
    """rows per optimizer step, over all ranks"""
    epoch: PositiveInt | None = None
    """rows between evaluations; null: all"""
    evaluation_batch: PositiveInt = 384
    """rows per evaluation batch, over all ranks"""
    masks: Literal["drawn", "stored"] = "drawn"
    """drawn: masked tokens are drawn anew in each epoch; stored: those in the files of MLPerf, with next-sentence labels"""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """fraction of tokens that are masked"""
    balance: Literal["none", "cost", "sequences"] = "cost"
    """the rows of a batch that each rank gets: any; with an even cost of tokens and pairs of them; with evenly many sequences"""
    pictures: NonNegativeInt = 16
    """families whose contacts are predicted for the report"""


class StartConfig(Settings):
    """Initial weights."""

    weights: Path | None = None
    """file or folder that ``hpcai.models.bert.load_weights`` reads"""


class AxesConfig(MeshConfig, Tensor):
    """The mesh: model replicas, each of which may be sharded over heads, channels and vocabulary."""


class Config(RunConfig):
    """A BERT run. The defaults are those of MLPerf on one node: 384 rows of two sequences to a masked-LM accuracy of 0.72."""

    model: BertConfig = BertConfig(activation="gelu_pytorch_tanh")
    start: StartConfig = StartConfig()
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    step: StepConfig = StepConfig(
        optimizer="lamb", lr=9.6e-4, betas=(0.60466, 0.85437), eps=1e-6, weight_decay=0.1, decay_names=("*[!m].weight",), clip=1.0,
        schedule=ScheduleConfig(unit="steps", decay="linear", length=3680, from_zero=True),
    )  # fmt: skip
    train: TrainConfig = TrainConfig(steps=3680, metric="mlm_accuracy", target=0.72, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/bert"))
