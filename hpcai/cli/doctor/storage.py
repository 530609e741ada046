"""The folders of a job: whether all ranks see the same, and how fast each node writes and reads while the others do."""

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
"""The beginning of the names of our files."""
MAX_BYTES = 256 << 20
_CHUNK = 16 << 20
_VISIBLE_WITHIN = 3.0  # seconds after which a file that another node has made must be seen

temporary_files: set[Path] = set()
"""Files that are to be deleted, however this ends."""


def delete_files() -> None:
    """Delete what this process has made."""
    for path in list(temporary_files):
        with suppress(OSError):
            path.unlink()
        temporary_files.discard(path)


@dataclass(frozen=True)
class Folder:
    """A folder as one rank sees it. ``problem``: why nothing can be written. ``seen``: whether rank 0's file is there; None where
    that was not asked. ``write`` and ``read`` are bytes a second, 0 where not measured."""

    path: str
    kind: str = ""
    free: int = 0
    problem: str = ""
    seen: bool | None = None
    write: float = 0.0
    read: float = 0.0


@dataclass
class Folders:
    """The folder of the run and the scratch folder, by rank; the latter of the first rank of each node."""

    run: dict[int, Folder] = field(default_factory=dict)
    scratch: dict[int, Folder] = field(default_factory=dict)


@contextmanager
def marker_file(folder: Path, token: str) -> Iterator[str]:
    """A file of rank 0 lies in ``folder`` within the block. Yields why it cannot be written, "" where it can."""
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


def sees_marker(folder: Path, token: str, patience: float = _VISIBLE_WITHIN) -> bool:
    """Whether rank 0's file is in ``folder``: file systems between nodes may show it some seconds late."""
    until = time.monotonic() + patience
    while True:
        with suppress(OSError):
            os.listdir(folder)  # has NFS ask its server again
            if (folder / (PREFIX + token)).read_text() == token:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def measure_folder(folder: Path, token: str, rank: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> Folder:
    """Write a file, to the disk every 16 MiB, and read it past the page cache: each for ``seconds`` or up to 256 MiB."""
    path, found = folder / f"{PREFIX}{token}-{rank}", Folder(str(folder), file_system(folder) or "")
    noise, size = os.urandom(_CHUNK), 0  # which no file system can squeeze
    try:
        found = replace(found, free=shutil.disk_usage(folder).free)
        temporary_files.add(path)
        began = clock()
        with open(path, "xb", buffering=0) as file:
            while size < min(MAX_BYTES, found.free // 4) and (not size or clock() < began + seconds):
                size += file.write(noise)
                os.fdatasync(file.fileno())
        found = replace(found, write=size / max(clock() - began, 1e-9))
        evict(path)
        done, began = 0, clock()
        with Reader("auto", threads=4) as reader:
            while done < size and (not done or clock() < began + seconds):
                done += len(reader.fetch(path, done, min(_CHUNK, size - done)))
        return replace(found, read=done / max(clock() - began, 1e-9))
    except (OSError, DataError) as problem:
        return replace(found, problem=getattr(problem, "strerror", None) or str(problem))
    finally:
        delete_files()

