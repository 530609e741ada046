"""The files of a data set, and their entries in index.json."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, StrictBool, ValidationError, field_validator

from hpcai.cli.check.findings import Finding, finding
from hpcai.cli.check.inspection import Bounds, Inspection, widest
from hpcai.cli.check.inspection import DatasetInfo as Dataset
from hpcai.data.index import INDEX, read_index
from hpcai.data.table import Table, read_table
from hpcai.errors import DataError

SPLITS = ("train", "validation", "test")
SUFFIXES = (".h5", ".npy")
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]


class Entry(BaseModel):
    """A file in an index; None if not given."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$")] = "-"
    rows: Count | None = None
    bytes: Count | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None


class ExpectedField(Bounds):
    """A dataset in the "fields" of an index. None in a shape allows any length; a name as its first length is the dataset with the
    lengths of ragged rows, which are concatenated."""

    dtype: str | None = None
    shape: list[Count | str | None] | None = None
    key: StrictBool = False

    @field_validator("dtype")
    @classmethod
    def _dtype(cls, value: str | None) -> str | None:
        try:
            return None if value is None else np.dtype(value).str
        except TypeError as error:
            raise ValueError(str(error)) from error

    @property
    def ragged_by(self) -> str | None:
        return self.shape[0] if self.shape and isinstance(self.shape[0], str) else None


class IndexContent(BaseModel):
    """The parts of an index that a check reads."""

    files: list[Entry]
    fields: dict[str, ExpectedField] = {}

    @field_validator("files")
    @classmethod
    def _names(cls, files: list[Entry]) -> list[Entry]:
        names = [file.name for file in files]
        if duplicate := next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None:
            raise ValueError(f"{duplicate[:50]!r} is named twice")
        return files


@dataclass
class DataFile:
    """A file and its inspection. ``complete``: It could be described, and has the expected size."""

    path: Path
    split: "Split"
    entry: Entry
    size: int = 0
    inspection: Inspection = field(default_factory=lambda: Inspection([]))
    complete: bool = False
    verified: bool = False
    rows: int = 0

    @property
    def fields(self) -> list[Dataset]:
        return self.inspection.fields

    @property
    def widest(self) -> Dataset | None:
        """The dataset whose rows represent the samples."""
        return None if self.split.ragged else widest(self.fields)


@dataclass
class Split:
    """A folder of files. ``index`` is the content of index.json; ``file_numbers`` are the positions of its files."""

    name: str
    path: Path
    files: list[DataFile] = field(default_factory=list)
    index: dict[str, Any] | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    expected: dict[str, ExpectedField] = field(default_factory=dict)
    table: Table | None = None
    file_numbers: dict[str, int] = field(default_factory=dict)

    @property
    def ragged(self) -> set[str]:
        """Datasets with the concatenated parts of all rows."""
        return {name for name, field in self.expected.items() if field.ragged_by is not None}

    @property
    def keys(self) -> set[str] | None:
        """Datasets that identify samples; None for the one with the widest rows."""
        return set() if self.ragged else {name for name, field in self.expected.items() if field.key} or None

    def bounds(self, ranges: Mapping[str, Any]) -> dict[str, Bounds]:
        """Return the allowed values of each dataset; ``ranges`` override the index."""
        limits = {name: {"low": low, "high": high} for name, (low, high) in ranges.items()}
        return {**self.expected, **{name: self.expected.get(name, Bounds()).model_copy(update=x) for name, x in limits.items()}}

    def row_shape(self, data: Dataset) -> tuple[Any, ...] | str:
        """Return the shape of a row, with None where the index allows any length."""
        shape, expected = data.shape[1:], self.expected.get(data.name, ExpectedField()).shape or []
        expected = expected[1:] if expected and isinstance(expected[0], str) else expected
        if data.kind == "scalar":
            return "scalar"
        return tuple(None if want is None else n for n, want in zip(shape, expected)) if len(expected) == len(shape) else shape


def find_splits(directory: Path) -> tuple[list[Split], list[Finding]]:
    """Return the splits with their files, and findings about the list of files. Raises DataError if there is no such folder."""
    if not directory.is_dir():
        raise DataError(f"{directory}: no such folder; name the folder of a data set, which holds train, validation, test or *.h5")
    splits, findings = list[Split](), list[Finding]()
    for folder in [directory, *sorted(p for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))]:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            findings.append(finding("unreadable", folder, why=f"cannot be listed: {error.strerror}"))
            continue
        files = [name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
        split = Split("." if folder == directory else folder.name, folder)
        if files or INDEX in names or (folder != directory and folder.name in SPLITS):
            splits.append(split)
            findings += [*_read_index(split), *_match_files(split, files)]
        elif folder != directory:
            continue
        findings += [finding("leftover", folder / name) for name in names if name.endswith(".partial")]
    if not splits:
        reason = f"holds neither *.h5 nor *.npy nor a folder with any ({', '.join(SPLITS)})"
        findings.append(finding("empty", directory, why=reason))
    splits.sort(key=lambda s: (SPLITS.index(s.name) if s.name in SPLITS else len(SPLITS), s.name))
    return splits, findings


def _read_index(split: Split) -> Iterator[Finding]:
    path = split.path / INDEX
    try:
        text = path.read_bytes()
        content = IndexContent.model_validate_json(text)
    except FileNotFoundError:
        yield finding("index/none", path, repairable=True)
        return
    except OSError as problem:
        yield finding("index", path, why=problem.strerror)
        return
    except ValidationError as problem:
        for error in problem.errors()[:5]:
            location = ".".join(map(str, error["loc"]))
            repairable = error["loc"] in ((), ("files",)) and error["type"] != "value_error"
            kind = "index/lost" if repairable else "index"
            yield finding(kind, path, repairable=repairable, why=f"{location or 'JSON'}: {error['msg']}")
        return
    split.index, split.expected = json.loads(text), content.fields
    split.entries = {entry.name: entry for entry in content.files}
    if "table" in split.index:
        try:
            _, files, table_entry = read_index(path)
            split.table = read_table(split.path, table_entry, files) if table_entry is not None else None
            split.file_numbers = {file.name: number for number, file in enumerate(files)}
        except DataError as problem:
            reason = str(problem).removeprefix(f"{path}: ").removeprefix(f"{split.path}/").partition("; write it with")[0]
            yield finding("index/table", path, repairable=True, why=reason)


def _match_files(split: Split, names: list[str]) -> Iterator[Finding]:
    for name in names:
        split.files.append(file := DataFile(split.path / name, split, split.entries.get(name, Entry())))
        with suppress(OSError):
            file.size = file.path.stat().st_size
        if split.index is not None and name not in split.entries:
            yield finding("stranger", file.path)
    for name in split.entries.keys() - set(names):
        path = split.path / name
        if name.endswith(SUFFIXES) or not path.exists():  # other suffixes are other formats
            yield finding("missing", path)
    if not split.files:
        yield finding("empty", split.path, why="holds neither *.h5 nor *.npy")
