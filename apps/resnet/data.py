"""Encoded images as samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from apps.resnet.settings import Config
from hpcai.data import Loader, Rows
from hpcai.data.images import FIELDS, ImageSamples, dali_fields
from hpcai.data.splits import HELD_OUT, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.resnet import Batch, ResNetConfig
from hpcai.programs import command_of


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, ResNetConfig]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures, and the settings of the model,
    completed from the data."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    model = _complete_model_config(cfg, train)
    kwargs, batch = training_kwargs(train, cfg), cfg.data.evaluation_batch
    few = Images(validation, cfg, False, cfg.data.pictures)
    with open_loaders(
        mesh,
        lambda: build_loader(Images(train, cfg, True), cfg.data.batch, cfg, mesh, **kwargs),
        lambda: build_loader(Images(validation, cfg, False), batch, cfg, mesh, name="validation", **HELD_OUT),
        (lambda: build_loader(few, batch, cfg, mesh, name="pictures", **HELD_OUT)) if len(few) else None,
    ) as (training, held_out, pictures):
        yield training, held_out, pictures, model


class Images(ImageSamples):
    """Images of one split, decoded by the loader or, with reader ``dali``, by DALI."""

    def __init__(self, rows: Rows, cfg: Config, train: bool, count: int | None = None) -> None:
        data, model = cfg.data, cfg.model
        super().__init__(
            rows, model.size, cfg.train.seed, train, scale=data.scale, ratio=data.ratio, flip=data.flip, rotate90=data.rotate90,
            resize=model.resize, encoded=data.reader == "dali", count=count,
        )  # fmt: skip

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Any:
        sample = super().transform(values, index, epoch)
        return sample if self.encoded else Batch(**sample)


def build_loader(source: Images, batch: int, cfg: Config, mesh: Mesh, **kwargs: Any) -> Loader:
    fields = dali_fields(source, gpu=mesh.device.type == "cuda")
    return make_loader(source, batch, cfg.data, mesh, fields, Batch, **kwargs)


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data = cfg.data
    remedy = (
        f"make data with: {command_of('data_prep.galaxies')} simulate {data.directory}, or from images with: "
        f"{command_of('data_prep.images')} convert SOURCE {data.directory}, or set data.directory"
    )
    return open_split(data.directory / split, FIELDS, remedy, data, mesh, data.shards if split == "train" else 1)


def _complete_model_config(cfg: Config, rows: Rows) -> ResNetConfig:
    """Return the settings of the model with the names of the classes of the data."""
    model, names = cfg.model, tuple(rows.metadata.get("classes") or ())
    if not names:
        if model.classes or model.num_classes:
            return model
        raise DataError(f"{rows.folder}: the index has no names of classes; write it again, or set model.num_classes")
    if model.classes not in ((), names) or model.num_classes not in (None, len(names)):
        setting = f"model.classes is {list(model.classes)}" if model.classes else f"model.num_classes is {model.num_classes}"
        raise DataError(f"{rows.folder}: has {len(names)} classes, {', '.join(names[:8])}, but {setting}; set neither, or the same")
    return model.model_copy(update={"classes": names, "num_classes": None})
