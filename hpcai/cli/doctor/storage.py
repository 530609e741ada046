"""The folders of a job: whether all ranks see the same, how fast each node writes and reads, with the others idle and at once."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcai.cli.check.disk import evict, file_system
from hpcai.data.direct import Mode, Reader
from hpcai.errors import DataError

MARK = ".hpcai-doctor-"
"""What the names of our files begin with."""
MOST = 256 << 20
_CHUNK = 16 << 20
_LATE = 3.0  # seconds after which a file that another node has made must be seen

left_over: set[Path] = set()
"""Files that are to be deleted, however this ends."""


def clean() -> None:
    """Delete what this process has made."""
    for path in list(left_over):
        with suppress(OSError):
            path.unlink()
        left_over.discard(path)


@dataclass(frozen=True)
class Speed:
    """Bytes a second; 0 where nothing was measured. ``problem`` tells why."""

    write: float = 0.0
    read: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder as one rank sees it. ``direct``: why O_DIRECT is refused there, "" where it is not. ``seen``: whether rank 0's file
    is there; None where that was not asked."""

    path: str
    kind: str = ""
    free: int = 0
    direct: str = ""
    problem: str = ""
    seen: bool | None = None
    alone: Speed | None = None
    at_once: Speed | None = None


@dataclass
class Folders:
    """By rank: the folder of the run, as all ranks see it, and the scratch folder of the first rank of each node."""

    run: dict[int, Folder] = field(default_factory=dict)
    scratch: dict[int, Folder] = field(default_factory=dict)


def scratch() -> Path:
    """Where programs put what they need for a while: $TMPDIR, or what the system has instead."""
    return Path(tempfile.gettempdir())


@contextmanager
def mark(folder: Path, token: str) -> Iterator[str]:
    """Within its block a file of rank 0 lies in ``folder``. Gives why it cannot be written, "" where it can."""
    path, problem = folder / (MARK + token), ""
    try:
        left_over.add(path)
        with open(path, "x") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield problem
    finally:
        clean()


def sees(folder: Path, token: str, patience: float = _LATE) -> bool:
    """Whether rank 0's file is in ``folder``: file systems between nodes may show it some seconds late."""
    until = time.monotonic() + patience
    while True:
        with suppress(OSError):
            os.listdir(folder)  # has NFS ask its server again
            if (folder / (MARK + token)).read_text() == token:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def describe(folder: Path, token: str, rank: int) -> Folder:
    """Kind and room of a folder, whether a file can be written there, and whether it can be read by O_DIRECT."""
    path = folder / f"{MARK}{token}-{rank}-direct"
    kind = file_system(folder) or ""
    try:
        free = shutil.disk_usage(folder).free
        left_over.add(path)
        path.write_bytes(bytes(4096))
    except OSError as error:
        clean()
        return Folder(str(folder), kind, problem=error.strerror or str(error))
    refused = ""
    try:
        with Reader("direct", threads=1) as reader:
            reader.fetch(path, 0, 4096)
    except DataError as problem:
        refused = str(problem).removeprefix(f"{path}: ").splitlines()[0]
    finally:
        clean()
    return Folder(str(folder), kind, free, refused)


def speed(folder: Folder, token: str, rank: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> Speed:
    """Write a file, to the disk every 16 MiB, and read it past the page cache: each for ``seconds`` or up to 256 MiB."""
    path = Path(folder.path) / f"{MARK}{token}-{rank}"
    if folder.problem or folder.free < 4 * MOST:
        return Speed(problem=folder.problem or f"only {folder.free / 2**30:.1f} GiB are free")
    left_over.add(path)
    try:
        size, written = _write(path, seconds, clock)
        evict(path)
        mode: Mode = "buffered" if folder.direct else "direct"
        done, began = 0, clock()
        with Reader(mode, threads=4) as reader:
            while done < size and (not done or clock() < began + seconds):
                done += len(reader.fetch(path, done, min(_CHUNK, size - done)))
        return Speed(size / written, done / max(clock() - began, 1e-9))
    except (OSError, DataError) as problem:
        return Speed(problem=getattr(problem, "strerror", None) or str(problem))
    finally:
        clean()


def _write(path: Path, seconds: float, clock: Callable[[], float]) -> tuple[int, float]:
    """Bytes that no file system can squeeze, and in which time."""
    noise, size = os.urandom(_CHUNK), 0
    began = clock()
    with open(path, "xb", buffering=0) as file:
        while size < MOST and (not size or clock() < began + seconds):
            size += file.write(noise)
            os.fdatasync(file.fileno())
    return size, max(clock() - began, 1e-9)
