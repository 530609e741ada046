"""Simulated universes as samples.   B batch, D H W the cube, C redshifts, P parameters."""

import json
from pathlib import Path

import numpy as np
import torch

from apps.cosmoflow.settings import Config
from hpcai.data import Loader, Rows
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.cosmoflow import Batch, CosmoFlowConfig, to_physical


class Universes:
    """The universes of one split; ``turn`` seeds a random turn of each, a pure function of (seed, epoch, index)."""

    def __init__(self, folder: Path, model: CosmoFlowConfig, turn: int | None) -> None:
        cube = (model.size,) * 3
        remedy = (
            f"make data with: python -m data_prep.cosmoflow simulate {folder.parent} --size {model.size}, "
            "or set data.directory, model.size and model.channels to what is there"
        )
        fields = {"counts": ("int16", (*cube, model.channels)), "target": ("float32", (len(model.parameters),))}
        self.rows, self.turn = Rows(folder, fields, remedy), turn

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self, index: int) -> str:
        return self.rows.describe(index)

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        samples = [self.rows.read(int(index)) for index in indices]
        counts = [sample["counts"] for sample in samples]
        if self.turn is not None:
            counts = [turned(c, np.random.default_rng([self.turn, epoch, index])) for c, index in zip(counts, indices)]
        return Batch(torch.from_numpy(np.stack(counts)), torch.from_numpy(np.stack([sample["target"] for sample in samples])))


def turned(counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One of the 48 turns and mirrors of a cube, all equally likely.   [D, H, W, C] -> [D, H, W, C]"""
    axes = rng.permutation(3)
    flips = tuple(axis for axis in range(3) if rng.integers(2))
    return np.flip(counts.transpose(*axes, 3), flips)


def universes(cfg: Config, mesh: Mesh) -> tuple[Loader, Loader, CosmoFlowConfig]:
    """Loaders for training and validation, and the model's settings completed by what the data know."""
    seed = cfg.train.seed
    train = Universes(cfg.data.directory / "train", cfg.model, seed if cfg.data.turn else None)
    validation = Universes(cfg.data.directory / "validation", cfg.model, None)
    loaders = (
        Loader(train, cfg.data.batch, mesh, name="train", seed=seed, accumulate=cfg.step.accumulate, threads=cfg.data.threads),
        Loader(
            validation, cfg.data.evaluation_batch, mesh, name="validation", shuffle=False, whole=False, threads=cfg.data.threads
        ),
    )
    return *loaders, _completed(cfg, train.rows)


def _completed(cfg: Config, rows: Rows) -> CosmoFlowConfig:
    """The model's settings with what the data know: physical ranges, and the statistics of the input where they are wanted."""
    model, about = cfg.model, rows.about
    if model.low is None and "low" in about:
        if tuple(about["parameters"]) != model.parameters:
            found, asked = about["parameters"], list(model.parameters)
            raise DataError(f"{rows.folder}: holds the parameters {found}, the settings say model.parameters={asked}")
        model = model.model_copy(update={"low": tuple(about["low"]), "high": tuple(about["high"]), "units": tuple(about["units"])})
    if cfg.data.whiten and model.mean is None:
        path = cfg.data.directory / "statistics.json"
        try:
            about = json.loads(path.read_text())["splits"]["train"]["log1p"]
            mean, mix = about["mean"], whitening(np.array(about["covariance"]))
        except (OSError, ValueError, KeyError, np.linalg.LinAlgError) as problem:
            raise DataError(f"{path}: no statistics of the input ({problem!r}); set data.whiten=false") from problem
        model = model.model_copy(update={"mean": tuple(mean), "mix": tuple(map(tuple, mix.tolist()))})
    return model


def whitening(covariance: np.ndarray) -> np.ndarray:
    """The symmetric matrix that makes a covariance the identity: the same matter seen at several redshifts is almost the same
    input several times, and what tells one cosmology from another is the small difference.   [C, C] -> [C, C]"""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors / np.sqrt(np.maximum(values, 1e-6 * values[-1]))) @ vectors.T


def write_pairs(path: Path, pairs: dict[str, torch.Tensor], model: CosmoFlowConfig) -> None:
    """Predicted and true parameters of the validation universes, in physical units where the data name them.   [N, P]"""
    values = {name: (to_physical(rows, model) if model.low else rows).numpy() for name, rows in pairs.items()}
    with path.open("wb") as file:
        np.savez(
            file, names=np.array(model.parameters), units=np.array(model.units), predicted=values["predicted"], true=values["true"]
        )
