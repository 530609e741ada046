"""Frames of atoms as samples, and their batches as graphs.   N atoms, E edges"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from apps.opencatalyst.settings import Config
from hpcai.data import Rows
from hpcai.data.sampler import Balanced
from hpcai.data.splits import HELD_OUT, Samples, make_loader, open_loaders, open_split, training_kwargs, training_statistics
from hpcai.dist import Mesh
from hpcai.models.dimenet import Batch, DimeNetConfig, Frame, Sizes, Structure, build_structure_for_model, graph_sizes, make_batch
from hpcai.programs import command_of
from hpcai.train import MicroBatches

FIELDS: dict[str, tuple[str, tuple[int | str | None, ...]]] = {
    "atoms": ("int32", ()), "triplets": ("int64", ()), "edges": ("int32", ()), "energy": ("float64", ()),
    "cell": ("float64", (3, 3)), "pbc": ("uint8", (3,)), "positions": ("float32", ("atoms", 3)),
    "forces": ("float32", ("atoms", 3)), "numbers": ("uint8", ("atoms",)), "fixed": ("uint8", ("atoms",)),
}  # fmt: skip


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, DimeNetConfig]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures, and the settings of the model,
    completed from the data."""
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    model, data, kwargs = _complete_model_config(cfg, train), cfg.data, training_kwargs(train, cfg)
    replicas, parts = mesh["replicate"].size, cfg.step.accumulate
    if data.balance != "none":  # the settings refuse shards then
        kwargs["sampler"] = Balanced(train.column("triplets"), cfg.train.seed, equal=data.balance == "frames")
    bucket = smallest_bucket(train, data.batch // (replicas * parts), model.most) if data.shapes == "few" else None
    few, batch = Frames(validation, model, count=data.pictures), data.evaluation_batch
    with open_loaders(
        mesh,
        lambda: make_loader(Frames(train, model, parts, bucket), data.batch, data, mesh, **kwargs),
        lambda: make_loader(Frames(validation, model), batch, data, mesh, name="validation", **HELD_OUT),
        (lambda: make_loader(few, batch, data, mesh, name="pictures", **HELD_OUT)) if len(few) else None,
    ) as (training, held_out, pictures):
        yield training, held_out, pictures, model


def smallest_bucket(rows: Rows, frames: int, most: int | None) -> Sizes:
    """Return the mean sizes of a batch of ``frames`` frames, the smallest bucket of sizes."""
    atoms, edges = rows.column("atoms"), rows.column("edges")
    wide = most or int((edges / np.maximum(atoms, 1)).max()) + 1
    mean = [int(column.mean() * frames) + 1 for column in (atoms, edges)]
    return Sizes(mean[0], mean[1], wide, wide + wide // 2, int(atoms.max()))


def fit_bucket(smallest: Sizes, structures: Sequence[Structure]) -> Sizes:
    """Return the bucket that these structures fit: all sizes of the smallest one, times a power of 1.1."""
    steps = max(max(np.ceil(np.log(n / size) / np.log(1.1)), 0) for n, size in zip(graph_sizes(structures), smallest))
    return Sizes(*(int(np.ceil(size * 1.1**steps)) for size in smallest))


class Frames(Samples):
    """Frames of one split with the neighbours of their atoms. ``count``: the first frames only. A batch is one graph, or ``parts``
    micro-batches if a step has several, padded to sizes that are powers of 1.1 times ``bucket``, so that there are few shapes."""

    replicated = True

    def __init__(
        self, rows: Rows, model: DimeNetConfig, parts: int = 1, bucket: Sizes | None = None, count: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rows, count)
        self.model, self.parts, self.bucket = model, parts, bucket

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Frame:
        return parse_frame(values, self.model, self.rows.describe(index))

    def collate(self, samples: list[Frame]) -> Any:
        return collate_frames(samples, self.parts, self.bucket)


def parse_frame(values: dict[str, Any], model: DimeNetConfig, location: str) -> Frame:
    """Return a frame of a file, with its neighbours."""
    structure = build_structure_for_model(values["numbers"], values["positions"], values["cell"], values["pbc"], model, location)
    return Frame(structure, float(values["energy"]), values["forces"], 1 - values["fixed"])


def collate_frames(frames: list[Frame], parts: int = 1, bucket: Sizes | None = None) -> Any:
    """Return one batch, or ``parts`` micro-batches."""
    each = len(frames) // parts

    def batch(some: list[Frame]) -> Batch:
        return make_batch(some, fit_bucket(bucket, [f.structure for f in some]) if bucket else Sizes())

    batches = [batch(frames[k * each : (k + 1) * each]) for k in range(parts)]
    return MicroBatches(batches) if parts > 1 else batches[0]


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data = cfg.data
    remedy = f"make data with: {command_of('data_prep.opencatalyst')} simulate {data.directory}, or set data.directory"
    return open_split(data.directory / split, FIELDS, remedy, data, mesh, data.shards if split == "train" else 1)


def _complete_model_config(cfg: Config, rows: Rows) -> DimeNetConfig:
    """Return the settings of the model with the mean energy and the RMS force of the data."""
    model = cfg.model
    if model.mean is not None and model.scale is not None:
        return model
    remedy = "write them with data_prep.opencatalyst, or set model.mean and model.scale"
    with training_statistics(cfg.data.directory, "the training frames", remedy) as statistics:
        values = {"mean": float(statistics["energy"]["mean"]), "scale": float(statistics["forces"]["rms"])}
    return model.model_copy(update={name: value for name, value in values.items() if getattr(model, name) is None})
