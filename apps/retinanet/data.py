"""Images with objects as samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from apps.retinanet.settings import Config
from hpcai.data import Rows
from hpcai.data.image_files import mirror_boxes
from hpcai.data.images import as_image, draw_mirror, with_classes
from hpcai.data.splits import HELD_OUT, Samples, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.retinanet import Batch, RetinaNetConfig
from hpcai.models.retinanet.images import pad, resize
from hpcai.parallel.spatial import SpatialPartition
from hpcai.programs import command_of

FIELDS: dict[str, Any] = {
    "bytes": ("int32", ()), "image": ("uint8", ("bytes",)), "id": ("int64", ()), "objects": ("int32", ()),
    "boxes": ("float32", ("objects", 4)), "labels": ("int32", ("objects",)), "crowd": ("uint8", ("objects",)),
}  # fmt: skip
_STREAM = 0xB0C5


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, RetinaNetConfig]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures, and the settings of the model,
    completed from the data."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    kwargs, batch = training_kwargs(train, cfg), cfg.data.evaluation_batch
    cut = SpatialPartition.from_mesh(mesh, 2)
    shard = cut.local_slices(cfg.model.size) if cut.axes else ()
    few = Images(validation, cfg, False, shard, cfg.data.pictures)
    with open_loaders(
        mesh,
        lambda: make_loader(Images(train, cfg, True, shard), cfg.data.batch, cfg.data, mesh, **kwargs),
        lambda: make_loader(Images(validation, cfg, False, shard), batch, cfg.data, mesh, name="validation", **HELD_OUT),
        (lambda: make_loader(few, batch, cfg.data, mesh, name="pictures", **HELD_OUT)) if len(few) else None,
    ) as (training, held_out, pictures):
        yield training, held_out, pictures, with_classes(cfg.model, train)


class Images(Samples):
    """Images of one split with their objects, resized and, for training, flipped: a pure function of (seed, epoch, index). Crowds
    are left out. ``shard``: the box of each image of this rank."""

    def __init__(self, rows: Rows, cfg: Config, train: bool, shard: Sequence[slice] = (), count: int | None = None) -> None:
        super().__init__(rows, count)
        self.cfg, self.train, self.shard, self.replicated = cfg, train, tuple(shard), not shard

    def mirror(self, index: int, epoch: int) -> tuple[bool, bool, bool]:
        """Return whether the image is flipped in x, in y, then transposed."""
        if not self.train:
            return False, False, False
        data, bits = self.cfg.data, np.random.PCG64([self.cfg.train.seed, epoch, index, _STREAM])
        return draw_mirror(np.random.Generator(bits).random(3), data.flip, data.rotate90)

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        name, limit = self.describe(index), self.cfg.data.objects
        image, mirror = as_image(values["image"].tobytes(), name), self.mirror(index, epoch)
        pixels = resize(image, self.cfg.model, mirror)
        size, alone = pixels.shape[:2], values["crowd"] == 0
        scale = np.tile(np.divide(size[::-1], image.size), 2).astype(np.float32)
        boxes, labels = mirror_boxes(values["boxes"][alone] * scale, size, mirror), values["labels"][alone].astype(np.int64)
        if limit is not None and len(boxes) > limit:
            raise DataError(f"{name}: {len(boxes)} objects, data.objects is {limit}; raise it")
        return Batch(pixels[self.shard], boxes, labels, *map(np.array, (size, image.size[::-1], values["id"])))

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Return a batch of samples whose objects, and images of several sizes, are padded."""
        most = max(len(sample.labels) for sample in samples)
        count = self.cfg.data.objects or 1 << max(most - 1, 7).bit_length()
        boxes, labels = np.zeros((len(samples), count, 4), np.float32), np.full((len(samples), count), -1)
        for row, sample in enumerate(samples):
            boxes[row, : len(sample.boxes)], labels[row, : len(sample.labels)] = sample.boxes, sample.labels
        images = (np.stack if self.cfg.model.resize == "fixed" else pad)([sample.image for sample in samples])
        rest = (np.stack(values) for values in list(zip(*samples))[3:])
        return Batch(*(torch.from_numpy(values) for values in (images, boxes, labels, *rest)))


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data = cfg.data
    make = f"make data with: {command_of('data_prep.survey')} simulate {data.directory}, or from annotations of COCO with"
    remedy = f"{make}: {command_of('data_prep.coco')} convert ANNOTATIONS IMAGES {data.directory}, or set data.directory"
    return open_split(data.directory / split, FIELDS, remedy, data, mesh, data.shards if split == "train" else 1)
