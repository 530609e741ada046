"""Rows of fixed width in raw files, by id: random reads past the page cache, with the rows that are read most often in memory.

N rows, F elements of a row"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.data.direct import Reader
from hpcai.errors import DataError

Array = NDArray[Any]
_GAP = 1 << 16  # bytes between hot rows that are read along: fewer and longer reads


class RowsFile:
    """A file of ``count`` rows of ``width`` elements. ``reader``: None maps the file. ``hot``: ids, ascending, of rows that are
    loaded now and kept. Thread-safe. ``requested`` and ``hits`` count the rows that were read, and those from memory.

    Raises DataError for ids that are not there; -1 gives a row of zeros."""

    def __init__(
        self, path: Path, count: int, width: int, dtype: np.dtype, reader: Reader | None = None, hot: Array | Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.path, self.count, self.width, self.dtype, self.reader = path, count, width, np.dtype(dtype), reader
        self.row_bytes, self.requested, self.hits = width * self.dtype.itemsize, 0, 0
        self._lock, self.hot = threading.Lock(), np.asarray(hot, np.int64)
        self._mapped = np.memmap(path, dtype, "r", shape=(count, width)).view(np.ndarray) if reader is None else None
        self._rows = np.zeros((len(self.hot), width), dtype)
        if len(self.hot) and reader is not None:
            reader.read_rows(path, self.hot * self.row_bytes, self._bytes(self._rows), _GAP)

    def read(self, ids: Array, into: Array) -> None:
        """Fill ``into`` with the rows ``ids``, fastest if these ascend.   [N] -> [N, F], contiguous"""
        if ids.size and not -1 <= ids.min() <= ids.max() < self.count:
            wrong = int(ids.min() if ids.min() < -1 else ids.max())
            raise DataError(f"{self.path}: row {wrong:,} is requested, but there are {self.count:,}")
        if (np.diff(ids) < 0).any():
            order = np.argsort(ids)
            self.read(ids[order], rows := np.empty_like(into))
            into[order] = rows
            return
        blank, hits = int(np.searchsorted(ids, 0)), 0
        into[:blank] = 0
        ids, into = ids[blank:], into[blank:]
        if self._mapped is not None:
            np.take(self._mapped, ids, 0, into, "clip")
        elif self.reader is not None:
            missing = slice(None)
            if len(self.hot):
                place = np.minimum(np.searchsorted(self.hot, ids), len(self.hot) - 1)
                cached = self.hot[place] == ids
                into[cached], missing, hits = self._rows[place[cached]], ~cached, int(cached.sum())
            rows = into[missing]  # into itself if none is cached
            self.reader.read_rows(self.path, ids[missing] * self.row_bytes, self._bytes(rows))
            if len(self.hot):
                into[missing] = rows
        with self._lock:
            self.requested, self.hits = self.requested + len(ids), self.hits + hits

    def _bytes(self, rows: Array) -> Array:
        return rows.reshape(len(rows), self.width).view(np.uint8)


def hottest(uses: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """Return the ids of the ``rows`` rows with the most uses over all tables, ascending, of each table.   [N] of each"""
    levels = {name: np.minimum(values, _LEVELS - 1) for name, values in uses.items()}
    counts = np.sum([np.bincount(values, minlength=_LEVELS) for values in levels.values()], 0)
    least = _LEVELS - int(np.searchsorted(np.cumsum(counts[::-1]), rows, "right"))  # all rows from this level on fit
    chosen = {name: values >= least for name, values in levels.items()}
    left = rows - sum(int(mask.sum()) for mask in chosen.values())
    for name, values in levels.items():  # and the first ones of the level below
        equal = np.flatnonzero(values == least - 1)[:left]
        chosen[name][equal] = True
        left -= len(equal)
    return {name: np.flatnonzero(mask) for name, mask in chosen.items()}


_LEVELS = 1 << 16  # numbers of uses that are told apart
