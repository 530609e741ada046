"""Datasets of HDF5 files that other programs wrote. HDF5 itself reads values that are not there as zeros, without an error."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcai.arrays import FILL_VALUES
from hpcai.errors import DataError

PLUGINS = {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2"}  # without a label


def open_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset after checking that all its values can be read. Raises DataError for a link to nothing or another object, a
    filter that HDF5 lacks, values in files that are not there or too short or were never written, and netCDF's scaled values."""
    try:
        data = file[name]
    except KeyError:
        link = file.get(name, getlink=True)
        raise DataError(f"{file.filename}: '{name}' is a link to {link.path}, where nothing is; copy the file again") from None
    if not isinstance(data, h5py.Dataset) or data.shape is None:
        raise DataError(f"{file.filename}: '{name}' is a {type(data).__name__.lower()}, expected values")
    check_filters(data)
    if missing := missing_values(data):
        raise DataError(f"{file.filename}: '{name}' has values {missing}; copy or write it again")
    if scaled := {"scale_factor", "add_offset"} & set(data.attrs):
        raise DataError(f"{file.filename}: '{name}' has {', '.join(sorted(scaled))}; apply them, and remove the attributes")
    return data


def fill_values(data: h5py.Dataset) -> NDArray[Any]:
    """Return the values that stand for missing ones by netCDF's conventions."""
    names = [name for name in ("_FillValue", "missing_value") if name in data.attrs]
    return np.hstack([FILL_VALUES[0], *(np.ravel(data.attrs[name]) for name in names)])


def check_filters(data: h5py.Dataset) -> None:
    """Raise DataError if HDF5 lacks the filter of a dataset, and the package hdf5plugin does so too."""
    plist = data.id.get_create_plist()
    for number in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(number)
        if not h5py.h5z.filter_avail(code) and find_spec("hdf5plugin") is not None:
            __import__("hdf5plugin")  # registers its filters
        if not h5py.h5z.filter_avail(code):
            text = f"is compressed by filter {code} ({PLUGINS.get(code) or label.decode(errors='replace')}), which this HDF5 lacks"
            raise DataError(f"{data.file.filename}: '{data.name.strip('/')}' {text}: pip install hdf5plugin")


def missing_values(data: h5py.Dataset) -> str:
    """Return the place of values that are missing, or an empty string."""
    folder = Path(data.file.filename).parent
    for source in data.virtual_sources() if data.is_virtual else ():
        if source.file_name != "." and "%" not in source.file_name and not (folder / source.file_name).is_file():
            return f"in {source.file_name}, which is not there"
    for name, offset, size in data.external or ():
        stored = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if stored < offset + min(size, data.nbytes):
            return f"in {name}, which has {stored:,} bytes, expected {offset + min(size, data.nbytes):,}"
    if data.chunks:
        count, written = math.prod(-(-n // chunk) for n, chunk in zip(data.shape, data.chunks)), data.id.get_num_chunks()
        return f"in {count:,} chunks, of which {count - written:,} were never written" if written < count else ""
    plain = data.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and not data.external
    return "that were never written" if plain and data.nbytes and data.id.get_offset() is None else ""
