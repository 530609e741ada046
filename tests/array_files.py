"""Random arrays with indices, and the same array in HDF5, .npy and raw files."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hypothesis import strategies as st

from hpcai.data.layout import Layout, hdf5_layout, npy_layout


@st.composite
def arrays_and_slices(draw: Any, dtypes: list[str]) -> tuple[np.ndarray, tuple[int, ...] | None, list[slice | int]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.integers(0, 4)) == 0:
        shape = (2, 30, 40, 9)
    array = np.arange(np.prod(shape)).astype(draw(st.sampled_from(dtypes))).reshape(shape)
    chunks = tuple(draw(st.integers(1 + n // 10, n)) for n in shape) if draw(st.booleans()) else None  # each is a read
    index: list[slice | int] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size - 1))
        index.append(draw(st.sampled_from([start, start - size, slice(start, draw(st.integers(start, size))), slice(None)])))
    return array, chunks, index


def write_arrays(
    folder: Path, array: np.ndarray, chunks: tuple[int, ...] | None, partial: bool, offset: int = 4, version: str = "earliest"
) -> tuple[np.ndarray, list[Layout]]:
    """Write ``array`` to an HDF5 file, a .npy file and, from byte ``offset``, a raw file. Return the stored array and the layouts.

    With ``partial``, most chunks are not allocated and read as the fill value, 7.
    """
    with h5py.File(folder / "x.h5", "w", libver=version) as file:
        data = file.create_dataset("group/x", array.shape, array.dtype, chunks=chunks, fillvalue=7)
        data[: 1 if partial and chunks else None] = array[: 1 if partial and chunks else None]
        array = data[...]
    np.save(folder / "x.npy", array)
    (folder / "x.raw").write_bytes(bytes(offset) + array.tobytes())
    with h5py.File(folder / "x.h5") as file:
        return array, [
            hdf5_layout(file, "group/x"),
            npy_layout(folder / "x.npy"),
            Layout(folder / "x.raw", "x", array.shape, array.dtype, offset),
        ]
