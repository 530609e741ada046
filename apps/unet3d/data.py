"""CT volumes as samples: random crops for training, full volumes for evaluation.   D H W the volume."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from apps.unet3d.settings import AugmentConfig, Config
from hpcai.data import Loader, Rows
from hpcai.data.hdf5 import Selection
from hpcai.data.sampler import LargestFirst
from hpcai.data.splits import Samples, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.kernels import philox
from hpcai.models.unet3d import Batch, UNet3DConfig, plan_windows
from hpcai.parallel.spatial import SpatialPartition
from hpcai.programs import command_of

FIELDS: dict[str, Any] = {
    "image": ("float32", (None, None, None)), "label": ("uint8", (None, None, None)), "boxes": ("int32", (2, 2, 6)),
}  # fmt: skip


def build_loaders(cfg: Config, mesh: Mesh) -> AbstractContextManager[tuple[Any, Any, Any]]:
    """Open loaders for training (None on ranks that only evaluate), validation and pictures."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    cut = SpatialPartition.from_mesh(mesh)
    crops = Crops(train, cfg.model.window, cfg.data.augment, cfg.train.seed, cut.local_slices(cfg.model.window), cfg.data.repeat)
    kwargs, few = training_kwargs(train, cfg), Volumes(validation, cfg.data.pictures)
    return open_loaders(
        mesh,
        lambda: make_loader(crops, cfg.data.batch, cfg.data, mesh, **kwargs),
        lambda: _evaluation_loader(Volumes(validation), cfg, mesh, "validation"),
        (lambda: _evaluation_loader(few, cfg, mesh, "pictures")) if len(few) else None,
    )


def _evaluation_loader(source: "Volumes", cfg: Config, mesh: Mesh, name: str) -> Loader:
    """Return a loader of validation volumes, those with most windows first, each assigned to the least loaded replicas."""
    _, group = mesh.split("replicate", cfg.data.window_group, "data.window_group")
    costs = [source.windows(index, cfg.model) for index in range(len(source))]
    sampler = LargestFirst(costs, mesh["replicate"].size, group.size)
    return make_loader(source, sampler.groups, cfg.data, mesh, name=name, sampler=sampler, last_batch="keep")


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data = cfg.data
    remedy = f"make data with: {command_of('data_prep.kits19')} simulate {data.directory}, or change data.directory"
    rows = open_split(data.directory / split, FIELDS, remedy, data, mesh, data.shards if split == "train" else 1)
    spacing = rows.metadata.get("spacing_mm")
    if spacing is not None and not np.allclose(spacing, cfg.model.spacing_mm):
        actual, expected = (" x ".join(f"{n:g}" for n in row) for row in (spacing, cfg.model.spacing_mm))
        raise DataError(f"{rows.folder}: voxels of {actual} mm, model.spacing_mm is {expected}; convert data to that, or set it")
    if split == "train":
        for index in range(len(rows)):
            shape = rows.shape(index, "image")
            if any(n < w for n, w in zip(shape, cfg.model.window)):
                actual, expected = (" x ".join(map(str, row)) for row in (shape, cfg.model.window))
                advice = f"make data with data_prep.kits19 --least {expected.replace(' x ', ' ')}, or lower the window"
                raise DataError(f"{rows.describe(index)}: a volume of {actual}, smaller than model.window {expected}; {advice}")
    return rows


# ---- training


@dataclass(frozen=True)
class Crop:
    """A crop of a volume and its augmentation: corner, flipped dims, intensity factor, and deviation and seed of the noise."""

    corner: tuple[int, int, int]
    flips: tuple[int, ...]
    factor: float
    noise: float
    seed: int


class Crops(Samples):
    """A random, augmented crop of each volume: image [d, h, w] float32 and label [d, h, w] uint8, a pure function of (seed, epoch,
    index). ``shard``: the box of the crop of this rank; nothing else is read. ``repeat``: crops of each volume in an epoch."""

    def __init__(
        self, rows: Rows, window: Sequence[int], cfg: AugmentConfig, seed: int, shard: Sequence[slice], repeat: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(rows)
        self.window, self.cfg, self.seed, self.repeat = tuple(window), cfg, seed, repeat
        self.box = [part_.indices(n)[:2] for part_, n in zip(shard, window)]

    def __len__(self) -> int:
        return len(self.rows) * self.repeat

    def describe(self, index: int) -> str:
        return self.rows.describe(index % len(self.rows))

    def sample(self, index: int, epoch: int) -> Batch:
        volume = index % len(self.rows)
        crop = self.draw_crop(index, epoch)
        box = []
        for dim, (at, (first, end), w) in enumerate(zip(crop.corner, self.box, self.window)):
            first, end = (w - end, w - first) if dim in crop.flips else (first, end)
            box.append(slice(at + first, at + end))
        values = self.rows.read(volume, {"image": box, "label": box})
        image, label = (self.rows.reader.memory.copy(np.flip(values[name], crop.flips)) for name in ("image", "label"))
        if crop.factor != 1:
            image = image * np.float32(crop.factor)
        if crop.noise:
            image = image + normal(crop.seed, self.window, self.box) * np.float32(crop.noise)
        return Batch(image, label)

    def draw_crop(self, index: int, epoch: int) -> Crop:
        cfg, rng = self.cfg, np.random.default_rng([self.seed, epoch, index])
        volume = index % len(self.rows)
        shape = self.rows.shape(volume, "image")
        wanted = rng.random() < cfg.foreground
        corner = self._foreground_corner(volume, shape, rng) if wanted else None
        if corner is None:
            corner = tuple(int(rng.integers(n - w + 1)) for n, w in zip(shape, self.window))
        flips = tuple(dim for dim in range(3) if rng.random() < cfg.flip)
        factor = float(rng.uniform(*cfg.factor)) if rng.random() < cfg.brighter else 1.0
        noise = float(rng.uniform(0, cfg.noise)) if rng.random() < cfg.noisy else 0.0
        return Crop((corner[0], corner[1], corner[2]), flips, factor, noise, int(rng.integers(2**62)))

    def _foreground_corner(self, volume: int, shape: Sequence[int], rng: np.random.Generator) -> tuple[int, ...] | None:
        """Return the corner of a crop that contains a component of some class, or as much of it as fits; None if there is none."""
        boxes = self.rows.read(volume, _NO_VOXELS)["boxes"]
        present = [[box for box in kind if box[3] > box[0]] for kind in boxes]
        present = [kind for kind in present if kind]
        if not present:
            return None
        kind = present[int(rng.integers(len(present)))]
        box = kind[int(rng.integers(len(kind)))]
        corner = []
        for first, end, n, w in zip(box[:3], box[3:], shape, self.window):
            low, high = sorted((int(end) - w, int(first)))
            corner.append(min(max(int(rng.integers(low, high + 1)), 0), n - w))
        return tuple(corner)


_NO_VOXELS: Selection = {"image": (slice(0, 0),), "label": (slice(0, 0),)}


def normal(seed: int, window: Sequence[int], box: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return standard normal noise from a counter-based generator, keyed by seed and voxel: the shard ``box`` (first and end along
    each dim) of a crop of ``window``.   [d, h, w] float32"""
    (d, h), (begin, end) = (torch.arange(*ends) for ends in box[:2]), box[2]
    rows = (d[:, None] * window[1] + h) * window[2] + begin
    return philox.normal(0, rows, end - begin, upper=seed).numpy()


# ---- evaluation


class Volumes(Samples):
    """Full volumes of any sizes; a batch is a list of them."""

    replicated = True  # with spatial parallelism, windows are sharded later

    def windows(self, index: int, model: UNet3DConfig) -> int:
        """Return the number of windows that cover a volume."""
        placed = (plan_windows(n, w, model.overlap, True) for n, w in zip(self.rows.shape(index, "image"), model.window))
        return int(np.prod([len(p.starts) for p in placed]))

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        return Batch(values["image"], values["label"])

    def collate(self, samples: list[Batch]) -> list[Batch]:
        """Return writable volumes, copies of rows that are cached.   [D, H, W] -> [1, D, H, W]"""
        return [Batch(*(torch.from_numpy(np.require(x, requirements=("C", "W")))[None] for x in sample)) for sample in samples]
