"""Child processes that read untrusted files or run untrusted templates: a crash, a hang or a lack of memory becomes a DataError."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from hpcai.errors import DataError

Task = Callable[..., Iterator[Any]]
"""Work of a child process: a generator of numbers, which report progress, and finally of the result."""


def serve(descriptor: int, max_bytes: int) -> None:
    """Process requests until the connection is closed: the main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(ValueError):  # macOS maps more than that at the start of a process
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes if hard == resource.RLIM_INFINITY else min(hard, max_bytes), hard))
    connection = Connection(descriptor)
    with suppress(EOFError):
        while True:
            seconds, task, args = connection.recv()
            signal.alarm(int(2 * seconds) + 1)  # ends an endless loop if the parent was killed
            try:
                for message in task(*args):
                    signal.alarm(int(2 * seconds) + 1)
                    connection.send(message)
            except Exception as error:  # anything that a library raises for a damaged file
                connection.send(error if isinstance(error, DataError) else DataError(f"{type(error).__name__}: {error}"))
            signal.alarm(0)


class StoppedError(Exception):
    """The command is ending."""


class Worker:
    """A child process, started on first use and restarted after it died, or after a fork of this process.

    ``name`` and ``advice``: For errors. ``seconds``: Longest time without a message. ``max_bytes``: Limit of its address space.
    """

    def __init__(self, name: str, advice: str, seconds: float, max_bytes: int) -> None:
        self.name, self.advice, self.seconds, self.max_bytes = name, advice, seconds, max_bytes
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._stopped, self._pid = False, os.getpid()
        self._lock, self._calling = threading.Lock(), threading.Lock()

    def call(self, task: Task, *args: Any, advance: Callable[[int], None] = lambda count: None) -> Any:
        """Return the result of ``task(*args)``. Raises DataError if the task does, or the child process dies or hangs. Threads take
        turns."""
        if self._pid != os.getpid():  # the child is that of the process that forked this one
            self._child, self._pid, self._lock, self._calling = None, os.getpid(), threading.Lock(), threading.Lock()
        with self._calling:
            return self._call(task, args, advance)

    def _call(self, task: Task, args: tuple[Any, ...], advance: Callable[[int], None]) -> Any:
        child, connection = self._start()
        reply: Any = None
        try:
            with suppress(OSError):  # it died; _receive raises the error
                connection.send((self.seconds, task, args))
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
                code = f"from hpcai.child_process import serve; serve({far.fileno()}, {self.max_bytes})"
                null = subprocess.DEVNULL
                command = [sys.executable, "-P", "-c", code]
                child = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=environ, pass_fds=[far.fileno()])
                far.close()
                self._child = child, near
            return self._child

    def _receive(self, child: "subprocess.Popen[bytes]", connection: Connection) -> Any:
        try:
            if connection.poll(self.seconds):
                return connection.recv()
        except (EOFError, OSError) as error:
            code = child.wait()
            reason = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            raise DataError(f"{self.name} takes its process down ({reason}); {self.advice}") from error
        raise DataError(f"{self.name} is silent for {self.seconds:g} s; {self.advice}")

    def kill(self, stop: bool = False) -> None:
        """Kill the child process; with ``stop`` it is not restarted."""
        with self._lock:
            child, self._child, self._stopped = self._child, None, self._stopped or stop
        if child is not None and self._pid == os.getpid():
            child[0].kill()
            child[0].wait()
            child[1].close()
