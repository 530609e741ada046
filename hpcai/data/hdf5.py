"""Rows of HDF5 files as one indexable set.   N rows of a file."""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch

from hpcai.data.direct import ALIGN, Reader
from hpcai.data.index import INDEX, read_index
from hpcai.data.layout import Layout, UnreadableLayoutError, finite
from hpcai.data.layout import hdf5 as layout_of
from hpcai.data.opened import OpenFiles
from hpcai.data.readers import open_reader
from hpcai.errors import DataError, HpcaiError

if TYPE_CHECKING:
    from hpcai.data.gds import GdsReader

Where = Mapping[str, Sequence[slice]]
Fields = Mapping[str, tuple[str, tuple[int | str | None, ...]]]

_OPEN = 64  # files that h5py keeps open; a parallel file system answers an open in milliseconds


@dataclass(frozen=True)
class _Known:
    """What one opening of a file told: where each field lies, and the values of those that are small."""

    layouts: Mapping[str, Layout]
    small: Mapping[str, np.ndarray]
    ends: Mapping[str, np.ndarray]  # where each row's part of a flat dataset ends, by the name of its counts


class Rows:
    """All rows of the ``*.h5`` files of a folder, in the order of the files' names.

    ``fields`` names each dataset with its dtype and the shape of a row; None in a shape allows any length. A name in place of the
    first length is that of a dataset that counts each row's part; the parts of all rows lie one after another. ``index.json``,
    where there is one, tells rows and sizes without opening the files. h5py is asked once per file where the values lie; samples
    are then read by ``reader``: one of ours, or the name of a way to read (see ``open_reader``). The way ``hdf5`` leaves all
    reading to h5py (compressed files too, one read at a time), ``memory`` keeps each row that was read, and ``gds`` gives the
    large fields as tensors on ``device``. ``local`` maps files to whole copies elsewhere (see hpcai.data.stage).

    Raises DataError, naming the file, for an empty folder, a missing, truncated or damaged file, a dataset of another shape
    or dtype, and UnreadableLayoutError for one that cannot be read directly.
    """

    def __init__(
        self, folder: str | Path, fields: Fields, remedy: str = "", *,
        reader: str | Reader = "auto", device: torch.device | None = None, local: Mapping[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.fields, self.remedy = Path(folder), dict(fields), f"; {remedy}" if remedy else ""
        self._counted = {name: shape[0] for name, (_, shape) in self.fields.items() if shape and isinstance(shape[0], str)}
        self.way = reader if isinstance(reader, str) else "direct"
        self.local = dict(local or {})
        self.about: dict[str, Any] = {}
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder{self.remedy}")
        self._begin()
        files = self._listed() or [(path, None) for path in sorted(self.folder.glob("*.h5"))]
        if not files:
            raise DataError(f"{self.folder}: holds no *.h5 file{self.remedy}")
        self.paths = [path for path, _ in files]
        self.shapes = {name: layout.shape[1:] for name, layout in self._known(self.paths[0]).layouts.items()}
        counts = [self._count(path) if rows is None else rows for path, rows in files]
        self._ends = np.cumsum(counts)
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
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_files", "_seen", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _listed(self) -> list[tuple[Path, int | None]]:
        path = self.folder / INDEX
        if not path.is_file():
            return []
        self.about, entries = read_index(path, self.remedy)
        files = [(self.folder / entry.name, entry.rows, entry.bytes) for entry in entries]
        for file, rows, size in files:
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes (truncated or rewritten?)"
                raise DataError(f"{file}: {what}, {path.name} says {size:,} bytes and {rows} rows{self.remedy}")
        return [(file, rows) for file, rows, _ in files]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def identity(self) -> str:
        """The same for the same files, wherever they lie: their number and rows, and a hash of names, rows and sizes."""
        counts = np.diff(self._ends, prepend=0).tolist()
        files = [f"{path.name} {rows} {path.stat().st_size}" for path, rows in zip(self.paths, counts)]
        return f"{len(files)} files, {len(self)} rows, {hashlib.sha256(chr(10).join(files).encode()).hexdigest()[:12]}"

    @property
    def bytes(self) -> int:
        """Bytes of all files: from the index, otherwise from the disk."""
        listed = [int(entry["bytes"]) for entry in self.about.get("files", ())]
        return sum(listed) if listed else sum(path.stat().st_size for path in self.paths)

    def locate(self, index: int) -> tuple[Path, int]:
        """File and row of sample ``index``."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self.paths[file], int(index - (self._ends[file - 1] if file else 0))

    def describe(self, index: int) -> str:
        path, row = self.locate(index)
        return f"{path.parent.name}/{path.name} row {row}"

    def column(self, name: str) -> np.ndarray:
        """All values of a small field, such as the counts that the work of a sample follows from.   [N, ...]"""
        parts = []
        for path in self.paths:
            with self._lock, self._opened(path) as file, self._faults_named(path):
                parts.append(file[name][...])
        return np.concatenate(parts)

    def shape(self, index: int, name: str) -> tuple[int, ...]:
        """The shape of one row of a field, where rows differ: from the index, otherwise from the file."""
        path, _ = self.locate(index)
        want, entries = self.fields[name][1], self.about.get("files") or [{}] * len(self.paths)
        told = entries[self.paths.index(path)].get("shape")
        if told is not None and None in want and len(told) == len(want):
            return tuple(int(n) for n in told)
        return tuple(self._known(path).layouts[name].shape[1:])

    def read(self, index: int, where: Where | None = None) -> dict[str, Any]:
        """One row of every field, or a box of it: ``where`` has a slice for each of the leading dims of the row, by field. Raises
        DataError when it cannot be read or holds a value that is not finite."""
        if self.way == "memory" and where:
            row_values = self.read(index)
            return {name: value[tuple(where.get(name, ()))] for name, value in row_values.items()}
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

    def _opened(self, path: Path) -> h5py.File:
        try:
            file = h5py.File(self.local.get(path, path), "r")
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
            with self._lock, self._opened(path) as file, self._faults_named(path):
                known = self._seen[path] = self._look(path, file)
        return known

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
            # A row of a few bytes would cost a block of the disk each time.
            is_small = name not in self._counted and data.nbytes <= max(data.shape[0], 1) * ALIGN // 4
            if self.way == "hdf5" or is_small:
                layouts[name] = Layout(path, name, data.shape, data.dtype, None)
            else:
                layouts[name] = self._layout(file, name)
            if self.way != "hdf5" and is_small:
                small[name] = self._whole(path, name, data)
        ends = {name: np.cumsum(file[name][...], dtype=np.int64) for name in set(self._counted.values())}
        for name, counts in self._counted.items():
            if (many := int(ends[counts][-1]) if len(ends[counts]) else 0) != layouts[name].shape[0]:
                text = f"dataset '{name}' holds {layouts[name].shape[0]:,} {counts}, its rows should have {many:,}"
                raise DataError(f"{path}: {text}{self.remedy}")
        return _Known(layouts, small, ends)

    def _layout(self, file: h5py.File, name: str) -> Layout:
        try:
            return layout_of(file, name)
        except UnreadableLayoutError as problem:
            raise UnreadableLayoutError(
                f"{problem}; rewrite it with: hpcai data check {self.folder} --repair, or leave the reading to HDF5: "
                "data.reader=hdf5"
            ) from problem

    def _whole(self, path: Path, name: str, data: h5py.Dataset) -> np.ndarray:
        if data.nbytes > 100 * path.stat().st_size:
            raise DataError(f"{path}: dataset '{name}' says {data.nbytes:,} bytes; the file is damaged{self.remedy}")
        try:
            return data[...]
        except Exception as problem:
            raise DataError(f"{path}: dataset '{name}' cannot be read ({problem}){self.remedy}") from problem

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
            expected = shape if name in self._counted else ("rows", *shape)
            fits = len(data.shape) == len(expected) and all(want in (None, got) for want, got in zip(expected[1:], data.shape[1:]))
            if not fits:
                want_text = ", ".join("any" if n is None else str(n) for n in expected)
                raise DataError(f"{path}: dataset '{name}' is {tuple(data.shape)}, expected ({want_text}){self.remedy}")
            if data.dtype.newbyteorder("=") != np.dtype(dtype):
                raise DataError(f"{path}: dataset '{name}' is {data.dtype}, expected {np.dtype(dtype)}{self.remedy}")

    def _count(self, path: Path) -> int:
        layouts = self._known(path).layouts
        rows = {name: layout.shape[0] for name, layout in layouts.items() if name not in self._counted}
        if len(set(rows.values())) > 1:
            raise DataError(f"{path}: datasets have different numbers of rows: {rows}{self.remedy}")
        return next(iter(rows.values()))


def _part(ends: np.ndarray, row: int) -> slice:
    """The part of a flat dataset that belongs to one row."""
    return slice(int(ends[row - 1]) if row else 0, int(ends[row]))
