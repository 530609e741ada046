"""Forks of this process: they have torch already, where a new Python takes seconds to load it."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist


class ForkedProcesses:
    """Processes that were forked, and the file into which all of them speak."""

    def __init__(self, call: Callable[[], object], output: Path, ranks: int) -> None:
        meeting: dict[str, str] = {}
        if ranks > 1:
            door = socket.create_server(("127.0.0.1", 0), backlog=ranks)
            port = door.getsockname()[1]
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                       "TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(ranks)}  # fmt: skip
        self.output = output
        self.processes = []
        for rank in range(ranks):
            place = meeting and {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(multiprocessing.get_context("fork").Process(target=_run_child, args=(call, output, place)))
            self.processes[-1].start()
        if ranks > 1:  # a store of this process, as torchrun's agent has one: last, for a fork may inherit a lock of its thread
            words: Any = {"wait_for_workers": False, "master_listen_fd": door.detach()}
            self.store = torch_dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), **words)

    def wait(self, timeout: float = 120) -> tuple[list[int | None], str]:
        """Exit codes, and what was said. A process that has not ended after ``timeout`` seconds has none, and says where it
        stands."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        late = [process for process in self.processes if process.exitcode is None]
        codes = [process.exitcode for process in self.processes]
        for process in late:
            os.kill(process.pid or 0, signal.SIGABRT)  # at which faulthandler writes its stacks
            process.join(10)
        return codes, self.output.read_text()


@contextmanager
def fork_processes(call: Callable[[], object], output: Path, ranks: int = 1) -> Iterator[ForkedProcesses]:
    """``call`` in as many forks of this process, which meet as torchrun's processes do; none of them outlives the block."""
    forks = ForkedProcesses(call, output, ranks)
    try:
        yield forks
    finally:
        for process in forks.processes:
            process.kill()
            process.join()


def _run_child(call: Callable[[], object], output: Path, place: Mapping[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(place)
    torch.set_num_threads(1)
    faulthandler.enable(sys.stderr)
    raise SystemExit(call())
