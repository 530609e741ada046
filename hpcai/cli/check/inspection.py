"""One file of a data set, read in a child process: its datasets, their layouts, the values of their rows, its SHA-256.

R rows of a dataset   V values of a row
"""

import hashlib
import math
import zlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import h5py
import numpy as np
import pydantic
from pydantic import BaseModel

from hpcai.cli.check.disk import evict
from hpcai.data import layout
from hpcai.data.hdf5_source import check_filters, missing_values
from hpcai.errors import DataError

ARRAY = "values"
"""The name of the array of a .npy file in "fields" and ranges."""
FEW_VALUES = 16  # values: a row with no more may be constant
MAX_NAMED_ROWS = 10  # maximum number of rows named in a finding
_READ_BYTES = 64 << 20  # bytes read at once; at least one row
_HASH_BYTES = 1 << 20  # bytes hashed at once, in cache
_WIDE_ROW = 64 << 10
_NUMERIC_KINDS = "biufc"


@dataclass(frozen=True)
class DatasetInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    kind: Literal["contiguous", "chunked", "compressed", "header", "elsewhere", "objects", "damaged", "scalar"]
    why: str = ""
    offset: int = 0
    chunk: tuple[int, ...] = ()
    chunks: int = 0  # expected number
    missing: int = 0  # number never written
    stored: int = 0  # bytes

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def readable(self) -> bool:
        return self.kind in ("contiguous", "chunked", "compressed", "header") and not self.missing and self.nbytes > 0


Number = Annotated[float, pydantic.Field(strict=True)]


class Bounds(BaseModel):
    """Allowed values of a dataset. ``blank`` is the value with which a whole row may be filled."""

    low: Number | None = None
    high: Number | None = None
    blank: Number | None = None


class RowStatistics:
    """Faults of the rows of one dataset, and a key of each row: equal for equal rows, and 0 for a constant row.

    ``faults`` holds the first rows that are not finite (``nan``), out of range or constant, with a value; ``counts`` counts all.
    """

    def __init__(self, bounds: Bounds, keyed: bool) -> None:
        self._bounds, self._keyed = bounds, keyed
        self.keys = array("Q")
        self.faults: dict[str, list[tuple[int, float]]] = {"nan": [], "range": [], "constant": []}
        self.counts = dict.fromkeys(self.faults, 0)

    def add(self, first: int, part: np.ndarray) -> None:
        """Add the rows ``part`` [R, ...], of which the first has the number ``first``."""
        part = np.ascontiguousarray(part).reshape(len(part), -1)
        constant = self._find_faults(first, part) if part.dtype.kind in _NUMERIC_KINDS else np.zeros(len(part), bool)
        if self._keyed:
            self.keys.extend(0 if is_constant else row_key(row) for row, is_constant in zip(part.view(np.uint8), constant))

    def _find_faults(self, first: int, values: np.ndarray) -> np.ndarray:
        """Record faulty rows, and return whether each row is constant.   values [R, V] -> [R]"""
        few = values.shape[1] <= FEW_VALUES
        if values.dtype.kind in "bc":
            values = values.view(np.uint8 if values.dtype.kind == "b" else values.real.dtype)
        bounds = self._bounds
        with np.errstate(all="ignore"):
            minimum, maximum = values.min(1), values.max(1)  # NaN where a row has one
            finite = np.isfinite(minimum) & np.isfinite(maximum)
            below = minimum < (-np.inf if bounds.low is None else bounds.low)
            above = maximum > (np.inf if bounds.high is None else bounds.high)
            constant = (minimum == maximum) & finite & (not few)
            unexpected = constant if bounds.blank is None else constant & (minimum != bounds.blank)
        for name, mask in ("nan", ~finite), ("range", (below | above) & finite), ("constant", unexpected):
            rows, faults = np.flatnonzero(mask).tolist(), self.faults[name]
            self.counts[name] += len(rows)
            faults += [(first + i, float(maximum[i] if above[i] else minimum[i])) for i in rows[: MAX_NAMED_ROWS - len(faults)]]
        return constant


def row_key(row: np.ndarray) -> int:
    """Return 64 bits that identify a row [bytes]: a digest of a narrow row; of a wide one two checksums, at memory speed."""
    if row.size < _WIDE_ROW:
        return int.from_bytes(hashlib.blake2b(row.data, digest_size=8).digest()) or 1
    words = row[: row.size // 8 * 8].view(np.uint64)
    return (int(np.add.reduce(words)) + zlib.crc32(row.data) * 0x9E3779B97F4A7C15) % (1 << 64) or 1


@dataclass
class Inspection:
    """The contents of a file. ``problem`` is the error if its values cannot be read."""

    fields: list[DatasetInfo]
    sha256: str = ""
    statistics: dict[str, RowStatistics] = field(default_factory=dict)
    problem: str = ""


def describe(path: Path, rows: int | None) -> list[DatasetInfo]:
    """Return the datasets of a file, each once, even if several links lead to it. A .npy file is one row, unless its first dim is
    ``rows`` of the index. Raises DataError, and the exceptions of h5py for a damaged file."""
    if path.suffix == ".npy":
        try:
            stored = layout.npy_layout(path)
        except layout.UnreadableLayoutError as error:
            return [DatasetInfo(ARRAY, (1,), "?", 1, "elsewhere", str(error).removeprefix(f"{path}: "))]
        shape = stored.shape if rows != 1 and stored.shape[:1] == (rows,) else (1, *stored.shape)
        return [DatasetInfo(ARRAY, shape, stored.dtype.str, stored.dtype.itemsize, "contiguous", offset=stored.offset or 0)]
    with h5py.File(path, "r", locking=False) as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        return [_describe_dataset(file, name) for name in names]


def _describe_dataset(file: h5py.File, name: str) -> DatasetInfo:
    data = file[name]
    dtype, is_numeric = data.dtype, data.dtype.kind in _NUMERIC_KINDS
    kwargs = {"name": name, "shape": data.shape or (), "dtype": dtype.str if is_numeric else str(dtype), "itemsize": dtype.itemsize}
    if not data.shape:
        return DatasetInfo(kind="scalar", **kwargs)
    try:
        check_filters(data)
        if (data.is_virtual or data.external) and (missing := missing_values(data)):
            raise DataError(f"has values {missing}; copy or write it again")
        stored = layout.hdf5_layout(file, name)
    except DataError as error:
        kwargs["why"] = str(error).removeprefix(f"{file.filename}: ")
        if not isinstance(error, layout.UnreadableLayoutError):
            return DatasetInfo(kind="damaged", **kwargs)
        if dtype.hasobject or data.is_virtual or data.external:
            return DatasetInfo(kind="objects" if dtype.hasobject else "elsewhere", **kwargs)
        if not data.id.get_create_plist().get_nfilters():
            return DatasetInfo(kind="header", **kwargs)
    else:
        if stored.offset is not None or not stored.nbytes:
            return DatasetInfo(kind="contiguous", offset=stored.offset or 0, **kwargs)
    chunk = data.chunks or data.shape  # contiguous, but never written
    chunks = math.prod(-(-n // c) for n, c in zip(data.shape, chunk))
    written = data.id.get_num_chunks() if data.chunks else 0
    kwargs |= {"chunk": chunk, "chunks": chunks, "missing": chunks - written, "stored": data.id.get_storage_size()}
    return DatasetInfo(kind="compressed" if "why" in kwargs else "chunked", **kwargs)


def read_headers(path: Path, rows: int | None) -> Iterator[Any]:
    yield Inspection(describe(path, rows))


def read_content(path: Path, rows: int | None, bounds: Mapping[str, Bounds], keys: Collection[str] | None) -> Iterator[Any]:
    """Read a whole file: its SHA-256, and then the values of all rows from the page cache, from which it is evicted at the end.
    ``keys`` names the datasets that identify samples; None is the one with the widest rows."""
    evict(path)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
            yield len(block)
    inspection = Inspection([], digest.hexdigest())
    try:
        inspection.fields = describe(path, rows)
        readable = [dataset for dataset in inspection.fields if dataset.readable]
        if keys is None or (keys and not {dataset.name for dataset in readable} & set(keys)):
            keys = {dataset.name for dataset in [widest(readable)] if dataset is not None}
        for dataset in readable:
            statistics = RowStatistics(bounds.get(dataset.name, Bounds()), dataset.name in keys)
            inspection.statistics[dataset.name] = statistics
            for first, part in _read_parts(path, dataset):
                statistics.add(first, part)
                yield 0
    except Exception as error:  # from h5py for a damaged file, whose SHA-256 is still reported
        inspection.problem = str(error)
    evict(path)
    yield inspection


def widest(fields: Sequence[DatasetInfo]) -> DatasetInfo | None:
    return max((data for data in fields if data.readable), key=lambda data: (data.row_bytes, data.name), default=None)


def _read_parts(path: Path, dataset: DatasetInfo) -> Iterator[tuple[int, np.ndarray]]:
    """Yield all rows in parts, of whole chunks if these are not too large, each with the number of its first row."""
    step = max(_READ_BYTES // dataset.row_bytes, 1)
    step -= step % dataset.chunk[0] if dataset.chunk and dataset.chunk[0] < step else 0
    if path.suffix == ".npy":
        values = np.memmap(path, np.dtype(dataset.dtype), "r", dataset.offset, dataset.shape)
        yield from ((start, values[start : start + step]) for start in range(0, dataset.shape[0], step))
        return
    with h5py.File(path, "r", locking=False, rdcc_nbytes=_READ_BYTES) as file:
        yield from ((start, file[dataset.name][start : start + step]) for start in range(0, dataset.shape[0], step))
