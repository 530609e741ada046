"""The files of a prepared data set, and the work of making them: many files, each made once, by any number of processes.

    OUT/recipe.json             the settings that decide every value; a run with other settings is refused
    OUT/<split>/<name>.h5       "counts" int16 [R, D, H, W, C] and "target" float32 [R, P], contiguous
    OUT/<split>/.records/       one JSON text per finished file: size, SHA-256, sums; what a resumed run trusts
    OUT/<split>/index.json      written when all files are there
    OUT/statistics.json         moments per split, and the settings

Ranks share nothing but the folder: rank r of n makes every n-th file, and rank 0 waits for the files of the others. No MPI call
is needed for that, so the same code runs under mpiexec, srun or alone.

R rows   D, H, W cells   C channels   P parameters
"""

import hashlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import hpcai
from hpcai.dist.environment import place
from hpcai.durable import flush
from hpcai.errors import ConfigError, DataError

SPLITS = ("train", "validation", "test")
PATIENCE = 1800.0                               # seconds without a new file from any other rank before rank 0 gives up
Record = dict[str, Any]


# ---- one file


@contextmanager
def rows_file(path: Path, rows: int, shape: Sequence[int], parameters: int, attributes: dict[str, Any]) -> Iterator[h5py.File]:
    """A new file with room for its rows: written beside its place, flushed to the disk and renamed, or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Data on a page boundary can be read past the page cache.
        with h5py.File(partial, "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            file.create_dataset("counts", (rows, *shape), np.int16)
            file.create_dataset("target", (rows, parameters), np.float32)
            file.attrs.update({**attributes, "version": hpcai.__version__})
            yield file
        _settle(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file in one act."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")      # ranks may write the same recipe at once
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _settle(partial, path)


def _settle(partial: Path, path: Path) -> None:
    flush(partial)
    partial.replace(path)
    flush(path.parent)


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


def sums(counts: h5py.Dataset, target: h5py.Dataset) -> dict[str, Any]:
    """Per channel: cells, sum, sum of squares, maximum, sums of log(1 + count) and of its products; per parameter: sums.
    They come from a histogram, so that integers are exact and their order does not matter."""
    channels = counts.shape[-1]
    histogram = [np.zeros(1, np.int64) for _ in range(channels)]
    products = np.zeros((channels, channels))
    for row in range(counts.shape[0]):
        cube = counts[row].reshape(-1, channels)
        if cube.min() < 0:
            raise DataError(f"{counts.file.filename}: row {row} holds a count of {cube.min()}, expected none below 0")
        for channel in range(channels):
            more = np.bincount(cube[:, channel], minlength=histogram[channel].size)
            more[: histogram[channel].size] += histogram[channel]
            histogram[channel] = more
        log = np.log1p(np.arange(cube.max() + 1))[cube]                                  # [cells, C]
        products += np.einsum("ni,nj->ij", log, log)      # not BLAS, whose sums depend on the number of threads
    every = [(h, np.arange(h.size), np.log1p(np.arange(h.size))) for h in histogram]
    rows = target[...].astype(np.float64)
    return {
        "cells": int(histogram[0].sum()),
        "sum": [int((h * n).sum()) for h, n, _ in every],
        "square": [int((h * n * n).sum()) for h, n, _ in every],
        "max": [int(h.size - 1) for h in histogram],
        "log_sum": [float((h * log).sum()) for h, _, log in every],
        "log_product": products.tolist(),
        "target_sum": rows.sum(0).tolist(),
        "target_square": (rows**2).sum(0).tolist(),
    }


def _record_path(path: Path) -> Path:
    return path.parent / ".records" / f"{path.name}.json"


def write_record(path: Path) -> Record:
    """The record of a finished file, from the file."""
    with h5py.File(path, "r") as file:
        record: Record = {
            "name": path.name,
            "rows": file["counts"].shape[0],
            "bytes": path.stat().st_size,
            "sha256": digest(path),
            "shape": list(file["counts"].shape[1:]),
            "sums": sums(file["counts"], file["target"]),
        }
    write_json(_record_path(path), record)
    return record


def finished(path: Path) -> bool:
    """Whether the file is there, of the size that its record states."""
    record = _record_path(path)
    return path.is_file() and record.is_file() and read_json(record).get("bytes") == path.stat().st_size


# ---- one folder


def claim(out: Path, recipe: dict[str, Any]) -> None:
    """Takes an empty folder, or one that was begun with the same recipe."""
    path = out / "recipe.json"
    # In this order: another rank writes its recipe before it makes a split.
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


def refuse_strangers(out: Path, planned: Sequence[Path], advice: str) -> None:
    """Files that this run would not make must not end up in its splits unseen."""
    there = {path for split in SPLITS for path in (out / split).glob("*.h5")}
    extra = sorted(there - set(planned))
    if extra:
        raise ConfigError(f"{extra[0]}: one of {len(extra)} files that this run would not make; {advice}")


def finish(out: Path, planned: Sequence[Path], header: dict[str, Any], settings: dict[str, Any]) -> int:
    """Index of every split, and statistics. Returns the bytes of all files."""
    statistics: dict[str, Any] = {"format": 1, "version": hpcai.__version__, "splits": {}, "settings": settings}
    indexes: dict[str, Any] = {}
    for split in SPLITS:
        records = [read_json(_record_path(path)) for path in sorted(planned) if path.parent.name == split]
        if not records:
            continue
        shapes = {tuple(record["shape"]) for record in records}
        if len(shapes) > 1:
            raise DataError(f"{out / split}: samples of different shapes {sorted(shapes)}, expected one; give each its own folder")
        files = [{key: record[key] for key in ("name", "rows", "bytes", "sha256")} for record in records]
        shape = list(shapes.pop())
        fields = {                               # what hpcai data check compares with
            "counts": {"dtype": "int16", "shape": shape, "low": 0},
            "target": {"dtype": "float32", "shape": [len(header["parameters"])], "low": -1, "high": 1},
        }
        indexes[split] = {"format": 1, "files": files, "shape": shape, "fields": fields, **header}
        statistics["splits"][split] = _moments(records)
    write_json(out / "statistics.json", statistics)
    for split, index in indexes.items():
        write_json(out / split / "index.json", index)
        for left in (out / split).glob(".*.partial"):
            left.unlink(missing_ok=True)
    return sum(file["bytes"] for index in indexes.values() for file in index["files"])


def _moments(records: Sequence[Record]) -> dict[str, Any]:
    def total(key: str) -> Any:
        return np.sum([record["sums"][key] for record in records], axis=0, dtype=np.float64)

    def deviation(mean: Any, square: Any) -> list[float]:
        return np.sqrt(np.maximum(square - mean**2, 0)).tolist()

    rows, cells = sum(record["rows"] for record in records), float(total("cells"))
    mean, log, target = total("sum") / cells, total("log_sum") / cells, total("target_sum") / rows
    return {
        "rows": rows,
        "counts": {
            "mean": mean.tolist(),
            "variance": (total("square") / cells - mean**2).tolist(),
            "max": np.max([record["sums"]["max"] for record in records], axis=0).tolist(),
        },
        "log1p": {"mean": log.tolist(), "covariance": (total("log_product") / cells - np.outer(log, log)).tolist()},
        "target": {"mean": target.tolist(), "std": deviation(target, total("target_square") / rows)},
    }


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
    here = 1
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"):
        text = os.environ.get(name, "").split("(")[0].split(",")[0]
        if text.isdigit():
            here = int(text)
            break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bound = usable < (os.cpu_count() or 1)       # a bound rank has these cores for itself
    return usable if bound else max(1, usable // here)


def make(jobs: Sequence[Any], work: Callable[[Any], Any], workers: int, label: str, speak: bool) -> None:
    """Calls work on every job, in this process or in several; the first error stops it and is raised."""
    with _progress(len(jobs), label, speak) as step:
        if workers == 1 or len(jobs) < 2:
            for job in jobs:
                work(job)
                step()
            return
        # A fresh interpreter per worker: forking a process that may hold threads (HDF5, a test runner) is not safe.
        pool = ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _leave_interrupts)
        try:
            waiting: set[Future[Any]] = set()
            for job in jobs:
                waiting.add(pool.submit(work, job))
                if len(waiting) >= 4 * workers:
                    waiting = _collect(waiting, step)
            while waiting:
                waiting = _collect(waiting, step)
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent alone answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collect(waiting: set[Future[Any]], step: Callable[[], None]) -> set[Future[Any]]:
    done, rest = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
        step()
    return rest


@contextmanager
def _progress(total: int, label: str, speak: bool) -> Iterator[Callable[[], None]]:
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


def wait_for(planned: Sequence[Path], speak: bool) -> None:
    """Rank 0, its own files done, waits for those of the others."""
    missing, last, told = [path for path in planned if not finished(path)], time.monotonic(), 0.0
    while missing:
        if speak and time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"waiting for {len(missing)} files of the other ranks", flush=True)
        time.sleep(0.2)
        still = [path for path in missing if not finished(path)]
        if len(still) < len(missing):
            last = time.monotonic()
        elif time.monotonic() - last > PATIENCE:
            raise DataError(
                f"{still[0]}: not made, and no file came from another rank for {PATIENCE:.0f} s; look whether a rank ended early, "
                "then repeat the command: finished files are kept"
            )
        missing = still
