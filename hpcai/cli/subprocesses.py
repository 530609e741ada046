"""Forked child processes: they inherit the imported torch, which a new Python takes seconds to load."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist


class ForkedProcesses(AbstractContextManager["ForkedProcesses"]):
    """Child processes of one ``function``, with standard output and error in one file. They rendezvous as under torchrun, and the
    end of the ``with`` block kills those that still run."""

    def __init__(self, function: Callable[[], object], output: Path, ranks: int = 1) -> None:
        rendezvous: dict[str, str] = {}
        if ranks > 1:
            listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
            port = listener.getsockname()[1]
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                       "TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(ranks)}  # fmt: skip
        self.output = output
        self.processes = []
        for rank in range(ranks):
            environ = rendezvous and {**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(multiprocessing.get_context("fork").Process(target=_run_child, args=(function, output, environ)))
            self.processes[-1].start()
        if ranks > 1:  # the store, as in torchrun's agent; last, since a fork may inherit a lock held by its thread
            kwargs: Any = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
            self.store = torch_dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), **kwargs)

    def wait(self, timeout: float = 120) -> tuple[list[int | None], str]:
        """Return exit codes and output. A process that still runs after ``timeout`` seconds has None, and its stack traces are
        printed."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        running = [process for process in self.processes if process.exitcode is None]
        codes = [process.exitcode for process in self.processes]
        for process in running:
            os.kill(process.pid or 0, signal.SIGABRT)  # faulthandler then writes the stack traces
            process.join(10)
        return codes, self.output.read_text()

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _run_child(function: Callable[[], object], output: Path, environ: Mapping[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(environ)
    torch.set_num_threads(1)
    faulthandler.enable(sys.stderr)
    raise SystemExit(function())
