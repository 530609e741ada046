"""Fields as samples, each with its coarse counterpart, and the loaders of a run.

B samples, C channels, S and s places along each dim, P parameters
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.diffusion import latents
from apps.diffusion.settings import Config
from hpcai.data import Loader, Rows
from hpcai.data.loader import Source
from hpcai.data.sampler import Endless
from hpcai.data.splits import Samples, by_shard, load, loaders, open_split
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.diffusion import Batch, Diffusion, DiffusionConfig, FieldsConfig, load_later, parallelize

_HELD: dict[str, Any] = {"shuffle": False, "last": "keep"}


class Fields(Samples):
    """Fields of one split: high [C, *S], and of low [C, *s] and parameters [P] what the model is conditioned on, float32. ``turn``
    seeds a random shift and turn of each, a pure function of (seed, epoch, index). ``count``: the first of them only."""

    def __init__(self, rows: Rows, turn: int | None = None, count: int | None = None) -> None:
        super().__init__(rows, count)
        self.turn = turn
        if turn is not None:
            about = rows.about
            self._periodic, self._factor = about["periodic"], about["factor"]
            self._alike = all(self._periodic) and len({*about["box"]}) == 1 and len(about["channels"]) == 1

    def make(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        high, low = values["high"], values.get("low")
        if self.turn is not None:
            high, low = self._turned(high, low, np.random.default_rng([self.turn, epoch, index]))
        number, when = (np.asarray(value, np.int64) for value in (index, epoch))
        return Batch(high, number, when, low, values.get("parameters"))

    def _turned(self, high: Any, low: Any, random: np.random.Generator) -> tuple[Any, Any]:
        """Moved by whole cells of ``low``, so that these stay the means of theirs."""
        dims, factor = high.ndim - 1, self._factor
        cells = [n // factor for n in high.shape[1:]]
        shift = [int(random.integers(n)) if periodic else 0 for n, periodic in zip(cells, self._periodic)]
        order = 1 + (random.permutation(dims) if self._alike else np.arange(dims))
        flips = tuple(1 + dim for dim in range(dims) if self._alike and random.integers(2))

        def turned(x: Any, by: int) -> Any:
            moved = np.roll(x, [by * n for n in shift], tuple(range(1, dims + 1)))
            return self.rows.reader.memory.copy(np.flip(moved.transpose(0, *order), flips))

        return turned(high, factor), None if low is None else turned(low, 1)


@contextmanager
def samples(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, DiffusionConfig]]:
    """Loaders for training (None on processes that only evaluate), validation and ensembles, and the model's settings completed by
    what the data know."""
    encoded = latents.about(cfg.data.directory / "train")
    train, validation = rows_of(cfg, "train", mesh), rows_of(cfg, "validation", mesh)
    source: Any = latents.Encoded if encoded else Fields
    seed, data = cfg.train.seed, cfg.data
    words: dict[str, Any] = {"name": "train", "seed": seed, "accumulate": cfg.step.accumulate}
    words |= {"sampler": Endless(len(train), data.epoch, seed)} if data.epoch else by_shard(train, data, data.batch, seed)
    turned = {} if encoded or not data.turn else {"turn": seed}
    with loaders(
        mesh,
        lambda: load(source(train, **turned), data.batch, data, mesh, **words),
        lambda: load(source(validation), data.evaluation_batch, data, mesh, **_HELD, name="validation"),
        (lambda: _spread(source(validation, count=data.drawn), cfg, mesh)) if data.drawn else None,
    ) as (training, held_out, drawn):
        yield training, held_out, drawn, latents.completed(cfg, train) if encoded else completed(cfg, train)


def _spread(source: Source, cfg: Config, mesh: Mesh) -> Loader:
    """A sample at a time for each copy: an ensemble of it is a batch."""
    return load(source, mesh["replicate"].size, cfg.data, mesh, **_HELD, name="drawn")


def rows_of(cfg: Config, split: str, mesh: Mesh) -> Rows:
    """Of the fields those that the model is conditioned on, or of latents their texts."""
    data, network, shards = cfg.data, cfg.model.network, cfg.data.shards if split == "train" else 1
    if latents.about(data.directory / split):
        return open_split(data.directory / split, latents.layouts(cfg, data.directory / split), latents.REMEDY, data, mesh, shards)
    remedy = f"make data with: python -m data_prep.fields simulate {data.directory} --kind matter, or set data.directory"
    dims = getattr(network, "dims", 2)
    layouts: dict[str, Any] = {"high": ("float32", (network.inputs, *(None,) * dims))}
    if getattr(network, "field", 0):
        layouts["low"] = ("float32", (network.field, *(None,) * dims))
    if getattr(network, "parameters", 0):
        layouts["parameters"] = ("float32", (network.parameters,))
    return open_split(data.directory / split, layouts, remedy, data, mesh, shards)


def completed(cfg: Config, rows: Rows) -> DiffusionConfig:
    """The model's settings with the size of a sample and what it is in physical units. Raises DataError where they say otherwise
    than the data."""
    model, about, size = cfg.model, rows.about, tuple(rows.shape(0, "high"))
    if model.size and model.size != size:
        found, asked = list(size), list(model.size)
        raise DataError(f"{rows.folder}: samples are {found}, model.size is {asked}; leave it out, or set data.directory")
    wraps = tuple(about["periodic"])
    if model.unet is not None and (model.unet.periodic or (False,) * len(wraps)) != wraps:
        told = [str(wrap).lower() for wrap in wraps]
        raise DataError(
            f"{rows.folder}: its dims are periodic as [{', '.join(told)}], model.unet.periodic says otherwise; set it to that"
        )
    fields = FieldsConfig(
        names=tuple(about["channels"]), units=tuple(about["channel_units"]), mean=tuple(about["mean"]),
        deviation=tuple(about["deviation"]), floor=about.get("floor"), factor=about["factor"], box=tuple(about["box"]),
        box_units=about["box_units"], periodic=wraps, parameters=tuple(about["parameters"]), low=tuple(about["low"]),
        high=tuple(about["high"]), parameter_units=tuple(about["units"]),
    )  # fmt: skip
    return model.model_copy(update={"size": size, "fields": fields})


def network(cfg: Config, shape: DiffusionConfig, mesh: Mesh) -> Diffusion:
    """The model over the mesh, of random weights or those that ``cfg.start`` names, to be built within ``train.seeds``."""
    model = Diffusion(shape, cfg.train.seed)
    latents.tell_nothing(model, cfg.data.directory)
    cut = partial(parallelize, mesh=mesh)
    return cut(model) if cfg.start.weights is None else load_later(model, cfg.start.weights, cut)


def write_ensembles(path: Path, rows: dict[str, torch.Tensor], model: DiffusionConfig) -> None:
    """Ensembles for conditions of validation samples, as the model sees them, and how to undo that.
    truth [N, C, *S], members [N, M, C, *S], field [N, C, *s], parameters [N, P]"""
    about = {} if model.fields is None else model.fields.model_dump()
    arrays: dict[str, Any] = {f"about_{name}": np.array(value) for name, value in about.items() if value is not None}
    with path.open("wb") as file:
        arrays |= {name: value.numpy() for name, value in rows.items()}
        np.savez_compressed(file, **arrays)
