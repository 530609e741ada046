"""The disk that a data set lies on: its file system, how files should lie there, and how fast random rows come."""

import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcai import log
from hpcai.cli.check.findings import Finding, Options, finding
from hpcai.cli.check.manifest import SetFile, Split
from hpcai.data.direct import Reader
from hpcai.errors import DataError

SMALL, MANY = 1 << 20, 10_000
"""Files that are smaller and more than this keep a metadata server busier than its disks."""
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "afs")
_GROUP = 32 << 20
_MOST_READ = 2 << 30


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system that ``path`` lies on: that of the longest mount point above it."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    place, best, found = path.resolve(), -1, None
    for words in filter(lambda words: len(words) > 2, map(str.split, lines)):
        point = Path(words[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
        if place.is_relative_to(point) and len(point.parts) >= best:  # of two at one place the later hides the earlier
            best, found = len(point.parts), words[2]
    return found


def metadata_bound(folder: Path, files: int, size: int) -> Iterator[Finding]:
    """A warning when there are many and small files, ``size`` bytes in all."""
    if files > MANY and size / files < SMALL:
        yield finding("inodes", folder, files=files, each=log.size(size // files), better=max(size // (64 << 20), 1))


def stripes(size: int) -> int:
    """Servers that a file of ``size`` bytes should lie on: NERSC's stripe_small, _medium and _large."""
    return next((count for limit, count in ((10**9, 1), (10**10, 8), (10**11, 24)) if size < limit), 72)


def stripe_hint(kind: str | None, folder: Path, sizes: Sequence[int], present: int | None = None) -> Iterator[Finding]:
    """How files of ``sizes`` should lie on a parallel file system of type ``kind``. ``present`` is their stripe count where it is
    known; -1 is all servers."""
    typical = int(statistics.median(sizes)) if sizes else 0
    want, kind = stripes(typical), kind or ""
    advice, enough = "", present == 1 if want == 1 else present == -1 or (present or 0) >= want // 2
    if kind == "lustre" and not enough:
        found = "" if present is None else f", found on {'all' if present < 0 else present}"
        why = "each further server costs an open" if want == 1 else "many processes read them at once"
        line = f"lfs setstripe -c {want} {'-S 4m ' if want > 1 else ''}{folder}"
        advice = f"belong on {want} server{'s' * (want > 1)}{found}: {why}; {line}, then lfs migrate -c {want} FILE"
    elif kind.startswith("beegfs") and want > 1:
        line = f"beegfs-ctl --setpattern --numtargets={want} --chunksize=1m {folder}"
        advice = f"belong on {want} targets; {line}, then copy them anew"
    elif kind == "gpfs" and typical < SMALL:
        advice = "are smaller than its blocks, so each comes from one server; pack samples into files of 64 MiB"
    if sizes and advice:
        yield finding("stripe", folder, file_system=kind, typical=log.size(typical), advice=advice)
    elif sizes and kind.startswith(NETWORK):
        yield finding("network", folder, file_system=kind)


def present_stripes(path: Path) -> int | None:
    """The stripe count of a file as ``lfs`` tells it, or None."""
    lfs = shutil.which("lfs")
    if lfs is None:
        return None
    try:
        words = [lfs, "getstripe", "-c", str(path)]
        run = subprocess.run(words, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
        return int(run.stdout.split()[-1]) if run.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


# ---- the rate


def rate(splits: Sequence[Split], options: Options, threads: int = 8) -> dict[str, Any] | None:
    """How fast random rows of the largest split come from the disk, in each way of reading, beside what the training needs."""
    rows = max((_Sources.of(split) for split in splits), key=lambda s: s.bytes, default=None)
    if rows is None or not rows.count:
        return None
    found: dict[str, Any] = {"bytes_per_sample": round(rows.bytes / rows.count), "threads": max(threads, options.threads)}
    for mode in ("direct", "buffered"):
        try:
            with options.reader(mode, threads=found["threads"]) as reader:
                found[mode] = _measured(rows, reader, options.seconds, options.seed)
        except DataError as problem:
            found[mode] = {"problem": str(problem)}
    if options.step_time is not None and options.batch is not None:
        need = options.batch / options.step_time / options.nodes
        found["needed_per_node"] = {"samples_per_s": need, "gb_per_s": need * found["bytes_per_sample"] / 1e9}
    return found


def too_slow(directory: Path, found: dict[str, Any], options: Options) -> Iterator[Finding]:
    def text(samples: float) -> str:
        return f"{samples:,.1f} samples/s ({samples * found['bytes_per_sample'] / 1e9:.3g} GB/s)"

    best = max(found[mode].get("samples_per_s", 0.0) for mode in ("direct", "buffered"))
    need = found.get("needed_per_node", {}).get("samples_per_s", 0.0)
    if best < need:
        job = f"{options.batch} samples per {options.step_time:g} s need {text(need)} on each node ({options.nodes})"
        yield finding("rate", directory, best=text(best), job=job)


@dataclass
class _Sources:
    """All rows of a split: for each file the number of the rows before its end, and where rows lie."""

    files: list[SetFile]
    ends: list[int]
    bytes: int

    @staticmethod
    def of(split: Split) -> "_Sources":
        files = [file for file in split.files if file.whole and file.rows and all(
            f.kind == "scalar" or f.name in file.flat or f.shape[0] == file.rows for f in file.fields)]  # fmt: skip
        size = 0
        for file in files:
            plain = all(f.kind in ("contiguous", "scalar") for f in file.fields) and not file.flat
            size += sum(f.width * file.rows for f in file.fields if f.kind == "contiguous") if plain else file.size
        return _Sources(files, np.cumsum([file.rows for file in files]).tolist(), size)

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0

    def ranges(self, number: int, chance: random.Random) -> list[tuple[Path, int, int]]:
        index = int(np.searchsorted(self.ends, number, side="right"))
        file, row = self.files[index], number - (self.ends[index - 1] if index else 0)
        plain = [f for f in file.fields if f.kind == "contiguous" and f.width and f.name not in file.flat]
        found = [(file.path, (f.offset or 0) + row * f.width, f.width) for f in plain]
        if len(found) == sum(f.kind != "scalar" for f in file.fields):
            return found
        length = max(file.size // max(file.rows, 1), 1)  # of packed rows as much as they take, wherever
        return [(file.path, chance.randrange(max(file.size - length, 0) + 1), length)]


def _measured(rows: _Sources, reader: Reader, seconds: float, seed: int) -> dict[str, Any]:
    """Random rows, many at once, for a time or 2 GiB; a file leaves the page cache before its first row is read."""
    chance, spent, size, count = random.Random(seed), 0.0, 0, 0
    mean = max(rows.bytes // rows.count, 1)
    group = max(1, min(16, _GROUP // mean))
    while spent < seconds and size < _MOST_READ:
        order = chance.sample(range(rows.count), min(rows.count, 100_000))
        evicted: set[Path] = set()
        while order and spent < seconds and size < _MOST_READ:
            part = [each for number in order[:group] for each in rows.ranges(number, chance)]
            count += len(order[:group])
            del order[:group]
            for path in {path for path, _, _ in part} - evicted:
                _evict(path)
                evicted.add(path)
            began = time.perf_counter()
            reader.fetch_all(part)
            took = time.perf_counter() - began
            spent += took
            size += sum(length for _, _, length in part)
            group = max(1, min(int(group * min(0.2 / max(took, 1e-6), 2)), 256, 2 * _GROUP // mean))
    spent = max(spent, 1e-9)
    return {"gb_per_s": size / spent / 1e9, "samples_per_s": count / spent, "bytes": size, "seconds": spent}


def _evict(path: Path) -> None:
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(handle)  # a page that is not on the disk yet stays
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
