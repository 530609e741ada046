"""Reader of universes in HDF5, of which the public TFRecords are samples: one file each.

    full        counts [N, N, N, C]: whole numbers from 0 to 32,767, of any type
    unitPar     the parameters in [-1, 1]   [P]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep.tfrecord import check_target
from hpcai.data.hdf5_source import fill_values, open_dataset
from hpcai.data.layout import parse_errors
from hpcai.errors import DataError

MAX_COUNT = np.iinfo(np.int16).max


def split_cubes(counts: NDArray[np.int16], size: int) -> Iterator[NDArray[np.int16]]:
    """Yield the samples [size, size, size, C] in the order of the public set: the first axis slowest."""
    for x, y, z in product(*(range(0, cells, size) for cells in counts.shape[:3])):
        yield counts[x : x + size, y : y + size, z : z + size]


@contextmanager
def _open(path: Path, channels: int, size: int) -> Iterator[tuple[h5py.Dataset, NDArray[np.float32]]]:
    """Context manager for the counts of a universe, with its target. Raises DataError for damaged and other files."""
    with parse_errors(path, "fetch it again"), h5py.File(path) as file:
        for name in ("full", "unitPar"):
            if name not in file:
                raise DataError(f"{path}: no dataset '{name}', found {sorted(file)}; is it a CosmoFlow universe?")
        full, target = (open_dataset(file, name) for name in ("full", "unitPar"))
        cells = full.shape[0] if full.shape else 0
        if full.shape != (cells, cells, cells, channels) or full.dtype.kind not in "iuf":
            expected = f"numbers (N, N, N, {channels}); see --channels"
            raise DataError(f"{path}: dataset 'full' is {full.dtype} {full.shape}, expected {expected}")
        if cells % size:
            raise DataError(f"{path}: {cells} cells per side are no multiple of --cut-size {size}")
        yield full, target[...].astype(np.float32).reshape(-1)


def count_samples(path: Path, channels: int, size: int) -> int:
    with _open(path, channels, size) as (full, _):
        return int(full.shape[0] // size) ** 3


def read_samples(path: Path, channels: int, size: int) -> Iterator[tuple[str, NDArray[np.int16], NDArray[np.float32]]]:
    """Yield (location, counts [size, size, size, C], target [P]) of every sample of a universe."""
    with _open(path, channels, size) as (full, target):
        check_target(target, str(path))
        for x in range(0, full.shape[0], size):
            slab = full[x : x + size]
            counts = slab.astype(np.int16, copy=False)
            # A value beyond the range of int16 becomes another number.
            if (bad := (counts < 0) | (counts != slab) | np.isin(slab, fill_values(full))).any():
                row, *cell = np.argwhere(bad)[0].tolist()
                text = f"'full' holds {slab[row, *cell]} in cell {[x + row, *cell]}"
                raise DataError(f"{path}: {text}, expected whole numbers from 0 to {MAX_COUNT:,}, and no fill value")
            for cube in split_cubes(counts, size):
                yield str(path), cube, target
