"""The folders of a job: whether all ranks see the same files, and the write and read rate of each node under concurrent load."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcai.cli.check.disk import evict, file_system
from hpcai.data.direct import Reader
from hpcai.errors import DataError

PREFIX = ".hpcai-doctor-"
"""Prefix of the names of temporary files."""
MAX_BYTES = 256 << 20
_CHUNK = 16 << 20
_VISIBLE_WITHIN = 3.0  # seconds after which a file of another node must be visible

temporary_files: set[Path] = set()
"""Files to delete on any exit."""


def delete_files(reason: str = "") -> None:
    """Delete the temporary files of this process, for any reason."""
    for path in list(temporary_files):
        with suppress(OSError):
            path.unlink()
        temporary_files.discard(path)


@dataclass(frozen=True)
class Folder:
    """One rank's view of a folder. ``problem``: the error if it is not writable. ``seen``: whether rank 0's file is visible, None
    if not checked. ``write`` and ``read`` are in bytes per second, 0 if not measured."""

    path: str
    kind: str = ""
    free: int = 0
    problem: str = ""
    seen: bool | None = None
    write: float = 0.0
    read: float = 0.0


@dataclass
class Folders:
    """The folder of the run and the scratch folder, by rank; the latter only for the first rank of each node."""

    run: dict[int, Folder] = field(default_factory=dict)
    scratch: dict[int, Folder] = field(default_factory=dict)


@contextmanager
def marker_file(folder: Path, token: str) -> Iterator[str]:
    """Context manager that creates a file in ``folder`` on rank 0. Yield the error if it cannot be written, or ""."""
    path, problem = folder / (PREFIX + token), ""
    try:
        temporary_files.add(path)
        with open(path, "x") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield problem
    finally:
        delete_files()


def sees_marker(folder: Path, token: str, timeout: float = _VISIBLE_WITHIN) -> bool:
    """Whether rank 0's file is visible in ``folder``: network file systems may show it after some seconds."""
    deadline = time.monotonic() + timeout
    while True:
        with suppress(OSError):
            os.listdir(folder)  # makes NFS revalidate its cache
            if (folder / (PREFIX + token)).read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def measure_folder(folder: Path, token: str, rank: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> Folder:
    """Write a file with a sync every 16 MiB, and read it past the page cache: each for ``seconds`` or up to 256 MiB."""
    path, result = folder / f"{PREFIX}{token}-{rank}", Folder(str(folder), file_system(folder) or "")
    chunk, size = os.urandom(_CHUNK), 0  # incompressible
    try:
        result = replace(result, free=shutil.disk_usage(folder).free)
        temporary_files.add(path)
        start = clock()
        with open(path, "xb", buffering=0) as file:
            while size < min(MAX_BYTES, result.free // 4) and (not size or clock() < start + seconds):
                size += file.write(chunk)
                os.fsync(file.fileno())
        result = replace(result, write=size / max(clock() - start, 1e-9))
        evict(path)
        read_bytes, start = 0, clock()
        with Reader("auto", threads=4) as reader:
            while read_bytes < size and (not read_bytes or clock() < start + seconds):
                read_bytes += len(reader.fetch(path, read_bytes, min(_CHUNK, size - read_bytes)))
        return replace(result, read=read_bytes / max(clock() - start, 1e-9))
    except (OSError, DataError) as error:
        return replace(result, problem=getattr(error, "strerror", None) or str(error))
    finally:
        delete_files()
