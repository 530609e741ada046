"""The disk of a data set: its file system, the layout of files on it, and the rate of random reads."""

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
"""More files than the latter, smaller on average than the former, load a metadata server more than the disks."""
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "afs")
_GROUP_BYTES = 32 << 20
_MAX_BYTES = 2 << 30
MODES: tuple[Mode, ...] = ("direct", "buffered")


def file_system(path: Path) -> str | None:
    """Return the type of the file system of ``path``: that of the longest mount point above it."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    resolved, longest, kind = path.resolve(), -1, None
    for columns in filter(lambda columns: len(columns) > 2, map(str.split, lines)):
        mount = Path(columns[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
        if resolved.is_relative_to(mount) and len(mount.parts) >= longest:  # a later mount at the same point hides an earlier one
            longest, kind = len(mount.parts), columns[2]
    return kind


def layout_findings(kind: str | None, splits: "Sequence[Split]", folder: Path) -> Iterator[Finding]:
    """Yield advice on the number and place of files: too many small ones, or one server for all nodes."""
    sizes = [file.size for split in splits for file in split.files]
    if len(sizes) > MANY_FILES and sum(sizes) / len(sizes) < SMALL_FILE:
        mean_size, suggested_count = log.format_bytes(sum(sizes) // len(sizes)), max(sum(sizes) // (64 << 20), 1)
        yield finding("inodes", folder, files=len(sizes), each=mean_size, better=suggested_count)
    if sizes and (kind or "").startswith(NETWORK):
        yield finding("network", folder, file_system=kind)


def measure_rate(splits: "Sequence[Split]", options: Options) -> dict[str, Any] | None:
    """Measure random reads of the size of a sample in the largest split, and compute the rate that the training needs."""
    complete_files = [[file for file in split.files if file.complete and file.rows] for split in splits]
    files = max(complete_files, key=lambda files: sum(file.size for file in files), default=[])
    if not files:
        return None
    sample_bytes = max(round(sum(file.size for file in files) / sum(file.rows for file in files)), 1)
    result: dict[str, Any] = {"bytes_per_sample": sample_bytes, "threads": max(8, options.threads)}
    for mode in MODES:
        try:
            with Reader(mode, threads=result["threads"]) as reader:
                result[mode] = _measure_reads(files, sample_bytes, reader, options.seconds)
        except DataError as error:
            result[mode] = {"problem": str(error)}
    if options.step_time is not None and options.batch is not None:
        needed = options.batch / options.step_time / options.nodes
        result["needed_per_node"] = {"samples_per_s": needed, "gb_per_s": needed * sample_bytes / 1e9}
    return result


def rate_findings(directory: Path, result: dict[str, Any], options: Options) -> Iterator[Finding]:
    def format_rate(samples: float) -> str:
        return f"{samples:,.1f} samples/s ({samples * result['bytes_per_sample'] / 1e9:.3g} GB/s)"

    best = max(result[mode].get("samples_per_s", 0.0) for mode in MODES)
    needed = result.get("needed_per_node", {}).get("samples_per_s", 0.0)
    if best < needed:
        job = f"{options.batch} samples per {options.step_time:g} s need {format_rate(needed)} on each node ({options.nodes})"
        yield finding("rate", directory, best=format_rate(best), job=job)


def _measure_reads(files: "Sequence[DataFile]", sample_bytes: int, reader: Reader, seconds: float) -> dict[str, Any]:
    """Read random samples, many at once, for ``seconds`` or up to 2 GiB; files are evicted from the page cache before."""
    generator, elapsed, size, count = random.Random(0), 1e-9, 0, 0
    group, cumulative = max(1, min(64, _GROUP_BYTES // sample_bytes)), list(accumulate(file.size for file in files))
    while elapsed < seconds and size < _MAX_BYTES:
        ranges = []
        for file in generator.choices(files, cum_weights=cumulative, k=group):
            page = generator.randrange(max(file.size - sample_bytes, 0) // ALIGN + 1)
            ranges.append((file.path, page * ALIGN, min(sample_bytes, file.size)))
        for path in {path for path, _, _ in ranges}:
            evict(path)
        start = time.perf_counter()
        reader.fetch_all(ranges)
        elapsed, count, size = elapsed + time.perf_counter() - start, count + group, size + sum(length for _, _, length in ranges)
    return {"gb_per_s": size / elapsed / 1e9, "samples_per_s": count / elapsed, "bytes": size, "seconds": elapsed}


def evict(path: Path) -> None:
    """Drop a file from the page cache."""
    with suppress(OSError, AttributeError), path.open("rb", buffering=0) as file:  # macOS has no such call
        os.fsync(file.fileno())  # dirty pages would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
