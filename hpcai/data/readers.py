"""The choice between buffered and direct reads, by the memory that is available."""

import logging
import os
import re
from pathlib import Path

import torch

from hpcai.data.direct import MemoryPool, Mode, Reader
from hpcai.errors import DataError
from hpcai.host_limits import cgroup_folders, count_cpus, read_text
from hpcai.log import format_bytes as format_size

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.6
"""Fraction of the memory that the page cache may use; the rest is for models, batches and other processes of the node."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process and its page cache may still use: free memory of the node, or all where the system does
    not tell, within its cgroup limits."""
    available = re.search(r"^MemAvailable: *(\d+)", read_text(root / "proc/meminfo"), re.M)  # only Linux has it
    free = int(available[1]) << 10 if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for version, folder in cgroup_folders("memory", root):
        names = ("memory.max", "memory.current", "file"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        limit, usage, cache = names[0] if version == 2 else names[1]
        limit_bytes = _read_int(folder / limit)
        if limit_bytes is not None:
            stat = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            free = min(free, limit_bytes - (_read_int(folder / usage) or 0) + int(stat.get(cache, 0)))
    return max(free, 0)


def choose_mode(size: int, root: Path = Path("/")) -> tuple[Mode, str]:
    """Return the mode and the reason: ``buffered`` if ``size`` bytes fit into the page cache, otherwise ``auto`` (direct)."""
    limit = int(MEMORY_FRACTION * available_memory(root))
    if size <= limit:
        return "buffered", f"{format_size(size)} of samples fit into {format_size(limit)} of page cache: reads go through it"
    return "auto", f"{format_size(size)} of samples do not fit into {format_size(limit)} of page cache: reads go past it"


def open_reader(kind: str, size: int, name: str = "data", device: torch.device | None = None) -> Reader:
    """Return a reader for ``size`` bytes of samples, with memory pinned for ``device`` if that is a GPU.

    ``kind``: ``auto`` uses the mode of ``choose_mode``, logged; ``direct`` requires O_DIRECT; ``buffered`` uses the page cache.
    Other kinds (``memory``, ``hdf5``, ``dali``, ``gds``) use O_DIRECT if the file system supports it.
    Raises DataError for ``memory`` if the samples do not fit.
    """
    mode: Mode = "direct" if kind == "direct" else "buffered" if kind == "buffered" else "auto"
    if kind == "auto":
        mode, reason = choose_mode(size)
        logger.info("%s: %s", name, reason)
    elif kind == "memory" and size > (limit := int(MEMORY_FRACTION * available_memory())):
        fault = f"{name}: data.reader=memory, but there are {format_size(size)} of samples"
        raise DataError(f"{fault}, and {format_size(limit)} of memory may be used for them; use data.reader=direct")
    memory = MemoryPool(pin=device if device is not None and device.type == "cuda" else None)
    return Reader(mode, memory=memory, threads=max(8, min(32, count_cpus())))


def _read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
