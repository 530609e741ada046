"""Files that stay open between reads: an open takes milliseconds on a parallel file system."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class _Entry(Generic[T]):
    __slots__ = ("file", "users")

    def __init__(self, file: T) -> None:
        self.file, self.users = file, 0


class FileCache(Generic[T]):
    """Open files: at most ``limit``, and those that are in use. The one that was not used for longest is closed first.

    ``open`` and ``close`` are called by whichever thread needs a file or lets the last one go, and never under the lock.
    """

    def __init__(self, open: Callable[[Path], T], close: Callable[[T], None], limit: int) -> None:
        self._open, self._close, self._limit = open, close, limit
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
                entry = self._entries.setdefault(path, opened)  # another thread may have been faster
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
            if last:  # it was forgotten meanwhile
                self._close(entry.file)

    def invalidate(self, path: Path, file: T) -> None:
        """Let the next use open ``path`` anew; present uses of ``file`` go on."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None and entry.file is file and entry.users:
                del self._entries[path]

    def close(self) -> None:
        """Close all files, those in use when their last user is done."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
            idle = [entry for entry in entries if not entry.users]
        for entry in idle:
            self._close(entry.file)
