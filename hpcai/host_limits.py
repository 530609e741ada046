"""Limits of this process on its host: CPUs, within the quotas of its cgroups, and open files."""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield the version, 1 or 2, and the folder of each cgroup that limits this process, from its own to the root of the hierarchy:
    limits of parents apply too. In a container the path is that of the host, and the root of its own hierarchy is visible."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers and controller not in controllers.split(","):
            continue
        if controllers:
            base /= controller if (base / controller).is_dir() else controllers
        folder = base / name.lstrip("/")
        for path in (folder, *folder.parents):
            if not path.is_relative_to(base):
                break
            yield (1 if controllers else 2), path


def allowed_cpus() -> set[int]:
    """Return the CPUs of the affinity mask."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def count_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use: those of its affinity mask, and no more than the CPU time of its
    cgroups, rounded up."""
    counts = [len(allowed_cpus())]
    for version, folder in cgroup_folders("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = " ".join(read_text(folder / name) for name in names).split()  # microseconds of each period, or max, or -1
        if len(numbers) == 2 and all(number.isdigit() and int(number) for number in numbers):
            counts.append(math.ceil(int(numbers[0]) / int(numbers[1])))
    return min(counts)


def raise_file_limit() -> int:
    """Raise the limit of open files to the highest that the system permits, and return it: many systems start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < highest:
        with suppress(OSError, ValueError):  # the kernel may have a lower one of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
            soft = highest
    return highest if soft == resource.RLIM_INFINITY else soft


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty string if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
