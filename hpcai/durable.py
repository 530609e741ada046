"""Files that survive a crash of the machine, and directories with one owner."""

import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hpcai.errors import CheckpointError


def fsync(path: Path) -> None:
    """Wait until the data of a file, or the entries of a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file atomically, and keep its permissions."""
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically, and keep its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # several ranks may write the same file
    try:
        partial.write_bytes(content)
        if path.exists():
            shutil.copymode(path, partial)
        commit_file(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def commit_file(partial: Path, path: Path) -> None:
    """Flush a finished file to the disk, and rename it to ``path``."""
    fsync(partial)
    partial.replace(path)
    fsync(path.parent)


def lock_directory(folder: Path, remedy: str = "choose another report.directory") -> IO[str]:
    """Lock a directory until ``unlock_directory`` is called with the returned file, or the process ends.

    Raises CheckpointError with host and process of another owner. On a file system without locks it always succeeds.
    """
    file = open(folder / ".owner", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "an unknown process"
        file.close()
        raise CheckpointError(f"{folder}: another run uses this directory ({owner}); wait for its end, or {remedy}") from None
    except OSError:  # a file system without locks
        pass
    if not os.path.exists(file.name) or not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
        file.close()  # an owner before this one removed the file between its opening and its lock
        return lock_directory(folder, remedy)
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def unlock_directory(owner: IO[str]) -> None:
    """Release the lock of ``lock_directory``."""
    with suppress(OSError):  # closing the file releases the lock in any case
        Path(owner.name).unlink(missing_ok=True)
    owner.close()


@contextmanager
def locked_directory(folder: Path, remedy: str) -> Iterator[None]:
    """Context manager that locks a directory, as ``lock_directory``."""
    owner = lock_directory(folder, remedy)
    try:
        yield
    finally:
        unlock_directory(owner)
