"""Settings of an OpenFold run. It imports no torch."""

from datetime import date
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveInt, Settings
from hpcai.models.openfold import FeatureConfig, ObjectiveConfig, OpenFoldConfig
from hpcai.settings import LoaderConfig, MeshConfig, ReportConfig, RunConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Chains on disk, from ``data_prep.openfold``, their selection, and how they are read."""

    directory: Path = Path("datasets/openfold")
    """folder with train/, validation/ and optionally templates/"""
    batch: PositiveInt = 128
    """chains per optimizer step, over all replicas"""
    epoch: PositiveInt | None = None
    """chains sampled between two evaluations; null: the number of chains"""
    draw: Literal["weighted", "once"] = "weighted"
    """weighted: sample with replacement, long chains more often and those in large clusters less (clamp(residues, 256, 512) / 512 /
    sqrt(cluster size)); once: each chain once an epoch"""
    released_until: date | None = None
    """last release date of training chains; null: no limit"""
    validation_from: date | None = None
    """first release date of validation chains"""
    validation_until: date | None = None
    """last release date of validation chains"""
    validation_residues: PositiveInt | None = None
    """most residues of a validation chain"""
    pictures: NonNegativeInt = 4
    """validation chains whose predicted structures are written as mmCIF, and drawn in the report"""


class StartConfig(Settings):
    """Initial weights, instead of random ones."""

    weights: Path | None = None
    """file in any format of ``hpcai.models.openfold.load_weights``, such as MLPerf HPC's initial checkpoint"""
    sha256: str | None = None
    """SHA-256 that the file must have"""


class AxesConfig(MeshConfig):
    """The mesh: replicas of the network, each with its own proteins, which are sharded over ``axial``."""

    axial: PositiveInt = 1
    """axial parallelism: a tensor is sharded along one of two dims, and along the other if an operation needs all of the first"""


def _check_shards(features: FeatureConfig, axial: int, templates: int) -> None:
    """Raise ValueError if some rank of ``axial`` would have no residues or sequences of a protein."""
    counts = ("crop", features.crop, 0), ("clusters", features.clusters, templates), ("extra", features.extra, 0)
    for name, count, more in counts:
        if count is not None and count + more < axial > 1:
            description = f"features.{name} is {count}" + f", with {more} templates" * (more > 0)
            raise ValueError(f"mesh.axial is {axial}, but {description}: less than one per rank; lower mesh.axial or increase it")


class FoldConfig(Settings):
    """The prediction of structures of chains."""

    chains: Path
    """FASTA file of one or more chains"""
    alignments: Path | None = None
    """folder with a folder of alignments (.a3m, .sto) named after each chain, or the folder of a single chain; null: none"""
    weights: Path = Path("runs/openfold/model.safetensors")
    """file in any format of ``hpcai.models.openfold.load_weights``"""
    out: Path = Path("folds")
    """folder for a structure file of each chain; a chain whose file exists is not folded again"""
    form: Literal["cif", "pdb"] = "cif"
    recycles: NonNegativeInt = 3
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    features: FeatureConfig = FeatureConfig(crop=None)
    """sizes of the features, such as rows of alignments"""
    mesh: AxesConfig = AxesConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        _check_shards(self.features, self.mesh.axial, 0)
        return self


class Config(RunConfig):
    """An OpenFold run. The defaults are those of MLPerf HPC at a global batch of 128, for random initial weights."""

    model: OpenFoldConfig = OpenFoldConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    features: FeatureConfig = FeatureConfig()
    data: DataConfig = DataConfig()
    mesh: AxesConfig = AxesConfig()
    start: StartConfig = StartConfig()
    step: StepConfig = StepConfig(optimizer="adam", lr=1e-3, eps=1e-6, clip=0.1, ema_decay=0.9)
    train: TrainConfig = TrainConfig(steps=2000, metric="lddt", target=0.8, better="higher")
    report: ReportConfig = ReportConfig(directory=Path("runs/openfold"))

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        data, objective = self.data, self.objective
        if data.reader in ("dali", "gds"):
            raise ValueError(f"data.reader is {data.reader}, not for chains of various lengths; set it to auto, direct or hdf5")
        if data.shards > 1:
            raise ValueError(f"data.shards is {data.shards}, but chains are sampled from all; set it to 1")
        if objective.aligned_error and not self.model.heads.tm:
            raise ValueError(f"objective.aligned_error is {objective.aligned_error:g}, which needs model.heads.tm=true")
        if self.model.template is None and self.features.templates:
            raise ValueError(f"features.templates is {self.features.templates}, but model.template is null; set it to 0")
        if self.model.template is not None and not self.features.templates:
            raise ValueError("features.templates is 0, but the network has template modules; set model.template to null")
        if data.epoch is not None and data.epoch < data.batch:
            raise ValueError(f"data.epoch is {data.epoch}, less than one batch of {data.batch} (data.batch)")
        _check_shards(self.features, self.mesh.axial, self.features.templates)
        return self
