"""Settings of an OpenFold run. No torch here."""

from datetime import date
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import NonNegativeInt, PositiveInt, Settings
from hpcai.models.openfold import ObjectiveConfig, OpenFoldConfig
from hpcai.models.openfold.features import FeatureConfig
from hpcai.settings import Axial, LoaderConfig, MeshConfig, ReportConfig, RunConfig, StepConfig, TrainConfig


class DataConfig(LoaderConfig):
    """Chains on disk, as ``data_prep.openfold`` makes them, which of them count, and how they are read."""

    directory: Path = Path("datasets/openfold")
    """folder with train/, validation/ and, where there are any, templates/"""
    batch: PositiveInt = 128
    """chains per optimizer step, over all copies"""
    epoch: PositiveInt | None = None
    """chains that are drawn between two evaluations; null: as many as there are"""
    draw: Literal["weighted", "once"] = "weighted"
    """weighted: anew each time, long chains more often and those with many relatives less (clamp(residues, 256, 512) / 512 /
    sqrt(cluster size)); once: each chain once an epoch"""
    released_until: date | None = None
    """day of release after which a chain is not trained on; null: all are"""
    validation_from: date | None = None
    """day of release before which a chain is not evaluated"""
    validation_until: date | None = None
    """day of release after which a chain is not evaluated"""
    validation_residues: PositiveInt | None = None
    """residues above which a chain is not evaluated"""
    pictures: NonNegativeInt = 4
    """validation chains whose predicted structures are kept as mmCIF, and drawn in the report"""


class StartConfig(Settings):
    """Weights that training begins with, instead of random ones."""

    weights: Path | None = None
    """file of any form that ``hpcai.models.openfold.load_weights`` reads, such as MLPerf HPC's initial checkpoint"""
    sha256: str | None = None
    """what the file must be"""


class AxesConfig(MeshConfig, Axial):
    """The axes of the processes: copies of the network, each with its own proteins, cut over ``axial``."""


def _check_shards(features: FeatureConfig, axial: int, templates: int) -> None:
    """Raise ValueError where some of the processes that a protein is cut over would have none of its residues or sequences."""
    counts = ("crop", features.crop, 0), ("clusters", features.clusters, templates), ("extra", features.extra, 0)
    for name, count, more in counts:
        if count is not None and count + more < axial > 1:
            description = f"features.{name} is {count}" + f", with {more} templates" * (more > 0)
            raise ValueError(f"mesh.axial is {axial}, but {description}: less than one for each process; make either fit")


class FoldConfig(Settings):
    """Chains to be folded."""

    chains: Path
    """FASTA file of one chain or more"""
    alignments: Path | None = None
    """folder with a folder of alignments (.a3m, .sto) for each chain, by its name, or for one chain its own; null: none"""
    weights: Path = Path("runs/openfold/model.safetensors")
    """file of any form that ``hpcai.models.openfold.load_weights`` reads"""
    out: Path = Path("folds")
    """folder for one structure file for each chain; a chain whose file is there is not folded again"""
    form: Literal["cif", "pdb"] = "cif"
    recycles: NonNegativeInt = 3
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    features: FeatureConfig = FeatureConfig.preset("evaluation")
    """how many rows of alignments are seen"""
    mesh: AxesConfig = AxesConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        _check_shards(self.features, self.mesh.axial, 0)
        return self


class Config(RunConfig):
    """An OpenFold run. The defaults are those of MLPerf HPC at a global batch of 128, where it begins with random weights."""

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
            raise ValueError(f"data.reader is {data.reader}, which has no chains of different lengths; take auto, direct or hdf5")
        if data.shards > 1:
            raise ValueError(f"data.shards is {data.shards}, but chains are drawn from all; set it to 1")
        if objective.aligned_error and not self.model.heads.tm:
            raise ValueError(f"objective.aligned_error is {objective.aligned_error:g}, which needs model.heads.tm=true")
        if self.model.template is None and self.features.templates:
            raise ValueError(f"features.templates is {self.features.templates}, but model.template is null; set it to 0")
        if self.model.template is not None and not self.features.templates:
            raise ValueError("features.templates is 0, but the network has a part for templates; set model.template to null")
        if data.epoch is not None and data.epoch < data.batch:
            raise ValueError(f"data.epoch is {data.epoch}, less than one batch of {data.batch} (data.batch)")
        _check_shards(self.features, self.mesh.axial, self.features.templates)
        return self
