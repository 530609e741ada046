"""Threads that look at files, blocks that are read ahead for them, and the child processes that they ask."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.cli.check.findings import Options, Progress, StoppedError
from hpcai.cli.check.inspector import Inspectors
from hpcai.cli.check.manifest import Field
from hpcai.data import layout
from hpcai.data.direct import Memory
from hpcai.errors import DataError

BLOCK = 4 << 20
ARRAY = "values"
"""The name under which the array of a .npy file is known to "fields" and to ranges."""


class Work:
    """Threads, a reader and child processes; all of it ends with the block, also by Ctrl-C. ``inspectors``, where given, are used
    and left open. ``progress`` is called several times a second, by the thread that called ``each``."""

    def __init__(
        self, options: Options, inspectors: Inspectors | None = None, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.threads, self._progress, self._own = options.threads, progress, inspectors is None
        self.inspectors = inspectors or Inspectors(options.threads, options.patience)
        memory = Memory(keep=4 * options.threads * BLOCK)
        self.reader = options.reader("auto", threads=options.threads, block=BLOCK, memory=memory)
        self._pool, self._ahead = ThreadPoolExecutor(options.threads), ThreadPoolExecutor(options.threads)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._done = 0

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ahead.shutdown(cancel_futures=True)
        self.reader.close()
        if self._own:
            self.inspectors.close()

    def advance(self, count: int) -> None:
        if self._stop.is_set():
            raise StoppedError
        with self._lock:
            self._done += count

    def each(self, act: Callable[[Any], Any], jobs: Sequence[Any], label: str, total: int, unit: str) -> None:
        """``act`` on every job by the threads; the first error is raised."""
        self._done, waiting, rest = 0, set[Future[Any]](), iter(jobs)
        try:
            while True:
                waiting |= {self._pool.submit(act, job) for job in islice(rest, 4 * self.threads - len(waiting))}
                done, waiting = wait_for(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                if self._progress is not None:
                    self._progress(Progress(label, self._done, total, unit))
                if not waiting and not done:
                    return
        except BaseException as problem:
            self._stop.set()
            if isinstance(problem, KeyboardInterrupt):
                self.inspectors.close()  # a thread that waits for an answer shall not wait for long
            for future in waiting:
                future.cancel()
            wait_for(waiting)
            raise

    def blocks(self, path: Path, ranges: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
        """The bytes of each range; the next is read while one is looked at."""
        ahead: Future[np.ndarray] | None = None
        try:
            for start, stop in ranges:
                before, ahead = ahead, self._ahead.submit(self.reader.fetch, path, start, stop - start)
                if before is not None:
                    yield before.result()
            if ahead is not None:
                yield ahead.result()
        finally:
            if ahead is not None and not ahead.cancel():
                wait_for([ahead])

    def hashed(self, path: Path, size: int, look: Callable[[int, np.ndarray], None] = lambda start, block: None) -> str:
        """The SHA-256 of a file, whose blocks ``look`` sees with the places where they begin."""
        digest, starts = hashlib.sha256(), range(0, size, BLOCK)
        for start, block in zip(starts, self.blocks(path, [(start, min(start + BLOCK, size)) for start in starts])):
            self.advance(block.size)
            digest.update(block.data)
            look(start, block)
        return digest.hexdigest()

    def describe(self, path: Path) -> list[Field]:
        """The datasets of a file. Raises DataError."""
        if path.name.endswith(".npy"):
            return [_npy(path)]
        with self.inspectors.one() as inspector:
            told = list(inspector.ask("describe", path=str(path)))
        return [Field(**{**words, "shape": tuple(words["shape"] or ()), "chunk": tuple(words.get("chunk", ()))}) for words in told]


def _npy(path: Path) -> Field:
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
    return Field(ARRAY, (1, *found.shape), dtype, plain, found.dtype.itemsize, "contiguous", found.offset)
