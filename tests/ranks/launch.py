"""Run one function as several processes of this machine (gloo, CPU) and raise the first failure with its traceback.

The processes are forked, so that torch is imported once: 0.1 s for two of them where spawned ones take 20.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.dist.mesh import Mesh


def on_ranks(axes: dict[str, int], function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """``function(mesh, *args)`` on a process per place of the mesh ``axes``; what each returned, by rank."""
    world = 1
    for name, size in axes.items():
        world *= size if name != "evaluate" else 1
    world += axes.get("evaluate", 0)
    if world == 1:
        return [function(Mesh(axes), *args)]
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        processes = [
            context.Process(target=_enter, args=(rank, world, axes, folder, queue, function, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, queue, world, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[Any], queue: Any, world: int, timeout: float) -> list[Any]:
    import time

    results, end = {}, time.monotonic() + timeout
    while len(results) < world:
        if not queue.empty():
            rank, value, failure = queue.get()
            if failure:
                raise AssertionError(f"rank {rank} of {world} failed:\n{failure}")
            results[rank] = value
        elif time.monotonic() > end or (all(p.exitcode is not None for p in processes) and queue.empty()):
            raise AssertionError(f"only {sorted(results)} of {world} ranks answered; exit codes {[p.exitcode for p in processes]}")
        else:
            time.sleep(0.005)
    return [results[rank] for rank in range(world)]


def _enter(rank: int, world: int, axes: dict[str, int], folder: str, queue: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = f"file://{Path(folder) / 'store'}"
        torch_dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        queue.put((rank, function(Mesh(axes, world, rank), *args), None))
        torch_dist.barrier()
        torch_dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
