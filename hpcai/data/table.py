"""Where the values of all HDF5 files of a folder lie, in one file beside its index: no file is opened before one of its samples is
read, and none for the numbers that orders and costs follow from.

index-<8 digits of its SHA-256>.safetensors, which "table" of index.json names:

    files           uint8 [32]          SHA-256 of the names, rows and sizes of the files, in the order of the index
    head            int64 [F]           CRC-32 of the first 4 KiB of each; -1 of a file that could not be described
    NAME:way        uint8 [F]           how a dataset lies there: ABSENT, PLAIN (in one piece), CHUNKED, or PACKED: for HDF5 alone
    NAME:type       uint8 [F, 12]       its dtype in numpy's letters
    NAME:dims       uint8 [F]           how many it has; their lengths follow file by file
    NAME:shape      int64 [sum]
    NAME:chunk      int64 [sum]         of those in chunks
    NAME:pieces     int64 [F]           1, or how many chunks were written; their places follow file by file
    NAME:cell       int64 [sum]         of a chunk in the grid of them, row-major
    NAME:offset     int64 [sum]         bytes
    NAME:fill       uint8 [sum]         the value, of dtype, where nothing was written; of those in chunks
    NAME:values     [N]                 all rows, where one is a number of at most 8 bytes, and all files have it

F files   N rows of all of them
"""

import hashlib
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.data import layout
from hpcai.data.entry import Entry, TableEntry
from hpcai.data.layout import Layout, UnreadableLayoutError
from hpcai.errors import DataError, HpcaiError

ABSENT, PLAIN, CHUNKED, PACKED = range(4)
HEAD = 4096
"""Bytes of a file that are compared before it is read: with another layout they are others."""
_TYPE, _TYPES = 12, re.compile(rb"[<>|][biufcS][1-9][0-9]{0,8}")
_DIMS, _LENGTH = 32, 1 << 48
_PARTS = {"way": np.uint8, "type": np.uint8, "dims": np.uint8, "shape": np.int64, "chunk": np.int64, "pieces": np.int64,
          "cell": np.int64, "offset": np.int64, "fill": np.uint8}  # fmt: skip


def signature(files: Iterable[tuple[str, int, int]]) -> "hashlib._Hash":
    """The SHA-256 of the names, rows and sizes of files."""
    return hashlib.sha256("\n".join(f"{name} {rows} {size}" for name, rows, size in files).encode())


def head_of(start: bytes | np.ndarray) -> int:
    """What the table has of the first bytes of a file."""
    return zlib.crc32(bytes(start[:HEAD]))


# ---- written


def describe(path: Path, rows: int) -> dict[str, Any]:
    """What the table is to say of a file, fit for JSON. Datasets whose values lie elsewhere, or are no numbers, are left out.
    Raises DataError for a file that is missing or damaged."""
    try:
        return _description(path, rows)
    except HpcaiError:
        raise
    except Exception as problem:  # a damaged file ends in any of a dozen exceptions of h5py
        raise DataError(f"{path}: cannot be read as HDF5 ({type(problem).__name__}: {problem}); make or copy it again") from problem


def _description(path: Path, rows: int) -> dict[str, Any]:
    names: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)

    with path.open("rb") as start:
        head = head_of(start.read(HEAD))
    with h5py.File(path, "r") as file:
        file.visititems(note)
        told = {name: _described(file, name, rows) for name in names}
    return {"bytes": path.stat().st_size, "head": head, "fields": {name: field for name, field in told.items() if field}}


def _described(file: h5py.File, name: str, rows: int) -> dict[str, Any] | None:
    data = file[name]
    if not data.shape or data.external or data.is_virtual or not _TYPES.fullmatch(data.dtype.str.encode()):
        return None
    told: dict[str, Any] = {"way": PACKED, "type": data.dtype.str, "shape": list(data.shape)}
    if len(data.shape) == 1 and data.shape[0] == rows and data.dtype.kind in "biuf" and data.dtype.itemsize <= 8:
        told["values"] = data[...].astype(data.dtype.newbyteorder("=")).tobytes().hex()
    try:
        found = layout.hdf5(file, name)
    except UnreadableLayoutError:
        return told
    if found.offset is not None:
        return told | {"way": PLAIN, "cell": [0], "offset": [found.offset]}
    grid = _grid(found.shape, found.chunk)
    cells = [int(np.ravel_multi_index(cell, grid)) for cell in found.offsets]
    fill = np.asarray(found.fill, found.dtype).tobytes().hex()
    where = {"cell": cells, "offset": list(found.offsets.values())}
    return told | {"way": CHUNKED, "chunk": list(found.chunk), "fill": fill, **where}


def _grid(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // max(c, 1)) for n, c in zip(shape, chunk))


def table_of(files: Sequence[Entry], described: Sequence[Mapping[str, Any] | None]) -> bytes:
    """The table of an index, from the description of each file; None for one that has none."""
    from safetensors.numpy import save

    told = [one["fields"] if one else {} for one in described]
    arrays: dict[str, np.ndarray] = {
        "files": np.frombuffer(signature((f.name, f.rows, f.bytes) for f in files).digest(), np.uint8),
        "head": np.array([one["head"] if one else -1 for one in described], np.int64),
    }
    for name in sorted({name for fields in told for name in fields}):
        arrays |= {f"{name}:{part}": array for part, array in _arrays([fields.get(name) or {} for fields in told]).items()}
    return save(arrays)


def _arrays(told: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    def flat(part: str) -> np.ndarray:
        return np.array([value for one in told for value in one.get(part, ())], np.int64)

    types = [one.get("type", "").encode().ljust(_TYPE, b"\0") for one in told]
    found: dict[str, np.ndarray] = {
        "way": np.array([one.get("way", ABSENT) for one in told], np.uint8),
        "type": np.frombuffer(b"".join(types), np.uint8).reshape(len(told), _TYPE),
        "dims": np.array([len(one.get("shape", ())) for one in told], np.uint8),
        "pieces": np.array([len(one.get("offset", ())) for one in told], np.int64),
        "fill": np.frombuffer(bytes.fromhex("".join(one.get("fill", "") for one in told)), np.uint8),
        **{part: flat(part) for part in ("shape", "chunk", "cell", "offset")},
    }
    kinds = {np.dtype(one["type"]).newbyteorder("=") for one in told if "values" in one}
    if all("values" in one for one in told) and len(kinds) == 1:
        found["values"] = np.frombuffer(bytes.fromhex("".join(one["values"] for one in told)), kinds.pop())
    return found


# ---- read


class Table:
    """What a table says of some datasets. Files go by their numbers in the index."""

    def __init__(self, arrays: Mapping[str, np.ndarray], files: Sequence[Entry], wanted: Collection[str] | None = None) -> None:
        """Raises ValueError for what cannot be."""
        own = signature((file.name, file.rows, file.bytes) for file in files).digest()
        _need(bytes(arrays["files"]) == own, "it is of other files than the index names, or of other rows or sizes")
        rows, sizes = (np.array(each, np.int64) for each in zip(*((file.rows, file.bytes) for file in files)))
        self.head, self._begins = arrays["head"], _starts(rows)
        _need(self.head.dtype == np.int64 and self.head.shape == rows.shape, "its sums are not those of so many files")
        self.fields, self.columns = dict[str, Places](), dict[str, np.ndarray]()
        for name in sorted({key.rpartition(":")[0] for key in arrays if ":" in key} if wanted is None else wanted):
            parts = {part: arrays[f"{name}:{part}"] for part in (*_PARTS, "values") if f"{name}:{part}" in arrays}
            if not parts:  # no file has it
                continue
            self.fields[name] = found = Places(name, parts, sizes)
            if "values" in parts:
                _need(found.fit(parts["values"], rows), f"the values of '{name}' are not those of its rows")
                self.columns[name] = parts["values"]

    def part(self, name: str, number: int) -> np.ndarray | None:
        """The values of one file of a field that is known whole."""
        column = self.columns.get(name)
        return None if column is None else column[self._begins[number] : self._begins[number + 1]]


class Places:
    """How one dataset lies in each file."""

    def __init__(self, name: str, parts: Mapping[str, np.ndarray], sizes: np.ndarray) -> None:
        self.name, count = name, len(sizes)
        for part, kind in _PARTS.items():
            found = parts.get(part)
            fits = found is not None and found.dtype == kind and found.ndim == 1 + (part == "type")
            _need(fits, f"'{name}:{part}' is no array of its kind")
        self.ways, dims, pieces, types = parts["way"], parts["dims"], parts["pieces"], parts["type"]
        self._shape, self._chunk, self._cell = parts["shape"], parts["chunk"], parts["cell"]
        self._offset, self._fill = parts["offset"], parts["fill"]
        per_file = len(self.ways) == len(dims) == len(pieces) == count and types.shape == (count, _TYPE)
        _need(per_file, f"'{name}' is not of so many files")
        there, chunked = self.ways != ABSENT, self.ways == CHUNKED
        _need(bool((self.ways <= PACKED).all() and ((dims > 0) == there).all() and (dims <= _DIMS).all()), self._wrong("dims"))
        self._kinds, self._kind = self._types(types, there)
        item = np.array([kind.itemsize for kind in self._kinds], np.int64)[self._kind]
        _need(bool((pieces >= 0).all() and (pieces <= len(self._offset)).all()), self._wrong("number of pieces"))
        plain = self.ways == PLAIN
        _need(bool((pieces[plain] == 1).all() and (pieces[~plain & ~chunked] == 0).all()), self._wrong("number of pieces"))
        self._dims, self._shapes, self._pieces = dims, _starts(dims), _starts(pieces)
        self._chunks, self._fills = _starts(np.where(chunked, dims, 0)), _starts(np.where(chunked, item, 0))
        ends = (self._shapes, self._chunks, self._pieces, self._pieces, self._fills)
        arrays = (self._shape, self._chunk, self._cell, self._offset, self._fill)
        _need(all(end[-1] == len(array) for end, array in zip(ends, arrays)), f"'{name}' has arrays of other lengths than it says")
        self._within(item, sizes, chunked)

    def _wrong(self, what: str) -> str:
        return f"the {what} of '{self.name}' cannot be"

    def _types(self, types: np.ndarray, there: np.ndarray) -> tuple[list[np.dtype], np.ndarray]:
        """The dtypes of all files, and which of them each has."""
        texts, which = np.unique(np.ascontiguousarray(types).view(f"S{_TYPE}").reshape(-1), return_inverse=True)
        used = np.bincount(which, there, len(texts)) > 0
        _need(all(_TYPES.fullmatch(text) for text, is_used in zip(texts.tolist(), used) if is_used), self._wrong("dtype"))
        return [np.dtype(text.decode() if is_used else "u1") for text, is_used in zip(texts.tolist(), used)], which

    def _within(self, item: np.ndarray, sizes: np.ndarray, chunked: np.ndarray) -> None:
        """All pieces lie in their files, and have their places in the grid. Lengths are multiplied as floats, which do not wrap."""
        shape, chunk = self._shape, self._chunk
        _need(bool(((shape >= 0) & (shape < _LENGTH)).all() and ((chunk >= 0) & (chunk < _LENGTH)).all()), self._wrong("shape"))
        cut = shape[np.repeat(chunked, self._dims)]
        _need(bool(((chunk > 0) | (cut == 0)).all()), self._wrong("shape of chunks"))
        grid = _products(-(-cut // np.maximum(chunk, 1)), self._chunks)
        unit = np.where(chunked, _products(chunk, self._chunks), _products(shape, self._shapes)) * item
        _need(bool((grid < 1 << 62).all()), self._wrong("shape of chunks"))
        many = np.diff(self._pieces)
        fits = (self._cell >= 0) & (self._cell < np.repeat(grid, many)) & (self._offset >= 0)
        fits &= self._offset + np.repeat(unit, many) <= np.repeat(sizes, many)
        _need(bool(fits.all()), f"values of '{self.name}' lie beyond the end of a file")

    def fit(self, values: np.ndarray, rows: np.ndarray) -> bool:
        """Whether ``values`` can be those of all rows: a number of each."""
        kinds = {kind.newbyteorder("=") for kind in self._kinds}
        alone = bool((self._dims == 1).all()) and np.array_equal(self._shape, rows)
        return alone and values.shape == (rows.sum(),) and kinds == {values.dtype} and values.dtype.kind in "biuf"

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self._shape[self._shapes[number] : self._shapes[number + 1]].tolist())

    def dtype(self, number: int) -> np.dtype:
        return self._kinds[self._kind[number]]

    def layout(self, number: int, path: Path) -> Layout:
        """Where the dataset lies in a file that has it; of one that is packed no more than its shape."""
        about, way = (path, self.name, self.shape(number), self.dtype(number)), self.ways[number]
        pieces = slice(self._pieces[number], self._pieces[number + 1])
        if way != CHUNKED:
            return Layout(*about, int(self._offset[pieces][0]) if way == PLAIN else None)
        chunk = tuple(self._chunk[self._chunks[number] : self._chunks[number + 1]].tolist())
        grid = _grid(about[2], chunk)
        cells = zip(*(cell.tolist() for cell in np.unravel_index(self._cell[pieces], grid))) if 0 not in grid else ()
        offsets = dict(zip(cells, self._offset[pieces].tolist()))
        fill = np.frombuffer(self._fill[self._fills[number] : self._fills[number + 1]].tobytes(), about[3])
        return Layout(*about, None, chunk, offsets, fill[0])

    def misfit(self, dtype: np.dtype, row: Sequence[int | str | None]) -> int | None:
        """The first file that has it with another dtype, or rows of another shape; None in ``row`` allows any length."""
        other = np.array([kind.newbyteorder("=") != dtype for kind in self._kinds])[self._kind] | (self._dims != len(row) + 1)
        here = np.flatnonzero(~other)
        for dim, length in enumerate(row, 1):
            if length is not None:
                other[here] |= self._shape[self._shapes[here] + dim] != length
        wrong = np.flatnonzero(other & (self.ways != ABSENT))
        return int(wrong[0]) if len(wrong) else None

    def miscounted(self, rows: np.ndarray) -> int | None:
        """The first file in which it has another number of rows."""
        there = np.flatnonzero(self.ways != ABSENT)
        wrong = there[self._shape[self._shapes[there]] != rows[there]]
        return int(wrong[0]) if len(wrong) else None


def read_table(folder: Path, told: TableEntry, files: Sequence[Entry], wanted: Collection[str] | None = None) -> Table:
    """What the table of an index says of the datasets ``wanted``, or of all. Raises DataError where it is not there, damaged, or
    that of other files."""
    path = folder / told.name
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size == told.bytes else b""
        _need(size == told.bytes, f"it has {size:,} bytes, the index says {told.bytes:,}")
        _need(hashlib.sha256(raw).hexdigest() == told.sha256, "its SHA-256 is not that of the index")
        from safetensors.numpy import load

        return Table(load(raw), files, wanted)
    except OSError as problem:
        why = str(problem.strerror)
    except Exception as problem:  # whatever safetensors and numpy make of what is not there
        why = str(problem) if type(problem) is ValueError else f"{type(problem).__name__}: {problem}"
    raise DataError(f"{path}: no table of the files beside it ({why[:300]}); write it with: hpcai data check {folder} --index")


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _products(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The product of each stretch of ``values``; 1 of an empty one."""
    found, some = np.ones(len(starts) - 1), starts[1:] > starts[:-1]
    if some.any():
        with np.errstate(over="ignore", invalid="ignore"):
            found[some] = np.multiply.reduceat(values.astype(np.float64), starts[:-1][some])
    return found
