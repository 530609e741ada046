"""Run a function on several local processes (gloo, CPU) and raise the first failure with its traceback.

The processes are forked, so that torch is imported once, and serve further calls of the same test file with the same process group
and meshes. After a failure, an exit or a timeout of one rank all are ended; the next call starts new ones.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from hpcai.dist.mesh import Mesh

Call = tuple[dict[str, int], Callable[..., Any], tuple[Any, ...]]
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def on_ranks(
    axes: dict[str, int], function: Callable[..., Any], *args: Any, timeout: float = 120, fresh: bool = False
) -> list[Any]:
    """Run ``function(mesh, *args)`` on each rank of a mesh with sizes ``axes``, and return the results by rank.

    The function is defined at module level. With ``fresh``, new processes run this call alone: the function may be a closure, sees
    changes that the test made in its own process, and may change global state.
    """
    world = 1
    for name, size in axes.items():
        world *= size if name not in ("evaluate", "expert") else 1
    world += axes.get("evaluate", 0)
    call = axes, function, args
    if world == 1:
        return [function(Mesh(axes), *args)]
    if fresh:
        ranks = _ProcessGroup(world, call)
        try:
            return ranks.collect(timeout)
        finally:
            ranks.end()
    if world not in _groups:
        _groups[world] = _ProcessGroup(world)
    try:
        return _groups[world].run(call, timeout)
    except BaseException:
        _groups.pop(world).end()
        raise


def end() -> None:
    """End the processes that wait for calls."""
    while _groups:
        _groups.popitem()[1].end()


class _ProcessGroup:
    """Forked processes of one process group. Each reads calls from its pipe, or runs the one ``call`` given at the fork."""

    def __init__(self, world: int, call: Call | None = None) -> None:
        # Imports of models and fully_shard take seconds: once here, not in every process
        import torch._dynamo
        import torch.distributed.fsdp  # noqa: F401

        self.folder = TemporaryDirectory()
        store = f"file://{Path(self.folder.name) / 'store'}"
        ours, theirs = zip(*(_FORK.Pipe() for _ in range(world)))
        self.pipes: list[Connection] = list(ours)
        self.processes = [_FORK.Process(target=_serve, args=(rank, world, store, theirs[rank], call)) for rank in range(world)]
        for process in self.processes:
            process.start()
        for pipe in theirs:
            pipe.close()

    def run(self, call: Call, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(call)
        return self.collect(timeout)

    def collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        world, until = len(self.pipes), time.monotonic() + timeout
        while len(results) < world:
            silent = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            for pipe in wait(silent, until - time.monotonic()) or self._raise_lost(results):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    results[rank], failure = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._raise_lost(results)
                if failure:
                    codes = [process.exitcode for process in self.processes]
                    raise AssertionError(f"rank {rank} of {world} failed; exit codes {codes}:\n{failure}")
        return [results[rank] for rank in range(world)]

    def _raise_lost(self, results: dict[int, Any]) -> list[Any]:
        codes = [process.exitcode for process in self.processes]
        raise AssertionError(f"only {sorted(results)} of {len(self.pipes)} ranks answered; exit codes {codes}")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes):
            process.join()
            pipe.close()
        self.folder.cleanup()


_groups: dict[int, _ProcessGroup] = {}
atexit.register(end)


def _serve(rank: int, world: int, store: str, pipe: Connection, call: Call | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)  # no rank outlives the tests
    gc.freeze()  # a collection would touch, and so copy, all inherited pages
    torch.set_num_threads(1)
    meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the tests ended or were interrupted
        while True:
            axes, function, args = call or pipe.recv()
            gc.collect()  # objects of the call before end now, while no collective is under way
            for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
                seed(0)  # calls are independent of earlier draws
            try:
                if not torch_dist.is_initialized():
                    torch_dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
                key = tuple(axes.items())
                if key not in meshes:
                    meshes[key] = Mesh(axes, world, rank)
                pipe.send((function(meshes[key], *args), None))
            except BaseException:
                pipe.send((None, traceback.format_exc()))
            if call:
                pipe.recv()  # stays until it is ended: other ranks may still need it
