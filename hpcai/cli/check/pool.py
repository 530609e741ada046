"""A pool of child processes that read the files of a data set: one that crashes or hangs the HDF5 library becomes a finding."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

from hpcai.child_process import Task, Worker
from hpcai.cli.progress import Progress
from hpcai.errors import DataError

TIMEOUT = 120  # seconds without progress of the HDF5 library, after which a file counts as damaged
_ADDRESS_SPACE = 8 << 30  # bytes of a child process, a limit to what a damaged file allocates


class Pool(AbstractContextManager["Pool"]):
    """Worker processes that end with the ``with`` block. ``progress`` is called several times a second by the calling thread."""

    def __init__(self, workers: int, progress: Callable[[Progress], None] | None = None) -> None:
        advice = "the file is damaged, or its disk hangs"
        self._workers = [Worker("the HDF5 library", advice, TIMEOUT, _ADDRESS_SPACE) for _ in range(workers)]
        self._progress = progress or (lambda state: None)

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill(stop=True)

    def map(self, task: Task, jobs: Sequence[tuple[Any, ...]], label: str, total: int | None = None) -> list[Any]:
        """Return the results of ``task(*job)`` in the order of ``jobs``; a failed one is a DataError. Progress counts up to
        ``total`` bytes, or files."""
        results: list[Any] = [None] * len(jobs)
        numbers, done, lock = iter(range(len(jobs))), 0, threading.Lock()

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count

        def work(worker: Worker) -> None:
            for number in numbers:
                try:
                    results[number] = worker.call(task, *jobs[number], advance=advance if total is not None else lambda count: None)
                except DataError as error:
                    results[number] = error
                if total is None:
                    advance(1)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            running = {threads.submit(work, worker) for worker in self._workers}
            try:
                while running:
                    finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    for worker in finished:
                        worker.result()
                    target = (len(jobs), "files") if total is None else (total, "bytes")
                    self._progress(Progress(label, done, *target))
            except BaseException:
                self.__exit__()  # unblocks threads that wait for a reply
                raise
        return results
