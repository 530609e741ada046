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

ABSENT, CONTIGUOUS, CHUNKED, HDF5_ONLY = range(4)
HEAD_BYTES = 4096
"""Bytes of a file that are compared before it is read: with another layout they are others."""
_DTYPE_BYTES, _DTYPE_PATTERN = 12, re.compile(rb"[<>|][biufcS][1-9][0-9]{0,8}")
_MAX_DIMS, _MAX_LENGTH = 32, 1 << 48
_ARRAY_DTYPES = {"way": np.uint8, "type": np.uint8, "dims": np.uint8, "shape": np.int64, "chunk": np.int64, "pieces": np.int64,
          "cell": np.int64, "offset": np.int64, "fill": np.uint8}  # fmt: skip


def signature(files: Iterable[tuple[str, int, int]]) -> "hashlib._Hash":
    """The SHA-256 of the names, rows and sizes of files."""
    return hashlib.sha256("\n".join(f"{name} {rows} {size}" for name, rows, size in files).encode())


def head_checksum(start: bytes | np.ndarray) -> int:
    """What the table has of the first bytes of a file."""
    return zlib.crc32(bytes(start[:HEAD_BYTES]))


# ---- written


def describe(path: Path, rows: int) -> dict[str, Any]:
    """What the table is to say of a file, fit for JSON. Datasets whose values lie elsewhere, or are no numbers, are left out.
    Raises DataError for a file that is missing or damaged."""
    try:
        return _describe_file(path, rows)
    except HpcaiError:
        raise
    except Exception as problem:  # a damaged file ends in any of a dozen exceptions of h5py
        raise DataError(f"{path}: cannot be read as HDF5 ({type(problem).__name__}: {problem}); make or copy it again") from problem


def _describe_file(path: Path, rows: int) -> dict[str, Any]:
    names: list[str] = []

    def add_dataset(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)

    with path.open("rb") as stream:
        head = head_checksum(stream.read(HEAD_BYTES))
    with h5py.File(path, "r") as file:
        file.visititems(add_dataset)
        fields = {name: _describe_dataset(file, name, rows) for name in names}
    return {"bytes": path.stat().st_size, "head": head, "fields": {name: field for name, field in fields.items() if field}}


def _describe_dataset(file: h5py.File, name: str, rows: int) -> dict[str, Any] | None:
    data = file[name]
    if not data.shape or data.external or data.is_virtual or not _DTYPE_PATTERN.fullmatch(data.dtype.str.encode()):
        return None
    description: dict[str, Any] = {"way": HDF5_ONLY, "type": data.dtype.str, "shape": list(data.shape)}
    if len(data.shape) == 1 and data.shape[0] == rows and data.dtype.kind in "biuf" and data.dtype.itemsize <= 8:
        description["values"] = data[...].astype(data.dtype.newbyteorder("=")).tobytes().hex()
    try:
        dataset_layout = layout.hdf5_layout(file, name)
    except UnreadableLayoutError:
        return description
    if dataset_layout.offset is not None:
        return description | {"way": CONTIGUOUS, "cell": [0], "offset": [dataset_layout.offset]}
    grid = _grid_shape(dataset_layout.shape, dataset_layout.chunk)
    cells = [int(np.ravel_multi_index(cell, grid)) for cell in dataset_layout.offsets]
    fill = np.asarray(dataset_layout.fill, dataset_layout.dtype).tobytes().hex()
    chunks = {"cell": cells, "offset": list(dataset_layout.offsets.values())}
    return description | {"way": CHUNKED, "chunk": list(dataset_layout.chunk), "fill": fill, **chunks}


def _grid_shape(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // max(c, 1)) for n, c in zip(shape, chunk))


def build_table(files: Sequence[Entry], descriptions: Sequence[Mapping[str, Any] | None]) -> bytes:
    """The table of an index, from the description of each file; None for one that has none."""
    from safetensors.numpy import save

    told = [one["fields"] if one else {} for one in descriptions]
    arrays: dict[str, np.ndarray] = {
        "files": np.frombuffer(signature((f.name, f.rows, f.bytes) for f in files).digest(), np.uint8),
        "head": np.array([one["head"] if one else -1 for one in descriptions], np.int64),
    }
    for name in sorted({name for fields in told for name in fields}):
        arrays |= {f"{name}:{part}": array for part, array in _build_arrays([fields.get(name) or {} for fields in told]).items()}
    return save(arrays)


def _build_arrays(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    def concatenate(part: str) -> np.ndarray:
        return np.array([value for one in descriptions for value in one.get(part, ())], np.int64)

    dtypes = [one.get("type", "").encode().ljust(_DTYPE_BYTES, b"\0") for one in descriptions]
    arrays: dict[str, np.ndarray] = {
        "way": np.array([one.get("way", ABSENT) for one in descriptions], np.uint8),
        "type": np.frombuffer(b"".join(dtypes), np.uint8).reshape(len(descriptions), _DTYPE_BYTES),
        "dims": np.array([len(one.get("shape", ())) for one in descriptions], np.uint8),
        "pieces": np.array([len(one.get("offset", ())) for one in descriptions], np.int64),
        "fill": np.frombuffer(bytes.fromhex("".join(one.get("fill", "") for one in descriptions)), np.uint8),
        **{part: concatenate(part) for part in ("shape", "chunk", "cell", "offset")},
    }
    kinds = {np.dtype(one["type"]).newbyteorder("=") for one in descriptions if "values" in one}
    if all("values" in one for one in descriptions) and len(kinds) == 1:
        arrays["values"] = np.frombuffer(bytes.fromhex("".join(one["values"] for one in descriptions)), kinds.pop())
    return arrays


# ---- read


class Table:
    """What a table says of some datasets. Files go by their numbers in the index."""

    def __init__(self, arrays: Mapping[str, np.ndarray], files: Sequence[Entry], datasets: Collection[str] | None = None) -> None:
        """Raises ValueError for what cannot be."""
        expected = signature((file.name, file.rows, file.bytes) for file in files).digest()
        _require(bytes(arrays["files"]) == expected, "it is of other files than the index names, or of other rows or sizes")
        rows, sizes = (np.array(each, np.int64) for each in zip(*((file.rows, file.bytes) for file in files)))
        self.head, self._row_offsets = arrays["head"], _offsets(rows)
        _require(self.head.dtype == np.int64 and self.head.shape == rows.shape, "its sums are not those of so many files")
        self.fields, self.columns = dict[str, DatasetLayouts](), dict[str, np.ndarray]()
        for name in sorted({key.rpartition(":")[0] for key in arrays if ":" in key} if datasets is None else datasets):
            parts = {part: arrays[f"{name}:{part}"] for part in (*_ARRAY_DTYPES, "values") if f"{name}:{part}" in arrays}
            if not parts:  # no file has it
                continue
            self.fields[name] = layouts = DatasetLayouts(name, parts, sizes)
            if "values" in parts:
                _require(layouts.values_fit(parts["values"], rows), f"the values of '{name}' are not those of its rows")
                self.columns[name] = parts["values"]

    def file_values(self, name: str, number: int) -> np.ndarray | None:
        """The values of one file of a field that is known whole."""
        column = self.columns.get(name)
        return None if column is None else column[self._row_offsets[number] : self._row_offsets[number + 1]]


class DatasetLayouts:
    """How one dataset lies in each file."""

    def __init__(self, name: str, parts: Mapping[str, np.ndarray], sizes: np.ndarray) -> None:
        self.name, count = name, len(sizes)
        for part, kind in _ARRAY_DTYPES.items():
            found = parts.get(part)
            fits = found is not None and found.dtype == kind and found.ndim == 1 + (part == "type")
            _require(fits, f"'{name}:{part}' is no array of its kind")
        self.storage, dims, pieces, dtypes = parts["way"], parts["dims"], parts["pieces"], parts["type"]
        self._shape_values, self._chunk_values, self._cells = parts["shape"], parts["chunk"], parts["cell"]
        self._byte_offsets, self._fill_bytes = parts["offset"], parts["fill"]
        has_all_files = len(self.storage) == len(dims) == len(pieces) == count and dtypes.shape == (count, _DTYPE_BYTES)
        _require(has_all_files, f"'{name}' is not of so many files")
        present, chunked = self.storage != ABSENT, self.storage == CHUNKED
        _require(bool((self.storage <= HDF5_ONLY).all() and ((dims > 0) == present).all() and (dims <= _MAX_DIMS).all()), self._invalid("dims"))
        self._dtypes, self._dtype_index = self._parse_dtypes(dtypes, present)
        item = np.array([kind.itemsize for kind in self._dtypes], np.int64)[self._dtype_index]
        _require(bool((pieces >= 0).all() and (pieces <= len(self._byte_offsets)).all()), self._invalid("number of pieces"))
        contiguous = self.storage == CONTIGUOUS
        _require(bool((pieces[contiguous] == 1).all() and (pieces[~contiguous & ~chunked] == 0).all()), self._invalid("number of pieces"))
        self._dims, self._shape_offsets, self._piece_offsets = dims, _offsets(dims), _offsets(pieces)
        self._chunk_offsets, self._fill_offsets = _offsets(np.where(chunked, dims, 0)), _offsets(np.where(chunked, item, 0))
        ends = (self._shape_offsets, self._chunk_offsets, self._piece_offsets, self._piece_offsets, self._fill_offsets)
        arrays = (self._shape_values, self._chunk_values, self._cells, self._byte_offsets, self._fill_bytes)
        _require(all(end[-1] == len(array) for end, array in zip(ends, arrays)), f"'{name}' has arrays of other lengths than it says")
        self._validate_offsets(item, sizes, chunked)

    def _invalid(self, array_name: str) -> str:
        return f"the {array_name} of '{self.name}' cannot be"

    def _parse_dtypes(self, dtypes: np.ndarray, present: np.ndarray) -> tuple[list[np.dtype], np.ndarray]:
        """The dtypes of all files, and which of them each has."""
        texts, index = np.unique(np.ascontiguousarray(dtypes).view(f"S{_DTYPE_BYTES}").reshape(-1), return_inverse=True)
        used = np.bincount(index, present, len(texts)) > 0
        _require(all(_DTYPE_PATTERN.fullmatch(text) for text, is_used in zip(texts.tolist(), used) if is_used), self._invalid("dtype"))
        return [np.dtype(text.decode() if is_used else "u1") for text, is_used in zip(texts.tolist(), used)], index

    def _validate_offsets(self, item: np.ndarray, sizes: np.ndarray, chunked: np.ndarray) -> None:
        """All pieces lie in their files, and have their places in the grid. Lengths are multiplied as floats, which do not wrap."""
        shape, chunk = self._shape_values, self._chunk_values
        _require(bool(((shape >= 0) & (shape < _MAX_LENGTH)).all() and ((chunk >= 0) & (chunk < _MAX_LENGTH)).all()), self._invalid("shape"))
        chunked_shape = shape[np.repeat(chunked, self._dims)]
        _require(bool(((chunk > 0) | (chunked_shape == 0)).all()), self._invalid("shape of chunks"))
        grid = _segment_products(-(-chunked_shape // np.maximum(chunk, 1)), self._chunk_offsets)
        piece_bytes = np.where(chunked, _segment_products(chunk, self._chunk_offsets), _segment_products(shape, self._shape_offsets)) * item
        _require(bool((grid < 1 << 62).all()), self._invalid("shape of chunks"))
        counts = np.diff(self._piece_offsets)
        fits = (self._cells >= 0) & (self._cells < np.repeat(grid, counts)) & (self._byte_offsets >= 0)
        fits &= self._byte_offsets + np.repeat(piece_bytes, counts) <= np.repeat(sizes, counts)
        _require(bool(fits.all()), f"values of '{self.name}' lie beyond the end of a file")

    def values_fit(self, values: np.ndarray, rows: np.ndarray) -> bool:
        """Whether ``values`` can be those of all rows: a number of each."""
        dtypes = {kind.newbyteorder("=") for kind in self._dtypes}
        is_scalar = bool((self._dims == 1).all()) and np.array_equal(self._shape_values, rows)
        return is_scalar and values.shape == (rows.sum(),) and dtypes == {values.dtype} and values.dtype.kind in "biuf"

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self._shape_values[self._shape_offsets[number] : self._shape_offsets[number + 1]].tolist())

    def dtype(self, number: int) -> np.dtype:
        return self._dtypes[self._dtype_index[number]]

    def layout(self, number: int, path: Path) -> Layout:
        """Where the dataset lies in a file that has it; of one that is packed no more than its shape."""
        args, storage = (path, self.name, self.shape(number), self.dtype(number)), self.storage[number]
        pieces = slice(self._piece_offsets[number], self._piece_offsets[number + 1])
        if storage != CHUNKED:
            return Layout(*args, int(self._byte_offsets[pieces][0]) if storage == CONTIGUOUS else None)
        chunk = tuple(self._chunk_values[self._chunk_offsets[number] : self._chunk_offsets[number + 1]].tolist())
        grid = _grid_shape(args[2], chunk)
        cells = zip(*(cell.tolist() for cell in np.unravel_index(self._cells[pieces], grid))) if 0 not in grid else ()
        offsets = dict(zip(cells, self._byte_offsets[pieces].tolist()))
        fill = np.frombuffer(self._fill_bytes[self._fill_offsets[number] : self._fill_offsets[number + 1]].tobytes(), args[3])
        return Layout(*args, None, chunk, offsets, fill[0])

    def first_mismatch(self, dtype: np.dtype, row: Sequence[int | str | None]) -> int | None:
        """The first file that has it with another dtype, or rows of another shape; None in ``row`` allows any length."""
        differs = np.array([kind.newbyteorder("=") != dtype for kind in self._dtypes])[self._dtype_index] | (self._dims != len(row) + 1)
        same_dims = np.flatnonzero(~differs)
        for dim, length in enumerate(row, 1):
            if length is not None:
                differs[same_dims] |= self._shape_values[self._shape_offsets[same_dims] + dim] != length
        wrong = np.flatnonzero(differs & (self.storage != ABSENT))
        return int(wrong[0]) if len(wrong) else None

    def first_row_mismatch(self, rows: np.ndarray) -> int | None:
        """The first file in which it has another number of rows."""
        present = np.flatnonzero(self.storage != ABSENT)
        wrong = present[self._shape_values[self._shape_offsets[present]] != rows[present]]
        return int(wrong[0]) if len(wrong) else None


def read_table(folder: Path, entry: TableEntry, files: Sequence[Entry], datasets: Collection[str] | None = None) -> Table:
    """What the table of an index says of the datasets ``wanted``, or of all. Raises DataError where it is not there, damaged, or
    that of other files."""
    path = folder / entry.name
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size == entry.bytes else b""
        _require(size == entry.bytes, f"it has {size:,} bytes, the index says {entry.bytes:,}")
        _require(hashlib.sha256(raw).hexdigest() == entry.sha256, "its SHA-256 is not that of the index")
        from safetensors.numpy import load

        return Table(load(raw), files, datasets)
    except OSError as problem:
        reason = str(problem.strerror)
    except Exception as problem:  # whatever safetensors and numpy make of what is not there
        reason = str(problem) if type(problem) is ValueError else f"{type(problem).__name__}: {problem}"
    raise DataError(f"{path}: no table of the files beside it ({reason[:300]}); write it with: hpcai data check {folder} --index")


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _segment_products(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The product of each stretch of ``values``; 1 of an empty one."""
    products, nonempty = np.ones(len(starts) - 1), starts[1:] > starts[:-1]
    if nonempty.any():
        with np.errstate(over="ignore", invalid="ignore"):
            products[nonempty] = np.multiply.reduceat(values.astype(np.float64), starts[:-1][nonempty])
    return products
