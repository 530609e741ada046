"""Files that outlive a crash of the machine, and folders that have one owner."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpcai.errors import CheckpointError


def fsync(path: Path) -> None:
    """Wait until what was written to a file, or which names a folder holds, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_directory(folder: Path) -> IO[str]:
    """The folder belongs to this process until ``release`` is called with the file, or the process ends in any way.

    Raises CheckpointError with host and process of another owner. A file system without locks gives the folder to everybody.
    """
    file = open(folder / ".owner", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "an unknown process"
        file.close()
        text = f"{folder}: another run uses this directory ({owner}); wait for its end, or choose another report.directory"
        raise CheckpointError(text) from None
    except OSError:  # no locks here
        pass
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def unlock_directory(owner: IO[str]) -> None:
    """Give up what ``claim`` gave."""
    with suppress(OSError):  # the lock ends with the file in any case
        Path(owner.name).unlink(missing_ok=True)
    owner.close()
