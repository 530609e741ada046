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

from hpcai.data.direct import ALIGN
from hpcai.data.doctor.findings import INDEX, JOURNAL, Finding
from hpcai.data.doctor.tally import _BOX, Tally
from hpcai.errors import DataError

SPLITS = ("train", "validation", "test")
ENDINGS = (".h5", ".npy")


# ---- the manifest


@dataclass
class _Entry:
    """What a manifest says of a file; None where it says nothing."""

    rows: int | None = None
    bytes: int | None = None
    sha256: str | None = None
    lengths: dict[str, int | None] = field(default_factory=dict)


@dataclass
class Field:
    """A dataset: what ``describe`` tells."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    plain: bool
    item: int
    kind: str
    offset: int | None = None
    why: str = ""
    chunk: tuple[int, ...] = ()
    grid: int = 0
    written: int = 0
    stored: int = 0
    aligned: float | None = None

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.item

    @property
    def type(self) -> np.dtype:
        return np.dtype(self.dtype) if self.plain else np.dtype(f"V{self.item}")

    @property
    def unwritten(self) -> bool:
        return self.kind in ("chunked", "filtered") and self.written < self.grid

    @property
    def readable(self) -> bool:
        """Whether values can be read, and as many as the file may hold."""
        if self.kind not in ("contiguous", "chunked", "filtered", "compact", "userblock"):
            return False
        there = self.written * self.item * math.prod(self.chunk)
        return self.kind not in ("chunked", "filtered") or math.prod(self.shape) * self.item <= 4 * there + _BOX

    def extra(self) -> tuple[float, float]:
        """Bytes read for pages that hold no byte of a row, over those of rows: as the dataset lies, and as it best would."""
        if self.kind != "contiguous" or self.offset is None or not self.width or not self.shape[0]:
            return 0.0, 0.0
        rows = np.arange(min(self.shape[0], 4096), dtype=np.float64) * self.width  # beyond that it repeats, or nearly

        def over(offset: int) -> float:
            first, last = (rows + offset) // ALIGN, np.ceil((rows + offset + self.width) / ALIGN)
            return float((last - first).mean()) * ALIGN / self.width - 1

        return over(self.offset), over(0)


@dataclass
class SetFile:
    path: Path
    split: "Split"
    size: int = 0
    entry: _Entry | None = None
    later: _Entry | None = None
    fields: list[Field] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    picked: list[int] | None = None
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


@dataclass
class Split:
    name: str
    path: Path
    files: list[SetFile] = field(default_factory=list)
    index: dict[str, Any] | None = None
    entries: dict[str, _Entry] = field(default_factory=dict)
    wanted: dict[str, dict[str, Any]] = field(default_factory=dict)
    journal: dict[str, _Entry] = field(default_factory=dict)

    def open_shape(self, data: Field) -> tuple[int | None, ...]:
        """Of a row, with None where the index allows any length."""
        shape, told = data.shape[1:], self.wanted.get(data.name, {}).get("shape", ())
        return tuple(None if want is None else got for want, got in zip(told, shape)) if len(told) == len(shape) else shape


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:50]!r} is no count")
    return value


def entry_in(told: Any) -> tuple[str, _Entry]:
    """Name and entry of one of "files". Raises ValueError."""
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        raise ValueError("has no name")
    name, sha = told["name"], told.get("sha256")
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"name {name[:50]!r} is not that of a file in this folder")
    if sha is not None and not (isinstance(sha, str) and len(sha) == 64 and set(sha.lower()) <= set("0123456789abcdef")):
        raise ValueError(f"{name[:50]!r}: sha256 {str(sha)[:20]!r} is not 64 hexadecimal digits")
    lengths = told.get("lengths") or {}
    if not isinstance(lengths, dict):
        raise ValueError(f"{name[:50]!r}: lengths is a {type(lengths).__name__}, expected an object")
    counts = {key: _count(value) for key, value in lengths.items()}
    return name, _Entry(_count(told.get("rows")), _count(told.get("bytes")), sha.lower() if sha else None, counts)


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
    again = "--repair makes it again from the files; what it said of them is lost, so compare them with their source first"
    try:
        index = json_of(path)
    except FileNotFoundError:
        text = "is not there, so nothing tells of truncated, damaged or missing files; --repair makes it from the files as they are"
        yield Finding("warning", "index", path, text, repairable=True)
        return
    except (OSError, ValueError) as problem:
        yield Finding("error", "index", path, f"cannot be read as JSON ({str(problem)[:200]}); {again}", repairable=True)
        return
    if not isinstance(index, dict) or not isinstance(index.get("files"), list):
        keys = ", ".join(list(index)[:9]) if isinstance(index, dict) else ""
        found = f"an object with {keys or 'no keys'}" if isinstance(index, dict) else f"a {type(index).__name__}"
        yield Finding("error", "index", path, f"is {found}, expected an object with a list 'files'; {again}", repairable=True)
        return
    split.index = index
    for number, told in enumerate(index["files"]):
        try:
            name, entry = entry_in(told)
            if name in split.entries:
                raise ValueError(f"names {name[:50]!r} a second time")
            split.entries[name] = entry
        except ValueError as problem:
            text = f"entry {number} of 'files' {problem}; --repair makes it again from the files"
            yield Finding("error", "index", path, text, repairable=True)
    fields = index.get("fields", {})
    if not isinstance(fields, dict):
        text = f"'fields' is a {type(fields).__name__}, expected an object by dataset; correct it by hand"
        yield Finding("error", "index", path, text)
        return
    for name, want in fields.items():
        try:
            split.wanted[name] = _wanted(want)
        except (ValueError, TypeError) as problem:
            yield Finding("error", "index", path, f"'fields' of '{name}': {str(problem)[:200]}; correct it by hand", name)


def _wanted(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ValueError(f"is a {type(told).__name__}, expected an object with dtype, shape, low, high, blank")
    found: dict[str, Any] = {}
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


def _read_journal(split: Split) -> Iterator[Finding]:
    path = split.path / JOURNAL
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError, RecursionError):  # the last line may be cut
            name, entry = entry_in(json.loads(line))
            split.journal[name] = entry
    text = f"an earlier --repair was stopped before it renewed {INDEX}; repeat --repair"
    yield Finding("warning", "leftover", path, text, repairable=True)


def _record(path: Path) -> _Entry | None:
    with suppress(OSError, ValueError):
        return entry_in(json_of(path.parent / ".records" / f"{path.name}.json") | {"name": path.name})[1]
    return None


def splits_in(directory: Path) -> Iterator[Split | Finding]:
    """The splits with their files, and what is wrong about that alone. Raises DataError when there is no such folder."""
    if not directory.is_dir():
        raise DataError(f"{directory}: no such folder; name the folder of a data set, which holds train, validation, test or *.h5")
    try:
        folders = [directory, *sorted(p for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))]
    except OSError as problem:
        raise DataError(f"{directory}: cannot be listed: {problem.strerror}") from problem
    splits = []
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError as problem:
            yield Finding("error", "unreadable", folder, f"cannot be listed: {problem.strerror}; look at its permissions")
            continue
        whole = [name for name in names if name.endswith(ENDINGS) and not name.startswith(".")]
        if whole or INDEX in names or (folder != directory and folder.name in SPLITS):
            split = Split("." if folder == directory else folder.name, folder)
            splits.append(split)
            yield from _read_index(split)
            yield from _read_journal(split)
            yield from _matched(split, whole)
            yield from _leftovers(folder, names)
        elif folder == directory:
            yield from _leftovers(folder, names)
    if not splits:
        text = f"holds neither *.h5 nor *.npy nor a folder with any ({', '.join(SPLITS)}); make the data set first"
        yield Finding("error", "empty", directory, text)
    yield from sorted(splits, key=lambda s: (SPLITS.index(s.name) if s.name in SPLITS else len(SPLITS), s.name))


def _matched(split: Split, names: list[str]) -> Iterator[Finding]:
    for name in names:
        file = SetFile(split.path / name, split, entry=split.entries.get(name), later=split.journal.get(name))
        split.files.append(file)
        if file.entry is None and split.index is None:
            file.entry = _record(file.path)
        elif file.entry is None:
            text = f"is not in {INDEX}, so a loader may leave it out; delete it, or let --repair add it"
            yield Finding("warning", "stranger", file.path, text, repairable=True)
    for name in split.entries.keys() - set(names):
        path = split.path / name
        if not name.endswith(ENDINGS) and path.exists():
            continue  # of another format
        text = f"is in {INDEX} and not in the folder; copy it again from its source, or drop it there: --repair --accept {name}"
        yield Finding("error", "missing", path, text)
    if not split.files:
        yield Finding("error", "empty", split.path, "holds neither *.h5 nor *.npy; make the split or delete it")


def _leftovers(folder: Path, names: list[str]) -> Iterator[Finding]:
    text = "was left by a process that ended early; --repair removes it"
    with suppress(OSError):
        names = names + [f".records/{name}" for name in os.listdir(folder / ".records")]
    for name in names:
        if name.endswith(".partial") and (folder / name).is_file():
            yield Finding("warning", "leftover", folder / name, text, repairable=True)
