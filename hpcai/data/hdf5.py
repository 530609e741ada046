"""Rows of HDF5 files as one indexable source.   N rows of a file."""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.errors import DataError

_OPEN = 64  # files kept open; a parallel file system answers an open in milliseconds


class Rows:
    """All rows of the ``*.h5`` files of a folder, in the order of the files' names.

    ``fields`` names each dataset with its dtype and the shape of a row; None in a shape allows any length. ``index.json``,
    where there is one, tells rows and sizes without opening the files. Raises DataError, naming the file, for an empty folder,
    a missing, truncated or damaged file, and a dataset of another shape or dtype.
    """

    def __init__(self, folder: str | Path, fields: Mapping[str, tuple[str, tuple[int | None, ...]]], remedy: str = "") -> None:
        self.folder, self.fields, self.remedy = Path(folder), dict(fields), f"; {remedy}" if remedy else ""
        self.about: dict[str, Any] = {}
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder{self.remedy}")
        files = self._listed() or [(path, None) for path in sorted(self.folder.glob("*.h5"))]
        if not files:
            raise DataError(f"{self.folder}: holds no *.h5 file{self.remedy}")
        self._lock, self._files = threading.Lock(), OrderedDict[Path, h5py.File]()
        self.paths = [path for path, _ in files]
        self.shapes = self._row_shapes(self.paths[0])
        counts = [self._count(path) if rows is None else rows for path, rows in files]
        self._ends = np.cumsum(counts)

    def _listed(self) -> list[tuple[Path, int | None]]:
        path = self.folder / "index.json"
        if not path.is_file():
            return []
        try:
            self.about = json.loads(path.read_text())
            files = [(self.folder / entry["name"], int(entry["rows"]), int(entry["bytes"])) for entry in self.about["files"]]
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(f"{path}: cannot be read as an index of files ({problem!r}){self.remedy}") from problem
        for file, _, size in files:
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes (truncated or rewritten?)"
                raise DataError(f"{file}: {what}, {path.name} says {size:,} bytes{self.remedy}")
        return [(file, rows) for file, rows, _ in files]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[Path, int]:
        """File and row of sample ``index``."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self.paths[file], int(index - (self._ends[file - 1] if file else 0))

    def describe(self, index: int) -> str:
        path, row = self.locate(index)
        return f"{path.parent.name}/{path.name} row {row}"

    def read(self, index: int) -> dict[str, np.ndarray]:
        """One row of every field. Raises DataError when it cannot be read or holds a value that is not finite."""
        path, row = self.locate(index)
        with self._lock:
            file = self._open(path)
            try:
                values = {name: file[name][row] for name in self.fields}
            except (OSError, KeyError, ValueError) as problem:
                raise DataError(f"{path}: row {row} cannot be read ({problem}){self.remedy}") from problem
        for name, value in values.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise DataError(f"{path}: row {row} of '{name}' holds NaN or infinity{self.remedy}")
        return values

    def _open(self, path: Path) -> h5py.File:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        try:
            file = h5py.File(path, "r")
        except OSError as problem:
            reason = "no such file" if not path.exists() else f"not a whole HDF5 file ({problem})"
            raise DataError(f"{path}: {reason}{self.remedy}") from problem
        self._check(path, file)
        self._files[path] = file
        if len(self._files) > _OPEN:
            self._files.popitem(last=False)[1].close()
        return file

    def _check(self, path: Path, file: h5py.File) -> None:
        for name, (dtype, shape) in self.fields.items():
            if name not in file:
                raise DataError(f"{path}: no dataset '{name}'; it has {', '.join(file) or 'none'}{self.remedy}")
            data = file[name]
            fits = len(data.shape) == len(shape) + 1 and all(want in (None, got) for want, got in zip(shape, data.shape[1:]))
            if not fits:
                want_text = ", ".join("any" if n is None else str(n) for n in ("rows", *shape))
                raise DataError(f"{path}: dataset '{name}' is {tuple(data.shape)}, expected ({want_text}){self.remedy}")
            if data.dtype != np.dtype(dtype):
                raise DataError(f"{path}: dataset '{name}' is {data.dtype}, expected {np.dtype(dtype)}{self.remedy}")

    def _row_shapes(self, path: Path) -> dict[str, tuple[int, ...]]:
        with self._lock:
            file = self._open(path)
            return {name: tuple(file[name].shape[1:]) for name in self.fields}

    def _count(self, path: Path) -> int:
        with self._lock:
            file = self._open(path)
            rows = {name: file[name].shape[0] for name in self.fields}
        if len(set(rows.values())) > 1:
            raise DataError(f"{path}: datasets have different numbers of rows: {rows}{self.remedy}")
        return next(iter(rows.values()))
