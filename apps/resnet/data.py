"""Encoded images as samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from apps.resnet.settings import Config
from hpcai.data import Loader, Rows
from hpcai.data.images import FIELDS, ImageSamples, dali_fields, with_classes
from hpcai.data.splits import HELD_OUT, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.models.resnet import Batch, ResNetConfig
from hpcai.programs import command_of


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, ResNetConfig]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures, and the settings of the model,
    completed from the data."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    kwargs, batch = training_kwargs(train, cfg), cfg.data.evaluation_batch
    few = Images(validation, cfg, False, cfg.data.pictures)
    with open_loaders(
        mesh,
        lambda: build_loader(Images(train, cfg, True), cfg.data.batch, cfg, mesh, **kwargs),
        lambda: build_loader(Images(validation, cfg, False), batch, cfg, mesh, name="validation", **HELD_OUT),
        (lambda: build_loader(few, batch, cfg, mesh, name="pictures", **HELD_OUT)) if len(few) else None,
    ) as (training, held_out, pictures):
        yield training, held_out, pictures, with_classes(cfg.model, train)


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
    make = f"make data with: {command_of('data_prep.galaxies')} simulate {data.directory}, or from images with"
    remedy = f"{make}: {command_of('data_prep.images')} convert SOURCE {data.directory}, or set data.directory"
    return open_split(data.directory / split, FIELDS, remedy, data, mesh, data.shards if split == "train" else 1)
