"""Child processes that read untrusted files: a file that crashes or hangs the HDF5 library becomes a finding."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from hpcai.cli.progress import Progress
from hpcai.errors import DataError

TIMEOUT = 120  # seconds without progress of the HDF5 library, after which a file counts as damaged
_ADDRESS_SPACE = 8 << 30  # bytes of a child process, a limit to what a damaged file allocates

Task = Callable[..., Iterator[Any]]
"""Work of a child process: a generator of the bytes of each part, and finally of the result."""


def serve(descriptor: int) -> None:
    """Process requests until the connection is closed: the main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(hard, _ADDRESS_SPACE), hard))
    connection = Connection(descriptor)
    with suppress(EOFError):
        while True:
            task, args = connection.recv()
            try:
                for message in task(*args):
                    signal.alarm(2 * TIMEOUT)  # ends an endless loop if the parent was killed
                    connection.send(message)
            except Exception as error:  # anything that h5py raises for a damaged file
                connection.send(error if isinstance(error, DataError) else DataError(f"{type(error).__name__}: {error}"))
            signal.alarm(0)


class StoppedError(Exception):
    """The command is ending."""


class Worker:
    """A child process, started on first use and restarted after it died."""

    def __init__(self) -> None:
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._lock, self._stopped = threading.Lock(), False

    def call(self, task: Task, *args: Any, advance: Callable[[int], None] = lambda count: None) -> Any:
        """Return the result of ``task(*args)``. Raises DataError if the task does, or the child process dies or hangs."""
        child, connection = self._start()
        reply: Any = None
        try:
            with suppress(OSError):  # it died; _receive raises the error
                connection.send((task, args))
            while isinstance(reply := self._receive(child, connection), int):
                advance(reply)
        finally:
            if reply is None or isinstance(reply, int):
                self.kill()
        if isinstance(reply, DataError):
            raise reply
        return reply

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        with self._lock:
            if self._stopped:
                raise StoppedError
            if self._child is None or self._child[0].poll() is not None:  # if killed between two requests, no file is at fault
                near, far = Pipe()
                # -P: a data set may hold an h5py.py
                environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, "-P", "-c", f"from hpcai.cli.check.pool import serve; serve({far.fileno()})"]
                null = subprocess.DEVNULL
                child = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=environ, pass_fds=[far.fileno()])
                far.close()
                self._child = child, near
            return self._child

    def _receive(self, child: "subprocess.Popen[bytes]", connection: Connection) -> Any:
        try:
            if connection.poll(TIMEOUT):
                return connection.recv()
        except (EOFError, OSError) as error:
            code = child.wait()
            reason = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            raise DataError(f"the HDF5 library takes its process down ({reason}); the file is damaged") from error
        raise DataError(f"the HDF5 library is silent for {TIMEOUT:g} s; the file is damaged, or its disk hangs")

    def kill(self, stop: bool = False) -> None:
        """Kill the child process; with ``stop`` it is not restarted."""
        with self._lock:
            child, self._child, self._stopped = self._child, None, self._stopped or stop
        if child is not None:
            child[0].kill()
            child[0].wait()
            child[1].close()


class Pool(AbstractContextManager["Pool"]):
    """Worker processes that end with the ``with`` block. ``progress`` is called several times a second by the calling thread."""

    def __init__(self, workers: int, progress: Callable[[Progress], None] | None = None) -> None:
        self._workers = [Worker() for _ in range(workers)]
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
