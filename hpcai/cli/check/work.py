"""Threads that look at files, blocks that are read ahead for them, and the child processes that they ask."""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.cli.check.inspector import Inspectors, StoppedError
from hpcai.cli.check.manifest import Field
from hpcai.cli.progress import Progress
from hpcai.data import layout
from hpcai.data.direct import Memory, Reader
from hpcai.errors import DataError

BLOCK = 4 << 20
ARRAY = "values"
"""The name under which the array of a .npy file is known to "fields" and to ranges."""


class Work(ExitStack):
    """Threads, a reader and child processes; all of it ends with the block, also by Ctrl-C. ``progress`` is called several times a
    second, by the thread that called ``each``."""

    def __init__(self, threads: int, progress: Callable[[Progress], None] | None) -> None:
        super().__init__()
        self.threads, self._progress = threads, progress or (lambda now: None)
        self._stop, self._lock, self._done = threading.Event(), threading.Lock(), 0
        self.inspectors = self.enter_context(closing(Inspectors(threads)))
        self.reader = self.enter_context(Reader(threads=threads, block=BLOCK, memory=Memory(keep=4 * threads * BLOCK)))
        self._pool, self._ahead = (self.enter_context(ThreadPoolExecutor(threads)) for _ in range(2))

    def advance(self, count: int) -> None:
        if self._stop.is_set():
            raise StoppedError
        with self._lock:
            self._done += count

    def each(self, act: Callable[[Any], Any], jobs: Sequence[Any], label: str, total: int, unit: str) -> None:
        """``act`` on every job by the threads; the first error is raised."""
        self._done, left = 0, iter(jobs)

        def work() -> None:
            for job in left:
                act(job)
                if self._stop.is_set():
                    return

        workers = {self._pool.submit(work) for _ in range(self.threads)}
        try:
            working = workers
            while working:
                done, working = wait_for(working, timeout=0.2, return_when=FIRST_COMPLETED)
                for worker in done:
                    worker.result()
                self._progress(Progress(label, self._done, total, unit))
        except BaseException as problem:
            self._stop.set()
            if isinstance(problem, KeyboardInterrupt):
                self.inspectors.close()  # a thread that waits for an answer shall not wait for long
            wait_for(workers)
            raise

    def blocks(self, path: Path, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """The bytes of a stretch of a file in blocks, each with where it begins; the next is read while one is looked at."""
        ahead = deque[tuple[int, Future[np.ndarray]]]()
        try:
            for at in range(start, stop, BLOCK):
                ahead.append((at, self._ahead.submit(self.reader.fetch, path, at, min(BLOCK, stop - at))))
                if len(ahead) > 1:
                    yield ahead[0][0], ahead.popleft()[1].result()
            if ahead:
                yield ahead[0][0], ahead[0][1].result()
        finally:
            wait_for([block for _, block in ahead if not block.cancel()])

    def hashed(self, path: Path, look: Callable[[int, np.ndarray], None] = lambda start, block: None) -> str:
        """The SHA-256 of a file, whose blocks ``look`` sees with the places where they begin."""
        digest = hashlib.sha256()
        for start, block in self.blocks(path, 0, path.stat().st_size):
            self.advance(block.size)
            digest.update(block.data)
            look(start, block)
        return digest.hexdigest()

    def describe(self, path: Path, rows: int | None = None) -> list[Field]:
        """The datasets of a file. An array is one row, or has ``rows`` along its first dim. Raises DataError."""
        if path.suffix == ".npy":
            return [_npy(path, rows)]
        with self.inspectors.one() as inspector:
            return [Field(**told) for told in inspector.ask("describe", path=str(path))]

    def tabled(self, path: Path, rows: int) -> dict[str, Any] | None:
        """What the table of an index is to say of a file of so many rows; None where it cannot be described."""
        with suppress(DataError), self.inspectors.one() as inspector:
            (told,) = inspector.ask("table", path=str(path), rows=rows)
            return dict(told)
        return None


def _npy(path: Path, rows: int | None) -> Field:
    with path.open("rb") as file:
        head = file.read(12)
    if head[:6] != b"\x93NUMPY" or (head[6:7] > b"\x01" and int.from_bytes(head[8:12], "little") > 1 << 16):
        # The length would be believed before anything else is.
        raise DataError("not a .npy file: its first bytes are not those of one")
    try:
        found = layout.npy(path)
    except layout.UnreadableLayoutError as problem:
        return Field(ARRAY, (1,), "?", False, 1, "elsewhere", why=str(problem).removeprefix(f"{path}: "))
    plain = found.dtype.kind in "biufc"
    dtype = found.dtype.str if plain else str(found.dtype)
    shape = found.shape if rows != 1 and found.shape[:1] == (rows,) else (1, *found.shape)
    return Field(ARRAY, shape, dtype, plain, found.dtype.itemsize, "contiguous", found.offset or 0)
