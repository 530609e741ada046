"""Simulated universes as samples.   B batch, D H W the cube, C redshifts, P parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.cosmoflow.settings import Config
from hpcai.data import Loader, MemoryPool, Rows
from hpcai.data.hdf5 import Selection
from hpcai.data.splits import HELD_OUT, Samples, make_loader, open_loaders, open_split, training_kwargs, training_statistics
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.cosmoflow import Batch, CosmoFlowConfig, to_physical
from hpcai.parallel.spatial import SpatialPartition
from hpcai.programs import command_of


class Universes(Samples):
    """Universes of one split: counts [D, H, W, C] int16 and target [P] float32. ``turn`` seeds a random symmetry of each, a pure
    function of (seed, epoch, index). ``shard``: the box of the transformed cube of this rank."""

    def __init__(self, rows: Rows, turn: int | None, shard: Sequence[slice] = ()) -> None:
        super().__init__(rows)
        self.turn, self.shard = turn, tuple(shard)

    def selection(self, index: int, epoch: int) -> Selection | None:
        if not self.shard:
            return None
        if self.turn is None:
            return {"counts": self.shard}
        axes, flips = self._draw_turn(index, epoch)
        box, size = list(self.shard), self.rows.shapes["counts"][0]
        for dim, axis in enumerate(axes):
            first, end, _ = self.shard[dim].indices(size)
            box[axis] = slice(size - end, size - first) if dim in flips else slice(first, end)
        return {"counts": box}

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        counts = values["counts"]
        if self.turn is not None:
            counts = permute_and_flip(counts, *self._draw_turn(index, epoch), self.rows.reader.memory)
        return Batch(counts, values["target"])

    def _draw_turn(self, index: int, epoch: int) -> tuple[list[int], tuple[int, ...]]:
        """Draw one of the 48 symmetries of a cube, uniformly: the axes in their new order, and the flipped ones among them."""
        rng = np.random.default_rng([self.turn or 0, epoch, index])
        axes = [int(axis) for axis in rng.permutation(3)]
        return axes, tuple(axis for axis in range(3) if rng.integers(2))


def permute_and_flip(counts: Any, axes: Sequence[int], flips: tuple[int, ...], memory: MemoryPool) -> Any:
    """Return a cube with its axes permuted, then flipped.   [D, H, W, C] -> [D, H, W, C]"""
    if isinstance(counts, torch.Tensor):
        side = torch.cuda.Stream(counts.device)  # not the stream of training, behind which it would wait
        with torch.cuda.stream(side):
            cube = counts.permute(*axes, 3).flip(flips)
        side.synchronize()  # the loader uses it in another stream
        return cube
    return memory.copy(np.flip(counts.transpose(*axes, 3), flips))


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, CosmoFlowConfig]]:
    """Yield loaders for training (None on ranks that only evaluate) and validation, and the settings of the model, completed from
    the data."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    cut = SpatialPartition.from_mesh(mesh)
    shard = cut.local_slices((cfg.model.size,) * 3) if cut.axes else ()
    turn, kwargs, data = cfg.train.seed if cfg.data.turn else None, training_kwargs(train, cfg), cfg.data
    with open_loaders(
        mesh,
        lambda: build_loader(Universes(train, turn, shard), data.batch, cfg, mesh, **kwargs),
        lambda: build_loader(Universes(validation, None, shard), data.evaluation_batch, cfg, mesh, name="validation", **HELD_OUT),
    ) as (training, held_out, _):
        yield training, held_out, _complete_model_config(cfg, train)


def build_loader(source: Samples, batch: int, cfg: Config, mesh: Mesh, **kwargs: Any) -> Loader:
    return make_loader(source, batch, cfg.data, mesh, {"counts": "DHWC", "target": ""}, Batch, **kwargs)


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    model, data = cfg.model, cfg.data
    make = f"make data with: {command_of('data_prep.cosmoflow')} simulate {data.directory} --size {model.size}"
    remedy = f"{make}, or set data.directory, model.size and model.channels to those of existing data"
    cube = (model.size,) * 3
    fields = {"counts": ("int16", (*cube, model.channels)), "target": ("float32", (len(model.parameters),))}
    return open_split(data.directory / split, fields, remedy, data, mesh, data.shards if split == "train" else 1)


def _complete_model_config(cfg: Config, rows: Rows) -> CosmoFlowConfig:
    """Return the settings of the model with physical ranges of the data and, for whitening, statistics of the input."""
    model, info = cfg.model, rows.metadata
    if model.low is None and "low" in info:
        if tuple(info["parameters"]) != model.parameters:
            actual, expected = info["parameters"], list(model.parameters)
            raise DataError(f"{rows.folder}: has the parameters {actual}, but model.parameters is {expected}")
        model = model.model_copy(update={"low": tuple(info["low"]), "high": tuple(info["high"]), "units": tuple(info["units"])})
    if cfg.data.whiten and model.mean is None:
        with training_statistics(cfg.data.directory, "the input", "set data.whiten=false") as statistics:
            mean, mix = statistics["log1p"]["mean"], whitening_matrix(np.array(statistics["log1p"]["covariance"]))
        model = model.model_copy(update={"mean": tuple(mean), "mix": tuple(map(tuple, mix.tolist()))})
    return model


def whitening_matrix(covariance: np.ndarray) -> np.ndarray:
    """Return the symmetric matrix W for which W C W is the identity, for a covariance C. The same matter at several redshifts gives
    nearly equal channels; their small differences distinguish cosmologies.   [C, C] -> [C, C]"""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors / np.sqrt(np.maximum(values, 1e-6 * values[-1]))) @ vectors.T


def write_pairs(path: Path, pairs: dict[str, torch.Tensor], model: CosmoFlowConfig) -> None:
    """Write predicted and true parameters of the validation universes, in physical units if the data have them.   [N, P]"""
    values = {name: (to_physical(rows, model) if model.low else rows).numpy() for name, rows in pairs.items()}
    np.savez(path, names=np.array(model.parameters), units=np.array(model.units), **values)  # type: ignore[arg-type]
