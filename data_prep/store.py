"""The files of a prepared data set, each written once, by any number of processes.

    OUT/recipe.json             the settings that determine every value; a run with other settings is refused
    OUT/<split>/<name>.h5       datasets of R rows each, contiguous
    OUT/<split>/.records/       one JSON file per finished file: rows, size, SHA-256, sums, refused items; for resumption
    OUT/<split>/index.json      written after all files; if samples vary in shape, each of "files" has its "shape"
    OUT/statistics.json         statistics of each split, and the settings

A dataset may be ragged: the concatenated elements of all rows, whose lengths are in another dataset. Its shape begins with the name
of that dataset, and each of "files" has the sum as one of its "lengths".

A workload declares the datasets as Fields, groups them as Contents, and defines by Jobs how files are written.

Ranks share only the folder: rank r of n writes every n-th file, and rank 0 waits for the files of the others. This needs no MPI
call, so that the same code runs under mpiexec, srun or alone.
"""

import hashlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

import hpcai
from data_prep import moments
from hpcai.cli.progress import Progress, show_progress
from hpcai.data.workers import block_signals, die_with_parent, ignore_signals
from hpcai.dist.environment import read_rank_info
from hpcai.durable import commit_file, write_json
from hpcai.errors import ConfigError, DataError
from hpcai.host_limits import allowed_cpus, count_cpus
from hpcai.json_file import read_object

SPLITS = ("train", "validation", "test")
WORK, SKIPPED = ".work", "skipped.json"         # of a conversion; they do not bind the next one to its settings
TIMEOUT = 1800.0                               # seconds without a new file from any other rank before rank 0 gives up
MAX_REASONS = 3                                 # reasons of refusals that are printed
LARGE_ROW = 1 << 24                             # values of a row that are measured at once
Record = dict[str, Any]
Refused = Sequence[tuple[str, str]]             # items that could not be used: where each is, and why


class Field(NamedTuple):
    """A dataset of the files: type and shape of a row, range, unit, and its statistics."""

    dtype: str
    shape: tuple[Any, ...] = ()                 # begins with the name of another dataset if ragged; None for any length
    low: float | None = None
    high: float | None = None
    blank: float | None = None                  # the value that may fill all of a row
    key: bool = False                           # duplicates are found by this dataset, not by the largest
    unit: str | None = None
    channels: int | None = None                 # moments are computed per entry of this dim of a row; ndim: of all values
    classes: int = 0                            # number of classes to count

    @property
    def row_lengths(self) -> str | None:
        """The name of the dataset with the length of each row, if this one is ragged."""
        return self.shape[0] if self.shape and isinstance(self.shape[0], str) else None

    def to_json(self, shape: Sequence[Any]) -> dict[str, Any]:
        """Return the entry of the field in an index."""
        entry = {"low": self.low, "high": self.high, "blank": self.blank, "key": self.key or None, "unit": self.unit}
        return {"dtype": self.dtype, "shape": list(shape), **{name: value for name, value in entry.items() if value is not None}}


Fields = Mapping[str, Field]


def _no_entries(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Contents:
    """The datasets of the files of a folder. An open shape of a row is that of the first field."""

    fields: Fields
    measure: Callable[[h5py.File], dict[str, Any]] = _no_entries        # further sums of a file
    merge: Callable[[Sequence[Record]], dict[str, Any]] = _no_entries   # further statistics of a split, from its records
    varies: bool = False                                                # the shape of samples varies between files

    @property
    def row_lengths(self) -> list[str]:
        return list(dict.fromkeys(field.row_lengths for field in self.fields.values() if field.row_lengths))

    def compute_sums(self, file: h5py.File) -> dict[str, Any]:
        """Return the sums over a file, from which the statistics of a split are computed."""
        sums: dict[str, Any] = {}
        for name, field in self.fields.items():
            if name in file and field.channels is not None:
                sums[name] = moments.merge(map(moments.compute, _channels_last(file[name], field.channels)))
            elif name in file and field.classes:
                parts = _channels_last(file[name], len(field.shape)) if field.shape else [file[name][...][:, None]]
                counts = (np.bincount(x[:, 0], minlength=field.classes) for x in parts)
                sums[name] = np.sum(list(counts), axis=0).tolist()
        return {**sums, **self.measure(file)}

    def compute_statistics(self, records: Sequence[Record]) -> dict[str, Any]:
        statistics: dict[str, Any] = {"rows": sum(record["rows"] for record in records)}
        for name, field in self.fields.items():
            parts = [record["sums"][name] for record in records if name in record["sums"]]
            if parts and field.channels is not None:
                statistics[name] = moments.summarize(parts)
            elif parts and field.classes:
                cells = np.sum(parts, axis=0)
                statistics[name] = {"cells": cells.tolist(), "frequency": (cells / cells.sum()).tolist()}
        return {**statistics, **self.merge(records)}


def _channels_last(values: h5py.Dataset, dim: int) -> Iterator[np.ndarray]:
    """Yield rows, or slices of large ones, with ``dim`` last and the others flattened.   Shape: [cells, C] each"""
    for row in range(values.shape[0]):
        array = values[row][..., None] if dim == values.ndim - 1 else np.moveaxis(values[row], dim, -1)
        for part in array if array.size > LARGE_ROW else [array]:
            yield part.reshape(-1, array.shape[-1])


@dataclass(frozen=True)
class Job:
    """A file to write. It is pickled for worker processes. ``write`` may return the items that it refused, and write no file if
    none is left."""

    path: Path
    write: Callable[[Path], Refused | None]
    contents: Contents
    rows: int | None = None                     # if known in advance


# ---- one file


class Skipped(list[tuple[str, str]]):
    """The items that a writer leaves out: where each is, and why. Without ``skip_bad`` the first one is an error."""

    def __init__(self, skip_bad: bool) -> None:
        super().__init__()
        self.skip_bad = skip_bad

    @contextmanager
    def catch(self, where: object) -> Iterator[None]:
        """Context manager that skips the rest of its block if an item cannot be used."""
        try:
            yield
        except DataError as problem:
            if not self.skip_bad:
                raise DataError(f"{problem}; or leave such items out with --skip-bad (finished files are kept)") from problem
            self.append(describe_refusal(problem, where))


def describe_refusal(problem: Exception, where: object) -> tuple[str, str]:
    """Return the location of a refused item, and the reason."""
    return str(where), str(problem).removeprefix(f"{where}: ")


class _NoRowsError(Exception):
    """A file without rows is not written."""


def truncate_rows(file: h5py.File, rows: int) -> None:
    """Remove the rows of a new file from ``rows`` on. A file without rows is not written: this ends its ``create_file``."""
    if not rows:
        raise _NoRowsError
    for name, data in file.items():
        if len(data) > rows:
            values = data[:rows]
            del file[name]
            file[name] = values


@contextmanager
def create_file(
    path: Path, rows: int, fields: Fields, attributes: dict[str, Any], lengths: Mapping[str, int] | None = None,
) -> Iterator[h5py.File]:  # fmt: skip
    """Create a file with datasets for ``rows`` rows of each field, atomically: with a temporary name, flushed to the disk, renamed.
    ``lengths`` has the total lengths of ragged datasets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Data on a page boundary can be read past the page cache.
        with h5py.File(partial, "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            for name, field in fields.items():
                shape = (lengths or {})[field.row_lengths] if field.row_lengths else rows, *field.shape[bool(field.row_lengths) :]
                file.create_dataset(name, shape, field.dtype)
            file.attrs.update({**attributes, "version": hpcai.__version__})
            yield file
        commit_file(partial, path)
    except _NoRowsError:
        partial.unlink()
        path.unlink(missing_ok=True)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_rows(path: Path, fields: Fields, rows: Sequence[Mapping[str, Any]], attributes: dict[str, Any]) -> None:
    """Write a file from the values of each row, which may have further entries. The lengths of ragged datasets are among them."""
    lengths = {field.row_lengths: sum(row[field.row_lengths] for row in rows) for field in fields.values() if field.row_lengths}
    with create_file(path, len(rows), fields, attributes, lengths) as file:
        for name, field in fields.items():
            if not field.row_lengths:
                file[name][...] = np.array([row[name] for row in rows], field.dtype)
                continue
            begin = 0
            for row in rows:
                end = begin + row[field.row_lengths]
                file[name][begin:end] = np.reshape(row[name], (end - begin, *field.shape[1:])).astype(field.dtype)
                begin = end


def read_rows(file: h5py.File, fields: Fields, first: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Return the rows from ``first`` to ``end`` of a file, each with its elements of ragged datasets."""
    columns = []
    for name, field in fields.items():
        if field.row_lengths:
            offsets = np.append(0, np.cumsum(file[field.row_lengths][:end], dtype=np.int64))[first:]
            columns.append(np.split(file[name][offsets[0] : offsets[-1]], offsets[1:-1] - offsets[0]))
        else:
            columns.append(file[name][first:end])
    return (dict(zip(fields, row)) for row in zip(*columns))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file that a command wrote. Raises DataError."""
    return read_object(path, "an object; delete it, and repeat or finish the command that writes it", DataError)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_path(path: Path) -> Path:
    return path.parent / ".records" / f"{path.name}.json"


def write_file(job: Job) -> None:
    """Write the file of a job, and its record. A complete file with a record of an earlier version gets a new record only."""
    refused = None if is_finished(job, "sums") else job.write(job.path)
    if refused and not job.path.is_file():
        write_json(record_path(job.path), {"name": job.path.name, "rows": 0, "refused": list(refused)})
        return
    with h5py.File(job.path, "r") as file:
        rows, *shape = file[next(iter(job.contents.fields))].shape
        record: Record = {
            "name": job.path.name, "rows": rows, "bytes": job.path.stat().st_size, "sha256": digest(job.path), "shape": shape,
            "sums": job.contents.compute_sums(file), "refused": list(refused or ()),
            "lengths": {name: int(file[name][...].sum()) for name in job.contents.row_lengths},
        }  # fmt: skip
    write_json(record_path(job.path), record)


def is_finished(job: Job, key: str = "refused") -> bool:
    """Return whether the file exists with the size of its record and the rows of the job. Records of earlier versions lack
    ``key``."""
    record = record_path(job.path)
    contents = read_json(record) if record.is_file() else {}
    if not job.path.is_file():
        return contents.get("rows") == 0        # all of its items were refused
    rows = contents.get("rows", 0) + len(contents.get("refused", ()))
    return key in contents and contents.get("bytes") == job.path.stat().st_size and job.rows in (None, rows)


# ---- one folder


def generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return a random generator that is a pure function of the arguments."""
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence([seed, stream, index])))


def split_of(index: int, seed: int, validation: float, test: float) -> str:
    """Return the split of a sample. One of every 1/held neighbours is held out, so that n samples have n * fraction of a split,
    give or take one. It is drawn at random from stream 0 for each block: a periodic choice could follow a period of the data."""
    held, part = (Fraction(f).limit_denominator(10**6) for f in (validation + test, test))
    if not held:
        return "train"
    block = math.floor(index * held)
    first, end = math.ceil(block / held), math.ceil((block + 1) / held)
    if index != first + int(generator(seed, 0, block).integers(end - first)):
        return "train"
    share = part / held
    return "test" if math.floor((block + 1) * share) > math.floor(block * share) else "validation"


def claim_folder(out: Path, recipe: dict[str, Any]) -> None:
    """Write the recipe into a new folder. Raises ConfigError if the folder has another recipe."""
    path = out / "recipe.json"
    # This must be read first: another rank writes its recipe before it creates a split.
    has_splits = any((out / split).exists() for split in SPLITS)
    if not path.is_file():
        if has_splits:
            raise ConfigError(f"{out}: holds train, validation or test without a recipe.json; choose a new folder")
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, recipe)
        return
    previous = read_json(path)
    keys = [key for key in {**previous, **recipe} if key != "skip_bad" and previous.get(key) != recipe.get(key)]
    files = (file for file in out.rglob("*") if file.is_file() and file.relative_to(out).parts[0] not in (path.name, WORK, SKIPPED))
    if keys and all(file.name.startswith(".") for file in files):
        write_json(path, recipe)                # nothing was written with the previous settings
    elif keys:
        changed = [f"{key} {previous.get(key)} (now {recipe.get(key, 'no such setting')})" for key in keys]
        advice = "choose a new folder" if any(out.rglob("*.h5")) or any(out.rglob("*.bin")) else "delete it (no file is finished)"
        raise ConfigError(f"{out}: was made with {', '.join(changed)}; {advice}, or repeat those settings")


def refuse_unplanned_files(out: Path, jobs: Sequence[Job], advice: str) -> None:
    """Raise ConfigError if the folders have files that are not planned, or a file with more rows than planned."""
    for job in jobs:
        record = record_path(job.path)
        rows = read_json(record).get("rows", 0) if job.rows and job.path.is_file() and record.is_file() else 0
        if job.rows and rows > job.rows:
            raise ConfigError(f"{job.path}: holds {rows} samples, this run would make {job.rows}; {advice}")
    planned = {job.path for job in jobs}
    folders = {*(out / split for split in SPLITS), *(path.parent for path in planned)}
    present = {path for folder in folders for path in folder.glob("*.h5")}
    extra = sorted(present - planned)
    if extra:
        raise ConfigError(f"{extra[0]}: one of {len(extra)} files that this run would not make; {advice}")


def finalize(out: Path, jobs: Sequence[Job], header: dict[str, Any], settings: dict[str, Any]) -> tuple[int, int, list[list[str]]]:
    """Write the index of every folder, and statistics.json. Return bytes and rows of all files, and the refused items."""
    from hpcai.data.index import write_index  # pydantic, which --help does not need

    statistics: dict[str, Any] = {"format": 1, "version": hpcai.__version__, "splits": {}, "settings": settings}
    indexes: dict[str, Any] = {}
    refused: list[list[str]] = []
    by_folder = {job.path.parent.name: job.contents for job in jobs}
    for folder in sorted(by_folder, key=[*SPLITS, *by_folder].index):
        spec = by_folder[folder]
        records = [read_json(record_path(path)) for path in sorted(job.path for job in jobs) if path.parent.name == folder]
        refused += [each for record in records for each in record["refused"]]
        if not (records := [record for record in records if record["rows"]]):
            for job in jobs:
                if not job.path.is_file():      # try them again with the next command
                    record_path(job.path).unlink(missing_ok=True)
            raise DataError(f"{out / folder}: no item can be used: {count_by_reason(refused)}")
        shapes = {tuple(len(record["shape"]) * [None] if spec.varies else record["shape"]) for record in records}
        if len(shapes) > 1:
            raise DataError(f"{out / folder}: samples of different shapes {sorted(shapes)}, expected one; give each its own folder")
        shape = list(shapes.pop())
        keys = ("name", "rows", "bytes", "sha256", *(["shape"] if spec.varies else []), *(["lengths"] if spec.row_lengths else []))
        indexes[folder] = {
            "files": [{key: record[key] for key in keys} for record in records], **({} if spec.varies else {"shape": shape}),
            "fields": {name: field.to_json(shape if None in field.shape else field.shape) for name, field in spec.fields.items()},
            **header,
        }  # fmt: skip
        (statistics["splits"] if folder in SPLITS else statistics)[folder] = spec.compute_statistics(records)
    write_json(out / "statistics.json", statistics)
    for folder, index in indexes.items():
        write_index(out / folder, index)
        for partial in (out / folder).rglob(".*.partial"):      # of files and of their records
            partial.unlink(missing_ok=True)
    files = [(file["bytes"], file["rows"], folder in SPLITS) for folder, index in indexes.items() for file in index["files"]]
    return sum(size for size, _, _ in files), sum(rows for _, rows, sample in files if sample), refused


def count_by_reason(items: Sequence[Sequence[str]]) -> str:
    """Return the commonest reasons, each with its count and an example. Reasons that differ only in numbers and paths are
    one."""
    kinds: dict[str, list[str]] = {}
    for where, reason in items:
        kinds.setdefault(re.sub(r"\S*/\S+|\d[\d.,]*", "N", reason), []).append(f"{where}: {reason}")
    commonest = sorted(kinds.values(), key=len, reverse=True)[:MAX_REASONS]
    texts = [f"{len(examples)} such as {examples[0]}" for examples in commonest]
    return " | ".join(texts + ([f"and {len(kinds) - MAX_REASONS} other reasons"] if len(kinds) > MAX_REASONS else []))


# ---- the work


def rank_and_size() -> tuple[int, int]:
    """Return rank and number of processes of the launcher, or (0, 1) without one."""
    info = read_rank_info()
    if info.world is None:                      # PMIx sets no size in the environment
        from mpi4py import MPI

        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return info.rank, info.world


def count_cores() -> int:
    """Return the number of cores for this process: its share of those that the ranks of its machine have."""
    usable = count_cpus()
    bound = usable == len(allowed_cpus()) < (os.cpu_count() or 1)       # a bound rank shares its cores with no other
    return usable if bound else max(1, usable // (read_rank_info().local_world or 1))


def all_gather_results(tasks: Mapping[Path, Callable[[], dict[str, Any]]], workers: int, label: str) -> Iterator[dict[str, Any]]:
    """Distribute tasks over ranks, and return all results, in order, on every rank. Each is kept in a JSON file, for resumption."""
    rank, size = rank_and_size()
    run_parallel([task for task in [*tasks.items()][rank::size] if not task[0].is_file()], _write_result, workers, label)
    wait_for(list(tasks), Path.is_file, str)
    return map(read_json, tasks)


def _write_result(task: tuple[Path, Callable[[], dict[str, Any]]]) -> None:
    write_json(task[0], task[1]())


def run_parallel(jobs: Sequence[Any], work: Callable[[Any], Any], workers: int, label: str) -> None:
    """Call ``work`` on every job, in this process or in several. The first error cancels the others and is raised."""
    with show_progress() if rank_and_size()[0] == 0 else nullcontext(lambda progress: None) as show:
        if workers == 1 or len(jobs) < 2:
            for done, job in enumerate(jobs, 1):
                work(job)
                show(Progress(label, done, len(jobs), "parts"))
            return
        # A new interpreter per worker: forking a process that may have threads (HDF5, a test runner) is not safe.
        before, pool = set(active_children()), ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _start_worker)
        try:
            with block_signals():
                futures = [pool.submit(_work, work, job) for job in jobs]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                show(Progress(label, done, len(jobs), "parts"))
        except KeyboardInterrupt:
            for worker in set(active_children()) - before:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Have only the parent handle Ctrl-C and the like, die with it, and end by SIGTERM as soon as partial files are deleted."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ignore_signals()
    die_with_parent()


def _work(work: Callable[[Any], Any], job: Any) -> None:
    try:
        work(job)
    except SystemExit as end:  # the pool would go on with another job
        os._exit(int(end.code or 0))


def wait_for(missing: Sequence[Any], is_done: Callable[[Any], bool], name: Callable[[Any], Any]) -> None:
    """Wait for the files of the other ranks. Raises DataError after ``TIMEOUT`` seconds without a new one."""
    last, logged = time.monotonic(), 0.0
    while remaining := [item for item in missing if not is_done(item)]:
        if len(remaining) < len(missing):
            last = time.monotonic()
        elif time.monotonic() - last > TIMEOUT:
            advice = "check whether a rank ended early, then repeat the command: finished files are kept"
            raise DataError(f"{name(remaining[0])}: not written, and no file came from another rank for {TIMEOUT:.0f} s; {advice}")
        if rank_and_size()[0] == 0 and time.monotonic() - logged > 30:
            logged = time.monotonic()
            print(f"waiting for {len(remaining)} files of the other ranks", flush=True)
        missing = remaining
        time.sleep(0.2)
