"""Child processes that open HDF5 files; one that dies or hangs is a finding."""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from hpcai.cli.check.findings import StoppedError
from hpcai.errors import DataError


class Inspector:
    """A child process that opens HDF5 files. It is started when it is first asked, and again after it died."""

    def __init__(self, patience: float) -> None:
        self.patience, self.closed = patience, False
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, do: str, **words: Any) -> Iterator[Any]:
        """The answers, as they come. Raises DataError when the child refuses, dies or stays silent for too long."""
        done = False
        try:
            child = self._started()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps({"do": do, "patience": self.patience, **words}).encode() + b"\n")
                child.stdin.flush()
            except OSError:
                pass  # it died; the answer says how
            for line in self._lines(child):
                answer = json.loads(line)
                done = "more" not in answer
                if "error" in answer:
                    raise DataError(answer["error"])
                if done:
                    return
                yield answer["more"]
        finally:
            if not done:  # what is still under way is nobody's
                self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self.closed:
                raise StoppedError
            if self._child is not None and self._child.poll() is not None:
                self._reap(self._child)  # it was killed between two requests, which is not the fault of this file
                self._child = None
            if self._child is None:
                # No working directory on the path: a data set may hold an h5py.py.
                place = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OPENBLAS_NUM_THREADS": "1"}
                code = "from hpcai.cli.check.child import serve; serve()"
                pipe = subprocess.PIPE
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=place
                )
            return self._child

    def _lines(self, child: subprocess.Popen[bytes]) -> Iterator[bytes]:
        assert child.stdout is not None
        parts: list[bytes] = []
        with selectors.PollSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(self.patience):
                    raise DataError(f"the HDF5 library is silent for {self.patience:g} s; the file is damaged, or its disk hangs")
                data = os.read(child.stdout.fileno(), 1 << 20)
                if not data:
                    if self.closed:
                        raise StoppedError
                    code = child.wait()
                    ended = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
                    raise DataError(f"the HDF5 library takes its process down ({ended}); the file is damaged")
                *lines, rest = data.split(b"\n")
                for line in lines:
                    yield b"".join((*parts, line))
                    parts.clear()
                parts.append(rest)

    def stop(self, closed: bool = False) -> None:
        with self._lock:
            child, self._child = self._child, None
            self.closed = self.closed or closed
        if child is not None:
            self._reap(child)

    @staticmethod
    def _reap(child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None and child.stdout is not None
        child.kill()
        child.wait()
        with suppress(OSError):
            child.stdin.close()
        child.stdout.close()


class Inspectors:
    """Up to ``most`` child processes, of which another is started only when none is free for a while."""

    def __init__(self, most: int, patience: float = 120.0) -> None:
        self.most, self.patience = most, patience
        self._free: SimpleQueue[Inspector] = SimpleQueue()
        self._every: list[Inspector] = []
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[Inspector]:
        inspector = self._take()
        try:
            yield inspector
        finally:
            self._free.put(inspector)

    def _take(self) -> Inspector:
        with suppress(Empty):
            return self._free.get(timeout=1.0 if self._every else 0)  # as long as one takes to start
        with self._lock:
            if len(self._every) < self.most:
                self._every.append(Inspector(self.patience))
                return self._every[-1]
        return self._free.get()

    def close(self) -> None:
        with self._lock:
            for inspector in self._every:
                inspector.stop(closed=True)

    def __enter__(self) -> "Inspectors":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
