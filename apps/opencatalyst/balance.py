"""Triplets of neighbours of the copies of a model:  hpcai bench opencatalyst balance"""

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from apps.opencatalyst.data import FIELDS
from hpcai.cli.bench.timing import Row
from hpcai.data import Rows
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


def triplets(directory: Path | None) -> tuple[Any, str]:
    """Triplets of frames, and where they come from.   [N]"""
    if directory is None:
        drawn = np.random.default_rng(0).lognormal(math.log(73) - 0.4**2 / 2, 0.4, 2 * _SYNTHETIC)
        atoms = drawn[(drawn >= 20) & (drawn <= 220)].round()[:_SYNTHETIC]
        return atoms * 46 * 46, "synthetic: log-normal like OC20's"
    remedy = f"make it with: {start('data_prep.opencatalyst')} simulate {directory}"
    rows = Rows(directory / "train", {"triplets": FIELDS["triplets"]}, remedy, reader="buffered")
    return rows.column("triplets"), str(directory)


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
