"""Weather maps as samples.   B batch, H W the map, V variables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from apps.deepcam.settings import Config
from hpcai.data import Loader, Rows
from hpcai.data.hdf5 import Selection
from hpcai.data.splits import HELD_OUT, Samples, make_loader, open_loaders, open_split, training_kwargs, training_statistics
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.deepcam import STRIDE, Batch, DeepCamConfig
from hpcai.parallel.spatial import SpatialPartition
from hpcai.programs import command_of


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, DeepCamConfig, tuple[int, int]]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures, the settings of the model, completed
    from the data, and the size of the maps."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    kwargs, replicas, cut = training_kwargs(train, cfg), mesh["replicate"].size, SpatialPartition.from_mesh(mesh, 2)
    shard = cut.local_slices(train.shapes["mask"]) if cut.axes else ()
    few = Maps(validation, cfg.data.pictures, shard)
    with open_loaders(
        mesh,
        lambda: build_loader(Maps(train, None, shard), cfg.data.batch, cfg, mesh, **kwargs),
        lambda: build_loader(Maps(validation, None, shard), cfg.data.evaluation_batch, cfg, mesh, name="validation", **HELD_OUT),
        (lambda: build_loader(few, replicas, cfg, mesh, name="pictures", **HELD_OUT)) if len(few) else None,
    ) as (training, held_out, pictures):
        yield training, held_out, pictures, _complete_model_config(cfg, train), train.shapes["mask"]


class Maps(Samples):
    """Maps of one split: fields [H, W, V] float32 in physical units and mask [H, W] uint8. ``count``: the first ones only.
    ``shard``: the box of each map of this rank."""

    def __init__(self, rows: Rows, count: int | None = None, shard: Sequence[slice] = ()) -> None:
        super().__init__(rows, count)
        self._shard = shard

    def selection(self, index: int, epoch: int) -> Selection | None:
        return {"fields": self._shard, "mask": self._shard} if self._shard else None

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        return Batch(values["fields"], values["mask"])


def build_loader(source: Samples, batch: int, cfg: Config, mesh: Mesh, **kwargs: Any) -> Loader:
    return make_loader(source, batch, cfg.data, mesh, {"fields": "HWC", "mask": "HW"}, Batch, **kwargs)


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data, count = cfg.data, len(cfg.model.variables)
    make = f"make data with: {command_of('data_prep.deepcam')} simulate {data.directory}"
    remedy = f"{make}, or set data.directory and model.variables to those of existing data"
    fields: Any = {"fields": ("float32", (None, None, count)), "mask": ("uint8", (None, None))}
    rows = open_split(data.directory / split, fields, remedy, data, mesh, data.shards if split == "train" else 1)
    height, width = rows.shapes["fields"][:2]
    if height % STRIDE or width % STRIDE or rows.shapes["mask"] != (height, width):
        fault = f"maps of {height} x {width} pixels with masks of {' x '.join(map(str, rows.shapes['mask']))}"
        fault = f"{rows.folder}: holds {fault}; expected equal sizes, multiples of {STRIDE}, the network's output stride"
        raise DataError(f"{fault}; crop the maps before they are converted, or simulate others")
    names = rows.metadata.get("variables")
    if names is not None and tuple(names) != cfg.model.variables:
        raise DataError(f"{rows.folder}: has the variables {names}, but model.variables is {list(cfg.model.variables)}")
    return rows


def _complete_model_config(cfg: Config, rows: Rows) -> DeepCamConfig:
    """Return the settings of the model with the range of each variable and the frequency of each class in the data."""
    model, path = cfg.model, cfg.data.directory / "statistics.json"
    if model.low is not None and model.frequencies is not None:
        return model
    remedy = "write them with data_prep.deepcam, or set model.low, model.high and model.frequencies"
    with training_statistics(cfg.data.directory, "the training maps", remedy) as statistics:
        low, high, frequencies = statistics["fields"]["minimum"], statistics["fields"]["maximum"], statistics["mask"]["frequency"]
    changes: dict[str, Any] = {} if model.low is not None else {"low": tuple(low), "high": tuple(high)}
    if model.frequencies is None:
        rare = [name for name, part in zip(model.classes, frequencies) if not part]
        if rare:
            raise DataError(f"{path}: no training map holds a {rare[0]}; give more maps, or set model.frequencies")
        changes["frequencies"] = tuple(frequencies)
    try:
        return DeepCamConfig.model_validate(model.model_dump() | changes)
    except ValueError as problem:
        raise DataError(f"{path}: does not fit the settings: {problem}") from problem
