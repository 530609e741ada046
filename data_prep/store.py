"""The files of a prepared data set, and the work of making them: many files, each made once, by any number of processes.

    OUT/recipe.json             the settings that decide every value; a run with other settings is refused
    OUT/<split>/<name>.h5       datasets of R rows each, contiguous
    OUT/<split>/.records/       one JSON text per finished file: rows, size, SHA-256, sums; what a resumed run trusts
    OUT/<split>/index.json      written when all files are there; where samples vary in shape, each of "files" has its "shape"
    OUT/statistics.json         moments per split, and the settings

A dataset may also be flat: the parts of all rows one after the other, where another dataset tells the length of each part. Its
shape then begins with the name of that dataset, and each of "files" has the sum as one of its "lengths".

A workload says by Contents what the datasets are and what is measured of them, and by Job how a file is made.

Ranks share nothing but the folder: rank r of n makes every n-th file, and rank 0 waits for the files of the others. No MPI call
is needed for that, so the same code runs under mpiexec, srun or alone.
"""

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import hpcai
from hpcai.data.index import INDEX, settle, write_index, write_json
from hpcai.dist.environment import place
from hpcai.errors import ConfigError, DataError

SPLITS = ("train", "validation", "test")
PATIENCE = 1800.0                               # seconds without a new file from any other rank before rank 0 gives up
Record = dict[str, Any]
Layouts = Mapping[str, tuple[Any, Sequence[Any]]]       # of datasets: type, shape of a row


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Contents:
    """What the files of a folder hold."""

    sample: str                                                     # the dataset whose rows have the shape of a sample
    fields: Callable[[list[Any], dict[str, Any]], dict[str, Any]] = _nothing    # shape and header to what the index says of each
    measure: Callable[[h5py.File], dict[str, Any]] = _nothing       # sums of a file, for its record
    merge: Callable[[Sequence[Record]], dict[str, Any]] = _nothing  # statistics of a split, from its records
    varies: bool = False                                            # each file has samples of a shape of its own
    parts: tuple[str, ...] = ()                                     # the datasets that tell how flat ones are cut
    across: Callable[[Path, dict[str, Any], dict[str, Any]], None] | None = None    # adds to statistics what no split tells alone


def fields_of(
    layouts: Layouts, ranges: Mapping[str, tuple[float | None, float | None]]
) -> Callable[[list[Any], dict[str, Any]], dict[str, Any]]:
    """``Contents.fields`` of datasets that are alike in all files: type, shape of a row, least and greatest value where known."""
    found: dict[str, Any] = {}
    for name, (dtype, row) in layouts.items():
        bounds = zip(("low", "high"), ranges.get(name, ()))
        found[name] = {"dtype": dtype, "shape": list(row), **{side: at for side, at in bounds if at is not None}}
    return partial(_alike, found)


def _alike(found: dict[str, Any], shape: list[Any], header: dict[str, Any]) -> dict[str, Any]:
    return found


@dataclass(frozen=True)
class Job:
    """A file to be made, perhaps by another process, to which all of this is sent."""

    path: Path
    write: Callable[[Path], object]
    contents: Contents
    rows: int | None = None                     # where they are known before
    recipe: str | None = None                   # a file that states it is not written again when its record is lost


# ---- one file


@contextmanager
def rows_file(
    path: Path, rows: int, datasets: Layouts, attributes: dict[str, Any], lengths: Mapping[str, int] | None = None,
) -> Iterator[h5py.File]:  # fmt: skip
    """A new file with room for the rows of each dataset, given as dtype and shape of a row: written beside its place, flushed to
    the disk and renamed, or not there at all. A shape that begins with one of the named lengths is that of a flat dataset."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Data on a page boundary can be read past the page cache.
        with h5py.File(partial, "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            for name, (dtype, shape) in datasets.items():
                file.create_dataset(name, _whole(rows, shape, lengths or {}), dtype)
            file.attrs.update({**attributes, "version": hpcai.__version__})
            yield file
        settle(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _whole(rows: int, shape: Sequence[Any], lengths: Mapping[str, int]) -> tuple[Any, ...]:
    """The shape of a dataset, from that of a row."""
    return (lengths.get(shape[0]), *shape[1:]) if _is_flat(shape) else (rows, *shape)


def _is_flat(shape: Sequence[Any]) -> bool:
    return bool(shape) and isinstance(shape[0], str)


def write_rows(path: Path, layouts: Layouts, rows: Sequence[Mapping[str, Any]], attributes: dict[str, Any]) -> None:
    """A file of the values of each row, which may have more of them than the file; the lengths of what is flat are among them."""
    lengths = {shape[0]: sum(row[shape[0]] for row in rows) for _, shape in layouts.values() if _is_flat(shape)}
    with rows_file(path, len(rows), layouts, attributes, lengths) as file:
        for name, (dtype, shape) in layouts.items():
            if not _is_flat(shape):
                file[name][...] = np.array([row[name] for row in rows], dtype)
                continue
            begin = 0
            for row in rows:
                end = begin + row[shape[0]]
                file[name][begin:end] = np.reshape(row[name], (end - begin, *shape[1:])).astype(dtype)
                begin = end


def read_rows(file: h5py.File, layouts: Layouts, first: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows from ``first`` to ``end`` of a file, each with its part of what is flat."""
    columns = []
    for name, (_, shape) in layouts.items():
        if _is_flat(shape):
            cuts = np.append(0, np.cumsum(file[shape[0]][:end], dtype=np.int64))[first:]
            columns.append(np.split(file[name][cuts[0] : cuts[-1]], cuts[1:-1] - cuts[0]))
        else:
            columns.append(file[name][first:end])
    return (dict(zip(layouts, row)) for row in zip(*columns))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: not there; finish the run that writes this folder, or name another folder") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); delete it and repeat the run that wrote it") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: a JSON {type(content).__name__}, expected an object; delete it and repeat the run that wrote it")
    return content


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record_path(path: Path) -> Path:
    return path.parent / ".records" / f"{path.name}.json"


def write_record(path: Path, contents: Contents) -> Record:
    """The record of a finished file, from the file."""
    with h5py.File(path, "r") as file:
        record: Record = {
            "name": path.name,
            "rows": file[contents.sample].shape[0],
            "bytes": path.stat().st_size,
            "sha256": digest(path),
            "shape": list(file[contents.sample].shape[1:]),
            "sums": contents.measure(file),
            **({"lengths": {name: int(file[name][...].sum()) for name in contents.parts}} if contents.parts else {}),
        }
    write_json(_record_path(path), record)
    return record


def make_file(job: Job) -> None:
    """Writes the file, if it is not whole, and its record."""
    if job.recipe is None or not _is_made(job, job.recipe):
        job.write(job.path)
    write_record(job.path, job.contents)


def finished(job: Job) -> bool:
    """Whether the file is there, with the rows that it should have, of the size that its record states."""
    record = _record_path(job.path)
    if not (job.path.is_file() and record.is_file()):
        return False
    stated = read_json(record)
    return stated.get("bytes") == job.path.stat().st_size and job.rows in (None, stated.get("rows"))


def _is_made(job: Job, recipe: str) -> bool:
    """Whether a file without a fitting record is whole all the same: of this recipe, with all its rows if they are known."""
    try:
        with h5py.File(job.path, "r") as file:
            return bool(file.attrs.get("recipe") == recipe and job.rows in (None, file[job.contents.sample].shape[0]))
    except (OSError, KeyError):
        return False


# ---- one folder


def generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """Random numbers that are a pure function of three numbers."""
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence([seed, stream, index])))


def split_of(index: int, seed: int, validation: float, test: float) -> str:
    """One of every 1/held neighbours is held out, so that n of them hold n * fraction of a split, give or take one. Which one is
    random, drawn from stream 0 for each block; a periodic choice could follow a period of the data."""
    held, part = (Fraction(f).limit_denominator(10**6) for f in (validation + test, test))
    if not held:
        return "train"
    block = math.floor(index * held)
    first, end = math.ceil(block / held), math.ceil((block + 1) / held)
    if index != first + int(generator(seed, 0, block).integers(end - first)):
        return "train"
    share = part / held
    return "test" if math.floor((block + 1) * share) > math.floor(block * share) else "validation"


def claim(out: Path, recipe: dict[str, Any]) -> None:
    """Takes an empty folder, or one that was begun with the same recipe."""
    path = out / "recipe.json"
    # This must be asked first: another rank writes its recipe before it makes a split.
    begun = any((out / split).exists() for split in SPLITS)
    if not path.is_file():
        if begun:
            raise ConfigError(f"{out}: holds train, validation or test, made otherwise (no recipe.json); choose a new folder")
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, recipe)
        return
    before = read_json(path)
    keys = [key for key in {**before, **recipe} if before.get(key) != recipe.get(key)]
    if keys:
        changed = [f"{key} {before.get(key)} (now {recipe.get(key)})" for key in keys]
        raise ConfigError(f"{out}: was made with {', '.join(changed)}; choose a new folder, or repeat those settings")


def refuse_strangers(out: Path, jobs: Sequence[Job], advice: str) -> None:
    """Files that this run would not make must not end up in its folders unseen, nor rows be lost that another run made."""
    for job in jobs:
        record = _record_path(job.path)
        held = read_json(record).get("rows", 0) if job.rows and job.path.is_file() and record.is_file() else 0
        if job.rows and held > job.rows:
            raise ConfigError(f"{job.path}: holds {held} samples, this run would make {job.rows}; {advice}")
    planned = {job.path for job in jobs}
    folders = {*(out / split for split in SPLITS), *(path.parent for path in planned)}
    there = {path for folder in folders for path in folder.glob("*.h5")}
    extra = sorted(there - planned)
    if extra:
        raise ConfigError(f"{extra[0]}: one of {len(extra)} files that this run would not make; {advice}")


def finish(out: Path, jobs: Sequence[Job], header: dict[str, Any], settings: dict[str, Any]) -> int:
    """Writes the index of every folder, and statistics. Returns the bytes of all files."""
    statistics: dict[str, Any] = {"format": 1, "version": hpcai.__version__, "splits": {}, "settings": settings}
    indexes: dict[str, Any] = {}
    contents = {job.path.parent.name: job.contents for job in jobs}
    for folder in sorted(contents, key=[*SPLITS, *contents].index):
        one = contents[folder]
        records = [read_json(_record_path(path)) for path in sorted(job.path for job in jobs) if path.parent.name == folder]
        shapes = {tuple(len(record["shape"]) * [None] if one.varies else record["shape"]) for record in records}
        if len(shapes) > 1:
            raise DataError(f"{out / folder}: samples of different shapes {sorted(shapes)}, expected one; give each its own folder")
        shape = list(shapes.pop())
        told = ("name", "rows", "bytes", "sha256", *(["shape"] if one.varies else []), *(["lengths"] if one.parts else []))
        files = [{key: record[key] for key in told} for record in records]
        alike = {} if one.varies else {"shape": shape}
        fields = one.fields(shape, header)  # what hpcai data check compares with
        indexes[folder] = {"files": files, **alike, "fields": fields, **header}
        (statistics["splits"] if folder in SPLITS else statistics)[folder] = one.merge(records)
    if across := jobs[0].contents.across:
        across(out, indexes, statistics)
    write_json(out / "statistics.json", statistics)
    for folder, index in indexes.items():
        write_index(out / folder, index)
        for left in (out / folder).rglob(".*.partial"):         # of files and of their records
            left.unlink(missing_ok=True)
    return sum(file["bytes"] for index in indexes.values() for file in index["files"])


# ---- what a folder holds


def indexed(out: Path, folders: Sequence[str] = SPLITS) -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """(path, entry, index) of every file."""
    splits = [split for split in folders if (out / split).is_dir()]
    if not splits:
        raise DataError(f"{out}: holds no folder train, validation or test; simulate or convert into it first")
    for split in splits:
        index = read_json(out / split / INDEX)
        for entry in index["files"]:
            yield out / split / entry["name"], entry, index


def mistakes(path: Path, entry: dict[str, Any], index: dict[str, Any]) -> Iterator[str]:
    """Where a file differs from what the index says of it."""
    if not path.is_file():
        yield "not there; repeat the command that made the folder"
        return
    if path.stat().st_size != entry["bytes"]:
        yield f"{path.stat().st_size} bytes, the index says {entry['bytes']}; delete it and repeat the command that made the folder"
        return
    if digest(path) != entry["sha256"]:
        yield "its SHA-256 is not that of the index; delete it and repeat the command that made the folder"
        return
    with h5py.File(path, "r") as file:
        for name, field in index["fields"].items():
            found, shape = file[name], _whole(entry["rows"], _shape(field["shape"], entry), entry.get("lengths", {}))
            if found.shape != shape or found.dtype != np.dtype(field["dtype"]) or found.chunks is not None:
                yield f"'{name}' is {found.dtype} {found.shape}, expected {field['dtype']} {shape} without chunks"


def _shape(told: Sequence[Any], entry: dict[str, Any]) -> list[Any]:
    """The shape of a row, where the fields leave lengths open (None) as the entry of the file has them."""
    return [here if length is None else length for length, here in zip(told, entry["shape"])] if None in told else list(told)


# ---- the work


def launched() -> tuple[int, int]:
    """Rank and number of processes of the launcher that started this one, or (0, 1)."""
    here = place()
    if here.world is None:                       # PMIx states no size in the environment
        from mpi4py import MPI

        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return here.rank, here.world


def cores() -> int:
    """Cores that this process may use, shared with the other ranks of its machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bound = usable < (os.cpu_count() or 1)       # a bound rank has these cores for itself
    return usable if bound else max(1, usable // (place().local_world or 1))


def make_share(jobs: Sequence[Job], workers: int, label: str) -> None:
    """Makes what is missing of this rank's share."""
    rank, size = launched()
    make([job for job in jobs[rank::size] if not finished(job)], make_file, workers, label)


def make(jobs: Sequence[Any], work: Callable[[Any], Any], workers: int, label: str) -> None:
    """Calls work on every job, in this process or in several; the first error stops it and is raised."""
    with _progress(len(jobs), label) as step:
        if workers == 1 or len(jobs) < 2:
            for job in jobs:
                work(job)
                step()
            return
        # A fresh interpreter per worker: forking a process that may hold threads (HDF5, a test runner) is not safe.
        pool = ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _leave_interrupts)
        try:
            for done in as_completed([pool.submit(work, job) for job in jobs]):
                done.result()
                step()
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent alone answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _progress(total: int, label: str) -> Iterator[Callable[[], None]]:
    speak = launched()[0] == 0
    if speak and sys.stdout.isatty():
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda: bar.advance(task)
        return
    state = {"done": 0, "next": time.monotonic() + 10}

    def step() -> None:
        state["done"] += 1
        if speak and time.monotonic() >= state["next"]:
            state["next"] = time.monotonic() + 10
            print(f"{label}: {state['done']:.0f} of {total}", flush=True)

    yield step


def wait_for(jobs: Sequence[Job]) -> None:
    """Waits for the files of the other ranks. Raises DataError after ``PATIENCE`` seconds without a new one."""
    speak = launched()[0] == 0
    missing, last, told = [job for job in jobs if not finished(job)], time.monotonic(), 0.0
    while missing:
        if speak and time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"waiting for {len(missing)} files of the other ranks", flush=True)
        time.sleep(0.2)
        still = [job for job in missing if not finished(job)]
        if len(still) < len(missing):
            last = time.monotonic()
        elif time.monotonic() - last > PATIENCE:
            raise DataError(
                f"{still[0].path}: not made, and no file came from another rank for {PATIENCE:.0f} s; look whether a rank ended "
                "early, then repeat the command: finished files are kept"
            )
        missing = still
