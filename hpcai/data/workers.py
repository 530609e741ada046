"""Worker processes that prepare samples, for sources that are bound by the interpreter. Arrays are passed through shared memory.

Workers are spawned, never forked, since the parent has threads, MPI and CUDA. A script that starts one therefore needs the guard
``if __name__ == "__main__":``. Numerical libraries have one thread in a worker. It has a process group of its own and ignores
signals, so that Ctrl-C and signals of a scheduler are handled by the parent alone. The kernel kills it with its parent.

The arrays of a sample are in anonymous shared memory (memfd: no name that could outlive a crash) of the size of the largest
sample so far. The parent copies them to its own memory before it requests the next sample.
"""

import faulthandler
import fcntl
import mmap
import multiprocessing
import operator
import os
import pickle
import select
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import numpy as np

from hpcai.data.direct import MemoryPool, align_up
from hpcai.data.pickling import buffer_offsets, flatten
from hpcai.errors import DataError, HpcaiError

_MIN_POOLED = 4096  # bytes from which an array is copied to a block of the pool
_POLL_INTERVAL = 0.3  # seconds between checks of the worker: a process that it forked may keep the socket open
_TERM_TIMEOUT = 0.5  # seconds from SIGTERM to SIGKILL
_KILL_TIMEOUT = 5.0  # seconds to wait after SIGKILL, which a hanging file system delays
_JOB_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_PROC_BIND": "false",  # otherwise all workers are bound to the same core
    "MPI4PY_RC_INITIALIZE": "0",  # an import of mpi4py.MPI must not initialize MPI again with the rank of the parent
}
_AFFINITY = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SPAWN = multiprocessing.get_context("spawn")
_start_lock = threading.Lock()


class Worker:
    """A process that prepares samples of ``source``. One thread uses it at a time; any thread may close it.

    ``name`` and ``number`` are for messages. Arrays of 4096 bytes or more are copied to ``memory``. Raises DataError if the source
    cannot be pickled; for errors of the worker see ``sample``.
    """

    def __init__(self, source: Any, name: str, number: int, memory: MemoryPool | None = None) -> None:
        self._label, self._memory = f"{name}: worker {number}", memory if memory is not None else MemoryPool()
        try:
            pickled = pickle.dumps(source, 5)
        except HpcaiError:
            raise
        except Exception as problem:
            fault = f"{self._label}: a {type(source).__name__} cannot be sent to a worker process ({_message(problem)})"
            raise DataError(f"{fault}; open files, locks and the like in sample(), or leave them out in __getstate__") from problem
        self._lock = threading.RLock()  # close() may be called in another thread, or in a signal handler of this one
        self._end_reason = ""  # why the worker has ended
        self._shared: mmap.mmap | bytearray = bytearray()
        self._connection, child_connection = _SPAWN.Pipe()
        args = child_connection, pickled, self._label
        self._process = _SPAWN.Process(target=_serve, args=args, name=f"{name}-{number}", daemon=True)
        with child_connection, spawn_environment():
            self._process.start()
        self.pid = self._process.pid

    def sample(self, index: int, epoch: int) -> Any:
        """Return ``source.sample(index, epoch)``, prepared by the worker.

        Raises the exception of the source if it is an HpcaiError, and DataError, with the sample, for any other exception, for a
        sample that cannot be pickled, and if the worker has died.
        """
        index = operator.index(index)
        with self._lock:
            error, stream, lengths, size = self._request(index, epoch)
            if error is not None:
                kind, text, note = error
                raised = kind.__new__(kind, text)  # without __init__, whose parameters are unknown
                raised.add_note(note)
                raise raised
            if size:
                self._map_shared(size, index)
            try:
                return pickle.loads(stream, buffers=self._copy_buffers(lengths))  # noqa: S301  (from our own child)
            except Exception as problem:
                text = f"{self._label}: sample {index} cannot be unpickled in the parent: {_message(problem)}"
                raise DataError(text) from problem

    def close(self) -> None:
        """Stop the process, whatever its state."""
        self._end_reason = self._end_reason or "is closed"
        self._stop()
        with self._lock:
            self._connection.close()
            self._shared = bytearray()

    def _request(self, index: int, epoch: int) -> Any:
        if self._end_reason:
            raise self._ended(index)
        try:
            self._connection.send((index, epoch))
            while not self._connection.poll(_POLL_INTERVAL):
                if not self._process.is_alive():
                    raise EOFError
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._ended(index) from None
        except BaseException:  # Ctrl-C: the answer would be read as the next sample
            self._end_reason = "was ended when a sample was interrupted"
            self._process.kill()
            raise

    def _map_shared(self, size: int, index: int) -> None:
        """Map new shared memory of the worker, and release the previous one."""
        self._shared = bytearray()
        try:
            fd = reduction.recv_handle(self._connection)
            try:
                self._shared = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        except Exception as problem:
            self._end_reason = f"was ended: its {size:,} bytes of shared memory cannot be mapped here ({_message(problem)})"
            self._process.kill()
            raise self._ended(index) from problem

    def _copy_buffers(self, lengths: Sequence[int]) -> Iterator[Any]:
        for start, length in zip(buffer_offsets(lengths), lengths):
            if length < _MIN_POOLED:  # a small array must not keep a page
                yield bytearray(self._shared[start : start + length])
            else:
                yield self._memory.copy(np.frombuffer(self._shared, np.uint8, length, start))

    def _stop(self, patience: float = 0.0) -> None:
        for stop, wait in (lambda: None, patience), (self._process.terminate, _TERM_TIMEOUT), (self._process.kill, _KILL_TIMEOUT):
            stop()
            self._process.join(wait)
            if not self._process.is_alive():
                return

    def _ended(self, index: int) -> DataError:
        if not self._end_reason:
            self._stop(patience=2 * _TERM_TIMEOUT)
            code = self._process.exitcode
            if code is None or code >= 0:
                self._end_reason = f"ended with exit code {code}; see its output on stderr"
            else:
                self._end_reason = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code == -signal.SIGKILL:
                self._end_reason += ": probably out of memory on the node; lower data.workers or data.prefetch"
        return DataError(f"{self._label}, sample {index}: the process {self.pid} {self._end_reason}")


@contextmanager
def block_signals() -> Iterator[None]:
    """Context manager that starts processes with the signals of a job blocked, until ``ignore_signals``."""
    resource_tracker.ensure_running()  # of multiprocessing; its start would unblock the signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_signals() -> None:
    """Ignore the signals of a job, which its main process handles, and leave SIGTERM to its handler."""
    for number in _JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextmanager
def spawn_environment() -> Iterator[None]:
    """Context manager for the start of a worker process: the variables of its environment, and no signal meanwhile."""
    with _start_lock, block_signals():
        before = {key: os.environ.get(key) for key in (*_ENVIRONMENT, *_AFFINITY)}
        try:
            os.environ.update(_ENVIRONMENT)
            for key in _AFFINITY:
                os.environ.pop(key, None)
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


# ---- the worker


def _serve(connection: Connection, pickled: bytes, label: str) -> None:
    """Answer requests until the parent closes the connection.   Answer: (error, pickle, buffer lengths, bytes of new memory)"""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may ignore or block it
    ignore_signals()
    os.setpgid(0, 0)
    die_with_parent()
    faulthandler.enable()
    source, load_error = None, ""
    try:
        source = pickle.loads(pickled)  # noqa: S301  (from our own parent)
    except BaseException as problem:
        load_error = f"the source cannot be loaded in the worker process: {_message(problem)}\n{_traceback(problem)}"
    del pickled
    shared: mmap.mmap | bytearray = bytearray()
    answer: tuple[Any, bytes, list[int], int]
    while True:
        try:
            index, epoch = connection.recv()
        except (EOFError, ConnectionError):
            return
        fd = -1
        try:
            if load_error:
                raise DataError(f"{label}, sample {index}: {load_error}")
            stream, buffers = _flatten(_sample(source, index, epoch, label), index, label)
            lengths = [len(buffer) for buffer in buffers]
            size = buffer_offsets(lengths)[-1]
            if size > len(shared):
                fd, shared = _create_shared(size, label)
            for start, buffer in zip(buffer_offsets(lengths), buffers):
                shared[start : start + len(buffer)] = buffer
            answer = (None, stream, lengths, len(shared) if fd >= 0 else 0)
            del buffers
        except HpcaiError as problem:
            kind = next(kind for kind in type(problem).__mro__ if kind.__module__ == HpcaiError.__module__)
            note = f"in {label}, process {os.getpid()}, sample {index}:\n{_traceback(problem)}"
            answer = ((kind, str(problem), note), b"", [], 0)
        with suppress(ConnectionError):  # closed by the parent; the next recv raises
            connection.send(answer)
            if fd >= 0:
                reduction.send_handle(connection, fd, os.getppid())
        if fd >= 0:
            os.close(fd)


def _sample(source: Any, index: int, epoch: int, label: str) -> Any:
    try:
        return source.sample(index, epoch)
    except HpcaiError:
        raise
    except BaseException as problem:
        raise DataError(f"{label}, sample {index}: {_message(problem)}\n{_traceback(problem)}") from problem


def _flatten(sample: Any, index: int, label: str) -> tuple[bytes, list[memoryview]]:
    try:
        return flatten(sample)
    except Exception as problem:
        fault = f"{label}: sample {index} cannot be sent from the worker process ({_message(problem)})"
        raise DataError(f"{fault}; a sample is a tree of arrays, tensors on the CPU and values that can be pickled") from problem


def _create_shared(need: int, name: str) -> tuple[int, mmap.mmap]:
    """Return descriptor and mapping of new shared memory of at least ``need`` bytes."""
    size = align_up(need + need // 8)  # sizes vary
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hpcai-sample")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            fd = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # out of memory is an error here, but a bus error later
        return fd, mmap.mmap(fd, size)
    except OSError as problem:
        os.close(fd)
        raise DataError(f"{name}: no {size:,} bytes of shared memory ({problem}); lower data.workers or data.prefetch") from problem


def die_with_parent() -> None:
    """Have the kernel kill this process at the end of its parent, by SIGKILL as the I/O signal of multiprocessing's sentinel pipe.

    A waiting thread would need the GIL, which a C call can hold for minutes. PR_SET_PDEATHSIG fires at the end of the parent's
    *thread*.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel
    if not hasattr(fcntl, "F_SETSIG"):  # only Linux sends another signal
        threading.Thread(target=lambda: (wait_for([sentinel]), os._exit(1)), daemon=True).start()
        return
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(sentinel, 0)
    if poll.poll(0):  # closed already
        os._exit(1)


def _message(problem: BaseException) -> str:
    return str(problem) if isinstance(problem, HpcaiError) else "".join(traceback.format_exception_only(problem)).strip()


def _traceback(problem: BaseException) -> str:
    """Return the last two traceback entries outside of this file."""
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    return "".join(traceback.format_list(frames[-2:])).rstrip()
