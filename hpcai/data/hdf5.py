"""The rows of HDF5 files as one indexable dataset.   N rows of a file"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch

from hpcai.data.catalog import Catalog, read_catalog
from hpcai.data.direct import ALIGN, Reader
from hpcai.data.file_cache import FileCache, check_file_limit
from hpcai.data.hdf5_source import check_filters, missing_values
from hpcai.data.index import INDEX
from hpcai.data.layout import Layout, UnreadableLayoutError, is_finite, parse_errors
from hpcai.data.layout import hdf5_layout as layout_of
from hpcai.data.readers import open_reader
from hpcai.data.table import ABSENT, HDF5_ONLY, HEAD_BYTES, DatasetLayouts, Table, head_checksum
from hpcai.dist.collectives import broadcast_from_first
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError

if TYPE_CHECKING:
    from hpcai.data.gds import GdsReader

Selection = Mapping[str, Sequence[slice]]
Fields = Mapping[str, tuple[str, tuple[int | str | None, ...]]]

_ALONE = Axis("alone")
_MAX_OPEN = 64  # files that h5py keeps open: opening takes milliseconds on a parallel file system


@dataclass(frozen=True)
class _FileInfo:
    """The layout of each field of a file, and the values of small fields."""

    layouts: Mapping[str, Layout]
    small: Mapping[str, np.ndarray]
    ends: Mapping[str, np.ndarray]  # end of each row in a flat dataset, by the name of its counts


class Rows:
    """All rows of the ``*.h5`` files of a folder, sorted by file name.

    Numbers of rows and sizes of files come from ``index.json``, and layouts from its table; without them h5py opens each file once.
    The first rank of ``axis`` lists the folder and reads both for all ranks, which construct their rows together. A file is opened
    when a sample of it is read, and then compared with the index.

    Args:
        fields: dtype and shape of a row for each dataset. None in a shape allows any length. A name as the first length is that of
            a dataset with the length of each row, for ragged rows that are concatenated in a flat dataset.
        reader: A reader, or its kind (see ``open_reader``). With ``hdf5``, h5py reads (also compressed files, one read at a time),
            ``memory`` caches each row, and ``gds`` returns large fields as tensors on ``device``.
        local: Complete copies of files on local disks (see hpcai.data.stage).

    Raises DataError, with the file, for an empty folder, a missing, truncated or damaged file, and a dataset of another shape or
    dtype, and UnreadableLayoutError for a dataset that cannot be read directly.
    """

    def __init__(
        self, folder: str | Path, fields: Fields, remedy: str = "", *,
        reader: str | Reader = "auto", device: torch.device | None = None, local: Mapping[Path, Path] | None = None,
        axis: Axis = _ALONE,
    ) -> None:  # fmt: skip
        self.folder, self.fields, self.remedy = Path(folder), dict(fields), f"; {remedy}" if remedy else ""
        self._ragged = {name: shape[0] for name, (_, shape) in self.fields.items() if shape and isinstance(shape[0], str)}
        self.reader_kind = reader if isinstance(reader, str) else "direct"
        self.local = dict(local or {})
        self.axis = axis
        self._reset()
        self._set_catalog(broadcast_from_first(self._scan, axis))
        self.reader = reader if isinstance(reader, Reader) else open_reader(reader, self.bytes, str(self.folder), device)
        self.gds: GdsReader | None = None
        if self.reader_kind == "gds":
            from hpcai.data import gds

            self.gds = gds.GdsReader(device or torch.device("cuda"))

    def _reset(self) -> None:
        self._lock, self._files = threading.Lock(), FileCache(self._open, h5py.File.close, _MAX_OPEN)
        self._info: dict[Path, _FileInfo] = {}
        self._cache: dict[int, dict[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without open files and caches."""
        return {key: value for key, value in self.__dict__.items() if key not in ("axis", "_lock", "_files", "_info", "_cache")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _scan(self) -> Catalog:
        """Return the catalog, with the shapes of the first file, and numbers of rows if there is no index."""
        catalog = read_catalog(self.folder, {*self.fields, *self._ragged.values()}, self.remedy)
        self._set_catalog(catalog)
        self._check_table()
        if catalog.rows is None:
            catalog = replace(catalog, rows=np.array([self._count_rows(path) for path in self.paths], np.int64))
        if all(self._in_table(name, 0) for name in self.fields):
            return replace(catalog, shapes={name: self._table_fields[name].shape(0)[1:] for name in self.fields})
        return replace(catalog, shapes={name: layout.shape[1:] for name, layout in self._file_info(self.paths[0]).layouts.items()})

    def _set_catalog(self, catalog: Catalog) -> None:
        self.paths = [self.folder / name for name in catalog.names]
        self._numbers = {path: number for number, path in enumerate(self.paths)}
        self.catalog, self.metadata, self.shapes = catalog, catalog.metadata, catalog.shapes or {}
        self._table_fields: Mapping[str, DatasetLayouts] = catalog.table.fields if catalog.table is not None else {}
        self._ends = np.cumsum(catalog.rows if catalog.rows is not None else np.zeros_like(catalog.sizes))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def identity(self) -> str:
        """A string that is equal for equal files in any folder: numbers of files and rows, and a hash of names, rows and sizes."""
        return self.catalog.identity

    @property
    def bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(self.catalog.sizes.tolist())

    def locate(self, index: int) -> tuple[Path, int]:
        """Return file and row of sample ``index``."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self.paths[file], int(index - (self._ends[file - 1] if file else 0))

    def describe(self, index: int) -> str:
        path, row = self.locate(index)
        return f"{path.parent.name}/{path.name} row {row}"

    def column(self, name: str) -> np.ndarray:
        """Return all values of a small field, such as the sizes of samples, from the table or otherwise from all files. [N, ...]"""
        table = self.catalog.table
        if table is not None and name in table.columns:
            return table.columns[name].copy()
        parts = []
        for path in self.paths:
            with self._lock, self._open(path) as file, parse_errors(path, f"it is damaged{self.remedy}"):
                parts.append(file[name][...])
        return np.concatenate(parts)

    def shape(self, index: int, name: str) -> tuple[int, ...]:
        """Return the shape of a row of a field of variable shape, from the index, its table, or otherwise the file."""
        path, _ = self.locate(index)
        number, expected = self._numbers[path], self.fields[name][1]
        listed = self.metadata["files"][number].get("shape") if self.metadata.get("files") else None
        if listed is not None and None in expected and len(listed) == len(expected):
            return tuple(int(n) for n in listed)
        if name in self._table_fields and self._table_fields[name].storage[number] != ABSENT:
            return self._table_fields[name].shape(number)[1:]
        return tuple(self._file_info(path).layouts[name].shape[1:])

    def read(self, index: int, selection: Selection | None = None) -> dict[str, Any]:
        """Return a row of every field, or the ``selection`` of it: slices of the leading dims of the row, by field. Raises
        DataError if it cannot be read or is not finite."""
        if self.reader_kind == "memory" and selection:
            row_values = self.read(index)
            return {name: value[tuple(selection[name])] if selection.get(name) else value for name, value in row_values.items()}
        if index in self._cache:
            return self._cache[index]
        path, row = self.locate(index)
        values = self._h5py_row(path, row, selection or {}) if self.reader_kind == "hdf5" else self._row(path, row, selection or {})
        for name, value in values.items():
            if isinstance(value, np.ndarray) and not value.dtype.isnative:
                values[name] = value.astype(value.dtype.newbyteorder("="))
            if not is_finite(value):
                raise DataError(f"{path}: row {row} of '{name}' holds NaN or infinity{self.remedy}")
        if self.reader_kind == "memory":
            for value in values.values():
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False  # so that a batch of one sample is a copy
            self._cache[index] = values
        return values

    def close(self) -> None:
        self.reader.close()
        self._files.close()

    # ---- one file

    def _row(self, path: Path, row: int, selection: Selection) -> dict[str, Any]:
        info = self._file_info(path)
        values: dict[str, Any] = {}
        for name, layout in info.layouts.items():
            if name in self._ragged:
                values[name] = layout.read(self.reader, _row_range(info.ends[self._ragged[name]], row))
                continue
            if row >= layout.shape[0]:
                raise DataError(f"{path}: dataset '{name}' has {layout.shape[0]} rows, row {row} is requested{self.remedy}")
            index: tuple[int | slice, ...] = (row, *selection.get(name, ()))
            if name in info.small:
                values[name] = info.small[name][index].copy()  # the next epoch reads them again
            else:
                values[name] = layout.read(self.reader, *index) if self.gds is None else self.gds.read(layout, *index)
        return values

    def _h5py_row(self, path: Path, row: int, selection: Selection) -> dict[str, np.ndarray]:
        ends = self._file_info(path).ends if self._ragged else {}
        with self._files.use(path) as file:
            try:
                indices = {name: (_row_range(ends[counts], row),) for name, counts in self._ragged.items()}
                return {name: file[name][indices.get(name, (row, *selection.get(name, ())))] for name in self.fields}
            except Exception as problem:  # h5py raises a dozen different exceptions for damaged files
                raise DataError(f"{path}: row {row} cannot be read ({problem}){self.remedy}") from problem

    def _check_size(self, path: Path, size_or_reason: int | str) -> None:
        """Raise DataError if the size of a file differs from the index, or if there is a reason instead of a size."""
        number = self._numbers[path]
        if not self.metadata.get("files") or size_or_reason == (size := int(self.catalog.sizes[number])):
            return
        problem = size_or_reason if isinstance(size_or_reason, str) else f"has {size_or_reason:,} bytes (truncated or rewritten?)"
        rows = int(self._ends[number] - (self._ends[number - 1] if number else 0))
        raise DataError(f"{path}: {problem}, {INDEX} has {size:,} bytes and {rows} rows{self.remedy}")

    def _open(self, path: Path) -> h5py.File:
        try:
            size_or_reason: int | str = os.stat(self.local.get(path, path)).st_size
        except OSError as problem:
            is_gone = isinstance(problem, FileNotFoundError)
            size_or_reason = "is missing (moved or deleted since the start?)" if is_gone else str(problem.strerror)
        self._check_size(path, size_or_reason)
        try:
            if not os.path.isfile(local_path := self.local.get(path, path)):  # HDF5 waits for the writer of a FIFO
                raise OSError("no regular file")
            file = h5py.File(local_path, "r")
        except Exception as problem:
            check_file_limit(path, problem)
            reason = "no such file" if not path.exists() else f"not a complete HDF5 file ({problem})"
            raise DataError(f"{path}: {reason}{self.remedy}") from problem
        try:
            with parse_errors(path, f"it is damaged{self.remedy}"):
                self._check_datasets(path, file)
        except BaseException:
            file.close()
            raise
        return file

    def _file_info(self, path: Path) -> _FileInfo:
        if path in self._info:
            return self._info[path]
        number, table, counts = self._numbers[path], self.catalog.table, set(self._ragged.values())
        layouts: dict[str, Layout] = {}
        small: dict[str, np.ndarray] = {}
        ends: dict[str, np.ndarray] = {}
        if table is not None and all(self._in_table(name, number) for name in (*self.fields, *counts)):
            local_path = self.local.get(path, path)
            self._check_head(path, int(table.head[number]))
            layouts = {name: self._table_fields[name].layout(number, local_path) for name in self.fields}
            small = {name: self._small_values(path, table, each) for name, each in layouts.items() if self._is_small(name, each)}
            for name in counts:
                values = self._small_values(path, table, self._table_fields[name].layout(number, local_path))
                ends[name] = np.cumsum(values, dtype=np.int64)
        else:
            with self._lock, self._open(path) as file, parse_errors(path, f"it is damaged{self.remedy}"):
                for name in self.fields:
                    data = file[name]
                    if self._is_small(name, data):
                        self._check_plausible(path, name, data.nbytes)
                        with parse_errors(path, f"it is damaged{self.remedy}", f"dataset '{name}' cannot be read"):
                            small[name] = data[...]
                    by_h5py = self.reader_kind == "hdf5" or name in small
                    layouts[name] = Layout(path, name, data.shape, data.dtype, None) if by_h5py else self._layout(file, name)
                ends = {name: np.cumsum(file[name][...], dtype=np.int64) for name in counts}
        for name, count in self._ragged.items():
            if (total := int(ends[count][-1]) if len(ends[count]) else 0) != layouts[name].shape[0]:
                text = f"dataset '{name}' holds {layouts[name].shape[0]:,} {count}, its rows should have {total:,}"
                raise DataError(f"{path}: {text}{self.remedy}")
        return self._info.setdefault(path, _FileInfo(layouts, small, ends))

    # ---- from the table

    def _in_table(self, name: str, number: int) -> bool:
        """Whether the table suffices to read a field of a file."""
        storage = self._table_fields[name].storage[number] if name in self._table_fields else ABSENT
        return bool(storage != ABSENT and (storage != HDF5_ONLY or self.reader_kind == "hdf5"))

    def _small_values(self, path: Path, table: Table, layout: Layout) -> np.ndarray:
        """Return all values of a small field of a file, from the table if it has them."""
        if (values := table.file_values(layout.name, self._numbers[path])) is not None:
            return values
        self._check_plausible(path, layout.name, layout.nbytes)
        return np.array(layout.read(self.reader))  # copied: each block of the pool is a mapping

    def _check_head(self, path: Path, head: int) -> None:
        """Raise DataError if size or first bytes of a file differ from those in the table."""
        size, local_path = int(self.catalog.sizes[self._numbers[path]]), self.local.get(path, path)
        try:
            size_or_reason: int | str = self.reader.size(local_path)
        except DataError as problem:
            check_file_limit(path, problem.__cause__)
            size_or_reason = str(problem).removeprefix(f"{path}: ")
        self._check_size(path, size_or_reason)
        if head_checksum(self.reader.fetch(local_path, 0, min(size, HEAD_BYTES))) != head:
            text = "its first bytes differ from those in the table beside it (rewritten since?)"
            advice = f"check it with: hpcai data check {self.folder}, and again with --index if it is right"
            raise DataError(f"{path}: {text}; {advice}{self.remedy}")

    def _check_table(self) -> None:
        """Raise DataError, with the first file, if dtype, shape or number of rows in the table differ from those expected."""
        for name, layouts in self._table_fields.items():
            if name not in self.fields:  # lengths of ragged rows
                continue
            dtype, shape = self.fields[name]
            expected = shape[1:] if name in self._ragged else shape
            if (number := layouts.first_mismatch(np.dtype(dtype), expected)) is not None:
                self._check_kind(self.paths[number], name, layouts.shape(number), layouts.dtype(number))
            rows = np.diff(self._ends, prepend=0)
            if name not in self._ragged and (number := layouts.first_row_mismatch(rows)) is not None:
                text = f"dataset '{name}' has {layouts.shape(number)[0]} rows, {INDEX} has {rows[number]}"
                raise DataError(f"{self.paths[number]}: {text}{self.remedy}")

    # ---- from h5py

    def _is_small(self, name: str, data: Layout | h5py.Dataset) -> bool:
        """Whether all rows of the field are read at once: each read of a few bytes would cost a block of the disk."""
        return self.reader_kind != "hdf5" and name not in self._ragged and data.nbytes <= max(data.shape[0], 1) * ALIGN // 4

    def _layout(self, file: h5py.File, name: str) -> Layout:
        try:
            return layout_of(file, name)
        except UnreadableLayoutError as problem:
            advice = "rewrite it with: h5repack -l CONTI -f NONE -t 65536 -a 4096 FILE NEW"
            raise UnreadableLayoutError(f"{problem}; {advice}, or leave the reading to HDF5: data.reader=hdf5") from problem

    def _check_plausible(self, path: Path, name: str, nbytes: int) -> None:
        if nbytes > 100 * int(self.catalog.sizes[self._numbers[path]]):
            raise DataError(f"{path}: dataset '{name}' has {nbytes:,} bytes by its header; the file is damaged{self.remedy}")

    def _check_datasets(self, path: Path, file: h5py.File) -> None:
        for name, (dtype, _) in self.fields.items():
            if file.get(name) is None:  # also a link to nothing
                raise DataError(f"{path}: no dataset '{name}'; it has {', '.join(file) or 'none'}{self.remedy}")
            data = file[name]
            if data.file.filename != file.filename:  # an external link could be to any file of this machine
                raise DataError(f"{path}: '{name}' is a link into another file; copy its values (h5repack){self.remedy}")
            if not isinstance(data, h5py.Dataset) or data.shape is None:
                raise DataError(f"{path}: '{name}' holds no values, expected {np.dtype(dtype)}{self.remedy}")
            if data.external or data.is_virtual:
                raise DataError(f"{path}: the values of '{name}' are in other files; copy them (h5repack){self.remedy}")
            self._check_kind(path, name, tuple(data.shape), data.dtype)
            check_filters(data)
            is_default = data.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED
            if is_default and (missing := missing_values(data)):  # HDF5 reads them as zeros
                raise DataError(f"{path}: '{name}' has values {missing}{self.remedy}")

    def _check_kind(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        kind, row_shape = self.fields[name]
        expected = row_shape if name in self._ragged else ("rows", *row_shape)
        if len(shape) != len(expected) or not all(n_expected in (None, got) for n_expected, got in zip(expected[1:], shape[1:])):
            shape_text = ", ".join("any" if n is None else str(n) for n in expected)
            raise DataError(f"{path}: dataset '{name}' is {shape}, expected ({shape_text}){self.remedy}")
        if dtype.newbyteorder("=") != np.dtype(kind):
            raise DataError(f"{path}: dataset '{name}' is {dtype}, expected {np.dtype(kind)}{self.remedy}")

    def _count_rows(self, path: Path) -> int:
        layouts = self._file_info(path).layouts
        rows = {name: layout.shape[0] for name, layout in layouts.items() if name not in self._ragged}
        if len(set(rows.values())) > 1:
            raise DataError(f"{path}: datasets have different numbers of rows: {rows}{self.remedy}")
        return next(iter(rows.values()))


def _row_range(ends: np.ndarray, row: int) -> slice:
    """Return the range of a row in a flat dataset."""
    return slice(int(ends[row - 1]) if row else 0, int(ends[row]))
