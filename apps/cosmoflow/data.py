"""Simulated universes as samples.   B batch, D H W the cube, C redshifts, P parameters."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.cosmoflow.settings import Config, DataConfig
from hpcai.data import Loader, Memory, Rows, Sharded
from hpcai.data.stage import holds, on_this_node, shard_of, stage_in
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.cosmoflow import Batch, CosmoFlowConfig, to_physical

logger = logging.getLogger(__name__)


class Universes:
    """The universes of one split; ``turn`` seeds a random turn of each, a pure function of (seed, epoch, index)."""

    def __init__(self, rows: Rows, turn: int | None) -> None:
        self.rows, self.turn = rows, turn

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self, index: int) -> str:
        return self.rows.describe(index)

    def sample(self, index: int, epoch: int) -> Batch:
        """Counts [D, H, W, C] int16 and target [P] float32 of one universe."""
        values = self.rows.read(index)
        counts = values["counts"]
        if self.turn is not None:
            counts = turned(counts, np.random.default_rng([self.turn, epoch, index]), self.rows.reader.memory)
        return Batch(counts, values["target"])

    def close(self) -> None:
        self.rows.close()


def turned(counts: Any, rng: np.random.Generator, memory: Memory) -> Any:
    """One of the 48 turns and mirrors of a cube, all equally likely.   [D, H, W, C] -> [D, H, W, C]"""
    axes = [int(axis) for axis in rng.permutation(3)]
    flips = tuple(axis for axis in range(3) if rng.integers(2))
    if isinstance(counts, torch.Tensor):
        side = torch.cuda.Stream(counts.device)  # not the one that trains, behind which it would wait
        with torch.cuda.stream(side):
            cube = counts.permute(*axes, 3).flip(flips)
        side.synchronize()  # the loader goes on with it in another stream
        return cube
    return memory.copy(np.flip(counts.transpose(*axes, 3), flips))


@contextmanager
def universes(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, CosmoFlowConfig]]:
    """Loaders for training (None on processes that only evaluate) and validation, and the model's settings completed by what the
    data know."""
    train, validation = _rows(cfg, "train", mesh), _rows(cfg, "validation", mesh)
    seed, batch = cfg.train.seed, cfg.data.batch
    words: dict[str, Any] = {"name": "train", "seed": seed, "accumulate": cfg.step.accumulate}
    if cfg.data.shards > 1:
        words["sampler"] = Sharded(_shards(train, cfg.data), batch, seed)
    with (
        _loader(Universes(train, seed if cfg.data.turn else None), batch, cfg, mesh, **words)
        if mesh.trains
        else nullcontext() as training,
        _loader(
            Universes(validation, None), cfg.data.evaluation_batch, cfg, mesh, name="validation", shuffle=False, last="keep"
        ) as held_out,
    ):
        yield training, held_out, _completed(cfg, train)


def _loader(source: Universes, batch: int, cfg: Config, mesh: Mesh, **words: Any) -> Loader:
    if cfg.data.reader != "dali":
        return Loader(source, batch, mesh, **cfg.data.loading(), **words)
    from hpcai.data.dali import DaliLoader, Field

    fields = (Field("counts", "DHWC"), Field("target"))
    own = {key: value for key, value in cfg.data.loading().items() if key in ("workers", "prefetch", "patience")}
    return DaliLoader(source, batch, mesh, fields, collect=lambda arrays: Batch(**arrays), **own, **words)


def _rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    model, data = cfg.model, cfg.data
    remedy = (
        f"make data with: python -m data_prep.cosmoflow simulate {data.directory} --size {model.size}, "
        "or set data.directory, model.size and model.channels to what is there"
    )
    cube, folder = (model.size,) * 3, data.directory / split
    fields = {"counts": ("int16", (*cube, model.channels)), "target": ("float32", (len(model.parameters),))}
    local = {}
    if data.stage is not None and folder.is_dir():  # else Rows says what to do
        own_disk = _own_disk(data.stage) / split
        staged = stage_in(folder, own_disk, mesh, shards=data.shards if split == "train" else 1)
        logger.info("%s: %s", split, staged)
        local = holds(own_disk, folder)
    return Rows(folder, fields, remedy, reader=data.reader, device=mesh.device, local=local)


def _own_disk(text: str) -> Path:
    found, unset = on_this_node(text)
    if unset:
        raise DataError(f"data.stage={text}: {unset[0]} is not set on this node; set it, or name a folder without it")
    return Path(found)


def _shards(rows: Rows, data: DataConfig) -> np.ndarray:
    """Shard of each sample.   [N]"""
    of_file = shard_of(rows.folder, data.shards)
    return np.array([of_file[rows.locate(index)[0]] for index in range(len(rows))])


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
