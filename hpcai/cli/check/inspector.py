"""Child processes that open HDF5 files; one that dies or hangs is a finding."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import LifoQueue
from typing import Any

from hpcai.errors import DataError

PATIENCE = 120.0  # seconds; a file that leaves the HDF5 library silent for longer is damaged


class StoppedError(Exception):
    """The check ends early."""


class Inspector:
    """A child process that opens HDF5 files. It is started when it is first asked, and again after it died."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience, self.closed = patience, False
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._lock = threading.Lock()

    def ask(self, do: str, **words: Any) -> Iterator[Any]:
        """The answers, as they come. Raises DataError when the child refuses, dies or stays silent for too long."""
        done = False
        try:
            child, line = self._started()
            with suppress(OSError):  # it died; the answer says how
                line.send_bytes(json.dumps({"do": do, "patience": self.patience, **words}).encode())
            while not done:
                answer = json.loads(self._heard(child, line))
                if "error" in answer:
                    done = True
                    raise DataError(answer["error"])
                if not (done := "more" not in answer):
                    yield answer["more"]
        finally:
            if not done:  # what is still under way is nobody's
                self.stop()

    def _started(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        with self._lock:
            if self.closed:
                raise StoppedError
            if self._child is None or self._child[0].poll() is not None:  # killed between two requests, it is no file's fault
                near, far = Pipe()
                # No working directory on the path: a data set may hold an h5py.py.
                place = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, "-P", "-c", f"from hpcai.cli.check.child import serve; serve({far.fileno()})"]
                null = subprocess.DEVNULL
                child = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=place, pass_fds=[far.fileno()])
                far.close()
                self._child = child, near
            return self._child

    def _heard(self, child: "subprocess.Popen[bytes]", line: Connection) -> bytes:
        try:
            if line.poll(self.patience):
                return line.recv_bytes()
        except (EOFError, OSError) as end:
            if self.closed:
                raise StoppedError from end
            code = child.wait()
            ended = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            raise DataError(f"the HDF5 library takes its process down ({ended}); the file is damaged") from end
        raise DataError(f"the HDF5 library is silent for {self.patience:g} s; the file is damaged, or its disk hangs")

    def stop(self, closed: bool = False) -> None:
        with self._lock:
            old, self._child = self._child, None  # its line closes when nobody listens to it any more
            self.closed = self.closed or closed
        if old is not None:
            old[0].kill()
            old[0].wait()


class Inspectors:
    """``most`` inspectors to be borrowed; one that was used before comes first."""

    def __init__(self, most: int) -> None:
        self._every = [Inspector() for _ in range(most)]
        self._free: LifoQueue[Inspector] = LifoQueue()
        for inspector in self._every:
            self._free.put(inspector)

    @contextmanager
    def one(self) -> Iterator[Inspector]:
        inspector = self._free.get()
        try:
            yield inspector
        finally:
            self._free.put(inspector)

    def close(self) -> None:
        for inspector in self._every:
            inspector.stop(closed=True)
