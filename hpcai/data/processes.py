"""Samples prepared in worker processes, for sources that cost Python's time; arrays arrive through shared memory.

A worker is a fresh interpreter (subprocess) at the end of a Unix socket. Never fork: the parent holds threads, MPI and CUDA.
Not multiprocessing either: spawn and forkserver run the user's script again in the child, which without a guard starts the
training there, and a forkserver is one more process that MPI launchers and signals can hit. An interpreter of our own starts
alike from a script, a notebook, pytest or mpiexec. It has the parent's sys.path, one thread for numerical libraries, and a
process group of its own, so that neither Ctrl-C nor a scheduler's signal for the job reaches it: the parent answers those.

The arrays of a sample lie in one block of anonymous shared memory (memfd: no name that could outlive a crash). A block goes to
the parent once, as a descriptor over the socket. When the last array that views it is gone there, its number goes back with the
next request, and the worker writes another sample into it.
"""

import ast
import copyreg
import ctypes
import faulthandler
import fcntl
import io
import json
import mmap
import operator
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from array import array as numbers_of
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpcai.errors import DataError, HpcaiError

_SMALL = 4096  # bytes of an array that travels within the pickle: a label that is kept must not hold a whole block
_ALIGN = 64  # bytes; a cache line, and what vector instructions and torch want
_SPARE = 2  # blocks beyond those that the parent held at a time
_WINDOW = 128  # samples over which that is counted: a batch that is let go at once must not cost its blocks
_LOOK = 0.3  # seconds between looks whether the worker lives, should a process that it forked keep the socket open
_GRACE = 0.5  # seconds from SIGTERM to SIGKILL
_HOPE = 5.0  # seconds that we wait after SIGKILL: a file system that hangs keeps even killed processes

_BOOT = """
import json, os, sys
setup = os.fdopen(int(sys.argv[1]), "rb")
sys.path[:] = json.loads(setup.readline())
from hpcai.data.processes import _serve
_serve(setup)
"""
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_PROC_BIND": "false",  # otherwise all workers are bound to the same first core
    "MPI4PY_RC_INITIALIZE": "0",  # importing mpi4py.MPI must not start MPI once more under the parent's rank
}
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_serving = False  # whether this process is a worker


class Worker:
    """A process that prepares the samples of ``source``; one thread of the parent uses it at a time, any thread may close it.

    ``name`` and ``number`` are for messages. ``pin(address, bytes)`` is called for every block when it is first mapped, ``unpin``
    before it is unmapped: at the latest after ``close`` when the last array is gone, in the thread that drops it. A copy to a
    device that is still under way needs its array: the block of an array that is gone is written again.

    Arrays and CPU tensors arrive writable and, from 4096 bytes on, without a copy; they stay as they are while anything views
    them, also after ``close``. Raises DataError when the source cannot be pickled; see ``sample`` for what the worker meets.
    """

    def __init__(
        self,
        source: Any,
        name: str,
        number: int,
        pin: Callable[[int, int], None] | None = None,
        unpin: Callable[[int, int], None] | None = None,
    ) -> None:
        self._who, self._pin, self._unpin = f"{name}: worker {number}", pin, unpin
        if _serving:
            raise DataError(f"{self._who}: a worker starts no workers; put what your script does under if __name__ == '__main__':")
        main = sys.modules["__main__"]
        sys.modules["__mp_main__"] = main  # as multiprocessing does: the module of the script's classes in a worker
        path = [os.getcwd() if entry == "" else os.fspath(entry) for entry in sys.path]
        file = getattr(main, "__file__", None)
        ours, theirs = socket.socketpair()
        alive, life = os.pipe()
        about = (self._who, theirs.fileno(), alive, sys.argv, file and os.path.abspath(file), getattr(main, "__package__", None))
        setup = os.memfd_create("hpcai-setup")
        try:
            try:
                parts = [json.dumps(text).encode() + b"\n" for text in (path, about)] + [pickle.dumps(source, 5)]
            except HpcaiError:
                raise
            except Exception as problem:
                raise DataError(
                    f"{self._who}: a {type(source).__name__} cannot be sent to a worker process ({_short(problem)}); open files, "
                    "locks and the like in sample(), or leave them out in __getstate__"
                ) from problem
            with open(setup, "wb", closefd=False) as out:  # not over the socket, which would have to wait for the start
                out.writelines(parts)
            os.lseek(setup, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(setup), f"{name}-{number}"],
                stdin=subprocess.DEVNULL,
                pass_fds=(setup, alive, theirs.fileno()),
                process_group=0,
                env={key: value for key, value in os.environ.items() if key not in _BINDING} | _SETTINGS,
            )
        except BaseException:
            ours.close()
            os.close(life)
            raise
        finally:
            theirs.close()
            os.close(alive)
            os.close(setup)
        self.pid = self._process.pid
        self._line, self._life = ours, open(life, "wb", buffering=0)
        self._line.settimeout(_LOOK)
        self._lock = threading.RLock()  # close() may come in another thread, or in a signal handler of this one
        self._over = ""  # why no more samples come
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[int] = deque()

    def sample(self, index: int, epoch: int) -> Any:
        """``source.sample(index, epoch)``, made by the worker.

        Raises the same exception where that raises one of hpcai's family; DataError, naming the sample, for any other one, for a
        sample that cannot be pickled, and when the worker has died.
        """
        index = operator.index(index)
        with self._lock:
            numbers, stream, fds = self._ask(index, epoch)
            failed, number, size, count, *rest = numbers
            for old in rest[count:]:
                del self._blocks[old]
            if failed:
                raise _told(stream)
            return self._take(index, stream, rest[:count], self._block(number, size, fds)) if count else self._take(index, stream)

    def close(self) -> None:
        """End the process, whatever it does, and let go of all that no array needs."""
        self._over = self._over or "is closed"
        _end(self._process)
        with self._lock:
            self._blocks.clear()
            self._line.close()
            self._life.close()

    def _ask(self, index: int, epoch: int) -> tuple[list[int], memoryview, list[int]]:
        if self._over:
            raise self._gone(index)
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        try:
            with suppress(ConnectionError):  # _receive then finds the end of the line, and _gone says why
                _send(self._line, [index, epoch, *freed])
            answer = _receive(self._line, lambda: self._process.poll() is None)
        except OSError:  # closed within this call, by a signal's handler
            answer = None
        except BaseException:  # Ctrl-C: the answer would be taken for the next sample's
            self._over = "was ended when a sample was interrupted"
            self._process.kill()
            raise
        if answer is None:
            raise self._gone(index)
        return answer

    def _gone(self, index: int) -> DataError:
        if not self._over:
            code = _end(self._process, patience=2 * _GRACE)
            if code < 0:
                with suppress(ValueError):
                    self._over = f" ({signal.Signals(-code).name})"
                self._over = f"was killed by signal {-code}{self._over}"
            else:
                self._over = f"ended with exit code {code}; what it said is on stderr"
            if code == -signal.SIGKILL:
                self._over += ": mostly the node has no more memory; lower data.workers or data.prefetch"
        return DataError(f"{self._who}, sample {index}: the process {self.pid} {self._over}")

    def _block(self, number: int, size: int, fds: list[int]) -> "_Block":
        if size:
            try:
                if not fds:
                    raise OSError("no file descriptor is left, see ulimit -n")
                self._blocks[number] = _Block(number, size, fds[0], self._unpin)
            except OSError as problem:
                self._freed.append(~number)  # the worker forgets it
                raise DataError(f"{self._who}: {size:,} bytes of shared memory cannot be mapped: {problem}") from problem
            finally:
                for fd in fds:
                    os.close(fd)
        return self._blocks[number]

    def _take(self, index: int, stream: memoryview, lengths: Sequence[int] = (), block: "_Block | None" = None) -> Any:
        buffers: list[np.ndarray] = []
        if block is not None:
            memory = np.asarray(_Loan(block, self._freed))
            if self._pin is not None and not block.pinned:
                self._pin(block.address, block.size)
                block.pinned = True
            buffers = [memory[start:end] for start, end in _places(lengths)]
        try:
            return pickle.loads(stream, buffers=buffers)  # noqa: S301  (from our own child)
        except Exception as problem:
            raise DataError(f"{self._who}: sample {index} cannot be unpickled in the parent: {_short(problem)}") from problem


def _end(process: subprocess.Popen, patience: float = 0.0) -> int:
    """The exit code of a process that has to end."""
    for stop, wait in (process.poll, patience), (process.terminate, _GRACE), (process.kill, _HOPE):
        stop()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(wait)
    return -signal.SIGKILL


def _told(stream: memoryview) -> HpcaiError:
    """The exception that the worker met."""
    name, text, note = pickle.loads(stream)  # noqa: S301  (from our own child)
    error: HpcaiError = DataError(text)
    with suppress(Exception):  # a class that only the worker can import, or that makes its text from what is not here
        kind = pickle.loads(name)  # noqa: S301
        same = kind.__new__(kind, text)  # without __init__, which may want something else than a text
        if str(same) == text:
            error = same
    if note:
        error.add_note(note)
    return error


# ---- memory, as the parent sees it

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap  # Python's own keeps a descriptor for each mapping, and 1024 is a common limit
_mmap.restype, _mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t


class _Block:
    """A worker's block, mapped here; unmapped when neither the Worker nor an array holds it."""

    def __init__(self, number: int, size: int, fd: int, unpin: Callable[[int, int], None] | None) -> None:
        self.number, self.size, self.pinned, self._unpin = number, 0, False, unpin
        self.address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
        if self.address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.size = size

    def __del__(self, munmap: Any = _munmap, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.size and not finalizing():  # at the end of the process other threads may still read
            try:
                if self.pinned and self._unpin is not None:
                    self._unpin(self.address, self.size)
            finally:
                munmap(self.address, self.size)


class _Loan:
    """The base of all arrays of one sample; its end frees the block for another sample."""

    def __init__(self, block: _Block, freed: deque[int]) -> None:
        self._block, self._freed = block, freed
        self.__array_interface__ = {"data": (block.address, False), "shape": (block.size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._freed.append(self._block.number)  # any thread, also within a garbage collection: nothing here may wait


def _places(lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Where each buffer begins and ends in a block, in bytes."""
    start = 0
    for length in lengths:
        yield start, start + length
        start += -(-length // _ALIGN) * _ALIGN


# ---- the line: two counts, whole numbers, a pickle


def _send(line: socket.socket, numbers: list[int], stream: bytes = b"", fds: Sequence[int] = ()) -> None:
    frame = numbers_of("q", [len(numbers), len(stream), *numbers]).tobytes() + stream
    sent = socket.send_fds(line, [frame], fds) if fds else line.send(frame)
    if sent < len(frame):
        line.sendall(memoryview(frame)[sent:])


def _receive(line: socket.socket, alive: Callable[[], bool]) -> tuple[list[int], memoryview, list[int]] | None:
    """Numbers, pickle and descriptors of one message; None at the end of the line."""
    data, fds, want = bytearray(), numbers_of("i"), 16
    while len(data) < want:
        room = max(65536, min(want - len(data), 1 << 20))
        try:
            part, control, _, _ = line.recvmsg(room, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            if alive():
                continue
            return None
        except ConnectionError:
            return None
        if not part:
            return None
        for _, _, sent in control:
            fds.frombytes(sent)
        data += part
        if want == 16 and len(data) >= 16:
            count, length = numbers_of("q", bytes(data[:16]))
            want = 16 + 8 * count + length
    body = 16 + 8 * count
    return numbers_of("q", bytes(data[16:body])).tolist(), memoryview(data)[body:], fds.tolist()


# ---- a sample as one pickle and the buffers beside it


def _flatten(sample: Any) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=buffers.append)
    ways: dict[type, Callable[[Any], Any]] = {**copyreg.dispatch_table, np.ndarray: _reduce_array, np.memmap: _reduce_array}
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        ways[tensor] = _reduce_tensor
    pickler.dispatch_table = ways
    pickler.dump(sample)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def _reduce_array(array: np.ndarray) -> Any:
    array = np.asarray(array)
    if array.dtype.hasobject:
        return array.__reduce_ex__(4)
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = array.T.reshape(-1) if order == "F" else np.ascontiguousarray(array).reshape(-1)
    data = flat.view(np.uint8).data
    return _array, (pickle.PickleBuffer(data) if len(data) >= _SMALL else bytearray(data), array.dtype, array.shape, order)


def _array(buffer: Any, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    if isinstance(buffer, memoryview):  # pickle's own, read-only because the worker's array was
        buffer = buffer.obj
    return np.ndarray(shape, dtype, buffer, order=order)


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise DataError(f"a tensor is on {tensor.device}; a worker gives tensors on the CPU")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        return tensor.__reduce_ex__(5)
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return _tensor, (flat.numpy(), tensor.dtype, tuple(tensor.shape))


def _tensor(flat: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(flat).view(dtype).reshape(shape)


# ---- the worker


class _Pool:
    """The worker's blocks, and which of them are free."""

    def __init__(self) -> None:
        self._all: dict[int, mmap.mmap] = {}
        self._free: dict[int, None] = {}  # last used, last
        self._made = self._taken = 0
        self._peaks = [0, 0]  # most blocks in use at a time, in this window and the one before

    def back(self, freed: Iterable[int]) -> None:
        for number in freed:
            if number < 0:
                self._all.pop(~number).close()
            else:
                self._free[number] = None

    def take(self, need: int) -> tuple[int, mmap.mmap, int | None]:
        """A block of at least ``need`` bytes: its number, its memory and, for a new one, its descriptor. Raises OSError."""
        used = len(self._all) - len(self._free)
        if self._taken % _WINDOW == 0:
            self._peaks = [used, self._peaks[0]]
        self._peaks[0] = max(self._peaks[0], used)
        self._taken += 1
        fits = [number for number in reversed(self._free) if len(self._all[number]) >= need]
        if fits:
            number = min(fits, key=lambda number: len(self._all[number]))
            del self._free[number]
            return number, self._all[number], None
        step = max(mmap.PAGESIZE, 1 << need.bit_length() >> 4)  # up to an eighth more: sizes vary
        size = -(-need // step) * step
        fd = os.memfd_create("hpcai-sample")
        try:
            os.posix_fallocate(fd, 0, size)  # no memory is an error here, and a bus error later
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            raise
        number, self._made = self._made, self._made + 1
        self._all[number] = memory
        return number, memory, fd

    def surplus(self) -> list[int]:
        """Blocks that are dropped now: those not used for longest, mostly too small."""
        many = len(self._all) - max(self._peaks) - _SPARE
        dropped = list(self._free)[: max(0, many)]
        for number in dropped:
            del self._free[number]
            self._all.pop(number).close()
        return dropped


class _Reader(pickle.Unpickler):
    """Reads the source; its class may live in the parent's script."""

    script: tuple[str | None, str | None] | None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self.script is not None:
            (file, package), self.script = self.script, None
            _run_script(file, package)
        return super().find_class(module, name)


def _run_script(file: str | None, package: str | None) -> None:
    """The parent's script as ``__main__`` of this process, without what its guard keeps for the parent."""
    if file is None or not os.path.isfile(file):  # python - says <stdin>
        raise DataError("its class lives in a notebook or a prompt; move it to a module, such as a .py file beside the notebook")
    text = Path(file).read_bytes()
    tests = [node.test for node in ast.parse(text, file).body if isinstance(node, ast.If)]
    if not any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test)):
        raise DataError(
            f"its class lives in the script {file}, all of which would run again here; put what the script does under "
            "if __name__ == '__main__':, or move the class to a module"
        )
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(__file__=file, __package__=package)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(compile(text, file, "exec"), module.__dict__)


def _serve(setup: BinaryIO) -> None:
    """The life of a worker, from the interpreter's start on."""
    global _serving
    _serving = True
    for number in signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent ignored or blocked
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.stderr is not None:
        faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a process that is ended by a signal flushes nothing
    who, line_fd, life, sys.argv, file, package = json.loads(setup.readline())
    _die_with_parent(life)
    os.set_inheritable(line_fd, False)
    line = socket.socket(fileno=line_fd)
    line.setblocking(True)  # whatever default the parent has set
    source, refusal = None, ""
    try:
        reader = _Reader(setup)
        reader.script = file, package
        source = reader.load()
    except BaseException as problem:
        refusal = f"the source cannot be loaded in the worker process: {_short(problem)}"
        if not isinstance(problem, HpcaiError):
            refusal += "\n" + _lines(problem)
    setup.close()
    pool = _Pool()
    while (request := _receive(line, lambda: True)) is not None:
        index, epoch, *freed = request[0]
        pool.back(freed)
        del request
        if refusal:
            _tell(line, DataError, f"{who}, sample {index}: {refusal}")
        else:
            _answer(line, source, pool, who, index, epoch)


def _answer(line: socket.socket, source: Any, pool: _Pool, who: str, index: int, epoch: int) -> None:
    try:
        sample = source.sample(index, epoch)
    except HpcaiError as problem:
        return _tell(line, type(problem), str(problem), f"in {who}, process {os.getpid()}, sample {index}:\n{_lines(problem)}")
    except BaseException as problem:
        return _tell(line, DataError, f"{who}, sample {index}: {_short(problem)}\n{_lines(problem)}")
    number, size, fds = -1, 0, []
    try:
        stream, buffers = _flatten(sample)
        lengths = [len(buffer) for buffer in buffers]
        if buffers:
            places = list(_places(lengths))
            number, memory, fd = pool.take(max(1, places[-1][1]))
            if fd is not None:
                size, fds = len(memory), [fd]
            with memoryview(memory) as view:
                for (start, end), buffer in zip(places, buffers):
                    view[start:end] = buffer
    except BaseException as problem:
        if isinstance(problem, OSError):
            hint = "the node has no more memory for it; lower data.workers or data.prefetch"
        else:
            hint = "a sample is a tree of arrays, tensors on the CPU and values that can be pickled"
        return _tell(line, DataError, f"{who}: sample {index} cannot be sent from the worker process ({_short(problem)}); {hint}")
    del sample, buffers
    try:
        _send(line, [0, number, size, len(lengths), *lengths, *pool.surplus()], stream, fds)
    except ConnectionError:
        pass  # the parent hung up, as the next look at the line will tell
    finally:
        for fd in fds:
            os.close(fd)
    return None


def _tell(line: socket.socket, kind: type[HpcaiError], text: str, note: str = "") -> None:
    try:
        name = pickle.dumps(kind)
    except Exception:  # a class within a function
        name, text = b"", f"{kind.__name__}: {text}"
    with suppress(ConnectionError):
        _send(line, [1, -1, 0, 0], pickle.dumps((name, text, note)))


def _die_with_parent(life: int) -> None:
    """Let the kernel kill this process once the other end of a pipe closes.

    A thread that waited for it would need the interpreter, which a C call can hold for minutes. PR_SET_PDEATHSIG fires at the
    end of the parent's *thread*.
    """
    os.set_inheritable(life, False)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    look = select.poll()
    look.register(life, 0)
    if look.poll(0):  # it closed before
        os._exit(1)


def _short(problem: BaseException) -> str:
    return str(problem) if isinstance(problem, HpcaiError) else "".join(traceback.format_exception_only(problem)).strip()


def _lines(problem: BaseException) -> str:
    """The last two lines of the traceback that are not in this file."""
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    return "".join(traceback.format_list(frames[-2:])).rstrip()
