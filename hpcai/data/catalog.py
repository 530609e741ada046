"""The catalog of a folder of HDF5 files, read without opening them.   F files"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.data.index import INDEX, read_index
from hpcai.data.table import Table, read_table, signature
from hpcai.errors import DataError


@dataclass(frozen=True)
class Catalog:
    """The files of a folder, with sizes and numbers of rows (None without an index). ``metadata``: the contents of the index;
    ``table``: the layouts of the files, if the index has a table; ``shapes``: of a row of the first file, once it is inspected."""

    names: list[str]
    sizes: np.ndarray  # [F]
    rows: np.ndarray | None  # [F]
    metadata: dict[str, Any]
    table: Table | None = None
    shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def identity(self) -> str:
        """A string that is equal for equal files in any folder: numbers of files and rows, and a hash of names, rows and sizes."""
        rows = (np.zeros_like(self.sizes) if self.rows is None else self.rows).tolist()
        digest = signature(zip(self.names, rows, self.sizes.tolist()))
        return f"{len(rows)} files, {sum(rows)} rows, {digest.hexdigest()[:12]}"


def read_catalog(folder: Path, datasets: Collection[str], remedy: str = "") -> Catalog:
    """Return the catalog of a folder, by its index and a listing, or without an index by a listing with sizes. Only ``datasets``
    are read from the table. Raises DataError for a missing file, and for a folder without files."""
    try:
        existing = set(os.listdir(folder))
    except OSError as problem:
        reason = "no such folder" if isinstance(problem, FileNotFoundError | NotADirectoryError) else problem.strerror
        raise DataError(f"{folder}: {reason}{remedy}") from problem
    metadata, files, table = read_index(folder / INDEX, remedy) if INDEX in existing else ({}, [], None)
    if not files:
        names = sorted(name for name in existing if name.endswith(".h5"))
        if not names:
            raise DataError(f"{folder}: holds no *.h5 file{remedy}")
        try:
            sizes = [(folder / name).stat().st_size for name in names]
        except OSError as problem:
            raise DataError(f"{problem.filename}: cannot be read: {problem.strerror}{remedy}") from problem
        return Catalog(names, np.array(sizes, np.int64), None, metadata)
    for file in files:
        if file.name not in existing:
            expected = f"{INDEX} has {file.bytes:,} bytes and {file.rows} rows"
            raise DataError(f"{folder / file.name}: is missing, {expected}{remedy}")
    return Catalog(
        [file.name for file in files], np.array([file.bytes for file in files], np.int64),
        np.array([file.rows for file in files], np.int64), metadata,
        read_table(folder, table, files, datasets) if table is not None else None,
    )  # fmt: skip
