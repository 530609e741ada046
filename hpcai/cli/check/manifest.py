"""What is there, and what index and records say should be."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.cli.check.findings import Finding, finding
from hpcai.cli.check.tally import Tally
from hpcai.data.direct import ALIGN
from hpcai.data.index import INDEX, read_index
from hpcai.data.table import Table, read_table
from hpcai.errors import DataError

SPLITS = ("train", "validation", "test")
ENDINGS = (".h5", ".npy")
_MOST_FILL = 64 << 20  # bytes of values that no chunk of the file holds


@dataclass
class Entry:
    """What a manifest says of a file; None where it says nothing."""

    rows: int | None = None
    bytes: int | None = None
    sha256: str | None = None
    lengths: dict[str, int | None] = field(default_factory=dict)


@dataclass
class Field:
    """A dataset, as a child process describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    plain: bool
    item: int
    kind: str
    offset: int = 0
    why: str = ""
    chunk: tuple[int, ...] = ()
    grid: int = 0
    written: int = 0
    stored: int = 0
    on_pages: float = 0.0  # of the rows of a chunked one

    def __post_init__(self) -> None:
        self.shape, self.chunk = tuple(self.shape), tuple(self.chunk)

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.item

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item

    @property
    def type(self) -> np.dtype:
        return np.dtype(self.dtype) if self.plain else np.dtype(f"V{self.item}")

    @property
    def unwritten(self) -> bool:
        return self.kind in ("chunked", "filtered") and self.written < self.grid

    @property
    def readable(self) -> bool:
        """Whether values can be read, and as many as the file may hold."""
        if self.kind in ("chunked", "filtered"):
            return self.nbytes <= 4 * self.written * self.item * math.prod(self.chunk) + _MOST_FILL
        return self.kind in ("contiguous", "compact", "userblock")

    @property
    def aligned(self) -> float:
        """The fraction of rows that begin on a page."""
        if self.kind != "contiguous":
            return self.on_pages
        rows = np.arange(max(1, min(self.shape[0], ALIGN)))  # beyond that it repeats
        return float(((self.offset + rows * (self.width % ALIGN)) % ALIGN == 0).mean())

    def extra(self, offset: int) -> float:
        """Bytes read for pages that hold no byte of a row, over those of rows, where the dataset lies at ``offset``."""
        rows = np.arange(min(self.shape[0], 4096), dtype=np.float64) * self.width  # beyond that it repeats, or nearly
        first, last = (rows + offset) // ALIGN, np.ceil((rows + offset + self.width) / ALIGN)
        return float((last - first).mean()) * ALIGN / self.width - 1


@dataclass
class SetFile:
    path: Path
    split: "Split"
    size: int = 0
    entry: Entry = field(default_factory=Entry)
    fields: list[Field] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    picked: list[int] = field(default_factory=list)  # rows, where only some are read
    whole: bool = False  # described, and of the size that it should have
    verified: bool = False
    rows: int = 0

    @property
    def flat(self) -> dict[str, str]:
        """Datasets that hold the parts of all rows one after another, and the dataset that counts each row's."""
        return {name: want["parts"] for name, want in self.split.wanted.items() if "parts" in want}

    @property
    def largest(self) -> Field | None:
        """The dataset whose rows stand for the samples."""
        rows = [f for f in self.fields if f.readable and f.width] if not self.flat else []
        return max(rows, key=lambda f: (f.width, f.name)) if rows else None

    @property
    def key(self) -> Field | None:
        """The dataset by which samples are told apart: which the index says is it, otherwise the largest."""
        named = (f for f in self.fields if f.readable and f.width and self.split.wanted.get(f.name, {}).get("key"))
        return self.largest if self.flat else next(named, self.largest)


@dataclass
class Split:
    name: str
    path: Path
    files: list[SetFile] = field(default_factory=list)
    index: dict[str, Any] | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    wanted: dict[str, dict[str, Any]] = field(default_factory=dict)
    table: Table | None = None
    numbers: dict[str, int] = field(default_factory=dict)  # of files in the table

    def open_shape(self, data: Field) -> tuple[int | None, ...]:
        """The shape of a row, with None where the index allows any length."""
        shape, told = data.shape[1:], self.wanted.get(data.name, {}).get("shape", ())
        return tuple(None if want is None else got for want, got in zip(told, shape)) if len(told) == len(shape) else shape


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:50]!r} is no count")
    return value


def _entry(told: Any) -> tuple[str, Entry]:
    """Name and entry of one of "files". Raises ValueError."""
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        raise ValueError("has no name")
    name, sha, lengths = told["name"], told.get("sha256"), told.get("lengths") or {}
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"name {name[:50]!r} is not that of a file in this folder")
    if sha is not None and not (isinstance(sha, str) and len(sha) == 64 and set(sha.lower()) <= set("0123456789abcdef")):
        raise ValueError(f"{name[:50]!r}: sha256 {str(sha)[:20]!r} is not 64 hexadecimal digits")
    if not isinstance(lengths, dict):
        raise ValueError(f"{name[:50]!r}: lengths is a {type(lengths).__name__}, expected an object")
    counts = {key: _count(value) for key, value in lengths.items()}
    return name, Entry(_count(told.get("rows")), _count(told.get("bytes")), sha.lower() if sha else None, counts)


def json_of(path: Path) -> Any:
    """Raises OSError, and ValueError for what is not JSON."""
    if path.stat().st_size > 1 << 30:
        raise ValueError("is larger than 1 GiB")
    try:
        return json.loads(path.read_bytes())
    except RecursionError as problem:
        raise ValueError("is nested too deeply") from problem


def _read_index(split: Split) -> Iterator[Finding]:
    path = split.path / INDEX
    try:
        index = json_of(path)
    except FileNotFoundError:
        yield finding("index/none", path, repairable=True)
        return
    except (OSError, ValueError) as problem:
        yield finding("index/json", path, repairable=True, why=str(problem)[:200])
        return
    if not isinstance(index, dict) or not isinstance(index.get("files"), list):
        keys = ", ".join(list(index)[:9]) if isinstance(index, dict) else ""
        found = f"an object with {keys or 'no keys'}" if isinstance(index, dict) else f"a {type(index).__name__}"
        yield finding("index/files", path, repairable=True, found=found)
        return
    split.index = index
    for number, told in enumerate(index["files"]):
        try:
            name, entry = _entry(told)
            if name in split.entries:
                raise ValueError(f"names {name[:50]!r} a second time")
            split.entries[name] = entry
        except ValueError as problem:
            yield finding("index/entry", path, number=number, why=problem)
    yield from _read_table(split)
    fields = index.get("fields", {})
    if not isinstance(fields, dict):
        yield finding("index/fields", path, why=f"is a {type(fields).__name__}, expected an object by dataset")
        return
    for name, want in fields.items():
        try:
            split.wanted[name] = _wanted(want)
        except (ValueError, TypeError) as problem:
            yield finding("index/fields", path, name, why=f"of '{name}': {str(problem)[:200]}")


def _read_table(split: Split) -> Iterator[Finding]:
    path = split.path / INDEX
    try:
        _, files, told = read_index(path)
        split.table = read_table(split.path, told, files) if told is not None else None
        split.numbers = {file.name: number for number, file in enumerate(files)}
    except DataError as problem:
        if split.index and "table" in split.index:
            why = str(problem).removeprefix(f"{path}: ").removeprefix(f"{split.path}/").partition("; write it with")[0]
            yield finding("index/table", path, repairable=True, why=why)


def _wanted(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ValueError(f"is a {type(told).__name__}, expected an object with dtype, shape, low, high, blank, key")
    found: dict[str, Any] = {"key": told.get("key", False)}
    if not isinstance(found["key"], bool):
        raise ValueError(f"key is {str(found['key'])[:50]!r}, expected true or false")
    if told.get("dtype") is not None:
        found["dtype"] = np.dtype(told["dtype"])
    if told.get("shape") is not None:
        first, *rest = told["shape"] or [None]
        if isinstance(first, str):
            found["parts"], told = first, {**told, "shape": rest}
        found["shape"] = tuple(_count(n) for n in told["shape"])
    for key in ("low", "high", "blank"):  # blank: the value that may fill a whole row
        value = told.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            raise ValueError(f"{key} is {str(value)[:50]!r}, expected a number or null")
        found[key] = value
    return found


def record_of(path: Path) -> Path:
    return path.parent / ".records" / f"{path.name}.json"


def _record(path: Path) -> Entry | None:
    with suppress(OSError, ValueError, TypeError):
        return _entry(json_of(record_of(path)) | {"name": path.name})[1]
    return None


def splits_in(directory: Path) -> tuple[list[Split], list[Finding]]:
    """The splits with their files, and what is wrong about that alone. Raises DataError when there is no such folder."""
    if not directory.is_dir():
        raise DataError(f"{directory}: no such folder; name the folder of a data set, which holds train, validation, test or *.h5")
    splits, findings = list[Split](), list[Finding]()
    try:
        folders = [directory, *sorted(p for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))]
    except OSError as problem:
        raise DataError(f"{directory}: cannot be listed: {problem.strerror}") from problem
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError as problem:
            findings.append(finding("unreadable/folder", folder, why=problem.strerror))
            continue
        whole = [name for name in names if name.endswith(ENDINGS) and not name.startswith(".")]
        split = Split("." if folder == directory else folder.name, folder)
        if whole or INDEX in names or (folder != directory and folder.name in SPLITS):
            splits.append(split)
            findings += [*_read_index(split), *_matched(split, whole)]
        elif folder != directory:
            continue
        findings += _leftovers(split, names)
    if not splits:
        findings.append(finding("empty/set", directory, splits=", ".join(SPLITS)))
    splits.sort(key=lambda s: (SPLITS.index(s.name) if s.name in SPLITS else len(SPLITS), s.name))
    return splits, findings


def _matched(split: Split, names: list[str]) -> Iterator[Finding]:
    for name in names:
        path = split.path / name
        known = split.entries.get(name) if split.index is not None else _record(path)
        split.files.append(SetFile(path, split, entry=known or Entry()))
        if split.index is not None and known is None:
            yield finding("stranger", path)
    for name in split.entries.keys() - set(names):
        path = split.path / name
        if name.endswith(ENDINGS) or not path.exists():  # others are of another format
            yield finding("missing", path)
    if not split.files:
        yield finding("empty/split", split.path)


def _leftovers(split: Split, names: list[str]) -> Iterator[Finding]:
    with suppress(OSError):
        names = names + [f".records/{name}" for name in os.listdir(split.path / ".records")]
    for path in (split.path / name for name in names if name.endswith(".partial")):
        if not path.is_file():
            continue
        name = path.name.removeprefix(".").removesuffix(".partial")
        entry = split.entries.get(name)
        if entry is not None and entry.sha256 and entry.bytes == path.stat().st_size:
            yield finding("leftover/whole", path, repairable=True, name=name)
        else:
            yield finding("leftover", path)
