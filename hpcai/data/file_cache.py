"""A cache of open files: opening one takes milliseconds on a parallel file system."""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from hpcai.errors import DataError
from hpcai.host_limits import raise_file_limit

T = TypeVar("T")


def check_file_limit(path: Path, problem: BaseException | None) -> None:
    """Raise DataError if the problem is that too many files are open."""
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
        text = f"{os.strerror(problem.errno)} (this process may have {raise_file_limit():,}); raise the limit: ulimit -n 4096"
        raise DataError(f"{path}: cannot be opened: {text}") from problem


class _Entry(Generic[T]):
    __slots__ = ("file", "users")

    def __init__(self, file: T) -> None:
        self.file, self.users = file, 0


class FileCache(Generic[T]):
    """An LRU cache of ``limit`` open files, for several threads. Files in use stay open, also beyond the limit. The system's limit
    of open files is raised where it may be; each cache keeps at most 1/8 of it open.

    ``open`` and ``close`` are called without the lock, from the thread that first uses a file or that releases it last.
    """

    def __init__(self, open: Callable[[Path], T], close: Callable[[T], None], limit: int) -> None:
        self._open, self._close, self._limit = open, close, max(1, min(limit, raise_file_limit() // 8))
        self._lock, self._entries = threading.Lock(), OrderedDict[Path, _Entry[T]]()

    @contextmanager
    def use(self, path: Path) -> Iterator[T]:
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None:
                self._entries.move_to_end(path)
                entry.users += 1
        if entry is None:
            opened = _Entry(self._open(path))
            with self._lock:
                entry = self._entries.setdefault(path, opened)  # another thread may have opened it meanwhile
                entry.users += 1
                surplus = [opened] if entry is not opened else []
                idle = [p for p, e in self._entries.items() if not e.users]
                surplus += [self._entries.pop(p) for p in idle[: max(len(self._entries) - self._limit, 0)]]
            for other in surplus:
                self._close(other.file)
        try:
            yield entry.file
        finally:
            with self._lock:
                entry.users -= 1
                last = entry.users == 0 and self._entries.get(path) is not entry
            if last:  # invalidated meanwhile
                self._close(entry.file)

    def invalidate(self, path: Path, file: T) -> None:
        """Reopen ``path`` on its next use. Present users keep ``file``."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None and entry.file is file and entry.users:
                del self._entries[path]

    def close(self) -> None:
        """Close all files; files in use are closed by their last user."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
            idle = [entry for entry in entries if not entry.users]
        for entry in idle:
            self._close(entry.file)
