"""Rows, samples and loaders of a split, from the data settings of an app."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcai.data.changes import changes_since
from hpcai.data.hdf5 import Fields, Rows, Selection
from hpcai.data.loader import Loader, Source
from hpcai.data.sampler import Endless, Sharded
from hpcai.data.stage import assign_shards, stage_in, staged_paths
from hpcai.dist.collectives import broadcast_from_first
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.json_file import read_object
from hpcai.settings import LoaderConfig

if TYPE_CHECKING:
    from hpcai.data.dali import Field

logger = logging.getLogger(__name__)
HELD_OUT: Mapping[str, Any] = {"shuffle": False, "last_batch": "keep"}
"""keyword arguments of a loader of held-out samples: each once, in order"""


class Samples:
    """A split as a source of samples: the fields of a row by name, or their ``transform`` by a subclass. Its ``selection`` may
    depend on the rank within a model replica, unless a subclass sets ``replicated``. ``count``: use the first rows only."""

    replicated = False

    def __init__(self, rows: Rows, count: int | None = None) -> None:
        self.rows, self._count = rows, len(rows) if count is None else min(count, len(rows))

    def __len__(self) -> int:
        return self._count

    @property
    def identity(self) -> str:
        return self.rows.identity

    def changes_since(self, seconds: float) -> str:
        return changes_since(self.rows, seconds)

    def selection(self, index: int, epoch: int) -> Selection | None:
        """Return the box of each field that is read, or None for full rows: a pure function."""
        return None

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Any:
        """Return the sample, a tree of arrays: a pure function of its arguments."""
        return values

    def describe(self, index: int) -> str:
        return self.rows.describe(index)

    def sample(self, index: int, epoch: int) -> Any:
        return self.transform(self.rows.read(index, self.selection(index, epoch)), index, epoch)

    def close(self) -> None:
        self.rows.close()


class ConcatSamples:
    """The concatenation of several sources."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.replicated = all(part.replicated for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def identity(self) -> str:
        return "; ".join(part.identity for part in self.parts)

    def changes_since(self, seconds: float) -> str:
        return "; ".join(filter(None, (part.changes_since(seconds) for part in self.parts)))

    def sample(self, index: int, epoch: int) -> Any:
        part, local = self._locate(index)
        return part.sample(local, epoch)

    def describe(self, index: int) -> str:
        part, local = self._locate(index)
        return part.describe(local)

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _locate(self, index: int) -> tuple[Samples, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - int(self._ends[number]) + len(self.parts[number])


def open_split(folder: Path, fields: Fields, remedy: str, cfg: LoaderConfig, mesh: Mesh, shards: int = 1) -> Rows:
    """Open the rows of a split. A collective call of ``mesh.peers``: the first rank lists the folder and reads its index for
    all. If ``cfg.stage`` is set, the files, or this node's shard of them, are first copied to the disk of the node."""
    local = {}
    if cfg.stage is not None and folder.is_dir():  # otherwise Rows raises
        staged = stage_in(folder, Path(cfg.stage) / folder.name, mesh, shards=shards)
        logger.info("%s: %s", folder.name, staged)
        local = staged_paths(staged.directory, folder, check=False)  # checked right now
    rows = Rows(folder, fields, remedy, reader=cfg.reader, device=mesh.device, local=local, axis=mesh.peers)
    if rows.catalog.table is None and mesh.world > 1:
        text = "%s: no table of its %d files, so each rank opens the files that it needs; hpcai data check %s --index writes one"
        logger.info(text, folder.name, len(rows.paths), folder)
    return rows


def training_kwargs(rows: Rows, cfg: Any) -> dict[str, Any]:
    """Return the keyword arguments of the loader for training of a run with the settings ``cfg``. If ``data.shards`` is set, each
    group of nodes trains on its own shard; an epoch has ``data.epoch`` samples, if that is set. A collective call of the ranks that
    opened ``rows``."""
    data, seed = cfg.data, cfg.train.seed
    kwargs: dict[str, Any] = {"name": "train", "seed": seed, "accumulate": cfg.step.accumulate}
    if data.shards > 1:
        shards = broadcast_from_first(partial(row_shards, rows, data.shards), rows.axis)
        kwargs["sampler"] = Sharded(shards, data.batch, seed)
    elif getattr(data, "epoch", None):
        kwargs["sampler"] = Endless(len(rows), data.epoch, seed)
    return kwargs


def row_shards(rows: Rows, shards: int) -> np.ndarray:
    """Return the shard of each sample.   [N]"""
    of_file = assign_shards(rows.folder, shards)
    return np.array([of_file[rows.locate(index)[0]] for index in range(len(rows))])


def group_by_shape(rows: Rows, name: str) -> np.ndarray:
    """Return the group of each sample, of equal shapes of a field. A file has one shape.   [N]"""
    counts = np.asarray(rows.catalog.rows)
    shapes = [rows.shape(int(first), name) for first in np.cumsum(counts) - counts]
    return np.repeat(np.unique(shapes, axis=0, return_inverse=True)[1], counts)


@contextmanager
def training_statistics(directory: Path, of: str, remedy: str) -> Iterator[dict[str, Any]]:
    """Context manager: the statistics of the training split, ``of`` some data. Raises DataError if an entry that its block reads is
    missing or invalid."""
    path = directory / "statistics.json"
    try:
        yield read_object(path, "statistics of the splits", DataError)["splits"]["train"]
    except (ValueError, KeyError, TypeError) as problem:  # ValueError is also DataError and LinAlgError
        raise DataError(f"{path}: no statistics of {of} ({problem!r}); {remedy}") from problem


@contextmanager
def open_loaders(
    mesh: Mesh, training: Callable[[], Loader], validation: Callable[[], Loader], pictures: Callable[[], Loader] | None = None,
) -> Iterator[tuple[Any, Any, Any]]:  # fmt: skip
    """Context manager: the loaders of a run. Those for training and pictures are None on ranks that only evaluate."""
    with (
        training() if mesh.trains else nullcontext() as train,
        validation() as held_out,
        pictures() if pictures is not None and mesh.trains else nullcontext() as shown,
    ):
        yield train, held_out, shown


def make_loader(
    source: Source, batch: int, cfg: LoaderConfig, mesh: Mesh, layouts: "Mapping[str, str] | Sequence[Field]" = (),
    make_batch: Callable[..., Any] = dict, **kwargs: Any,
) -> Loader:  # fmt: skip
    """Return a loader of ``source`` with the settings ``cfg``. For DALI, ``layouts`` names the dims of each field (DHWC, or empty),
    or is the fields with operators, and ``make_batch(**fields)`` builds a batch."""
    if cfg.reader != "dali":
        return Loader(source, batch, mesh, **cfg.loader_kwargs(), **kwargs)
    from hpcai.data.dali import DaliLoader, Field

    fields = tuple(Field(*item) for item in layouts.items()) if isinstance(layouts, Mapping) else layouts
    options = {key: value for key, value in cfg.loader_kwargs().items() if key in ("workers", "prefetch", "patience")}
    return DaliLoader(source, batch, mesh, fields, make_batch=lambda arrays: make_batch(**arrays), **options, **kwargs)
