"""Run one function as several processes of this machine (gloo, CPU) and raise the first failure with its traceback.

The processes are forked, so that torch is imported once, and they stay for the next calls of the same test file: a group of
processes and its meshes are made once. A failure, an end or a silence of one of them ends all; the next call starts new ones.
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
    """``function(mesh, *args)`` on a process per place of the mesh ``axes``; what each returned, by rank.

    The function is one of a module. With ``fresh`` its processes serve this call alone: it may be a closure, find what the test
    has changed in its own process, and leave them changed.
    """
    world = 1
    for name, size in axes.items():
        world *= size if name != "evaluate" else 1
    world += axes.get("evaluate", 0)
    call = axes, function, args
    if world == 1:
        return [function(Mesh(axes), *args)]
    if fresh:
        ranks = _Ranks(world, call)
        try:
            return ranks.answers(timeout)
        finally:
            ranks.end()
    if world not in _standing:
        _standing[world] = _Ranks(world)
    try:
        return _standing[world].run(call, timeout)
    except BaseException:
        _standing.pop(world).end()
        raise


def end() -> None:
    """End the processes that wait for more calls."""
    while _standing:
        _standing.popitem()[1].end()


class _Ranks:
    """Forked processes that have met; each waits at its pipe for calls, or answers the one ``call`` that it was forked with."""

    def __init__(self, world: int, call: Call | None = None) -> None:
        # What models and fully_shard import takes seconds: once here, not in every process
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
        return self.answers(timeout)

    def answers(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        world, until = len(self.pipes), time.monotonic() + timeout
        while len(results) < world:
            silent = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            for pipe in wait(silent, until - time.monotonic()) or self._lost(results):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    results[rank], failure = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._lost(results)
                if failure:
                    codes = [process.exitcode for process in self.processes]
                    raise AssertionError(f"rank {rank} of {world} failed; exit codes {codes}:\n{failure}")
        return [results[rank] for rank in range(world)]

    def _lost(self, results: dict[int, Any]) -> list[Any]:
        codes = [process.exitcode for process in self.processes]
        raise AssertionError(f"only {sorted(results)} of {len(self.pipes)} ranks answered; exit codes {codes}")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes):
            process.join()
            pipe.close()
        self.folder.cleanup()


_standing: dict[int, _Ranks] = {}
atexit.register(end)


def _serve(rank: int, world: int, store: str, pipe: Connection, call: Call | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)  # no rank outlives the tests, however they end
    gc.freeze()  # a collection would look at all that was there before, and so copy it
    torch.set_num_threads(1)
    meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the pipe's other end is gone, or the tests are interrupted
        while True:
            axes, function, args = call or pipe.recv()
            gc.collect()  # what a call before this one left ends while nothing is under way
            for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
                seed(0)  # no call depends on what those before it have drawn
            try:
                if not torch_dist.is_initialized():
                    torch_dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
                places = tuple(axes.items())
                if places not in meshes:
                    meshes[places] = Mesh(axes, world, rank)
                pipe.send((function(meshes[places], *args), None))
            except BaseException:
                pipe.send((None, traceback.format_exc()))
            if call:
                pipe.recv()  # it stays until its end comes: the others may still need it
