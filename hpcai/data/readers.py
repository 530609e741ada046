"""Which way to read, by what fits into memory."""

import logging
import os
from pathlib import Path

import torch

from hpcai.data.direct import MemoryPool, Mode, Reader
from hpcai.errors import DataError
from hpcai.log import format_bytes as format_size

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.6
"""Part of the memory that a page cache may be counted on for; the rest is for models, batches and others on the node."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its page cache may still fill: what the node has free, within the limits of its cgroups."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            base = root / "sys/fs/cgroup"
            limit, usage, cache = "memory.max", "memory.current", "file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"
        else:
            continue
        folder = base / name.lstrip("/")
        # In a container the path is that of the host; what it may see is the root of its own hierarchy. Limits of parents hold too.
        for path in (folder, *folder.parents):
            if not path.is_relative_to(base):
                break
            limit_bytes = _read_int(path / limit)
            if limit_bytes is not None:
                stat = dict(line.split() for line in _read_text(path / "memory.stat").splitlines())
                free = min(free, limit_bytes - (_read_int(path / usage) or 0) + int(stat.get(cache, 0)))
    return max(free, 0)


def choose_mode(size: int, root: Path = Path("/")) -> tuple[Mode, str]:
    """``buffered`` where ``size`` bytes fit into the page cache and ``direct`` (``auto``) where not, with the reason."""
    limit = int(MEMORY_FRACTION * available_memory(root))
    if size <= limit:
        return "buffered", f"{format_size(size)} of samples fit into {format_size(limit)} of page cache: reads go through it"
    return "auto", f"{format_size(size)} of samples do not fit into {format_size(limit)} of page cache: reads go past it"


def open_reader(kind: str, size: int, name: str = "data", device: torch.device | None = None) -> Reader:
    """A reader for ``size`` bytes of samples, whose memory suits copies to ``device``.

    ``auto`` takes what ``choose`` finds best, and says so; ``direct`` insists on O_DIRECT; ``buffered`` reads through the page
    cache. The other ways (``memory``, ``hdf5``, ``dali``, ``gds``) read by O_DIRECT where the file system has it.
    Raises DataError for ``memory`` when the samples do not fit.
    """
    mode: Mode = "direct" if kind == "direct" else "buffered" if kind == "buffered" else "auto"
    if kind == "auto":
        mode, reason = choose_mode(size)
        logger.info("%s: %s", name, reason)
    elif kind == "memory" and size > (limit := int(MEMORY_FRACTION * available_memory())):
        raise DataError(
            f"{name}: data.reader=memory, but there are {format_size(size)} of samples, and {format_size(limit)} of memory may be used for them; "
            "use data.reader=direct"
        )
    memory = MemoryPool(pin=device if device is not None and device.type == "cuda" else None)
    return Reader(mode, memory=memory, threads=max(8, min(32, os.cpu_count() or 8)))


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    """The text of a file, none where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
