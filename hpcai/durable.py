"""Files that outlive a crash of the machine."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until what was written to a file, or which names a folder holds, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
