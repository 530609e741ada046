"""What one process does in each act of a run: sockets, messages, bytes, file operations, CPU seconds, memory.

Messages are calls of a process group (torch's collectives, however they are called) and words to the hub; bytes sent are those that
TCP has seen acknowledged. File operations are counted twice: by Python's audit events, its ``stat`` and h5py's opens, and, where
strace is there and asked for, by the system's calls that name a file.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import h5py
import torch.distributed as torch_dist

from hpcai.cli.bench.step import bytes_sent
from hpcai.dist import watch

Found = dict[str, dict[str, float]]

SPENT = ("messages", "bytes sent", "file operations", "bytes from disk", "cpu seconds")
HELD = ("sockets", "memory")

_CALLS = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "gather", "scatter", "send", "recv", "recv_anysource", "barrier", "monitored_barrier",
)  # fmt: skip
_EVENTS = {
    "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink",
}  # fmt: skip
_MARK = "/hpcai-bench-growth/"  # a file that is asked for at the beginning of each act, for who reads the trace
_NONE = "none"  # what is done there is the bench's own
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class Ledger:
    """Counts for the process that makes it, from then on. It is made once in a process, and belongs to its main thread."""

    def __init__(self, trace: Path | None = None) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self.held: dict[str, dict[str, float]] = {}
        self.times: Counter[str] = Counter()
        self._acts, self._counts, self._looks = [_NONE], Counter[str](), False
        self._tracer, self._trace = None if trace is None else _traced(trace), trace
        self._count_messages()
        self._count_files()
        self._inherited = _sockets()  # a process that was forked has those of the other one
        self._last = self._read()

    def now(self, act: str, times: int = 1) -> None:
        """From here on all belongs to ``act``, but for what is within others."""
        self._turn()
        self._acts[0] = act
        self.times[act] += times
        self._mark()

    @contextmanager
    def act(self, name: str, times: int = 1) -> Iterator[None]:
        """What is done within belongs to ``name``."""
        self._turn()
        self._acts.append(name)
        self.times[name] += times
        self._mark()
        try:
            yield
        finally:
            self._turn()
            self._acts.pop()
            self._mark()

    def close(self) -> Found:
        """What one time of each act took, and what was held at its end."""
        self._turn()
        if self._tracer is not None and self._trace is not None:
            self._tracer.terminate()
            self._tracer.wait()
            for act, calls in traced_calls(self._trace.read_text()).items():
                self.found[act]["file operations"] = calls
        acts = [act for act in self.found if self.times[act] and act != _NONE]
        return {act: {**{name: self.found[act][name] / self.times[act] for name in SPENT}, **self.held[act]} for act in acts}

    def _turn(self) -> None:
        """Book what was done since the last turn on the act that ends here, or is left for another one."""
        if self._acts[-1] != _NONE:
            os.access(_MARK + _NONE, os.F_OK)
        act, now = self._acts[-1], self._read()
        spent = self.found.setdefault(act, dict.fromkeys(SPENT, 0.0))
        for name in SPENT:  # who closes a socket forgets what it has sent
            spent[name] += max(now[name] - self._last[name], 0.0)
        self.held[act] = {name: now[name] for name in HELD}
        self._last = now | {"cpu seconds": time.process_time()}

    def _mark(self) -> None:
        os.access(_MARK + self._acts[-1], os.F_OK)

    def _read(self) -> dict[str, float]:
        self._looks, cpu = True, time.process_time()
        disk = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {
            "sockets": _sockets() - self._inherited, "memory": pages * os.sysconf("SC_PAGESIZE"), "bytes sent": bytes_sent(),
            "bytes from disk": int(disk[1]) if disk else 0, "cpu seconds": cpu, **self._counts,
        }  # fmt: skip
        self._looks = False
        return {name: found.get(name, 0) for name in (*SPENT, *HELD)}

    def _note(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noted(*given: Any, **words: Any) -> Any:
            if not self._looks:
                self._counts[what] += 1
            return function(*given, **words)

        return noted

    def _count_messages(self) -> None:
        group: Any = torch_dist.ProcessGroup
        for name in _CALLS:
            if hasattr(group, name):
                setattr(group, name, self._note("messages", getattr(group, name)))
        watch._send = self._note("messages", watch._send)

    def _count_files(self) -> None:
        """What Python's audit tells, and what it does not: where something is asked about a path, and what HDF5 opens."""
        for owner, name in ((os, "stat"), (os, "lstat"), (h5py.File, "__init__")):
            setattr(owner, name, self._note("file operations", getattr(owner, name)))

        def hook(event: str, given: tuple[Any, ...]) -> None:
            if event in _EVENTS and not self._looks and not isinstance(given[0], int):
                self._counts["file operations"] += 1

        sys.addaudithook(hook)


def _sockets() -> int:
    return sum(_link(name).startswith("socket:") for name in os.listdir("/proc/self/fd"))


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # that of the listing
        return ""


def can_trace() -> bool:
    """Whether strace is there and may look at a process here."""
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-qq", "-o", os.devnull, "-e", "trace=none", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _traced(into: Path) -> "subprocess.Popen[bytes]":
    """strace at work on this process and all of its threads."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    command = ["strace", "-f", "-qq", "-e", "trace=%file", "-e", "signal=none", "-o", str(into), "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while "TracerPid:\t0" in Path("/proc/self/status").read_text():
        if tracer.poll() is not None:
            raise OSError(f"strace ended with {tracer.returncode} instead of looking at process {os.getpid()}")
        time.sleep(0.01)
    return tracer


def traced_calls(text: str) -> Counter[str]:
    """Calls that name a file, by act, in what strace has written."""
    calls, act = Counter[str](), _NONE
    for line in text.splitlines():
        if mark := re.search(rf'"{_MARK}([^"]+)"', line):
            act = mark[1]
        elif "resumed>" not in line and act != _NONE:
            calls[act] += 1
    return calls
