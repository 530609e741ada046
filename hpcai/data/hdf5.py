"""Rows of HDF5 files as one indexable set.   N rows of a file."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch

from hpcai.data.catalog import Catalog, read_catalog
from hpcai.data.direct import ALIGN, Reader
from hpcai.data.index import INDEX
from hpcai.data.layout import Layout, UnreadableLayoutError, finite
from hpcai.data.layout import hdf5 as layout_of
from hpcai.data.opened import OpenFiles
from hpcai.data.readers import open_reader
from hpcai.data.table import ABSENT, HEAD, PACKED, Places, Table, head_of
from hpcai.dist.collectives import broadcast_from_first
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError, HpcaiError

if TYPE_CHECKING:
    from hpcai.data.gds import GdsReader

Where = Mapping[str, Sequence[slice]]
Fields = Mapping[str, tuple[str, tuple[int | str | None, ...]]]

_ALONE = Axis("alone")
_OPEN = 64  # files that h5py keeps open; a parallel file system answers an open in milliseconds


@dataclass(frozen=True)
class _Known:
    """What is known of a file before its samples are read: where each field lies, and the values of those that are small."""

    layouts: Mapping[str, Layout]
    small: Mapping[str, np.ndarray]
    ends: Mapping[str, np.ndarray]  # where each row's part of a flat dataset ends, by the name of its counts


class Rows:
    """All rows of the ``*.h5`` files of a folder, in the order of the files' names.

    ``fields`` names each dataset with its dtype and the shape of a row; None in a shape allows any length. A name in place of the
    first length is that of a dataset that counts each row's part; the parts of all rows lie one after another. ``index.json``,
    where there is one, tells rows and sizes without opening the files, and its table where the values lie; otherwise h5py is asked
    once per file. The first process of ``axis`` reads both and lists the folder for all; they make their rows together. A file is
    opened when a sample of it is read, and compared with the index then.

    Samples are read by ``reader``: one of ours, or the name of a way to read (see ``open_reader``). The way ``hdf5`` leaves all
    reading to h5py (compressed files too, one read at a time), ``memory`` keeps each row that was read, and ``gds`` gives the
    large fields as tensors on ``device``. ``local`` maps files to whole copies elsewhere (see hpcai.data.stage).

    Raises DataError, naming the file, for an empty folder, a missing, truncated or damaged file, a dataset of another shape
    or dtype, and UnreadableLayoutError for one that cannot be read directly.
    """

    def __init__(
        self, folder: str | Path, fields: Fields, remedy: str = "", *,
        reader: str | Reader = "auto", device: torch.device | None = None, local: Mapping[Path, Path] | None = None,
        axis: Axis = _ALONE,
    ) -> None:  # fmt: skip
        self.folder, self.fields, self.remedy = Path(folder), dict(fields), f"; {remedy}" if remedy else ""
        self._counted = {name: shape[0] for name, (_, shape) in self.fields.items() if shape and isinstance(shape[0], str)}
        self.way = reader if isinstance(reader, str) else "direct"
        self.local = dict(local or {})
        self.axis = axis
        self._begin()
        catalog = broadcast_from_first(self._surveyed, axis)
        if axis.rank:
            self._list(catalog)
        self._take(catalog)
        self.reader = reader if isinstance(reader, Reader) else open_reader(reader, self.bytes, str(self.folder), device)
        self.gds: GdsReader | None = None
        if self.way == "gds":
            from hpcai.data import gds

            self.gds = gds.GdsReader(device or torch.device("cuda"))

    def _begin(self) -> None:
        self._lock, self._files = threading.Lock(), OpenFiles(self._opened, h5py.File.close, _OPEN)
        self._seen: dict[Path, _Known] = {}
        self._kept: dict[int, dict[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state that worker processes get, without open files and what was read."""
        return {key: value for key, value in self.__dict__.items() if key not in ("axis", "_lock", "_files", "_seen", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _surveyed(self) -> Catalog:
        """The catalog of the folder, with what its files tell: the shapes of the first, and rows where no index does."""
        catalog = read_catalog(self.folder, {*self.fields, *self._counted.values()}, self.remedy)
        self._list(catalog)
        self._take(catalog)
        self._compare_table()
        if catalog.rows is None:
            catalog = replace(catalog, rows=np.array([self._count(path) for path in self.paths], np.int64))
        if all(self._is_told(name, 0) for name in self.fields):
            return replace(catalog, shapes={name: self._places[name].shape(0)[1:] for name in self.fields})
        return replace(catalog, shapes={name: layout.shape[1:] for name, layout in self._asked(self.paths[0]).layouts.items()})

    def _list(self, catalog: Catalog) -> None:
        self.paths = [self.folder / name for name in catalog.names]
        self._numbers = {path: number for number, path in enumerate(self.paths)}

    def _take(self, catalog: Catalog) -> None:
        self.catalog, self.about, self.shapes = catalog, catalog.about, catalog.shapes or {}
        self._places: Mapping[str, Places] = catalog.table.fields if catalog.table is not None else {}
        self._ends = np.cumsum(catalog.rows if catalog.rows is not None else np.zeros_like(catalog.sizes))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def identity(self) -> str:
        """The same for the same files, wherever they lie: their number and rows, and a hash of names, rows and sizes."""
        return self.catalog.identity

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.catalog.sizes.tolist())

    def locate(self, index: int) -> tuple[Path, int]:
        """File and row of sample ``index``."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self.paths[file], int(index - (self._ends[file - 1] if file else 0))

    def describe(self, index: int) -> str:
        path, row = self.locate(index)
        return f"{path.parent.name}/{path.name} row {row}"

    def column(self, name: str) -> np.ndarray:
        """All values of a small field, such as the counts that the work of a sample follows from: by the table, otherwise from all
        files.   [N, ...]"""
        table = self.catalog.table
        if table is not None and name in table.columns:
            return table.columns[name].copy()
        parts = []
        for path in self.paths:
            with self._lock, self._opened(path) as file, self._faults_named(path):
                parts.append(file[name][...])
        return np.concatenate(parts)

    def shape(self, index: int, name: str) -> tuple[int, ...]:
        """The shape of one row of a field, where rows differ: by the index or its table, otherwise from the file."""
        path, _ = self.locate(index)
        number, want = self._numbers[path], self.fields[name][1]
        told = self.about["files"][number].get("shape") if self.about.get("files") else None
        if told is not None and None in want and len(told) == len(want):
            return tuple(int(n) for n in told)
        if name in self._places and self._places[name].ways[number] != ABSENT:
            return self._places[name].shape(number)[1:]
        return tuple(self._known(path).layouts[name].shape[1:])

    def read(self, index: int, where: Where | None = None) -> dict[str, Any]:
        """One row of every field, or a box of it: ``where`` has a slice for each of the leading dims of the row, by field. Raises
        DataError when it cannot be read or holds a value that is not finite."""
        if self.way == "memory" and where:
            row_values = self.read(index)
            return {name: value[tuple(where[name])] if where.get(name) else value for name, value in row_values.items()}
        if index in self._kept:
            return self._kept[index]
        path, row = self.locate(index)
        values = self._through_h5py(path, row, where or {}) if self.way == "hdf5" else self._directly(path, row, where or {})
        for name, value in values.items():
            if isinstance(value, np.ndarray) and not value.dtype.isnative:
                values[name] = value.astype(value.dtype.newbyteorder("="))
            if not finite(value):
                raise DataError(f"{path}: row {row} of '{name}' holds NaN or infinity{self.remedy}")
        if self.way == "memory":
            for value in values.values():
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False  # a batch of one sample is then a copy
            self._kept[index] = values
        return values

    def close(self) -> None:
        self.reader.close()
        self._files.close()

    # ---- one file

    def _directly(self, path: Path, row: int, boxes: Where) -> dict[str, Any]:
        known = self._known(path)
        values: dict[str, Any] = {}
        for name, layout in known.layouts.items():
            if name in self._counted:
                values[name] = layout.read(self.reader, _part(known.ends[self._counted[name]], row))
                continue
            if row >= layout.shape[0]:
                raise DataError(f"{path}: dataset '{name}' has {layout.shape[0]} rows, row {row} is asked for{self.remedy}")
            where: tuple[int | slice, ...] = (row, *boxes.get(name, ()))
            if name in known.small:
                values[name] = known.small[name][where].copy()  # the next epoch reads them again
            else:
                values[name] = layout.read(self.reader, *where) if self.gds is None else self.gds.read(layout, *where)
        return values

    def _through_h5py(self, path: Path, row: int, boxes: Where) -> dict[str, np.ndarray]:
        ends = self._known(path).ends if self._counted else {}
        with self._files.use(path) as file:
            try:
                parts = {name: (_part(ends[counts], row),) for name, counts in self._counted.items()}
                return {name: file[name][parts.get(name, (row, *boxes.get(name, ())))] for name in self.fields}
            except Exception as problem:  # a damaged file ends in any of a dozen exceptions of h5py
                raise DataError(f"{path}: row {row} cannot be read ({problem}){self.remedy}") from problem

    def _here(self, path: Path) -> Path:
        return self.local.get(path, path)

    def _sized(self, path: Path, found: int | str) -> None:
        """Raise DataError where a file has not the bytes that the index says, or is not there: ``found`` then says so."""
        number = self._numbers[path]
        if not self.about.get("files") or found == (size := int(self.catalog.sizes[number])):
            return
        what = found if isinstance(found, str) else f"has {found:,} bytes (truncated or rewritten?)"
        rows = int(self._ends[number] - (self._ends[number - 1] if number else 0))
        raise DataError(f"{path}: {what}, {INDEX} says {size:,} bytes and {rows} rows{self.remedy}")

    def _opened(self, path: Path) -> h5py.File:
        try:
            found: int | str = os.stat(self._here(path)).st_size
        except OSError as problem:
            is_gone = isinstance(problem, FileNotFoundError)
            found = "is missing (moved or deleted since the start?)" if is_gone else str(problem.strerror)
        self._sized(path, found)
        try:
            file = h5py.File(self._here(path), "r")
        except Exception as problem:
            reason = "no such file" if not path.exists() else f"not a whole HDF5 file ({problem})"
            raise DataError(f"{path}: {reason}{self.remedy}") from problem
        try:
            with self._faults_named(path):
                self._check(path, file)
        except BaseException:
            file.close()
            raise
        return file

    def _known(self, path: Path) -> _Known:
        known = self._seen.get(path)
        if known is None:
            number, table, names = self._numbers[path], self.catalog.table, (*self.fields, *self._counted.values())
            if table is None or not all(self._is_told(name, number) for name in names):
                return self._asked(path)
            known = self._seen[path] = self._told(path, table)
        return known

    def _asked(self, path: Path) -> _Known:
        """What h5py finds in a file."""
        known = self._seen.get(path)
        if known is None:
            with self._lock, self._opened(path) as file, self._faults_named(path):
                known = self._seen[path] = self._look(path, file)
        return known

    # ---- what the table says

    def _is_told(self, name: str, number: int) -> bool:
        """Whether the table says of a file all that reading a field asks for."""
        way = self._places[name].ways[number] if name in self._places else ABSENT
        return bool(way != ABSENT and (way != PACKED or self.way == "hdf5"))

    def _told(self, path: Path, table: Table) -> _Known:
        number, place = self._numbers[path], self._here(path)
        self._compare(path, int(table.head[number]))
        layouts = {name: self._places[name].layout(number, place) for name in self.fields}
        small: dict[str, np.ndarray] = {}
        for name, layout in layouts.items():
            if self.way != "hdf5" and self._is_small(name, layout.shape, layout.nbytes):
                small[name] = self._few(path, table.part(name, number), layout)
        ends = {}
        for name in set(self._counted.values()):
            counts = self._few(path, table.part(name, number), self._places[name].layout(number, place))
            ends[name] = np.cumsum(counts, dtype=np.int64)
        self._ends_fit(path, layouts, ends)
        return _Known(layouts, small, ends)

    def _few(self, path: Path, told: np.ndarray | None, layout: Layout) -> np.ndarray:
        """All values of a small field of a file, which the table may hold."""
        if told is not None:
            return told
        self._believed(path, layout.name, layout.nbytes)
        return np.array(layout.read(self.reader))  # in memory of its own: each block of the reader's is a mapping

    def _compare(self, path: Path, head: int) -> None:
        """Raise DataError where a file is not the one of which the table was made, by its size and its first bytes."""
        size = int(self.catalog.sizes[self._numbers[path]])
        try:
            found: int | str = self.reader.size(self._here(path))
        except DataError as problem:
            found = str(problem).removeprefix(f"{path}: ")
        self._sized(path, found)
        if head_of(self.reader.fetch(self._here(path), 0, min(size, HEAD))) != head:
            what = "its first bytes are not those of which the table beside it was made (rewritten since?)"
            advice = f"look at it with: hpcai data check {self.folder}, and again with --index if it is right"
            raise DataError(f"{path}: {what}; {advice}{self.remedy}")

    def _compare_table(self) -> None:
        """Raise DataError, naming the first file, where the table says another dtype, shape or number of rows than is wanted."""
        for name, places in self._places.items():
            if name not in self.fields:  # it counts parts
                continue
            dtype, shape = self.fields[name]
            expected = shape[1:] if name in self._counted else shape
            if (number := places.misfit(np.dtype(dtype), expected)) is not None:
                raise self._misfit(self.paths[number], name, places.shape(number), places.dtype(number))
            rows = np.diff(self._ends, prepend=0)
            if name not in self._counted and (number := places.miscounted(rows)) is not None:
                text = f"dataset '{name}' has {places.shape(number)[0]} rows, {INDEX} says {rows[number]}"
                raise DataError(f"{self.paths[number]}: {text}{self.remedy}")

    # ---- what h5py says

    @contextmanager
    def _faults_named(self, path: Path) -> Iterator[None]:
        """Raises a DataError that names the file for any of the dozen exceptions in which h5py meets damage."""
        try:
            yield
        except HpcaiError:
            raise
        except Exception as problem:
            text = f"{path}: cannot be read as HDF5 ({type(problem).__name__}: {problem}); it is damaged"
            raise DataError(f"{text}{self.remedy}") from problem

    def _look(self, path: Path, file: h5py.File) -> _Known:
        layouts: dict[str, Layout] = {}
        small: dict[str, np.ndarray] = {}
        for name in self.fields:
            data = file[name]
            is_small = self._is_small(name, data.shape, data.nbytes)
            if self.way == "hdf5" or is_small:
                layouts[name] = Layout(path, name, data.shape, data.dtype, None)
            else:
                layouts[name] = self._layout(file, name)
            if self.way != "hdf5" and is_small:
                small[name] = self._whole(path, name, data)
        ends = {name: np.cumsum(file[name][...], dtype=np.int64) for name in set(self._counted.values())}
        self._ends_fit(path, layouts, ends)
        return _Known(layouts, small, ends)

    def _is_small(self, name: str, shape: Sequence[int], nbytes: int) -> bool:
        """Whether the field is read whole: a row of a few bytes would cost a block of the disk each time."""
        return name not in self._counted and nbytes <= max(shape[0], 1) * ALIGN // 4

    def _ends_fit(self, path: Path, layouts: Mapping[str, Layout], ends: Mapping[str, np.ndarray]) -> None:
        for name, counts in self._counted.items():
            if (many := int(ends[counts][-1]) if len(ends[counts]) else 0) != layouts[name].shape[0]:
                text = f"dataset '{name}' holds {layouts[name].shape[0]:,} {counts}, its rows should have {many:,}"
                raise DataError(f"{path}: {text}{self.remedy}")

    def _layout(self, file: h5py.File, name: str) -> Layout:
        try:
            return layout_of(file, name)
        except UnreadableLayoutError as problem:
            raise UnreadableLayoutError(
                f"{problem}; rewrite it with: h5repack -l CONTI -f NONE -t 65536 -a 4096 FILE NEW, or leave the reading to HDF5: "
                "data.reader=hdf5"
            ) from problem

    def _whole(self, path: Path, name: str, data: h5py.Dataset) -> np.ndarray:
        self._believed(path, name, data.nbytes)
        try:
            return data[...]
        except Exception as problem:
            raise DataError(f"{path}: dataset '{name}' cannot be read ({problem}){self.remedy}") from problem

    def _believed(self, path: Path, name: str, nbytes: int) -> None:
        if nbytes > 100 * int(self.catalog.sizes[self._numbers[path]]):
            raise DataError(f"{path}: dataset '{name}' says {nbytes:,} bytes; the file is damaged{self.remedy}")

    def _check(self, path: Path, file: h5py.File) -> None:
        for name, (dtype, shape) in self.fields.items():
            if name not in file:
                raise DataError(f"{path}: no dataset '{name}'; it has {', '.join(file) or 'none'}{self.remedy}")
            data = file[name]
            if data.file.filename != file.filename:  # an external link could name any file of this machine
                raise DataError(f"{path}: '{name}' is a link into another file; copy its values (h5repack){self.remedy}")
            if not isinstance(data, h5py.Dataset) or data.shape is None:
                raise DataError(f"{path}: '{name}' holds no values, expected {np.dtype(dtype)}{self.remedy}")
            if data.external or data.is_virtual:
                raise DataError(f"{path}: the values of '{name}' lie in other files; copy them (h5repack){self.remedy}")
            expected = shape[1:] if name in self._counted else shape
            fits = len(data.shape) == len(expected) + 1 and all(want in (None, n) for want, n in zip(expected, data.shape[1:]))
            if not fits or data.dtype.newbyteorder("=") != np.dtype(dtype):
                raise self._misfit(path, name, tuple(data.shape), data.dtype)

    def _misfit(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> DataError:
        """A dataset of another shape, or else of another dtype."""
        kind, wanted = self.fields[name]
        expected = wanted if name in self._counted else ("rows", *wanted)
        if len(shape) != len(expected) or not all(want in (None, got) for want, got in zip(expected[1:], shape[1:])):
            want_text = ", ".join("any" if n is None else str(n) for n in expected)
            return DataError(f"{path}: dataset '{name}' is {shape}, expected ({want_text}){self.remedy}")
        return DataError(f"{path}: dataset '{name}' is {dtype}, expected {np.dtype(kind)}{self.remedy}")

    def _count(self, path: Path) -> int:
        layouts = self._asked(path).layouts
        rows = {name: layout.shape[0] for name, layout in layouts.items() if name not in self._counted}
        if len(set(rows.values())) > 1:
            raise DataError(f"{path}: datasets have different numbers of rows: {rows}{self.remedy}")
        return next(iter(rows.values()))


def _part(ends: np.ndarray, row: int) -> slice:
    """The part of a flat dataset that belongs to one row."""
    return slice(int(ends[row - 1]) if row else 0, int(ends[row]))
