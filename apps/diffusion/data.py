"""Fields as samples, each with its coarse counterpart, and the loaders of a run.

B samples, C channels, S and s pixels along each dim, P parameters
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from apps.diffusion import latents
from apps.diffusion.settings import Config
from hpcai.data import Rows
from hpcai.data.hdf5 import Selection
from hpcai.data.splits import HELD_OUT, Samples, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.dist.collectives import broadcast_from_first
from hpcai.errors import DataError
from hpcai.models.diffusion import Batch, Diffusion, DiffusionConfig, FieldsConfig, Slabs, UNetConfig, load_deferred, parallelize
from hpcai.models.diffusion.lora import adapt
from hpcai.programs import command_of

_DESCRIPTION = (
    "channels", "channel_units", "mean", "deviation", "factor", "box", "box_units", "periodic", "parameters", "low", "high",
    "units",
)  # fmt: skip


class Turn(NamedTuple):
    """A symmetry transform of a field: a periodic shift along each dim, a permutation of its dims, and flips."""

    shift: tuple[int, ...]
    order: tuple[int, ...]
    flips: tuple[int, ...] = ()

    def apply(self, x: Any, moves: Sequence[int]) -> Any:
        """Return ``x`` [C, *S] transformed, with ``moves`` in place of ``shift``: a view of it, or of a shifted copy."""
        dims = tuple(range(1, x.ndim))
        moved = np.roll(x, moves, dims) if any(moves) else x
        return np.flip(moved.transpose(0, *(1 + dim for dim in self.order)), tuple(1 + dim for dim in self.flips))

    def source_box(self, box: Sequence[slice], size: Sequence[int]) -> list[tuple[int, int]]:
        """Return the range of a box of the transformed field in the shifted field, along each dim of ``size``."""
        ranges = []
        for dim, n in enumerate(size):
            first, end, _ = box[self.order.index(dim)].indices(n)
            ranges.append((n - end, n - first) if self.order.index(dim) in self.flips else (first, end))
        return ranges


class Fields(Samples):
    """Fields of one split: high [C, *S], and the conditions of the model among low [C, *s] and parameters [P], float32. ``turn``
    seeds a random symmetry transform of each, a pure function of (seed, epoch, index). ``count``: the first fields only. ``box``:
    the shard of high of this rank, a slice of each dim; along the first dim usually only this shard is read."""

    def __init__(self, rows: Rows, turn: int | None = None, count: int | None = None, box: Sequence[slice] = ()) -> None:
        super().__init__(rows, count)
        self.turn, self.box, self.replicated = turn, box, not box
        if turn is not None or box:
            metadata = rows.metadata
            self._size, self._periodic, self._factor = rows.shape(0, "high")[1:], metadata["periodic"], metadata["factor"]
            self._is_isotropic = all(self._periodic) and len({*metadata["box"]}) == 1 and len(metadata["channels"]) == 1

    def selection(self, index: int, epoch: int) -> Selection | None:
        part = self._row_range(self.draw_turn(index, epoch)) if self.box else None
        return None if part is None else {"high": (slice(None), slice(*part))}

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        high, low = values["high"], values.get("low")
        if self.turn is not None or self.box:
            turn = self.draw_turn(index, epoch)
            if self.box:
                rows, slices = self._row_range(turn), [slice(*ends) for ends in turn.source_box(self.box, self._size)]
                moves = turn.shift
                if rows is not None:  # they were read alone
                    moves, slices[0] = (0, *turn.shift[1:]), slice(None)
                moved = np.roll(high, moves, tuple(range(1, high.ndim))) if any(moves) else high
                high = self._copy(turn.apply(moved[(slice(None), *slices)], ()))
            else:
                high = self._copy(turn.apply(high, turn.shift))
            if low is not None and self.turn is not None:
                low = self._copy(turn.apply(low, [by // self._factor for by in turn.shift]))
        number, when = (np.asarray(value, np.int64) for value in (index, epoch))
        return Batch(high, number, when, low, values.get("parameters"))

    def draw_turn(self, index: int, epoch: int) -> Turn:
        """Draw the transform of a sample. It shifts by multiples of a cell of ``low``: cells stay the means of their pixels."""
        dims = len(self._size)
        if self.turn is None:
            return Turn((0,) * dims, tuple(range(dims)))
        random, cell = np.random.default_rng([self.turn, epoch, index]), self._factor or 1
        shift = [int(random.integers(n // cell)) * cell if wraps else 0 for n, wraps in zip(self._size, self._periodic)]
        order = random.permutation(dims).tolist() if self._is_isotropic else range(dims)
        return Turn(tuple(shift), tuple(order), tuple(dim for dim in range(dims) if self._is_isotropic and random.integers(2)))

    def _row_range(self, turn: Turn) -> tuple[int, int] | None:
        """Return the rows of the file that this rank needs; None if they are not contiguous."""
        (first, end), n = turn.source_box(self.box, self._size)[0], self._size[0]
        begin = (first - turn.shift[0]) % n
        return None if begin + end - first > n else (begin, begin + end - first)

    def _copy(self, x: Any) -> Any:
        return self.rows.reader.memory.copy(x)


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, DiffusionConfig]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and ensembles, and the settings of the model,
    completed from the data."""
    metadata = broadcast_from_first(partial(latents.read_metadata, cfg.data.directory / "train"), mesh.peers)
    encoded = metadata.get("kind") == "latents"
    if metadata and not encoded:
        cfg = complete_network(cfg, metadata)
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    data, replicas = cfg.data, mesh["replicate"].size  # one sample per replica: its ensemble is a batch
    kwargs, turn_kwargs = training_kwargs(train, cfg), {} if encoded or not data.turn else {"turn": cfg.train.seed}
    shape = latents.complete_model_config(cfg, train) if encoded else complete_model_config(cfg, train)
    source: Any = partial(latents.EncodedImages if encoded else Fields, box=local_box(shape, mesh))
    with open_loaders(
        mesh,
        lambda: make_loader(source(train, **turn_kwargs), data.batch, data, mesh, **kwargs),
        lambda: make_loader(source(validation), data.evaluation_batch, data, mesh, **HELD_OUT, name="validation"),
        (lambda: make_loader(source(validation, count=data.drawn), replicas, data, mesh, **HELD_OUT, name="drawn"))
        if data.drawn else None,
    ) as (training, held_out, drawn):
        yield training, held_out, drawn, shape


def local_box(shape: DiffusionConfig, mesh: Mesh) -> Sequence[slice]:
    """Return the shard of a sample of this rank, a slice of each dim; empty if samples are not sharded."""
    grid = None if shape.unet is None else Slabs(shape.unet, mesh)
    return grid.box(shape.size[1:]) if grid is not None and grid.cut.axes else ()


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    """Open a split: the datasets that the model reads, fields and their conditions or latents and their texts."""
    data, network, shards = cfg.data, cfg.model.network, cfg.data.shards if split == "train" else 1
    folder = data.directory / split
    metadata = broadcast_from_first(partial(latents.read_metadata, folder), mesh.peers)
    if metadata.get("kind") == "latents":
        return open_split(folder, latents.layouts(cfg, folder, metadata), latents.REMEDY, data, mesh, shards)
    remedy = f"make data with: {command_of('data_prep.fields')} simulate {data.directory} --kind matter, or set data.directory"
    dims = getattr(network, "dims", 2)
    layouts: dict[str, Any] = {"high": ("float32", (network.inputs, *(None,) * dims))}
    if getattr(network, "field", 0):
        layouts["low"] = ("float32", (network.field, *(None,) * dims))
    if getattr(network, "parameters", 0):
        layouts["parameters"] = ("float32", (network.parameters,))
    return open_split(folder, layouts, remedy, data, mesh, shards)


def complete_network(cfg: Config, metadata: dict[str, Any]) -> Config:
    """Return the settings with dims, channels and periodic sides of the data if the channels of a U-Net are the defaults. Raises
    DataError for an index that does not describe fields."""
    if missing := [key for key in _DESCRIPTION if key not in metadata]:
        actual = f"{cfg.data.directory}: its index has no {', '.join(missing)}, which describe fields"
        raise DataError(f"{actual}; make it with: {command_of('data_prep.fields')} convert SOURCE OUT")
    unet, channels, default = cfg.model.unet, len(metadata["channels"]), UNetConfig()
    if unet is None or (unet.inputs, unet.outputs) != (default.inputs, default.outputs):
        return cfg
    values = {"inputs": channels, "outputs": channels, "dims": len(metadata["periodic"]), "periodic": tuple(metadata["periodic"])}
    completed = unet.model_copy(update=values | {"field": channels if metadata["factor"] and not unet.parameters else unet.field})
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"unet": completed})})


def complete_model_config(cfg: Config, rows: Rows) -> DiffusionConfig:
    """Return the settings of the model with the size of a sample and its physical units. Raises DataError if settings contradict
    the data."""
    model, metadata, size = cfg.model, rows.metadata, tuple(rows.shape(0, "high"))
    if model.size and model.size != size:
        actual, expected = list(size), list(model.size)
        raise DataError(f"{rows.folder}: samples are {actual}, model.size is {expected}; leave it out, or set data.directory")
    wraps = tuple(metadata["periodic"])
    if model.unet is not None and (model.unet.periodic or (False,) * len(wraps)) != wraps:
        flags = [str(wrap).lower() for wrap in wraps]
        raise DataError(
            f"{rows.folder}: its dims are periodic as [{', '.join(flags)}], model.unet.periodic is another list; set it to that"
        )
    fields = FieldsConfig(
        names=tuple(metadata["channels"]), units=tuple(metadata["channel_units"]), mean=tuple(metadata["mean"]),
        deviation=tuple(metadata["deviation"]), floor=metadata.get("floor"), transforms=tuple(metadata.get("transforms", ())),
        floors=tuple(metadata.get("floors", ())), factor=metadata["factor"], box=tuple(metadata["box"]),
        box_units=metadata["box_units"], periodic=wraps, parameters=tuple(metadata["parameters"]), low=tuple(metadata["low"]),
        high=tuple(metadata["high"]), parameter_units=tuple(metadata["units"]),
    )  # fmt: skip
    return model.model_copy(update={"size": size, "fields": fields})


def build_model(cfg: Config, shape: DiffusionConfig, mesh: Mesh) -> Diffusion:
    """Build the model on the mesh with random weights or those of ``cfg.start``, within ``train.seeds``."""
    model = Diffusion(shape, cfg.train.seed)
    latents.set_empty_text(model, cfg.data.directory)
    shard = partial(parallelize, mesh=mesh)
    model = shard(model) if cfg.start.weights is None else load_deferred(model, cfg.start.weights, shard)
    return model if cfg.lora is None else adapt(model, cfg.lora)


def write_ensembles(path: Path, rows: dict[str, torch.Tensor], model: DiffusionConfig) -> None:
    """Write ensembles for validation samples, normalized as for the model, and the metadata to undo that.

    Shape: truth [N, C, *S], members [N, M, C, *S], field [N, C, *s], parameters [N, P]"""
    metadata = {} if model.fields is None else model.fields.model_dump()
    arrays: dict[str, Any] = {f"about_{name}": np.array(value) for name, value in metadata.items() if value is not None}
    np.savez_compressed(path, **arrays, **{name: value.numpy() for name, value in rows.items()})  # type: ignore[arg-type]
