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
from hpcai.errors import DataError

ARRAY = "values"
"""The name under which the array of a .npy file is known to "fields" and to ranges."""
FEW_VALUES = 16  # values: a row of no more may well be constant
MAX_NAMED_ROWS = 10  # rows of a fault that a finding names
_READ_BYTES = 64 << 20  # bytes that are read at once, or one row
_HASH_BYTES = 1 << 20  # bytes that are hashed at once, while a cache holds them
_WIDE_ROW = 64 << 10
_NUMERIC_KINDS = "biufc"


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    kind: Literal["contiguous", "chunked", "compressed", "header", "elsewhere", "objects", "damaged", "scalar"]
    why: str = ""
    offset: int = 0
    chunk: tuple[int, ...] = ()
    chunks: int = 0  # that there should be
    missing: int = 0  # chunks that were never written
    stored: int = 0  # bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def readable(self) -> bool:
        return self.kind in ("contiguous", "chunked", "compressed", "header") and not self.missing and self.nbytes > 0


Number = Annotated[float, pydantic.Field(strict=True)]


class Bounds(BaseModel):
    """Values that a dataset may have. ``blank`` is the one that may fill a whole row."""

    low: Number | None = None
    high: Number | None = None
    blank: Number | None = None


class RowStatistics:
    """Faults of the rows of one dataset, and a key of each row, which equal rows share and a constant row has as 0.

    ``faults`` holds the first rows that are not finite (``nan``), out of range or constant, each with a value; ``counts`` counts
    all.
    """

    def __init__(self, bounds: Bounds, keyed: bool) -> None:
        self._bounds, self._keyed = bounds, keyed
        self.keys = array("Q")
        self.faults: dict[str, list[tuple[int, float]]] = {"nan": [], "range": [], "constant": []}
        self.counts = dict.fromkeys(self.faults, 0)

    def add(self, first: int, part: np.ndarray) -> None:
        """Rows from number ``first`` on.   part [R, ...]"""
        part = np.ascontiguousarray(part).reshape(len(part), -1)
        same = self._find_faults(first, part) if part.dtype.kind in _NUMERIC_KINDS else np.zeros(len(part), bool)
        if self._keyed:
            self.keys.extend(0 if is_constant else row_key(row) for row, is_constant in zip(part.view(np.uint8), same))

    def _find_faults(self, first: int, values: np.ndarray) -> np.ndarray:
        """Note faulty rows, and return which hold one value only.   values [R, V] -> [R]"""
        few = values.shape[1] <= FEW_VALUES
        if values.dtype.kind in "bc":
            values = values.view(np.uint8 if values.dtype.kind == "b" else values.real.dtype)
        bounds = self._bounds
        with np.errstate(all="ignore"):
            least, most = values.min(1), values.max(1)  # NaN where a row has one
            finite = np.isfinite(least) & np.isfinite(most)
            below = least < (-np.inf if bounds.low is None else bounds.low)
            above = most > (np.inf if bounds.high is None else bounds.high)
            same = (least == most) & finite & (not few)
            odd = same if bounds.blank is None else same & (least != bounds.blank)
        for name, mask in ("nan", ~finite), ("range", (below | above) & finite), ("constant", odd):
            rows, known = np.flatnonzero(mask).tolist(), self.faults[name]
            self.counts[name] += len(rows)
            known += [(first + i, float(most[i] if above[i] else least[i])) for i in rows[: MAX_NAMED_ROWS - len(known)]]
        return same


def row_key(row: np.ndarray) -> int:
    """Return 64 bits that tell rows apart: a digest of a narrow row; of a wide one two checksums, at the speed of memory.
    row [bytes]"""
    if row.size < _WIDE_ROW:
        return int.from_bytes(hashlib.blake2b(row.data, digest_size=8).digest()) or 1
    words = row[: row.size // 8 * 8].view(np.uint64)
    return (int(np.add.reduce(words)) + zlib.crc32(row.data) * 0x9E3779B97F4A7C15) % (1 << 64) or 1


@dataclass
class Inspection:
    """The contents of a file. ``problem`` says why values of it cannot be read."""

    fields: list[DatasetInfo]
    sha256: str = ""
    statistics: dict[str, RowStatistics] = field(default_factory=dict)
    problem: str = ""


def describe(path: Path, rows: int | None) -> list[DatasetInfo]:
    """Return the datasets of a file, each once, whatever links lead to it. A .npy file is one row, unless its first dim has the
    ``rows`` that an index tells. Raises DataError, and what h5py raises for a damaged file."""
    if path.suffix == ".npy":
        return [_describe_array(path, rows)]
    with h5py.File(path, "r", locking=False) as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        return [_describe_dataset(file, name) for name in names]


def _describe_dataset(file: h5py.File, name: str) -> DatasetInfo:
    data = file[name]
    kind, plain = data.dtype, data.dtype.kind in _NUMERIC_KINDS
    about = {"name": name, "shape": data.shape or (), "dtype": kind.str if plain else str(kind), "itemsize": kind.itemsize}
    if not data.shape:
        return DatasetInfo(kind="scalar", **about)
    try:
        found = layout.hdf5(file, name)
    except DataError as problem:
        about["why"] = str(problem).removeprefix(f"{file.filename}: ")
        if not isinstance(problem, layout.UnreadableLayoutError):
            return DatasetInfo(kind="damaged", **about)
        if kind.hasobject or data.is_virtual or data.external:
            return DatasetInfo(kind="objects" if kind.hasobject else "elsewhere", **about)
        if not data.id.get_create_plist().get_nfilters():
            return DatasetInfo(kind="header", **about)
    else:
        if found.offset is not None or not found.nbytes:
            return DatasetInfo(kind="contiguous", offset=found.offset or 0, **about)
    chunk = data.chunks or data.shape  # in one piece, with no value written
    chunks = math.prod(-(-n // c) for n, c in zip(data.shape, chunk))
    written = data.id.get_num_chunks() if data.chunks else 0
    about |= {"chunk": chunk, "chunks": chunks, "missing": chunks - written, "stored": data.id.get_storage_size()}
    return DatasetInfo(kind="compressed" if "why" in about else "chunked", **about)


def _describe_array(path: Path, rows: int | None) -> DatasetInfo:
    try:
        found = layout.npy(path)
    except layout.UnreadableLayoutError as problem:
        return DatasetInfo(ARRAY, (1,), "?", 1, "elsewhere", str(problem).removeprefix(f"{path}: "))
    shape = found.shape if rows != 1 and found.shape[:1] == (rows,) else (1, *found.shape)
    return DatasetInfo(ARRAY, shape, found.dtype.str, found.dtype.itemsize, "contiguous", offset=found.offset or 0)


def read_headers(path: Path, rows: int | None) -> Iterator[Any]:
    """Describe a file without reading any value."""
    yield Inspection(describe(path, rows))


def read_content(path: Path, rows: int | None, bounds: Mapping[str, Bounds], keys: Collection[str] | None) -> Iterator[Any]:
    """Read a whole file: its SHA-256, and then the values of all rows, from the page cache, which lets go of the file at the end.
    ``keys`` names the datasets by which samples are told apart, None is the largest."""
    evict(path)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
            yield len(block)
    found = Inspection([], digest.hexdigest())
    try:
        found.fields = describe(path, rows)
        yield from _read_statistics(path, found, bounds, keys)
    except Exception as problem:  # of h5py, for a damaged file, whose SHA-256 is told all the same
        found.problem = str(problem)
    evict(path)
    yield found


def widest(fields: Sequence[DatasetInfo]) -> DatasetInfo | None:
    """Return the dataset whose rows are the widest."""
    return max((one for one in fields if one.readable), key=lambda one: (one.row_bytes, one.name), default=None)


def _read_statistics(path: Path, found: Inspection, bounds: Mapping[str, Bounds], keys: Collection[str] | None) -> Iterator[int]:
    readable = [one for one in found.fields if one.readable]
    if keys is None or (keys and not {one.name for one in readable} & set(keys)):
        keys = {one.name for one in [widest(readable)] if one is not None}
    for one in readable:
        tally = found.statistics[one.name] = RowStatistics(bounds.get(one.name, Bounds()), one.name in keys)
        for first, part in _read_parts(path, one):
            tally.add(first, part)
            yield 0


def _read_parts(path: Path, one: DatasetInfo) -> Iterator[tuple[int, np.ndarray]]:
    """All rows, in parts of whole chunks where these are not too large, each with the number of its first row."""
    step = max(_READ_BYTES // one.row_bytes, 1)
    step -= step % one.chunk[0] if one.chunk and one.chunk[0] < step else 0
    if path.suffix == ".npy":
        values = np.memmap(path, np.dtype(one.dtype), "r", one.offset, one.shape)
        yield from ((begin, values[begin : begin + step]) for begin in range(0, one.shape[0], step))
        return
    with h5py.File(path, "r", locking=False, rdcc_nbytes=_READ_BYTES) as file:
        yield from ((begin, file[one.name][begin : begin + step]) for begin in range(0, one.shape[0], step))
