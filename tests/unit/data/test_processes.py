"""A worker process gives what its source gives, keeps nothing that it should not, and its end is noticed."""

import ctypes
import gc
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hpcai.data.processes import Worker
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
    "gaps": lambda a: np.repeat(a, 2, -1)[..., ::2],
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
            print("last words")
            os._exit(7)
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
            "argv": sys.argv,
            "heavy": "torch" in sys.modules or "mpi4py" in sys.modules,
            "settings": [os.environ.get(name) for name in [*names, "GOMP_CPU_AFFINITY"]],
            "inherited": [fd for fd in range(3, 20) if Path(f"/proc/self/fd/{fd}").exists() and os.get_inheritable(fd)],
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
        assert got.dtype == want.dtype and got.shape == want.shape and got.flags.writeable
        assert got.tolist() == want.tolist() if want.dtype.hasobject else got.tobytes() == want.tobytes()
        assert got.nbytes < 4096 or want.dtype.hasobject or got.ctypes.data % 64 == 0
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


def mapped() -> int:
    """Blocks that are mapped here, since the test began."""
    return sum("memfd:hpcai" in line for line in Path("/proc/self/maps").read_text().splitlines()) - BEFORE["mapped"]


BEFORE = {"mapped": 0}


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_of(pid: int) -> int:
    """Shared memory that a worker has mapped, in blocks."""
    return sum("memfd:hpcai-sample" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


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
    """No process, mapping or descriptor stays behind a test. Tests of another file may have left Python's own tracker."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    there = set(children.read_text().split())
    fds, BEFORE["mapped"] = opened(), BEFORE["mapped"] + mapped()
    yield
    if (opened(), mapped()) != (fds, 0):
        gc.collect()
    assert opened() <= fds and mapped() <= 0
    assert set(children.read_text().split()) <= there


def test_every_kind_of_tree_arrives_as_it_is() -> None:
    with closing(Worker(Trees(), "train", 0)) as worker:
        held = []
        for index, tree in enumerate(trees()):
            held.append((worker.sample(index, 0), tree))
            same(*held[-1])
            del held[: -1 - index % 4]
            for pair in held:
                same(*pair)
        del held, pair
        got = worker.sample(np.int64(3), 0)
        assert got[0].base is not None and got[0].flags.c_contiguous
        assert np.shares_memory(got[0], got[0].base)
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
        assert mapped() == 1
        view = got["plain"][3:]
        del got
        for _ in range(5):
            worker.sample(0, 0)
        assert torch.equal(view, want["plain"][3:])
        with pytest.raises(DataError, match="sample 1 cannot be sent .*a tensor is on meta; a worker gives tensors on the CPU"):
            worker.sample(1, 0)
    view += 1
    del view


def test_blocks_are_used_again() -> None:
    made: list[int] = []
    with closing(Worker(Full(1 << 20), "train", 0, pin=lambda address, size: made.append(address))) as worker:
        addresses, most = set(), 0
        for index in range(50):
            got = worker.sample(index, 5)
            assert got["a"][[0, -1]].tolist() == [(index + 5) % 251] * 2 and got["b"][-1] == index + 5
            addresses.add(got["a"].ctypes.data)
            most = max(most, mapped())
        assert len(addresses) == 2 == len(made) and most == 2 == memory_of(worker.pid)
        del got
        labels = [worker.sample(index, 0)["label"] for index in range(20)]
        assert mapped() == 2 and [int(label) for label in labels] == list(range(20))


def test_what_is_kept_stays_and_what_is_let_go_at_once_is_not_made_anew() -> None:
    made: list[int] = []
    with closing(Worker(Full(1 << 16), "train", 0, pin=lambda address, size: made.append(address))) as worker:
        for epoch in range(6):
            kept = [worker.sample(index, epoch) for index in range(10)]
            views = [got["a"][7:][::3] for got in kept]
            for index, (got, view) in enumerate(zip(kept, views)):
                assert (got["a"] == index + epoch).all() and (got["b"] == index + epoch).all() and (view == index + epoch).all()
                got["a"] += 1
            del kept, got
            assert (views[3] == 3 + epoch + 1).all()
            del views, view
        assert len(made) <= 10 + 2 and mapped() == len(made)
        for index in range(300):  # nothing held: what the many needed is given back
            worker.sample(index, 0)
        assert mapped() <= 2 + 2 and memory_of(worker.pid) == mapped()


def test_blocks_grow_with_the_samples_and_the_small_ones_go() -> None:
    with closing(Worker(Full(*(5000 * 2**k for k in range(10))), "train", 0)) as worker:
        for index in range(60):
            got = worker.sample(index, 0)
            assert (got["a"] == index).all() and got["b"].nbytes == got["a"].nbytes
            assert mapped() <= 1 + 2 and memory_of(worker.pid) == mapped()
        assert len(os.listdir(f"/proc/{worker.pid}/fd")) <= mapped() + 7  # its own few, and one of a block just made
        del got


def test_arrays_outlive_their_worker() -> None:
    fds = opened()
    worker = Worker(Full(100_000), "train", 0)
    kept = [worker.sample(index, 0)["b"] for index in range(3)]
    worker.sample(3, 0)
    worker.close()
    worker.close()
    assert mapped() == 3 and opened() == fds
    assert [float(array.sum()) for array in kept] == [0, 25_000, 50_000]
    kept[0][:] = 9
    del worker, kept[1]
    gc.collect()
    assert mapped() == 2


def test_arrays_may_go_in_any_thread() -> None:
    with closing(Worker(Full(20_000), "train", 0)) as worker:
        box: list[Any] = []
        stop = threading.Event()

        def drop() -> None:
            while not stop.is_set():
                if len(box) > 3:
                    loop = [box.pop(0)]
                    loop.append(loop)  # freed by the garbage collection, wherever that runs
                    del loop
                    gc.collect(0)

        thread = threading.Thread(target=drop)
        thread.start()
        try:
            for index in range(100):
                box.append(worker.sample(index, 0))
                assert all(len(set(got["a"][::1000])) == 1 and int(got["a"][0]) == int(got["label"]) % 251 for got in box[-3:])
        finally:
            stop.set()
            thread.join()
        box.clear()
        gc.collect()


def test_blocks_are_pinned_once_and_unpinned_before_they_go() -> None:
    pinned: dict[int, int] = {}
    calls: list[int] = []

    def pin(address: int, size: int) -> None:
        assert address not in pinned and address % 4096 == 0
        assert address in {int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()}
        pinned[address] = size
        calls.append(address)

    def unpin(address: int, size: int) -> None:
        assert pinned.pop(address) == size
        ctypes.string_at(address, size)  # still mapped

    worker = Worker(Full(10_000, 10_000, 90_000), "train", 0, pin, unpin)
    with closing(worker):
        for index in range(50):
            got = worker.sample(index, 0)
            start = got["a"].ctypes.data
            assert any(address <= start < address + size for address, size in pinned.items())
        assert len(calls) <= 4 and len(pinned) == mapped()
        kept = got
        del got
    assert len(pinned) == 1
    del kept
    assert not pinned


def test_a_pin_that_fails_costs_one_sample() -> None:
    refuse = [True]

    def pin(address: int, size: int) -> None:
        if refuse.pop():
            raise RuntimeError("CUDA error: out of memory")

    with closing(Worker(Full(10_000), "train", 0, pin)) as worker:
        with pytest.raises(RuntimeError, match="out of memory"):
            worker.sample(0, 0)
        refuse.append(False)
        assert (worker.sample(1, 0)["a"] == 1).all() and mapped() == 1


def test_memory_that_cannot_be_mapped_costs_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Worker(Full(10_000), "train", 0)) as worker:
        with monkeypatch.context() as patch:
            patch.setattr("hpcai.data.processes._mmap", lambda *_: ctypes.c_void_p(-1).value)
            with pytest.raises(DataError, match="train: worker 0: .* bytes of shared memory cannot be mapped"):
                worker.sample(0, 0)
        for index in range(5):
            assert (worker.sample(index, 0)["a"] == index).all()
        assert memory_of(worker.pid) == mapped() <= 2


@pytest.mark.filterwarnings("ignore:BuiltinImporter")  # xdist's __main__ in the text of an error
def test_what_the_source_raises_is_raised_here_and_the_worker_goes_on() -> None:
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
        picky = error(3)
        assert type(picky) is PickyError and str(picky) == "a.h5:7 is bad"
        private = error(4)
        assert type(private) is DataError and "PrivateError: ('private', <function" in str(private) and __file__ in str(private)
        unsendable = error(5)
        assert type(unsendable) is DataError and "sample 5 cannot be sent from the worker process" in str(unsendable)
        assert "lambda" in str(unsendable) and "a tree of arrays" in str(unsendable)
        assert "sample 6: SystemExit: enough" in str(error(6))
        assert type(error(7)) is DataError and str(error(7)) == "LocalError: from within"
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
    [(1, "ended with exit code 7; what it said is on stderr"), (2, r"signal 11 \(SIGSEGV\)"), (3, r"signal 15 \(SIGTERM\)")],
)
def test_the_end_of_a_worker_is_told(index: int, text: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with closing(Worker(Deadly(), "train", 5)) as worker:
        assert worker.sample(0, 0) == worker.pid
        died(worker, index, text)
        died(worker, 0, text)
    printed = capfd.readouterr()
    assert printed.out == ("last words\n" if index == 1 else "")
    assert ("in string_at" in printed.err and "test_processes.py" in printed.err) == (index == 2)  # where it happened


def test_a_killed_worker_is_noticed_idle_and_busy() -> None:
    text = r"was killed by signal 9 \(SIGKILL\): mostly the node has no more memory; lower data.workers or data.prefetch"
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
    assert got["path"] == [entry or str(tmp_path) for entry in sys.path] and got["argv"] == sys.argv
    assert not got["heavy"] and got["settings"] == ["1", "1", "1", "false", "0", None]
    assert got["signals"] == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL] and not got["blocked"] and got["group"]
    assert got["inherited"] == []  # by the programs that a source may start


def test_a_source_that_cannot_be_sent_or_loaded_is_named() -> None:
    with pytest.raises(DataError, match="train: worker 0: a Locked cannot be sent to a worker process .*lock.*__getstate__"):
        Worker(Locked(), "train", 0)
    with closing(Worker(Unloadable(), "train", 0)) as worker:
        for index in 4, 5:
            text = f"worker 0, sample {index}: the source cannot be loaded .*RuntimeError: no such tables here\n.*test_processes"
            with pytest.raises(DataError, match=text):
                worker.sample(index, 0)


SCRIPT = """
import os
from contextlib import closing
from typing import NamedTuple
import numpy as np
from hpcai.data.processes import Worker

class Row(NamedTuple):
    x: np.ndarray
    at: int

class Source:
    def sample(self, index, epoch):
        return Row(np.arange(index), index)

print("runs", flush=True)
"""
USE = """
with closing(Worker(Source(), "train", 0)) as worker:
    row = worker.sample(9000, 0)
    print(type(row) is Row, row.x.sum(), worker.pid != os.getpid(), __name__)
    del row
"""
GUARDED = SCRIPT + "\nif __name__ == '__main__':\n" + USE.replace("\n", "\n    ")


def run(*words: str, folder: Path, text: str | None = None) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[3])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, input=text, capture_output=True, text=True, timeout=60)


def test_a_source_of_the_script_itself(tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text(GUARDED)
    part = "import multiprocessing\nclass Of:\n    def __init__(self, source): self.sample = source.sample\n"
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "part.py").write_text(part)
    (tmp_path / "pack" / "train.py").write_text(
        "from .part import Of\n" + GUARDED.replace("Worker(Source()", "Worker(Of(Source())")
    )
    (tmp_path / "open.py").write_text(SCRIPT + USE)
    for words in ["guarded.py"], ["-m", "pack.train"]:
        result = run(*words, folder=tmp_path)
        assert result.stdout.split("\n") == ["runs", "runs", "True 40495500 True __main__", ""], result.stderr
        assert result.stderr == ""
    result = run("open.py", folder=tmp_path)
    assert result.stdout == "runs\n" and result.returncode == 1  # once, not again in the worker
    assert "its class lives in the script" in result.stderr and "open.py, all of which would run again here" in result.stderr
    result = run("-", folder=tmp_path, text=SCRIPT + USE)
    assert result.stdout == "runs\n" and "its class lives in a notebook or a prompt; move it to a module" in result.stderr


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "sources.py").write_text(SCRIPT.replace('print("runs", flush=True)', ""))
    text = "from sources import *\nprint('runs', flush=True)\n" + USE
    (tmp_path / "open.py").write_text(text)
    for words, given_text in (["open.py"], None), (["-"], text):
        result = run(*words, folder=tmp_path, text=given_text)
        assert result.stdout == "runs\nTrue 40495500 True __main__\n" and result.stderr == "", result.stderr
    loop = GUARDED.replace("if __name__", "Worker(Source(), 'train', 1).sample(0, 0)\nif __name__")
    (tmp_path / "loop.py").write_text(loop)
    result = run("loop.py", folder=tmp_path)
    assert "a worker starts no workers" in result.stderr and result.stdout == "runs\nruns\n"


ORPHANS = """
import os, sys, threading, time
from hpcai.data.processes import Worker
sys.path.insert(0, sys.argv[1])
from test_processes import Deadly
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


def test_a_worker_that_nobody_holds_ends() -> None:
    worker = Worker(Deadly(), "train", 0)
    pid = worker.sample(0, 0)
    with pytest.warns(ResourceWarning):
        del worker
        gc.collect()
    assert gone(pid, 2)
    with pytest.raises(ChildProcessError):  # reaped by the next subprocess otherwise
        while True:
            os.waitpid(pid, 0)


@pytest.mark.timing
def test_a_sample_costs_one_copy_and_a_fraction_of_a_millisecond() -> None:
    """The bounds are for a machine with other work; alone a sample takes 20 us, or 1.4 copies."""
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
        assert best(lambda: worker.sample(1, 0)) < 2 * copy + 1e-3
        assert best(lambda: worker.sample(0, 0), 500) < 500e-6
