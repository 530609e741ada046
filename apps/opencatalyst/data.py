"""Frames of atoms as samples, and batches of them as graphs.   N atoms, E edges"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.opencatalyst.settings import Config
from hpcai.data import Rows
from hpcai.data.sampler import Balanced, Sampler
from hpcai.data.splits import Samples, make_loader, open_loaders, open_split, sharded_sampler
from hpcai.dist import Mesh
from hpcai.errors import DataError
from hpcai.models.dimenet import Batch, DimeNetConfig, Frame, Sizes, Structure, build_structure_for_model, graph_sizes, make_batch
from hpcai.programs import command_of
from hpcai.train import MicroBatches

FIELDS: dict[str, tuple[str, tuple[int | str | None, ...]]] = {
    "atoms": ("int32", ()), "triplets": ("int64", ()), "edges": ("int32", ()), "energy": ("float64", ()),
    "cell": ("float64", (3, 3)), "pbc": ("uint8", (3,)), "positions": ("float32", ("atoms", 3)),
    "forces": ("float32", ("atoms", 3)), "numbers": ("uint8", ("atoms",)), "fixed": ("uint8", ("atoms",)),
}  # fmt: skip


@contextmanager
def frames(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, DimeNetConfig]]:
    """Loaders for training (None on processes that only evaluate), validation and pictures, and the model's settings completed by
    what the data know."""
    train, validation = rows_of(cfg, "train", mesh), rows_of(cfg, "validation", mesh)
    model = _completed(cfg, train)
    copies, parts = mesh["replicate"].size, cfg.step.accumulate
    held: dict[str, Any] = {"shuffle": False, "last_batch": "keep"}
    words: dict[str, Any] = {"name": "train", "seed": cfg.train.seed, "accumulate": parts, **_sampler(cfg, train)}
    ladder = Ladder.of(train, cfg.data.batch // (copies * parts), model.most) if cfg.data.shapes == "few" else None
    few, batch, data = Frames(validation, model, count=cfg.data.pictures), cfg.data.evaluation_batch, cfg.data
    with open_loaders(
        mesh,
        lambda: make_loader(Frames(train, model, parts, ladder), data.batch, data, mesh, **words),
        lambda: make_loader(Frames(validation, model), batch, data, mesh, name="validation", **held),
        (lambda: make_loader(few, batch, data, mesh, name="pictures", **held)) if len(few) else None,
    ) as (training, held_out, pictures):
        yield training, held_out, pictures, model


def _sampler(cfg: Config, rows: Rows) -> dict[str, Sampler]:
    data, seed = cfg.data, cfg.train.seed
    if data.balance == "none":
        return sharded_sampler(rows, data, data.batch, seed)
    return {"sampler": Balanced(rows.column("triplets"), data.batch, seed, equal=data.balance == "frames")}


@dataclass(frozen=True)
class Ladder:
    """Sizes of batches in steps of a tenth, all at once, so that there are few of them."""

    sizes: Sizes

    @classmethod
    def of(cls, rows: Rows, frames: int, most: int | None) -> "Ladder":
        """The ladder that begins at what ``frames`` frames have on average."""
        atoms, edges = rows.column("atoms"), rows.column("edges")
        wide = most or int((edges / np.maximum(atoms, 1)).max()) + 1
        mean = [int(column.mean() * frames) + 1 for column in (atoms, edges)]
        return cls(Sizes(mean[0], mean[1], wide, wide + wide // 2, int(atoms.max())))

    def least(self, structures: Sequence[Structure]) -> Sizes:
        """The lowest step that these structures fit."""
        steps = max(max(np.ceil(np.log(n / size) / np.log(1.1)), 0) for n, size in zip(graph_sizes(structures), self.sizes))
        return Sizes(*(int(np.ceil(size * 1.1**steps)) for size in self.sizes))


class Frames(Samples):
    """Frames of one split with the neighbours of their atoms; ``count``: the first of them only. Batches are joined, and in
    ``parts`` micro-batches where a step has several."""

    replicated = True

    def __init__(
        self, rows: Rows, model: DimeNetConfig, parts: int = 1, ladder: Ladder | None = None, count: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rows, count)
        self.model, self.parts, self.ladder = model, parts, ladder

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Frame:
        return frame(values, self.model, self.rows.describe(index))

    def collate(self, samples: list[Frame]) -> Any:
        return joined(samples, self.parts, self.ladder)


def frame(values: dict[str, Any], model: DimeNetConfig, where: str) -> Frame:
    """What a file has of a frame, with its neighbours."""
    found = build_structure_for_model(values["numbers"], values["positions"], values["cell"], values["pbc"], model, where)
    return Frame(found, float(values["energy"]), values["forces"], 1 - values["fixed"])


def joined(frames: list[Frame], parts: int = 1, ladder: Ladder | None = None) -> Any:
    """One batch, or as many micro-batches."""
    each = len(frames) // parts

    def batch(some: list[Frame]) -> Batch:
        return make_batch(some, ladder.least([f.structure for f in some]) if ladder else Sizes())

    made = [batch(frames[k * each : (k + 1) * each]) for k in range(parts)]
    return MicroBatches(made) if parts > 1 else made[0]


def rows_of(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data = cfg.data
    remedy = f"make data with: {command_of('data_prep.opencatalyst')} simulate {data.directory}, or set data.directory"
    return open_split(data.directory / split, FIELDS, remedy, data, mesh, data.shards if split == "train" else 1)


def _completed(cfg: Config, rows: Rows) -> DimeNetConfig:
    """The model's settings with what the data know: mean energy, and the size of a force."""
    model, path = cfg.model, cfg.data.directory / "statistics.json"
    if model.mean is not None and model.scale is not None:
        return model
    try:
        about = json.loads(path.read_text())["splits"]["train"]
        found = {"mean": float(about["energy"]["mean"]), "scale": float(about["forces"]["rms"])}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DataError(
            f"{path}: no statistics of the training frames ({problem!r}); make them with data_prep.opencatalyst, or set model.mean "
            "and model.scale"
        ) from problem
    return model.model_copy(update={name: value for name, value in found.items() if getattr(model, name) is None})


def write_pairs(path: Path, pairs: dict[str, torch.Tensor]) -> None:
    """What is true beside what the model says: energy [B, 2] eV; forces [A, 2, 3] eV/angstrom and numbers [A] of free atoms."""
    np.savez_compressed(path, **{name: values.numpy() for name, values in pairs.items()})  # type: ignore[arg-type]
