"""Residency of a file in the page cache."""

import ctypes
import mmap
from pathlib import Path


def resident_fraction(path: Path) -> float:
    """Return the fraction of a file's pages in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)
