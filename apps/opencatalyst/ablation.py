"""What each optimisation brings OpenCatalyst:  hpcai ablate opencatalyst [data.batch=4 ...]

Plain is what one would write first: a list of all triplets, torch's functions differentiated twice, float32, torch's optimizer and
DataLoader over h5py, and training waits for its evaluation. Frames are random slabs of 80 atoms, whose neighbours are found when
they are read. What balancing brings several processes is a part of ``hpcai bench opencatalyst``.
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from apps.opencatalyst.data import FIELDS, Frames, Ladder, _rows, frame, joined
from apps.opencatalyst.settings import Config, DataConfig
from hpcai.data import Loader
from hpcai.dist import Mesh
from hpcai.models.dimenet import DimeNet, Sizes, loss, parallelize, score
from hpcai.models.dimenet.triplets import WithTriplets
from hpcai.train.ablation import On, Switch, of_the_loop
from hpcai.train.trial import Subject, Training
from hpcai.train.trial import trial as trial_of

_GPU = torch.cuda.is_available()
_SLAB = (4, 4, 5)  # atoms along each side
_SPACING = 2.5  # angstrom


class CONFIG(Config):
    """An OpenCatalyst run of a size that is measured in minutes."""

    data: DataConfig = DataConfig(batch=16 if _GPU else 1, workers=4 if _GPU else 1, shapes="few", balance="none")


def switches(cfg: Config, mesh: Mesh) -> list[Switch]:
    return [
        Switch("no triplets", "moments of each atom's messages, and functions made to be differentiated twice"),
        *of_the_loop(cfg, mesh, _APP.sample_bytes(cfg)),
    ]


def trial(cfg: Config, mesh: Mesh, on: On) -> AbstractContextManager[Training]:
    return trial_of(_APP, cfg, mesh, on)


def _build(cfg: Config, mesh: Mesh, on: On) -> DimeNet:
    model = parallelize((DimeNet if "no triplets" in on else WithTriplets)(cfg.model), mesh)
    for output in model.output_blocks:  # whose last weights are 0 at first, and so would be all gradients
        torch.nn.init.normal_(output.lin.weight, std=0.1)
    return model


def _random(cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
    atoms = np.stack(np.meshgrid(*map(np.arange, _SLAB), indexing="ij"), -1).reshape(-1, 3)
    count, sides = len(atoms), np.array(_SLAB) * _SPACING + [0, 0, 12.0]
    values = {
        "atoms": np.int32(count), "triplets": np.int64(0), "edges": np.int32(0), "energy": np.float64(random.normal()),
        "cell": np.diag(sides), "pbc": np.ones(3, np.uint8), "numbers": random.integers(20, 80, count).astype(np.uint8),
        "positions": (atoms * _SPACING + random.normal(0, 0.1, (count, 3))).astype(np.float32),
        "forces": random.normal(size=(count, 3)).astype(np.float32), "fixed": (atoms[:, 2] < 2).astype(np.uint8),
    }  # fmt: skip
    return tuple(np.asarray(values[name]) for name in FIELDS)


def _ladder(cfg: Config, mesh: Mesh) -> Ladder | None:
    """Room for as many neighbours as there can be, so that all batches have one shape."""
    count, most = int(np.prod(_SLAB)) * cfg.data.batch // mesh["replicate"].size, cfg.model.most
    return Ladder(Sizes(count + 1, count * most + 1, most, 2 * most, int(np.prod(_SLAB)))) if most else None


def _together(cfg: Config, samples: list[tuple[Any, ...]]) -> Any:
    frames = [frame(dict(zip(FIELDS, values)), cfg.model, "a random slab") for values in samples]
    return joined(frames, cfg.step.accumulate)


def _loader(cfg: Config, mesh: Mesh, split: str, **words: Any) -> Any:
    source = Frames(_rows(cfg, split, mesh), cfg.model, cfg.step.accumulate, _ladder(cfg, mesh))
    return Loader(source, cfg.data.batch, mesh, **cfg.data.loading(), **words)


_FLAT = frozenset(name for name, (_, shape) in FIELDS.items() if shape[:1] == ("atoms",))
_APP = Subject(_build, loss, score, tuple(FIELDS), _random, _loader, _together, _FLAT)
