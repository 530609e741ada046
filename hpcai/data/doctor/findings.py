"""What a check finds, and what needs no file: division over ranks, stripes, file systems."""

import math
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcai import log
from hpcai.data.direct import Reader
from hpcai.errors import ConfigError

INDEX = "index.json"
JOURNAL = ".repair.journal"
"""What --repair has rewritten and the index does not say yet; a line of JSON each."""
ARRAY = "values"
"""The name under which the array of a .npy file is known to "fields" and to ranges."""
SMALL, MANY = 1 << 20, 10_000
"""Files that are smaller and more than this keep a metadata server busier than its disks."""
NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "afs")
Severity = Literal["error", "warning", "note"]
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing. ``row`` is the first of the rows that ``text`` names."""

    severity: Severity
    code: str
    path: Path
    text: str
    dataset: str | None = None
    row: int | None = None
    repairable: bool = False


@dataclass(frozen=True)
class Options:
    """What is checked, and against what.

    ``quick`` looks at sizes and headers only, ``sample`` reads that many random rows of each split and no more. ``ranges`` are
    the least and the most value of fields, and come before those of the index. ``batch`` counts the samples of one step over all
    ``world`` processes, ``step_time`` is in seconds and ``nodes`` share what is read. ``seconds`` is the time to measure each way
    of reading, 0 for not at all. A file that leaves the HDF5 library silent for ``patience`` seconds is damaged. ``reader`` makes
    the readers, ``mounts`` lists the file systems. Raises ConfigError with all mistakes.
    """

    quick: bool = False
    sample: int | None = None
    ranges: Mapping[str, Bounds] = field(default_factory=dict)
    world: int | None = None
    batch: int | None = None
    nodes: int = 1
    step_time: float | None = None
    seconds: float = 3.0
    threads: int = 4
    patience: float = 120.0
    seed: int = 0
    reader: Callable[..., Reader] = Reader
    mounts: Path = Path("/proc/mounts")

    def __post_init__(self) -> None:
        if wrong := list(self._mistakes()):
            raise ConfigError("\n".join(wrong))

    def _mistakes(self) -> Iterator[str]:
        for name in ("sample", "world", "batch", "nodes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} is {value}, expected 1 or more"
        if self.quick and self.sample is not None:
            yield f"quick and sample {self.sample} exclude one another: quick reads no row; leave one out"
        if self.step_time is not None and not 0 < self.step_time < math.inf:
            yield f"step-time is {self.step_time} s, expected a time above 0"
        if self.step_time is not None and self.batch is None:
            yield "step-time says nothing without the samples of a step; add batch, counted over all processes"
        if not 0 <= self.seconds < math.inf or not 0 < self.patience < math.inf:
            yield f"seconds is {self.seconds} and patience {self.patience}, expected finite times, above 0 for patience"
        for name, (low, high) in self.ranges.items():
            if low is not None and high is not None and not low <= high:
                yield f"range {name}={low}:{high}: expected the least value first"


@dataclass(frozen=True)
class Division:
    """The samples of a split in batches: with the rest dropped, or with samples repeated to fill the last batch."""

    samples: int
    batch: int
    world: int
    batches: int
    left_out: int
    padded_batches: int
    repeated: int
    problems: tuple[tuple[Severity, str, str], ...]


@dataclass(frozen=True)
class Summary:
    """A split in figures. ``verified`` files have the SHA-256 that the manifest says; ``aligned`` is the fraction of rows that
    begin on a page."""

    name: str
    files: int
    samples: int
    bytes: int
    verified: int
    fields: Mapping[str, str]
    aligned: float | None
    division: Division | None


@dataclass(frozen=True)
class Outcome:
    """All that a check has found."""

    directory: Path
    options: Options
    findings: tuple[Finding, ...]
    splits: tuple[Summary, ...]
    figures: Mapping[str, Any]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def failed(self, strict: bool = False) -> bool:
        return bool(self.count("error") or (strict and self.count("warning")))

    def as_json(self) -> dict[str, Any]:
        """The findings, splits and figures, of which JSON can be made."""
        severities: tuple[Severity, ...] = ("error", "warning", "note")
        codes = Counter(finding.code for finding in self.findings)
        return {
            "directory": str(self.directory),
            "summary": {**{f"{name}s": self.count(name) for name in severities}, "codes": dict(sorted(codes.items()))},
            "splits": [asdict(split) for split in self.splits],
            "figures": dict(self.figures),
            "findings": [{**asdict(finding), "path": str(finding.path)} for finding in self.findings],
        }


@dataclass(frozen=True)
class Progress:
    """How far the work is; ``unit`` is bytes, files or rows."""

    label: str
    done: int
    total: int
    unit: str


class StoppedError(Exception):
    """The check ends early."""


# ---- what needs no file


def divide(samples: int, batch: int, world: int) -> Division:
    """``samples`` in batches of ``batch`` over ``world`` processes, and what will deadlock or surprise about it."""
    batches, left_out = divmod(samples, batch)
    padded = -(-samples // batch)
    problems: list[tuple[Severity, str, str]] = []
    if batch % world:
        less, more = batch // world * world, -(-batch // world) * world
        near = f"{less} or {more}" if less else f"{more}"
        text = f"a batch of {batch} samples does not divide by {world} processes; expected a multiple: {near}"
        problems.append(("error", "batch", text))
    if samples < world:
        text = f"{samples} samples for {world} processes, expected one or more for each; use at most {samples} of them"
        problems.append(("error", "ranks", text))
    elif not batches:
        text = f"{samples} samples are less than one batch of {batch}, so that 'drop' leaves no batch; use a smaller one"
        problems.append(("error", "remainder", text))
    elif left_out:
        rest = f"'drop' leaves {left_out} of them out of each epoch, 'pad' repeats {batch - left_out}"
        problems.append(("note", "remainder", f"{samples} samples in batches of {batch}: {rest}"))
    return Division(samples, batch, world, batches, left_out, padded, padded * batch - samples, tuple(problems))


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system that ``path`` lies on: that of the longest mount point above it."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    place, best, found = path.resolve(), -1, None
    for line in lines:
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
        if place.is_relative_to(point) and len(point.parts) >= best:  # of two at one place the later hides the earlier
            best, found = len(point.parts), words[2]
    return found


def stripes(size: int) -> int:
    """Servers that a file of ``size`` bytes should lie on: NERSC's stripe_small, _medium and _large."""
    return next((count for limit, count in ((10**9, 1), (10**10, 8), (10**11, 24)) if size < limit), 72)


def stripe_hint(kind: str | None, folder: Path, sizes: Sequence[int], present: int | None = None) -> Finding | None:
    """A note about how files of ``sizes`` should lie on a parallel file system of type ``kind``, or None where there is nothing
    to say. ``present`` is their stripe count where it is known; -1 is all servers."""
    if not sizes or kind is None:
        return None
    typical = int(statistics.median(sizes))
    want = stripes(typical)
    about = f"files of {log.size(typical)}"
    if kind == "lustre":
        if present is not None and (present == 1 if want == 1 else present == -1 or present >= want // 2):
            return None
        found = "" if present is None else f", found on {'all' if present < 0 else present}"
        why = "each further server costs an open" if want == 1 else "many processes read them at once"
        line = f"lfs setstripe -c {want} {'-S 4m ' if want > 1 else ''}{folder}"
        text = f"Lustre: {about} belong on {want} server{'s' * (want > 1)}{found}: {why}; {line}, then lfs migrate -c {want} FILE"
        return Finding("note", "stripe", folder, text)
    if kind.startswith("beegfs") and want > 1:
        line = f"beegfs-ctl --setpattern --numtargets={want} --chunksize=1m {folder}"
        return Finding("note", "stripe", folder, f"BeeGFS: {about} belong on {want} targets; {line}, then copy them anew")
    if kind == "gpfs" and typical < SMALL:
        text = f"GPFS: {about} are smaller than its blocks, so each comes from one server; pack samples into files of 64 MiB"
        return Finding("note", "stripe", folder, text)
    if kind.startswith(NETWORK):
        text = f"lies on {kind}, one server for all nodes; copy it to local disks at the start of a job: hpcai data stage"
        return Finding("note", "network", folder, text)
    return None


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


def metadata_bound(folder: Path, files: int, size: int) -> Finding | None:
    """A warning when there are many and small files, ``size`` bytes in all."""
    if files <= MANY or size / files >= SMALL:
        return None
    text = (
        f"{files:,} files of {log.size(size // files)} on average: opening them costs more than reading, and each takes an "
        f"inode of a quota; pack rows into fewer files of 64 MiB and more, such as {max(size // (64 << 20), 1):,}"
    )
    return Finding("warning", "inodes", folder, text)
