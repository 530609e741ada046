"""Child processes that read files which may be damaged: a file that crashes or hangs the HDF5 library is a finding."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from hpcai.cli.progress import Progress
from hpcai.errors import DataError

TIMEOUT = 120  # seconds; a file that leaves the HDF5 library silent for longer is damaged
_ADDRESS_SPACE = 8 << 30  # bytes of a child process, whatever a damaged file asks for

Task = Callable[..., Iterator[Any]]
"""Work for a child process: a generator of how many bytes each part of it was, and last of the result."""


def serve(descriptor: int) -> None:
    """Answer requests until the connection is closed: the main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(hard, _ADDRESS_SPACE), hard))
    line = Connection(descriptor)
    with suppress(EOFError):
        while True:
            act, words = line.recv()
            try:
                for answer in act(*words):
                    signal.alarm(2 * TIMEOUT)  # ends a child in an endless loop whose parent was killed
                    line.send(answer)
            except Exception as problem:  # whatever h5py makes of a damaged file
                line.send(problem if isinstance(problem, DataError) else DataError(f"{type(problem).__name__}: {problem}"))
            signal.alarm(0)


class StoppedError(Exception):
    """The command ends early."""


class Worker:
    """A child process, started when it is first needed and again after it died."""

    def __init__(self) -> None:
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._lock, self._stopped = threading.Lock(), False

    def call(self, act: Task, *words: Any, advance: Callable[[int], None] = lambda count: None) -> Any:
        """Return the result of ``act(*words)``. Raises DataError where that does, or the child process dies or hangs."""
        child, line = self._start()
        answer: Any = None
        try:
            with suppress(OSError):  # it died; what follows says how
                line.send((act, words))
            while isinstance(answer := self._receive(child, line), int):
                advance(answer)
        finally:
            if answer is None or isinstance(answer, int):
                self.kill()
        if isinstance(answer, DataError):
            raise answer
        return answer

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        with self._lock:
            if self._stopped:
                raise StoppedError
            if self._child is None or self._child[0].poll() is not None:  # killed between two requests, it is no file's fault
                near, far = Pipe()
                # -P: a data set may hold an h5py.py
                place = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, "-P", "-c", f"from hpcai.cli.check.pool import serve; serve({far.fileno()})"]
                null = subprocess.DEVNULL
                child = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=place, pass_fds=[far.fileno()])
                far.close()
                self._child = child, near
            return self._child

    def _receive(self, child: "subprocess.Popen[bytes]", line: Connection) -> Any:
        try:
            if line.poll(TIMEOUT):
                return line.recv()
        except (EOFError, OSError) as end:
            code = child.wait()
            ended = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            raise DataError(f"the HDF5 library takes its process down ({ended}); the file is damaged") from end
        raise DataError(f"the HDF5 library is silent for {TIMEOUT:g} s; the file is damaged, or its disk hangs")

    def kill(self, stop: bool = False) -> None:
        """End the child process; with ``stop`` none is started again."""
        with self._lock:
            old, self._child, self._stopped = self._child, None, self._stopped or stop
        if old is not None:
            old[0].kill()
            old[0].wait()
            old[1].close()


class Pool:
    """Worker processes; all end with the ``with`` block. ``progress`` is called several times a second by the calling thread."""

    def __init__(self, workers: int, progress: Callable[[Progress], None] | None = None) -> None:
        self._workers = [Worker() for _ in range(workers)]
        self._progress = progress or (lambda now: None)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill(stop=True)

    def map(
        self,
        act: Task,
        jobs: Sequence[tuple[Any, ...]],
        label: str,
        total: int | None = None,
        then: Callable[[int, Any], object] = lambda number, result: None,
    ) -> list[Any]:
        """Return the results of ``act(*job)`` in the order of ``jobs``, with a DataError in the place of a result that there is
        not. ``then`` is called with number and result of each job as it ends, once at a time. Progress counts to ``total`` bytes,
        or files."""
        results: list[Any] = [None] * len(jobs)
        numbers, done, lock = iter(range(len(jobs))), 0, threading.Lock()

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count

        def work(worker: Worker) -> None:
            for number in numbers:
                try:
                    results[number] = worker.call(act, *jobs[number], advance=advance if total is not None else lambda count: None)
                except DataError as problem:
                    results[number] = problem
                with lock:
                    then(number, results[number])
                if total is None:
                    advance(1)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            running = {threads.submit(work, worker) for worker in self._workers}
            try:
                while running:
                    ended, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    for worker in ended:
                        worker.result()
                    many = (len(jobs), "files") if total is None else (total, "bytes")
                    self._progress(Progress(label, done, *many))
            except BaseException:
                self.__exit__()  # a thread that waits for an answer shall not wait for long
                raise
        return results
