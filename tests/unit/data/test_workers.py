"""A worker process gives what its source gives, keeps nothing that it should not, and its end is noticed."""

import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hpcai.data.direct import MemoryPool
from hpcai.data.workers import Worker
from hpcai.errors import ConfigError, DataError, HpcaiError

BIG = 5000  # elements; too large to travel within the pickle


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Box:
    inside: Any
    label: str = "box"


class PickyError(HpcaiError):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line} is bad")


class PrivateError(Exception):
    def __init__(self) -> None:
        super().__init__("private", lambda: None)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": np.asarray, "fortran": np.asfortranarray, "turned": np.transpose, "back": lambda a: a[..., ::-1],
    "gaps": lambda a: np.repeat(a, 2, -1)[..., ::2], "channels first": lambda a: np.moveaxis(a, -1, 0),
}  # fmt: skip


def grid(dtype: str) -> dict[str, np.ndarray]:
    """Arrays of every layout, with and without values, below and above what travels within the pickle."""
    shapes = [(1,), (3, 0, 2), (4, 2, 100), (2, 3, 4000)]
    plain = [np.arange(np.prod(shape)).clip(max=9e3).astype(dtype).reshape(shape) for shape in shapes]
    return {f"{name} {array.shape}": lay(array) for array in plain for name, lay in LAYOUTS.items()}


def trees() -> list[Any]:
    rng = np.random.default_rng(7)
    cube = rng.normal(size=(20, 30, 40)).astype("f4")
    table = np.zeros(BIG, [("id", ">i4"), ("at", "f8", (3,)), ("name", "S5")])
    table["id"], table["at"], table["name"] = np.arange(BIG), rng.normal(size=(BIG, 3)), b"ab"
    read_only = np.frombuffer(rng.bytes(BIG * 8), "f8")
    return [
        None,
        {},
        {"x": cube, "n": 3, "text": "é", "none": None, "bytes": b"12", "number": np.float32(3.5)},
        [cube, (cube[::2], [cube.T, cube[:, ::-1, 3:9]])],
        Pair(np.zeros((0, 3)), Pair(np.array(3.5), np.array(True))),
        Box({"flags": cube > 0, "big-endian": np.arange(BIG, dtype=">u2"), "small": np.arange(3, dtype=">i8")}),
        {"table": table, "column": table["at"], "times": np.arange(BIG).astype("M8[s]"), "words": np.full(BIG, "ab")},
        {"read-only": read_only, "wide": np.broadcast_to(np.arange(9.0), (900, 9)), "complex": cube + 1j},
        {"objects": np.array([1, "two", None] * BIG, object), "void": np.zeros(BIG, "V3"), "no size": np.zeros((2, 3), "V0")},
        {"odd sizes": [np.arange(4096 + n, dtype="u1") for n in range(5)], "long": list(range(100_000))},
        np.asfortranarray(cube),
        *map(grid, ["f4", ">f8", "u1", "?", "i8", "c16", "M8[s]", "S3", "<U2", "f2"]),
    ]


class Trees:
    def sample(self, index: int, epoch: int) -> Any:
        return trees()[index]


def tensors() -> dict[str, Any]:
    import torch

    x = torch.arange(6000, dtype=torch.float64).reshape(60, 100)
    return {
        "plain": x,
        "turned": x.T[::2],
        "bf16": x.to(torch.bfloat16),
        "bool": x > 3,
        "conjugate": torch.complex(x, x).conj(),
        "zero-dim": torch.tensor(3),
        "empty": torch.zeros(0, 5, dtype=torch.int16),
        "gradient": x.clone().requires_grad_(),
        "channels last": x.reshape(1, 3, 20, 100).contiguous(memory_format=torch.channels_last),
    }


class Tensors:
    def sample(self, index: int, epoch: int) -> Any:
        if index == 1:
            import torch

            return torch.zeros(3, device="meta")
        return tensors()


class Full:
    """Sample i holds the number i + epoch, in arrays of ``size(i)`` bytes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def sample(self, index: int, epoch: int) -> Any:
        n = self.sizes[index % len(self.sizes)]
        return {"a": np.full(n, (index + epoch) % 251, "u1"), "b": np.full(n // 4, index + epoch, "f4"), "label": np.array(index)}


class Constant:
    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, "u1")

    def sample(self, index: int, epoch: int) -> Any:
        return self.data if index else None


class Faulty:
    def sample(self, index: int, epoch: int) -> Any:
        if index == 0:
            return np.arange(BIG)
        if index == 1:
            return {}["missing key"]
        if index == 2:
            raise ConfigError("batch: 3 is odd\nseed: missing")
        if index == 3:
            raise PickyError("a.h5", 7)
        if index == 4:
            raise PrivateError
        if index == 5:
            return {"function": lambda: None}
        if index == 6:
            sys.exit("enough")
        if index == 7:

            class LocalError(DataError):
                pass

            raise LocalError("from within")
        if index == 8:
            return sys.modules["__main__"].__dict__.setdefault("Only", type("Only", (), {"__module__": "__main__"}))()
        return None


class Deadly:
    def sample(self, index: int, epoch: int) -> Any:
        if index == 1:
            os._exit(0)
        if index == 2:
            ctypes.string_at(1)
        if index == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if index == 4:
            time.sleep(60)
        if index == 5:
            sum(range(10**13))  # one C call, which keeps the interpreter for hours
        if index == 6 and os.fork() == 0:  # a process that keeps the socket open
            time.sleep(3)
            os._exit(0)
        return os.getpid()


class Surroundings:
    def sample(self, index: int, epoch: int) -> Any:
        names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "MPI4PY_RC_INITIALIZE"]
        return {
            "path": sys.path,
            "heavy": "torch" in sys.modules or "mpi4py" in sys.modules,
            "settings": [os.environ.get(name) for name in [*names, "GOMP_CPU_AFFINITY"]],
            "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)],
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "group": os.getpgrp() == os.getpid(),
        }


class Unloadable:
    def sample(self, index: int, epoch: int) -> Any:
        return None

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no such tables here")

    def __getstate__(self) -> Any:
        return {"a": 1}


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.tolist() == want.tolist() if want.dtype.hasobject else got.tobytes() == want.tobytes()
        assert got.nbytes < 4096 or want.dtype.kind not in "biufc" or got.ctypes.data % 64 == 0
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            same(one, other)
    elif isinstance(want, Box):
        same(vars(got), vars(want))
    else:
        assert got == want or (got != got and want != want)


def mapped(pid: int | str = "self") -> int:
    """Blocks of workers' memory that a process has mapped."""
    return sum("memfd:hpcai" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, mapping or descriptor stays behind a test."""
    resource_tracker.ensure_running()  # Python's own, which stays
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    there, fds = set(children.read_text().split()), opened()
    yield
    gc.collect()
    assert opened() <= fds and mapped() == 0
    assert set(children.read_text().split()) <= there


def test_every_kind_of_tree_is_passed_unchanged() -> None:
    with closing(Worker(Trees(), "train", 0)) as worker:
        held = []
        for index, tree in enumerate(trees()):
            held.append((worker.sample(index, 0), tree))
            same(*held[-1])
            del held[: -1 - index % 4]
            for pair in held:
                same(*pair)
        assert worker.sample(np.int64(3), 0)[0].flags.writeable
        twice = worker.sample(10, 0)
        assert twice.flags.f_contiguous and not twice.flags.c_contiguous


def test_tensors_arrive_as_tensors() -> None:
    import torch

    with closing(Worker(Tensors(), "train", 0)) as worker:
        got, want = worker.sample(0, 0), tensors()
        assert list(got) == list(want)
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
            assert torch.equal(got[name], tensor) and got[name].requires_grad == tensor.requires_grad, name
        with pytest.raises(DataError, match="sample 1 cannot be sent .*a tensor is on meta, expected one on the CPU"):
            worker.sample(1, 0)


def test_shared_memory_grows_and_earlier_samples_stay_valid() -> None:
    memory = MemoryPool()
    with closing(Worker(Full(*(5000 * 2**k for k in range(8))), "train", 0, memory)) as worker:
        kept = {index: worker.sample(index, 5) for index in range(8)}
        for index in range(8, 60):
            got = worker.sample(index, 5)
            assert (got["a"] == (index + 5) % 251).all() and (got["b"] == index + 5).all() and int(got["label"]) == index
            assert mapped() == 1 == mapped(worker.pid)
        assert memory.unused < 20 * 5000 * 2**7  # what is let go is used again
        assert len(os.listdir(f"/proc/{worker.pid}/fd")) < 20
    for index, got in kept.items():  # also after the end of the worker
        assert (got["a"] == index + 5).all() and (got["b"] == index + 5).all() and int(got["label"]) == index


def test_memory_that_cannot_be_mapped_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with closing(Worker(Full(10_000), "train", 5)) as worker:
        monkeypatch.setattr(mmap, "mmap", refuse)
        for _ in range(2):
            died(worker, 0, "was ended: its .* bytes of shared memory cannot be mapped here .*Cannot allocate memory")


@pytest.mark.filterwarnings("ignore:BuiltinImporter")  # xdist's __main__ in the text of an error
def test_exceptions_of_the_source_are_raised_in_the_parent_and_the_worker_continues() -> None:
    with closing(Worker(Faulty(), "train", 3)) as worker:

        def error(index: int) -> Exception:
            with pytest.raises(Exception) as caught:
                worker.sample(index, 0)
            assert len(worker.sample(0, 0)) == BIG
            return caught.value

        missing = error(1)
        assert type(missing) is DataError
        assert str(missing).startswith("train: worker 3, sample 1: KeyError: 'missing key'\n")
        line = Faulty.sample.__code__.co_firstlineno + 4
        assert f'File "{__file__}", line {line}, in sample' in str(missing) and '{}["missing key"]' in str(missing)
        assert str(Path("data/processes.py")) not in str(missing)
        config = error(2)
        assert type(config) is ConfigError and str(config) == "batch: 3 is odd\nseed: missing"
        assert f"process {worker.pid}, sample 2" in config.__notes__[0] and __file__ in config.__notes__[0]
        assert type(error(3)) is HpcaiError and str(error(3)) == "a.h5:7 is bad"
        private = error(4)
        assert type(private) is DataError and "PrivateError: ('private', <function" in str(private) and __file__ in str(private)
        unsendable = error(5)
        assert type(unsendable) is DataError and "sample 5 cannot be sent from the worker process" in str(unsendable)
        assert "lambda" in str(unsendable) and "a tree of arrays" in str(unsendable)
        assert "sample 6: SystemExit: enough" in str(error(6))
        assert type(error(7)) is DataError and str(error(7)) == "from within"
        assert "sample 8 cannot be unpickled in the parent" in str(error(8)) and type(error(8)) is DataError


def died(worker: Worker, index: int, text: str, within: float = 2.0) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match=text) as caught:
        worker.sample(index, 0)
    assert time.monotonic() - start < within
    assert f"sample {index}: the process {worker.pid}" in str(caught.value) and "train: worker 5" in str(caught.value)


def busy(worker: Worker, index: int) -> tuple[threading.Thread, list[Exception]]:
    """A thread that waits for a sample."""
    caught: list[Exception] = []

    def ask() -> None:
        try:
            worker.sample(index, 0)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    return thread, caught


@pytest.mark.parametrize(
    "index, text",
    [(1, "ended with exit code 0; see its output on stderr"), (2, r"signal 11 \(SIGSEGV\)"), (3, r"signal 15 \(SIGTERM\)")],
)
def test_the_end_of_a_worker_is_reported(index: int, text: str, capfd: pytest.CaptureFixture) -> None:
    with closing(Worker(Deadly(), "train", 5)) as worker:
        assert worker.sample(6, 0) == worker.pid  # leaves a process that keeps the socket open
        died(worker, index, text)
        died(worker, 0, text)
    err = capfd.readouterr().err
    assert ("in string_at" in err and "test_workers.py" in err) == (index == 2)  # where it happened


def test_a_killed_worker_is_noticed_idle_and_busy() -> None:
    text = r"was killed by signal 9 \(SIGKILL\): probably out of memory on the node; lower data.workers or data.prefetch"
    with closing(Worker(Deadly(), "train", 5)) as worker:
        worker.sample(6, 0)  # leaves a process that keeps the socket open
        os.kill(worker.pid, signal.SIGKILL)
        died(worker, 0, text)
    with closing(Worker(Deadly(), "train", 5)) as worker:
        worker.sample(0, 0)
        thread, caught = busy(worker, 5)
        os.kill(worker.pid, signal.SIGKILL)
        thread.join(2)
        assert not thread.is_alive() and "sample 5" in str(caught[0])
        died(worker, 0, text)


def test_a_busy_worker_is_closed_from_another_thread() -> None:
    worker = Worker(Deadly(), "train", 5)
    worker.sample(0, 0)
    thread, caught = busy(worker, 5)
    start = time.monotonic()
    worker.close()
    assert time.monotonic() - start < 2 and not Path(f"/proc/{worker.pid}").exists()
    thread.join(1)
    assert not thread.is_alive() and type(caught[0]) is DataError and "is closed" in str(caught[0])
    died(worker, 0, "is closed")


def test_a_worker_that_has_hardly_started_is_closed() -> None:
    start = time.monotonic()
    worker = Worker(Deadly(), "train", 5)
    assert time.monotonic() - start < 0.5
    worker.close()
    assert time.monotonic() - start < 2 and not Path(f"/proc/{worker.pid}").exists()


def test_an_interrupted_sample_is_never_taken_for_the_next_one() -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    with closing(Worker(Deadly(), "train", 5)) as worker:
        worker.sample(0, 0)
        before = signal.signal(signal.SIGUSR2, interrupt)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        try:
            with pytest.raises(Interrupt):
                worker.sample(4, 0)
        finally:
            timer.join()
            signal.signal(signal.SIGUSR2, before)
        died(worker, 0, "was ended when a sample was interrupted")


def test_a_worker_has_the_path_one_thread_and_no_signals_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    socket.setdefaulttimeout(5)
    for name in "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_CPU_AFFINITY":
        monkeypatch.setenv(name, "4")
    try:
        worker = Worker(Surroundings(), "train", 0)
    finally:
        socket.setdefaulttimeout(None)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGTERM, before)
    with closing(worker):
        got = worker.sample(0, 0)
        time.sleep(0.1)
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGUSR1)
        assert worker.sample(0, 0) == got
    assert str(tmp_path) in got["path"]
    assert not got["heavy"] and got["settings"] == ["1", "1", "1", "false", "0", None]
    assert got["signals"] == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL] and not got["blocked"] and got["group"]
    assert [os.environ[name] for name in ("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY")] == ["4", "4"]


def test_a_source_that_cannot_be_sent_or_loaded_is_named() -> None:
    with pytest.raises(DataError, match="train: worker 0: a Locked cannot be sent to a worker process .*lock.*__getstate__"):
        Worker(Locked(), "train", 0)
    with closing(Worker(Unloadable(), "train", 0)) as worker:
        for index in 4, 5:
            text = f"worker 0, sample {index}: the source cannot be loaded .*RuntimeError: no such tables here\n.*test_workers"
            with pytest.raises(DataError, match=text):
                worker.sample(index, 0)


SCRIPT = """
import os
from contextlib import closing
from typing import NamedTuple
import numpy as np
from hpcai.data.workers import Worker

class Row(NamedTuple):
    x: np.ndarray
    at: int

class Source:
    def sample(self, index, epoch):
        return Row(np.arange(index), index)

print("runs", flush=True)

if __name__ == '__main__':
    with closing(Worker(Source(), "train", 0)) as worker:
        row = worker.sample(9000, 0)
        print(type(row) is Row, row.x.sum(), worker.pid != os.getpid(), __name__)
"""


def test_a_source_of_the_script_itself(tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    words = [sys.executable, "guarded.py"]
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.split("\n") == ["runs", "runs", "True 40495500 True __main__", ""], result.stderr
    assert result.stderr == ""


ORPHANS = """
import os, sys, threading, time
from hpcai.data.workers import Worker
sys.path.insert(0, sys.argv[1])
from test_workers import Deadly
workers = [Worker(Deadly(), "train", n) for n in range(3)]
for worker, index in zip(workers, (0, 4, 5)):
    worker.sample(0, 0)
    threading.Thread(target=worker.sample, args=(index, 0), daemon=True).start()
time.sleep(0.3)
workers.append(Worker(Deadly(), "train", 3))
threading.Thread(target=workers[3].sample, args=(4, 0), daemon=True).start()
time.sleep(0.002)
print(*(worker.pid for worker in workers), flush=True)
os.kill(os.getpid(), 9)
"""


def test_workers_end_with_their_parent_idle_starting_or_busy() -> None:
    root = str(Path(__file__).parents[3])
    words = [sys.executable, "-c", ORPHANS, str(Path(__file__).parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        assert all(gone(pid, 2) for pid in pids)


def test_a_worker_ends_when_it_is_garbage_collected() -> None:
    worker = Worker(Deadly(), "train", 0)
    pid = worker.sample(0, 0)
    del worker
    gc.collect()
    assert gone(pid, 2)
    multiprocessing.active_children()  # reaps it


@pytest.mark.timing
def test_a_sample_costs_two_copies_and_a_fraction_of_a_millisecond() -> None:
    """The bounds are for a machine with other work."""
    bytes_ = 16 << 20

    def best(act: Callable[[], Any], times: int = 60) -> float:
        spent = []
        for _ in range(times):
            start = time.perf_counter()
            act()
            spent.append(time.perf_counter() - start)
        return min(spent)

    with closing(Worker(Constant(bytes_), "train", 0)) as worker:
        one, other = np.zeros(bytes_, "u1"), np.ones(bytes_, "u1")
        copy = best(lambda: np.copyto(one, other))
        assert best(lambda: worker.sample(1, 0)) < 3 * copy + 1e-3
        assert best(lambda: worker.sample(0, 0), 500) < 500e-6
