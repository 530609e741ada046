"""Triplets of neighbours of the copies of a model:  hpcai bench opencatalyst balance"""

import math
import statistics
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.cli.bench.timing import Row
from hpcai.data.sampler import Balanced, Sampler, Shuffled
from hpcai.errors import DataError
from hpcai.programs import start

_COPIES, _FRAMES = (8, 64), 16  # a copy
_BATCHES = 64  # of an epoch, at most
_SYNTHETIC = 8 * 1024  # frames: 64 batches of 8 copies


def balance(cfg: Any, repeats: int) -> list[Row]:
    """Triplets of the copy that has most over their mean, in batches of 16 frames a copy, on average of an epoch: dealt as they
    come (none), equally many frames (frames), only triplets counted (triplets); of the first 64 batches at most. The frames are
    those in ``data.directory``, if there are any there, and otherwise synthetic."""
    counts, source = triplets(cfg.data.directory if (cfg.data.directory / "train").is_dir() else None)
    return [uneven(counts, copies, source) for copies in _COPIES]


def triplets(directory: Path | None, synthetic: int = _SYNTHETIC) -> tuple[Any, str]:
    """Triplets of frames, and where they come from.   [N]"""
    if directory is None:
        draw = np.random.default_rng(0)
        atoms = np.empty(0)
        while len(atoms) < synthetic:
            more = draw.lognormal(math.log(73) - 0.4**2 / 2, 0.4, synthetic)
            atoms = np.concatenate([atoms, more[(more >= 20) & (more <= 220)].round()])[:synthetic]
        return atoms * 46 * 46, "synthetic: log-normal like OC20's"
    paths = sorted((directory / "train" if (directory / "train").is_dir() else directory).glob("*.h5"))
    if not paths:
        raise DataError(
            f"{directory}: no train/*.h5 with triplets; make them with: {start('data_prep.opencatalyst')} simulate {directory}"
        )
    columns = []
    for path in paths:
        with h5py.File(path, "r") as file:
            if "triplets" not in file:
                raise DataError(f"{path}: no dataset 'triplets'; remake it with: {start('data_prep.opencatalyst')}")
            columns.append(file["triplets"][:])
    return np.concatenate(columns), str(directory)


def uneven(counts: Any, copies: int, source: str = "") -> Row:
    batch = _FRAMES * copies
    if len(counts) < batch:
        raise DataError(f"{source}: {len(counts)} frames, expected {batch} at least for {copies} copies; simulate more")
    samplers: dict[str, Sampler] = {
        "none": Shuffled(len(counts)), "frames": Balanced(counts, batch), "triplets": Balanced(counts, batch, equal=False),
    }  # fmt: skip
    found: Row = {"counts": source, "samples": len(counts), "triplets_each": round(counts.mean()), "copies": copies}
    for name, sampler in samplers.items():
        order, most = sampler.order(0), []
        for first in range(0, len(order) - batch + 1, batch)[:_BATCHES]:
            indices = order[first : first + batch]
            work = [counts[indices[sampler.deal(indices, rank, copies)]].sum() for rank in range(copies)]
            most.append(max(work) / statistics.fmean(work))
        found[name] = round(statistics.fmean(most), 4)
    return found
