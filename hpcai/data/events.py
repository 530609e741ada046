"""Tables of events on disk: rows of fixed width, read in blocks.

    FOLDER/table.json           {"dense": F, "tables": [{"name": ..., "rows": ..., "hotness": ...}, ...],
                                 "splits": {"train": {"rows": N, "positives": P}, ...}}
    FOLDER/train.bin            N rows of 4-byte words: the label (float32, 0 or 1), F numbers (float32), K ids (int32)

The ids of a row are the bags of all tables, one after the other, each padded to its hotness with -1.   N rows, F numbers, K ids
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.data.direct import ALIGN, Reader
from hpcai.errors import DataError
from hpcai.json_file import check_fields, read_object

Array = NDArray[Any]
TABLE, TRUTH = "table.json", "truth.npz"
_WORD = 4  # bytes


class EventTable:
    """The table in ``folder``. Raises DataError for a folder without ``table.json``, with the advice ``remedy``, and for files with
    other sizes."""

    def __init__(self, folder: Path, remedy: str = "") -> None:
        self.folder, path = Path(folder), Path(folder) / TABLE
        if not path.is_file():
            raise DataError(f"{folder}: has no {TABLE}" + (f"; {remedy}" if remedy else ""))
        content = read_object(path, "a table of events", DataError)
        with check_fields(path, "a table of events", DataError):
            self.dense, tables = int(content["dense"]), content["tables"]
            self.names = [str(table["name"]) for table in tables]
            self.rows, self.hotness = (tuple(int(table[name]) for table in tables) for name in ("rows", "hotness"))
            self.splits = {str(name): {"rows": int(split["rows"]), "positives": int(split["positives"])}
                           for name, split in content["splits"].items()}  # fmt: skip
        if not tables or min(self.dense, *self.rows, *self.hotness) < 1:
            raise DataError(f"{path}: numbers, rows and hotness must be 1 or more, and there must be a table")
        self.width = 1 + self.dense + sum(self.hotness)
        for name, split in self.splits.items():
            self._check_size(self.path(name), split["rows"])

    @property
    def row_bytes(self) -> int:
        return _WORD * self.width

    def path(self, split: str) -> Path:
        return self.folder / f"{split}.bin"

    def count(self, split: str) -> int:
        """Return the rows of a split. Raises DataError if there is none."""
        if split not in self.splits:
            raise DataError(f"{self.folder / TABLE}: has no split {split}; it has {', '.join(self.splits) or 'none'}")
        return self.splits[split]["rows"]

    def truth(self) -> dict[str, Array]:
        """Return what is known of the validation events of a simulation, by name; empty for other tables."""
        if not (path := self.folder / TRUTH).is_file():
            return {}
        with np.load(path, allow_pickle=False) as file:
            return {f"truth_{name}": file[name] for name in file}

    def mapped(self, split: str) -> Array:
        """Return all rows of a split, mapped.   [N, 1 + F + K] int32"""
        count = self.count(split)
        return np.memmap(self.path(split), "<i4", "r", shape=(count, self.width)) if count else np.empty((0, self.width), np.int32)

    def read(self, reader: Reader, split: str, first: int, end: int) -> tuple[Array, Array, Array]:
        """Return numbers, ids and labels of rows, read and checked.   [n, F], [n, K], [n]"""
        offset, size = first * self.row_bytes, (end - first) * self.row_bytes
        # At the same place within a page as in the file, so that a direct read copies nothing.
        buffer = reader.memory.allocate(size + ALIGN)[offset % ALIGN :][:size]
        reader.read([(self.path(split), offset, buffer)])
        return self.check(buffer.view("<i4").reshape(-1, self.width), self.path(split), first)

    def check(self, words: Array, path: Path, first: int = 0) -> tuple[Array, Array, Array]:
        """Return numbers, ids and labels of rows, of which ``first`` is the number in ``path``. Raises DataError with the row of a
        label that is not 0 or 1, of a number that is not finite, or of an id that its table does not have."""
        label, dense = words[:, 0].view("<f4"), words[:, 1 : 1 + self.dense].view("<f4")
        ids = words[:, 1 + self.dense :]
        if (wrong := np.flatnonzero((label != 0) & (label != 1))).size:
            raise DataError(f"{path}: row {first + wrong[0]:,} has the label {label[wrong[0]]:g}, expected 0 or 1")
        if not np.isfinite(dense).all():
            row, column = np.argwhere(~np.isfinite(dense))[0]
            raise DataError(f"{path}: row {first + row:,} has {dense[row, column]:g} as number {column}, expected a finite one")
        # As unsigned numbers, ids below -1 are beyond every table.
        if (beyond := (ids + np.int32(1)).view(np.uint32) > self._limits).any():
            row, column = np.argwhere(beyond)[0]
            table = int(np.searchsorted(np.cumsum(self.hotness), column, "right"))
            fault = f"{path}: row {first + row:,} has the id {ids[row, column]} in table {self.names[table]}"
            raise DataError(f"{fault}, expected 0 to {self.rows[table] - 1:,}, or -1 for none")
        return dense, ids, label

    @cached_property
    def _limits(self) -> Array:
        return np.repeat(np.array(self.rows, np.uint32), self.hotness)

    def _check_size(self, path: Path, rows: int) -> None:
        size = path.stat().st_size if path.is_file() else -1
        if size == rows * self.row_bytes:
            return
        if size < 0:
            raise DataError(f"{path}: is not there, but {TABLE} has it with {rows:,} rows; copy it, or make the data again")
        held, rest = divmod(size, self.row_bytes)
        content = f"no multiple of the {self.row_bytes} bytes of a row" if rest else f"{held:,} rows"
        raise DataError(f"{path}: has {size:,} bytes, {content}, but {TABLE} has {rows:,} rows; copy both again")
