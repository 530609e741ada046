"""The table of a folder: the layouts of all its HDF5 files, in one file beside the index. With it, a file is opened only when one
of its samples is read, and scalar fields, which orders and costs depend on, need no file at all.

index-<8 digits of its SHA-256>.safetensors, named by "table" of index.json:

    files           uint8 [32]          SHA-256 of the names, rows and sizes of the files, in the order of the index
    head            int64 [F]           CRC-32 of the first 4 KiB of each file; -1 if it could not be described
    NAME:way        uint8 [F]           storage of a dataset: ABSENT, CONTIGUOUS, CHUNKED, or HDF5_ONLY (compressed, for example)
    NAME:type       uint8 [F, 12]       dtype, as numpy's ``dtype.str``
    NAME:dims       uint8 [F]           number of dims
    NAME:shape      int64 [sum]         sizes of dims, file by file
    NAME:chunk      int64 [sum]         shapes of chunks, of chunked files
    NAME:pieces     int64 [F]           1 if contiguous, otherwise the number of chunks that were written
    NAME:cell       int64 [sum]         row-major indices of the chunks in the grid, file by file
    NAME:offset     int64 [sum]         offsets of the pieces, in bytes
    NAME:fill       uint8 [sum]         fill value as bytes of the dtype, of chunked files
    NAME:values     [N]                 all rows, if a row is a scalar of at most 8 bytes and all files have the dataset

F files, N rows in total
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
from hpcai.data.layout import Layout, UnreadableLayoutError, parse_errors
from hpcai.errors import DataError

ABSENT, CONTIGUOUS, CHUNKED, HDF5_ONLY = range(4)
HEAD_BYTES = 4096
"""Bytes at the start of a file that are compared before it is read: they change with the layout."""
_DTYPE_BYTES, _DTYPE = 12, re.compile(rb"[<>|][biufcS][1-9][0-9]{0,8}")
_MAX_DIMS, _LIMIT = 32, 1 << 48
_ARRAY_DTYPES = {"way": np.uint8, "type": np.uint8, "dims": np.uint8, "shape": np.int64, "chunk": np.int64, "pieces": np.int64,
          "cell": np.int64, "offset": np.int64, "fill": np.uint8}  # fmt: skip


def signature(files: Iterable[tuple[str, int, int]]) -> "hashlib._Hash":
    """Return the SHA-256 of the names, rows and sizes of files."""
    return hashlib.sha256("\n".join(f"{name} {rows} {size}" for name, rows, size in files).encode())


def head_checksum(start: bytes | np.ndarray) -> int:
    return zlib.crc32(bytes(start[:HEAD_BYTES]))


def describe(path: Path, rows: int) -> dict[str, Any]:
    """Return the table entries of a file, as JSON values, without external, virtual and non-numeric datasets. Raises DataError for
    a file that is missing or damaged."""
    names: list[str] = []
    with parse_errors(path, "make or copy it again"):
        with path.open("rb") as stream:
            head = head_checksum(stream.read(HEAD_BYTES))
        with h5py.File(path, "r") as file:
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            fields = {name: _describe_dataset(file, name, rows) for name in names}
        return {"bytes": path.stat().st_size, "head": head, "fields": {name: field for name, field in fields.items() if field}}


def _describe_dataset(file: h5py.File, name: str, rows: int) -> dict[str, Any] | None:
    data = file[name]
    if not data.shape or data.external or data.is_virtual or not _DTYPE.fullmatch(data.dtype.str.encode()):
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
    grid = tuple(-(-n // max(c, 1)) for n, c in zip(dataset_layout.shape, dataset_layout.chunk))
    cells = [int(np.ravel_multi_index(cell, grid)) for cell in dataset_layout.offsets]
    fill = np.asarray(dataset_layout.fill, dataset_layout.dtype).tobytes().hex()
    chunks = {"cell": cells, "offset": list(dataset_layout.offsets.values())}
    return description | {"way": CHUNKED, "chunk": list(dataset_layout.chunk), "fill": fill, **chunks}


def build_table(files: Sequence[Entry], descriptions: Sequence[Mapping[str, Any] | None]) -> bytes:
    """Return the bytes of the table, from the description of each file, or None for files without."""
    from safetensors.numpy import save

    datasets = [d["fields"] if d else {} for d in descriptions]
    arrays: dict[str, np.ndarray] = {
        "files": np.frombuffer(signature((f.name, f.rows, f.bytes) for f in files).digest(), np.uint8),
        "head": np.array([d["head"] if d else -1 for d in descriptions], np.int64),
    }
    for name in sorted({name for fields in datasets for name in fields}):
        arrays |= {f"{name}:{part}": array for part, array in _build_arrays([f.get(name) or {} for f in datasets]).items()}
    return save(arrays)


def _build_arrays(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    def concatenate(part: str) -> np.ndarray:
        return np.array([value for d in descriptions for value in d.get(part, ())], np.int64)

    dtypes = [d.get("type", "").encode().ljust(_DTYPE_BYTES, b"\0") for d in descriptions]
    arrays: dict[str, np.ndarray] = {
        "way": np.array([d.get("way", ABSENT) for d in descriptions], np.uint8),
        "type": np.frombuffer(b"".join(dtypes), np.uint8).reshape(len(descriptions), _DTYPE_BYTES),
        "dims": np.array([len(d.get("shape", ())) for d in descriptions], np.uint8),
        "pieces": np.array([len(d.get("offset", ())) for d in descriptions], np.int64),
        "fill": np.frombuffer(bytes.fromhex("".join(d.get("fill", "") for d in descriptions)), np.uint8),
        **{part: concatenate(part) for part in ("shape", "chunk", "cell", "offset")},
    }
    kinds = {np.dtype(d["type"]).newbyteorder("=") for d in descriptions if "values" in d}
    if all("values" in d for d in descriptions) and len(kinds) == 1:
        arrays["values"] = np.frombuffer(bytes.fromhex("".join(d["values"] for d in descriptions)), kinds.pop())
    return arrays


class Table:
    """The table of some datasets. Files have the numbers of the index."""

    def __init__(self, arrays: Mapping[str, np.ndarray], files: Sequence[Entry], datasets: Collection[str] | None = None) -> None:
        """Raises ValueError for invalid arrays."""
        expected = signature((file.name, file.rows, file.bytes) for file in files).digest()
        _check(bytes(arrays["files"]) == expected, "it is of other files than the index names, or of other rows or sizes")
        rows, sizes = (np.array(each, np.int64) for each in zip(*((file.rows, file.bytes) for file in files)))
        self.head, self._row_offsets = arrays["head"], _offsets(rows)
        _check(self.head.dtype == np.int64 and self.head.shape == rows.shape, "its sums are not those of so many files")
        self.fields, self.columns = dict[str, DatasetLayouts](), dict[str, np.ndarray]()
        for name in sorted({key.rpartition(":")[0] for key in arrays if ":" in key} if datasets is None else datasets):
            parts = {part: arrays[f"{name}:{part}"] for part in (*_ARRAY_DTYPES, "values") if f"{name}:{part}" in arrays}
            if not parts:  # in no file
                continue
            self.fields[name] = layouts = DatasetLayouts(name, parts, sizes)
            if "values" in parts:
                _check(layouts.values_fit(parts["values"], rows), f"the values of '{name}' are not those of its rows")
                self.columns[name] = parts["values"]

    def file_values(self, name: str, number: int) -> np.ndarray | None:
        """Return the values of one file, if the table has those of the dataset."""
        column = self.columns.get(name)
        return None if column is None else column[self._row_offsets[number] : self._row_offsets[number + 1]]


class DatasetLayouts:
    """The layouts of one dataset in all files."""

    def __init__(self, name: str, parts: Mapping[str, np.ndarray], sizes: np.ndarray) -> None:
        self.name, count = name, len(sizes)
        for part, kind in _ARRAY_DTYPES.items():
            values = parts.get(part)
            fits = values is not None and values.dtype == kind and values.ndim == 1 + (part == "type")
            _check(fits, f"'{name}:{part}' is no array of its kind")
        self.storage, dims, pieces, dtypes = parts["way"], parts["dims"], parts["pieces"], parts["type"]
        self._shape_values, self._chunk_values, self._cells = parts["shape"], parts["chunk"], parts["cell"]
        self._byte_offsets, self._fill_bytes = parts["offset"], parts["fill"]
        has_all_files = len(self.storage) == len(dims) == len(pieces) == count and dtypes.shape == (count, _DTYPE_BYTES)
        _check(has_all_files, f"'{name}' is not of so many files")
        present, chunked = self.storage != ABSENT, self.storage == CHUNKED
        dims_fit = (self.storage <= HDF5_ONLY) & ((dims > 0) == present) & (dims <= _MAX_DIMS)
        _check(bool(dims_fit.all()), self._invalid("dims"))
        texts, self._dtype_of = np.unique(np.ascontiguousarray(dtypes).view(f"S{_DTYPE_BYTES}").reshape(-1), return_inverse=True)
        used = np.bincount(self._dtype_of, present, len(texts)) > 0
        _check(all(_DTYPE.fullmatch(text) for text, is_used in zip(texts.tolist(), used) if is_used), self._invalid("dtype"))
        self._dtypes = [np.dtype(text.decode() if is_used else "u1") for text, is_used in zip(texts.tolist(), used)]
        item = np.array([kind.itemsize for kind in self._dtypes], np.int64)[self._dtype_of]
        _check(bool((pieces >= 0).all() and (pieces <= len(self._byte_offsets)).all()), self._invalid("piece counts"))
        contiguous = self.storage == CONTIGUOUS
        _check(bool((pieces[contiguous] == 1).all() and (pieces[~contiguous & ~chunked] == 0).all()), self._invalid("piece counts"))
        self._dims, self._shape_offsets, self._piece_offsets = dims, _offsets(dims), _offsets(pieces)
        self._chunk_offsets, self._fill_offsets = _offsets(np.where(chunked, dims, 0)), _offsets(np.where(chunked, item, 0))
        ends = (self._shape_offsets, self._chunk_offsets, self._piece_offsets, self._piece_offsets, self._fill_offsets)
        arrays = (self._shape_values, self._chunk_values, self._cells, self._byte_offsets, self._fill_bytes)
        _check(all(end[-1] == len(array) for end, array in zip(ends, arrays)), f"'{name}' has arrays of other lengths than it says")
        # All pieces are within files and grids. Lengths are multiplied as floats, which do not overflow.
        shape, chunk = self._shape_values, self._chunk_values
        _check(bool(((shape >= 0) & (shape < _LIMIT)).all() and ((chunk >= 0) & (chunk < _LIMIT)).all()), self._invalid("shape"))
        chunked_shape = shape[np.repeat(chunked, dims)]
        _check(bool(((chunk > 0) | (chunked_shape == 0)).all()), self._invalid("shape of chunks"))
        grid = _products(-(-chunked_shape // np.maximum(chunk, 1)), self._chunk_offsets)
        piece_bytes = np.where(chunked, _products(chunk, self._chunk_offsets), _products(shape, self._shape_offsets)) * item
        _check(bool((grid < 1 << 62).all()), self._invalid("shape of chunks"))
        inside = (self._cells >= 0) & (self._cells < np.repeat(grid, pieces)) & (self._byte_offsets >= 0)
        inside &= self._byte_offsets + np.repeat(piece_bytes, pieces) <= np.repeat(sizes, pieces)
        _check(bool(inside.all()), f"values of '{name}' are beyond the end of a file")

    def _invalid(self, array_name: str) -> str:
        return f"'{self.name}' has invalid {array_name}"

    def values_fit(self, values: np.ndarray, rows: np.ndarray) -> bool:
        """Whether ``values`` can be those of all rows: a scalar of each."""
        dtypes = {kind.newbyteorder("=") for kind in self._dtypes}
        is_scalar = bool((self._dims == 1).all()) and np.array_equal(self._shape_values, rows)
        return is_scalar and values.shape == (rows.sum(),) and dtypes == {values.dtype} and values.dtype.kind in "biuf"

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self._shape_values[self._shape_offsets[number] : self._shape_offsets[number + 1]].tolist())

    def dtype(self, number: int) -> np.dtype:
        return self._dtypes[self._dtype_of[number]]

    def layout(self, number: int, path: Path) -> Layout:
        """Return the layout of the dataset in a file that has it; if it is HDF5_ONLY, only shape and dtype."""
        args, storage = (path, self.name, self.shape(number), self.dtype(number)), self.storage[number]
        pieces = slice(self._piece_offsets[number], self._piece_offsets[number + 1])
        if storage != CHUNKED:
            return Layout(*args, int(self._byte_offsets[pieces][0]) if storage == CONTIGUOUS else None)
        chunk = tuple(self._chunk_values[self._chunk_offsets[number] : self._chunk_offsets[number + 1]].tolist())
        grid = tuple(-(-n // max(c, 1)) for n, c in zip(args[2], chunk))
        cells = zip(*(cell.tolist() for cell in np.unravel_index(self._cells[pieces], grid))) if 0 not in grid else ()
        offsets = dict(zip(cells, self._byte_offsets[pieces].tolist()))
        fill = np.frombuffer(self._fill_bytes[self._fill_offsets[number] : self._fill_offsets[number + 1]].tobytes(), args[3])
        return Layout(*args, None, chunk, offsets, fill[0])

    def first_mismatch(self, dtype: np.dtype, row: Sequence[int | str | None]) -> int | None:
        """Return the first file where dtype or shape of a row differ, or None. None in ``row`` allows any length."""
        differ = np.array([kind.newbyteorder("=") != dtype for kind in self._dtypes])[self._dtype_of] | (self._dims != len(row) + 1)
        same_dims = np.flatnonzero(~differ)
        for dim, length in enumerate(row, 1):
            if length is not None:
                differ[same_dims] |= self._shape_values[self._shape_offsets[same_dims] + dim] != length
        wrong = np.flatnonzero(differ & (self.storage != ABSENT))
        return int(wrong[0]) if len(wrong) else None

    def first_row_mismatch(self, rows: np.ndarray) -> int | None:
        """Return the first file with another number of rows, or None."""
        present = np.flatnonzero(self.storage != ABSENT)
        wrong = present[self._shape_values[self._shape_offsets[present]] != rows[present]]
        return int(wrong[0]) if len(wrong) else None


def read_table(folder: Path, entry: TableEntry, files: Sequence[Entry], datasets: Collection[str] | None = None) -> Table:
    """Return the table of ``datasets``, or of all. Raises DataError if it is missing, damaged, or that of other files."""
    path = folder / entry.name
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size == entry.bytes else b""
        _check(size == entry.bytes, f"it has {size:,} bytes, the index has {entry.bytes:,}")
        _check(hashlib.sha256(raw).hexdigest() == entry.sha256, "its SHA-256 is not that of the index")
        from safetensors.numpy import load

        return Table(load(raw), files, datasets)
    except OSError as problem:
        reason = str(problem.strerror)
    except Exception as problem:  # safetensors and numpy raise various exceptions for damaged files
        reason = str(problem) if type(problem) is ValueError else f"{type(problem).__name__}: {problem}"
    raise DataError(f"{path}: no table of the files beside it ({reason[:300]}); write it with: hpcai data check {folder} --index")


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _products(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the product of each segment of ``values``, 1 if it is empty."""
    products, nonempty = np.ones(len(starts) - 1), starts[1:] > starts[:-1]
    if nonempty.any():
        with np.errstate(over="ignore", invalid="ignore"):
            products[nonempty] = np.multiply.reduceat(values.astype(np.float64), starts[:-1][nonempty])
    return products
