"""Fields as samples, each with its coarse counterpart, and the loaders of a run.

B samples, C channels, S and s pixels along each dim, P parameters
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file

from apps.diffusion import latents
from apps.diffusion.settings import Config
from hpcai.data import Rows
from hpcai.data.hdf5 import Selection
from hpcai.data.sampler import Grouped, GroupedInOrder, InOrder
from hpcai.data.splits import HELD_OUT, Samples, group_by_shape, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.dist.collectives import broadcast_from_first
from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion import Batch, Diffusion, DiffusionConfig, FieldsConfig, Slabs, UNetConfig, load_deferred, parallelize
from hpcai.models.diffusion.lora import adapt
from hpcai.nn.weights import read_settings
from hpcai.programs import command_of

logger = logging.getLogger(__name__)
_MEASURED = 64  # samples for the standard deviation of residuals
_DESCRIPTION = ("channels", "channel_units", "mean", "deviation", "factor", "box", "box_units", "periodic", "parameters", "low",
                "high", "units")  # fmt: skip


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
    """Fields of one split: high [C, *S], and the conditions of the model among fine [R, *S], low [K, *s] and parameters [P],
    float32. ``turn`` seeds a random symmetry transform of each, a pure function of (seed, epoch, index). ``count``: the first
    fields only. ``box``: the shard of high and fine of this rank, a slice of each dim; along the first dim usually only this shard
    is read. ``leads``: of trajectories, samples are states with so many that follow; ``count`` of them are evenly spaced."""

    def __init__(
        self, rows: Rows, turn: int | None = None, count: int | None = None, box: Sequence[slice] = (), leads: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(rows, count)
        self.turn, self.box, self.replicated = turn, box, not box
        metadata = getattr(rows, "metadata", {})  # samples of a benchmark have none
        self._has_static = bool(metadata.get("static") or metadata.get("weighted"))
        if turn is not None or box:
            self._size, self._periodic, self._factor = rows.shape(0, "high")[1:], metadata["periodic"], metadata["factor"]
            self._is_isotropic = all(self._periodic) and len({*metadata["box"]}) == 1 and len(metadata["channels"]) == 1
            others = ("interval", "fine", "coarse")  # such as vorticity, whose sign flips change
            self._is_isotropic &= not (self._has_static or any(map(metadata.get, others)))
        self.starts: np.ndarray | None = None
        if metadata.get("interval"):
            step = rows.column("step")
            starts = np.flatnonzero(step[leads:] == step[:-leads] + leads)
            if not len(starts):
                raise DataError(f"{rows.folder}: no {leads + 1} states in a row; set data.leads to less, or make longer ones")
            chosen = len(starts) if count is None else min(count, len(starts))
            self.starts, self._count, self.leads = starts[np.arange(chosen) * len(starts) // chosen], chosen, leads

    def describe(self, index: int) -> str:
        return super().describe(index if self.starts is None else int(self.starts[index]))

    def sample(self, index: int, epoch: int) -> Any:
        if self.starts is None:
            return super().sample(index, epoch)
        start, selection = int(self.starts[index]), self.selection(index, epoch)
        frames = (self.rows.read(start + lead, selection) for lead in range(self.leads + 1))
        first, *others = (self.transform(values, index, epoch) for values in frames)
        future = np.stack([other.sample for other in others]) if self.leads > 1 else None
        return others[0]._replace(fine=first.sample, future=future)

    def selection(self, index: int, epoch: int) -> Selection | None:
        part = self._row_range(self.draw_turn(index, epoch)) if self.box else None
        return None if part is None else dict.fromkeys(("high", "fine"), (slice(None), slice(*part)))

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        high, fine, low, shift = values["high"], values.get("fine"), values.get("low"), None
        if self.turn is not None or self.box:
            turn = self.draw_turn(index, epoch)
            shift = np.asarray(turn.shift, np.int64) if self._has_static else None
            high, fine = (None if x is None else self._copy(self._turned(x, turn)) for x in (high, fine))
            if low is not None and self.turn is not None:
                low = self._copy(turn.apply(low, [by // self._factor for by in turn.shift]))
        number, when = (np.asarray(value, np.int64) for value in (index, epoch))
        return Batch(high, number, when, low, values.get("parameters"), fine=fine, shift=shift)

    def _turned(self, x: Any, turn: Turn) -> Any:
        """Return the local cells of a field on the grid of samples, transformed."""
        if not self.box:
            return turn.apply(x, turn.shift)
        slices, moves = [slice(*ends) for ends in turn.source_box(self.box, self._size)], turn.shift
        if self._row_range(turn) is not None:  # they were read alone
            moves, slices[0] = (0, *turn.shift[1:]), slice(None)
        moved = np.roll(x, moves, tuple(range(1, x.ndim))) if any(moves) else x
        return turn.apply(moved[(slice(None), *slices)], ())

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
    is_forecast = shape.fields is not None and shape.fields.interval is not None
    drawn_kwargs: dict[str, Any] = {"leads": data.leads} if is_forecast else {}
    if is_forecast and (data.epoch is not None or data.shards > 1):
        raise ConfigError("data.epoch and data.shards: trajectories are read as a whole; leave them out")
    scored_kwargs, drawn_kwargs = drawn_kwargs if data.scored else {}, drawn_kwargs | {"count": data.drawn}
    held_out_kwargs, shown_kwargs = {**HELD_OUT, "name": "validation"}, {**HELD_OUT, "name": "drawn"}
    if metadata.get("buckets"):
        groups, held_out_groups = (group_by_shape(rows, "moments") for rows in (train, validation))
        kwargs["sampler"] = Grouped(groups, data.batch, data.epoch, cfg.train.seed)
        held_out_kwargs["sampler"] = GroupedInOrder(held_out_groups, data.evaluation_batch)
        commonest = np.flatnonzero(held_out_groups == np.bincount(held_out_groups).argmax())[: data.drawn]
        shown_kwargs["sampler"], drawn_kwargs = InOrder(commonest), {}
        logger.info("ensembles are of %d images of the commonest bucket: their file holds one size", len(commonest))
    with open_loaders(
        mesh,
        lambda: make_loader(source(train, **turn_kwargs), data.batch, data, mesh, **kwargs),
        lambda: make_loader(source(validation, **scored_kwargs), data.evaluation_batch, data, mesh, **held_out_kwargs),
        (lambda: make_loader(source(validation, **drawn_kwargs), replicas, data, mesh, **shown_kwargs)) if data.drawn else None,
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
    if metadata.get("fine") and getattr(network, "fine", 0):
        layouts["fine"] = ("float32", (len(metadata["fine"]["channels"]), *(None,) * dims))
    if getattr(network, "field", 0):
        layouts["low"] = ("float32", (network.field, *(None,) * dims))
    if getattr(network, "parameters", 0):
        layouts["parameters"] = ("float32", (network.parameters,))
    if metadata.get("interval"):
        layouts["step"] = ("int64", ())
    return open_split(folder, layouts, remedy, data, mesh, shards)


def complete_network(cfg: Config, metadata: dict[str, Any]) -> Config:
    """Return the settings with dims, channels and periodic sides of the data if the channels of a U-Net are the defaults, and with
    the channels of static fields, inputs and the state before if ``fine`` is not set. Raises DataError for an index that does not
    describe fields."""
    if missing := [key for key in _DESCRIPTION if key not in metadata]:
        actual = f"{cfg.data.directory}: its index has no {', '.join(missing)}, which describe fields"
        raise DataError(f"{actual}; make it with: {command_of('data_prep.fields')} convert SOURCE OUT")
    unet, channels, default = cfg.model.unet, len(metadata["channels"]), UNetConfig()
    if unet is None:
        return cfg
    values: dict[str, Any] = {}
    if (unet.inputs, unet.outputs) == (default.inputs, default.outputs):
        coarse = len((metadata.get("coarse") or metadata)["channels"])
        periodic, field = tuple(metadata["periodic"]), coarse if metadata["factor"] and not unet.parameters else unet.field
        values = {"inputs": channels, "outputs": channels, "dims": len(periodic), "periodic": periodic, "field": field}
    given = metadata["fine"]["channels"] if metadata.get("fine") else ()
    fine = (channels if metadata.get("interval") else 0) + len(given) + len(metadata.get("static", ()))
    if unet.fine not in (0, fine):
        has = f"has {fine} channels of static fields, inputs and states before"
        raise DataError(f"{cfg.data.directory}: {has}, model.unet.fine is {unet.fine}; leave it out")
    completed = unet.model_copy(update=values | {"fine": fine})
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"unet": completed})})


def complete_model_config(cfg: Config, rows: Rows) -> DiffusionConfig:
    """Return the settings of the model with the size of a sample and its physical units. Raises DataError if settings contradict
    the data."""
    model, metadata, size = cfg.model, rows.metadata, tuple(rows.shape(0, "high"))
    if model.size and model.size != size:
        raise DataError(f"{rows.folder}: samples are {[*size]}, model.size is {[*model.size]}; leave it out, or set data.directory")
    wraps = tuple(metadata["periodic"])
    if model.unet is not None and (model.unet.periodic or (False,) * len(wraps)) != wraps:
        flags = [str(wrap).lower() for wrap in wraps]
        has = f"its dims are periodic as [{', '.join(flags)}], model.unet.periodic is another list"
        raise DataError(f"{rows.folder}: {has}; set it to that")
    fields = FieldsConfig.from_index(metadata)
    model = model.model_copy(update={"size": size, "fields": fields})
    for name in ("channel_weights", "residual"):
        if isinstance(values := getattr(model, name), tuple) and len(values) not in (0, size[0]):
            raise DataError(f"{rows.folder}: model.{name} has {len(values)} values for {size[0]} channels; give one for each")
    if cfg.start.mean is not None:
        path = cfg.start.mean / "model.safetensors" if cfg.start.mean.is_dir() else cfg.start.mean
        mean = read_settings(path, "diffusion", DiffusionConfig)
        if mean is None or mean.objective.prediction_type != "regression" or mean.fields != fields:
            needed = f"one with objective.prediction_type regression, trained on {rows.folder.parent}"
            raise DataError(f"{path}: is another model; expected {needed}")
        model = model.model_copy(update={"mean": mean.model_dump(), "residual": model.residual or "measured"})
    if model.residual == "measured":
        residual = broadcast_from_first(partial(measure_residual, cfg, model, rows), rows.axis)
        model = model.model_copy(update={"residual": residual})
    return model


def measure_residual(cfg: Config, shape: DiffusionConfig, rows: Rows) -> tuple[float, ...]:
    """Return the root mean square difference of training samples from their baseline (``Diffusion.baseline``), by channel."""
    source, means = Fields(rows), list[torch.Tensor]()
    with torch.device("meta"):
        model = Diffusion(shape.model_copy(update={"residual": 1.0}))
    if cfg.start.mean is not None:
        model.mean = Diffusion.load(cfg.start.mean)
    weights = torch.from_numpy(static["weights"]) if "weights" in (static := read_static(cfg.data.directory)) else torch.ones(1)
    count = min(len(source), _MEASURED)
    logger.info("standard deviation of residuals: measured by %d samples of %s", count, rows.folder)
    for number in range(count):
        sample = source.sample(number * len(source) // count, 0)
        batch = Batch(*(None if x is None else torch.as_tensor(x)[None] for x in sample))
        difference = batch.sample - model.baseline(batch.condition, batch.sample)
        means.append((weights * difference.double().square()).mean((0, *range(2, difference.ndim))))
    return tuple(float(f"{value:.4g}") for value in torch.stack(means).mean(0).sqrt().tolist())


def read_static(directory: Path) -> dict[str, np.ndarray]:
    """Return the static fields [K, *S] and the weights of cells [C, *S] of a data set, if it has them."""
    path = directory / "static.safetensors"
    return load_file(path) if path.is_file() else {}


def build_model(cfg: Config, shape: DiffusionConfig, mesh: Mesh) -> Diffusion:
    """Build the model on the mesh with random weights or those of ``cfg.start``, within ``train.seeds``."""
    model = Diffusion(shape, cfg.train.seed)
    latents.set_empty_text(model, cfg.data.directory)
    static, where = read_static(cfg.data.directory), f"{cfg.data.directory}/static.safetensors"
    latents.copy_buffers(model, {"static": "static", "weights": "weights"}, static, where, "convert the data again")
    shard = partial(parallelize, mesh=mesh)
    model = shard(model) if cfg.start.weights is None else load_deferred(model, cfg.start.weights, shard)
    if cfg.start.mean is not None and model.mean is not None:
        load_deferred(model.mean, cfg.start.mean, lambda mean: mean)
    return model if cfg.lora is None else adapt(model, cfg.lora)


def write_ensembles(path: Path, rows: dict[str, torch.Tensor], model: DiffusionConfig, directory: Path) -> None:
    """Write ensembles for validation samples in their order, normalized as for the model, and the metadata to undo that.

    Shape: truth [N, C, *S], members [N, M, C, *S], mean [N, C, *S], fine [N, R, *S], field [N, C, *s], or coarse [N, K, *s] with
    channels of its own, parameters [N, P]; of forecasts with L lead times truth [N, L, C, *S], members [N, M, L, C, *S], start
    [N, C, *S]; weights [C, *S]"""
    order, metadata = rows["index"].argsort(), {} if model.fields is None else model.fields.model_dump(exclude={"coarse", "fine"})
    rows = {name: value[order] for name, value in rows.items()}
    if metadata.get("weighted"):
        rows["weights"] = torch.from_numpy(read_static(directory)["weights"])
    arrays: dict[str, Any] = {f"about_{name}": np.array(value) for name, value in metadata.items() if value is not None}
    np.savez_compressed(path, **arrays, **{name: value.numpy() for name, value in rows.items()})  # type: ignore[arg-type]
