"""One sample, one or several ``.npy`` files: volumes and images of any size."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from hpcai.data.direct import Reader
from hpcai.data.layout import Layout, finite, npy
from hpcai.data.readers import open_reader
from hpcai.errors import DataError

_KNOWN = 1 << 16  # files of which it is remembered where the values lie


class Files:
    """The samples of a folder, each in a file per field: ``fields`` maps a field to its file names with one ``*``, its dtype
    and its shape, None for any length: ``{"image": ("*_x.npy", "float32", (1, None, None, None)), ...}``.

    What stands for the star names the sample; samples are in the order of their names. Raises DataError for an empty folder, a
    sample that lacks a file, a damaged file, another dtype or shape, and values that are not finite.
    """

    def __init__(
        self, folder: str | Path, fields: Mapping[str, tuple[str, str, tuple[int | None, ...]]], remedy: str = "", *,
        reader: str | Reader = "auto", device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.fields, self.remedy = Path(folder), dict(fields), f"; {remedy}" if remedy else ""
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder{self.remedy}")
        there = {name: self._names(pattern) for name, (pattern, _, _) in self.fields.items()}
        self.names = sorted(set().union(*there.values()))
        if not self.names:
            raise DataError(f"{self.folder}: holds no {' or '.join(p for p, _, _ in self.fields.values())}{self.remedy}")
        for name, found in there.items():
            for sample in sorted(set(self.names) - found)[:1]:
                raise DataError(f"{self.folder}: sample {sample} lacks {self.fields[name][0].replace('*', sample)}{self.remedy}")
        self._known: dict[tuple[int, str], Layout] = {}
        if isinstance(reader, str):
            size = sum(path.stat().st_size for index in range(len(self)) for path in self.files(index).values())
            reader = open_reader(reader, size, str(self.folder), device)
        self.reader = reader

    def _names(self, pattern: str) -> set[str]:
        before, _, after = pattern.partition("*")
        return {path.name[len(before) : len(path.name) - len(after)] for path in self.folder.glob(pattern)}

    def __len__(self) -> int:
        return len(self.names)

    def files(self, index: int) -> dict[str, Path]:
        """The file of each field of sample ``index``."""
        return {name: self.folder / pattern.replace("*", self.names[index]) for name, (pattern, _, _) in self.fields.items()}

    def describe(self, index: int) -> str:
        return f"{self.folder.name}/{self.names[index]}"

    def read(self, index: int) -> dict[str, np.ndarray]:
        """Every field of one sample. Raises DataError when it cannot be read or holds a value that is not finite."""
        values = {}
        for name in self.fields:
            layout = self._known.get((index, name)) or self._look(index, name)
            value = layout.read(self.reader)
            if not finite(value):
                raise DataError(f"{layout.path}: holds NaN or infinity{self.remedy}")
            values[name] = value
        return values

    def close(self) -> None:
        self.reader.close()

    def _look(self, index: int, name: str) -> Layout:
        layout, (_, dtype, shape) = npy(self.files(index)[name]), self.fields[name]
        if len(layout.shape) != len(shape) or not all(want in (None, got) for want, got in zip(shape, layout.shape)):
            want_text = ", ".join("any" if n is None else str(n) for n in shape)
            raise DataError(f"{layout.path}: is {layout.shape}, expected ({want_text}){self.remedy}")
        if layout.dtype != np.dtype(dtype):
            raise DataError(f"{layout.path}: is {layout.dtype}, expected {np.dtype(dtype)}{self.remedy}")
        if len(self._known) < _KNOWN:
            self._known[index, name] = layout
        return layout
