"""Run a function on several processes with one GPU each, over NCCL, with the start and shutdown of a job."""

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
from tests.gpu.device import ON_GPU


def needs_gpus(count: int) -> pytest.MarkDecorator:
    available = torch.cuda.device_count() if ON_GPU else count
    return pytest.mark.skipif(available < count, reason=f"needs {count} GPUs, {available} are available")


def on_gpus(axes: dict[str, int], function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """Run ``function(mesh, *args)``, defined at module level, on each rank of a mesh; return the results (on the CPU) by rank."""
    world, context = prod(axes.values()), multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with TemporaryDirectory() as name:
        files = [Path(name, f"{rank}.pt") for rank in range(world)]
        tasks = [(rank, axes, port, file, function, args) for rank, file in enumerate(files)]
        processes = [context.Process(target=_run_rank, args=task) for task in tasks]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        assert not running, f"ranks {running} of {world} did not end within {timeout:.0f} s"
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world, f"exit codes {codes}; their output is above"
        return [torch.load(file, weights_only=False) for file in files]


def _run_rank(rank: int, axes: dict[str, int], port: int, file: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    world = prod(axes.values())
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port, "HPCAI_TIMEOUT": 120}  # fmt: skip
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    with dist.start(axes) as mesh:
        torch.save(function(mesh, *args), file)
