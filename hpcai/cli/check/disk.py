"""The disk that a data set lies on: its file system, how files should lie there, and how fast random samples come."""

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcai import log
from hpcai.cli.check.findings import Finding, Options, finding
from hpcai.data.direct import ALIGN, Mode, Reader
from hpcai.errors import DataError

if TYPE_CHECKING:
    from hpcai.cli.check.manifest import DataFile, Split

MOUNTS = Path("/proc/mounts")
SMALL_FILE, MANY_FILES = 1 << 20, 10_000
"""Files that are smaller and more than this keep a metadata server busier than its disks."""
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "afs")
_GROUP_BYTES = 32 << 20
_MAX_BYTES = 2 << 30
MODES: tuple[Mode, ...] = ("direct", "buffered")


def file_system(path: Path) -> str | None:
    """Return the type of the file system that ``path`` lies on: that of the longest mount point above it."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    place, best, found = path.resolve(), -1, None
    for words in filter(lambda words: len(words) > 2, map(str.split, lines)):
        point = Path(words[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
        if place.is_relative_to(point) and len(point.parts) >= best:  # of two at one place the later hides the earlier
            best, found = len(point.parts), words[2]
    return found


def layout_findings(kind: str | None, splits: "Sequence[Split]", folder: Path) -> Iterator[Finding]:
    """Advice on how the files of a set should lie: too many small ones, one server for all nodes."""
    sizes = [file.size for split in splits for file in split.files]
    if len(sizes) > MANY_FILES and sum(sizes) / len(sizes) < SMALL_FILE:
        each, better = log.size(sum(sizes) // len(sizes)), max(sum(sizes) // (64 << 20), 1)
        yield finding("inodes", folder, files=len(sizes), each=each, better=better)
    if sizes and (kind or "").startswith(NETWORK):
        yield finding("network", folder, file_system=kind)


def measure_rate(splits: "Sequence[Split]", options: Options) -> dict[str, Any] | None:
    """Measure how fast pieces of the size of a sample come from random places of the largest split, beside what the training
    needs."""
    sets = [[file for file in split.files if file.complete and file.rows] for split in splits]
    files = max(sets, key=lambda files: sum(file.size for file in files), default=[])
    if not files:
        return None
    each = max(round(sum(file.size for file in files) / sum(file.rows for file in files)), 1)
    found: dict[str, Any] = {"bytes_per_sample": each, "threads": max(8, options.threads)}
    for mode in MODES:
        try:
            with Reader(mode, threads=found["threads"]) as reader:
                found[mode] = _measure_reads(files, each, reader, options.seconds)
        except DataError as problem:
            found[mode] = {"problem": str(problem)}
    if options.step_time is not None and options.batch is not None:
        need = options.batch / options.step_time / options.nodes
        found["needed_per_node"] = {"samples_per_s": need, "gb_per_s": need * each / 1e9}
    return found


def rate_findings(directory: Path, found: dict[str, Any], options: Options) -> Iterator[Finding]:
    """A finding where the training needs more samples than come."""

    def text(samples: float) -> str:
        return f"{samples:,.1f} samples/s ({samples * found['bytes_per_sample'] / 1e9:.3g} GB/s)"

    best = max(found[mode].get("samples_per_s", 0.0) for mode in MODES)
    need = found.get("needed_per_node", {}).get("samples_per_s", 0.0)
    if best < need:
        job = f"{options.batch} samples per {options.step_time:g} s need {text(need)} on each node ({options.nodes})"
        yield finding("rate", directory, best=text(best), job=job)


def _measure_reads(files: "Sequence[DataFile]", each: int, reader: Reader, seconds: float) -> dict[str, Any]:
    """Read random samples, many at once, for a time or 2 GiB; files leave the page cache before they are read."""
    chance, spent, size, count = random.Random(0), 1e-9, 0, 0
    group, ends = max(1, min(64, _GROUP_BYTES // each)), list(accumulate(file.size for file in files))
    while spent < seconds and size < _MAX_BYTES:
        part = []
        for file in chance.choices(files, cum_weights=ends, k=group):
            page = chance.randrange(max(file.size - each, 0) // ALIGN + 1)
            part.append((file.path, page * ALIGN, min(each, file.size)))
        for path in {path for path, _, _ in part}:
            evict(path)
        began = time.perf_counter()
        reader.fetch_all(part)
        spent, count, size = spent + time.perf_counter() - began, count + group, size + sum(length for _, _, length in part)
    return {"gb_per_s": size / spent / 1e9, "samples_per_s": count / spent, "bytes": size, "seconds": spent}


def evict(path: Path) -> None:
    """Drop a file from the page cache."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(handle)  # a page that is not on the disk yet stays
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
