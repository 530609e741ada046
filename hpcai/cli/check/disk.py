"""The disk that a data set lies on: its file system, how files should lie there, and how fast random samples come."""

import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from hpcai import log
from hpcai.cli.check.findings import Finding, Options, finding
from hpcai.cli.check.manifest import SetFile, Split
from hpcai.data.direct import ALIGN, Mode, Reader
from hpcai.errors import DataError

MOUNTS = Path("/proc/mounts")
SMALL, MANY = 1 << 20, 10_000
"""Files that are smaller and more than this keep a metadata server busier than its disks."""
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "afs")
_GROUP = 32 << 20
_MOST_READ = 2 << 30


def file_system(path: Path) -> str | None:
    """The type of the file system that ``path`` lies on: that of the longest mount point above it."""
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


def rate(splits: Sequence[Split], options: Options) -> dict[str, Any] | None:
    """How fast pieces of the size of a sample come from random places of the largest split, beside what the training needs."""
    sets = [[file for file in split.files if file.whole and file.rows] for split in splits]
    files = max(sets, key=lambda files: sum(file.size for file in files), default=[])
    if not files:
        return None
    each = max(round(sum(file.size for file in files) / sum(file.rows for file in files)), 1)
    found: dict[str, Any] = {"bytes_per_sample": each, "threads": max(8, options.threads)}
    modes: tuple[Mode, ...] = ("direct", "buffered")
    for mode in modes:
        try:
            with Reader(mode, threads=found["threads"]) as reader:
                found[mode] = _measured(files, each, reader, options.seconds, options.seed)
        except DataError as problem:
            found[mode] = {"problem": str(problem)}
    if options.step_time is not None and options.batch is not None:
        need = options.batch / options.step_time / options.nodes
        found["needed_per_node"] = {"samples_per_s": need, "gb_per_s": need * each / 1e9}
    return found


def too_slow(directory: Path, found: dict[str, Any], options: Options) -> Iterator[Finding]:
    def text(samples: float) -> str:
        return f"{samples:,.1f} samples/s ({samples * found['bytes_per_sample'] / 1e9:.3g} GB/s)"

    best = max(found[mode].get("samples_per_s", 0.0) for mode in ("direct", "buffered"))
    need = found.get("needed_per_node", {}).get("samples_per_s", 0.0)
    if best < need:
        job = f"{options.batch} samples per {options.step_time:g} s need {text(need)} on each node ({options.nodes})"
        yield finding("rate", directory, best=text(best), job=job)


def _measured(files: Sequence[SetFile], each: int, reader: Reader, seconds: float, seed: int) -> dict[str, Any]:
    """Random samples, many at once, for a time or 2 GiB; files leave the page cache before they are read."""
    chance, spent, size, count = random.Random(seed), 1e-9, 0, 0
    group, ends = max(1, min(16, _GROUP // each)), list(accumulate(file.size for file in files))
    while spent < seconds and size < _MOST_READ:
        part = []
        for file in chance.choices(files, cum_weights=ends, k=group):
            page = chance.randrange(max(file.size - each, 0) // ALIGN + 1)
            part.append((file.path, page * ALIGN, min(each, file.size)))
        for path in {path for path, _, _ in part}:
            evict(path)
        began = time.perf_counter()
        reader.fetch_all(part)
        took = time.perf_counter() - began
        spent, count, size = spent + took, count + group, size + sum(length for _, _, length in part)
        group = max(1, min(int(group * min(0.2 / max(took, 1e-6), 2)), 256, 2 * _GROUP // each))
    return {"gb_per_s": size / spent / 1e9, "samples_per_s": count / spent, "bytes": size, "seconds": spent}


def evict(path: Path) -> None:
    """The page cache lets go of a file."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(handle)  # a page that is not on the disk yet stays
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
