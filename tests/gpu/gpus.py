"""One function as several processes, each with a GPU of its own, over NCCL: the way that jobs begin and end."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hpcai import dist
from tests.gpu.machine import ON_GPU


def needs(count: int) -> pytest.MarkDecorator:
    there = torch.cuda.device_count() if ON_GPU else count
    return pytest.mark.skipif(there < count, reason=f"needs {count} GPUs, and {there} are there")


def on_gpus(axes: dict[str, int], function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """``function(mesh, *args)``, a function of a module, on each process of the mesh; what it returned (on the CPU), by rank."""
    world, context = prod(axes.values()), multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TemporaryDirectory() as name:
        files = [Path(name, f"{rank}.pt") for rank in range(world)]
        tasks = [(rank, axes, port, file, function, args) for rank, file in enumerate(files)]
        processes = [context.Process(target=_enter, args=task) for task in tasks]
        for process in processes:
            process.start()
        until = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        assert not late, f"ranks {late} of {world} did not end within {timeout:.0f} s"
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world, f"exit codes {codes}; what they said is above"
        return [torch.load(file, weights_only=False) for file in files]


def _enter(rank: int, axes: dict[str, int], port: int, file: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    world = prod(axes.values())
    job = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": port, "HPCAI_TIMEOUT": 120}  # fmt: skip
    os.environ.update({name: str(value) for name, value in job.items()})
    torch.set_num_threads(1)
    with dist.start(axes) as mesh:
        torch.save(function(mesh, *args), file)
