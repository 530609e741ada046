"""How blocks go from node to node: MPI where the processes met over it, otherwise gloo."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as torch_dist

from hpcai.data.stage.plan import Circle
from hpcai.dist.launch import communicator
from hpcai.dist.mesh import Mesh


class Pending(Protocol):
    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        pass


class Exchange:
    """How blocks go around: this one is for a process alone, which spreads none. All calls are made by one thread; ``open`` and
    ``close`` by all processes of the job."""

    name = "none"

    def open(self, lanes: Sequence[Sequence[Circle]], rank: int) -> None:
        """Connect the circles."""

    def spread(self, circle: Circle, block: np.ndarray, root: int) -> Pending:
        """Begin to broadcast ``block`` from rank ``root`` of the job to its circle.   [n] uint8"""
        raise NotImplementedError

    def add(self, values: np.ndarray) -> Pending:
        """Begin to sum ``values`` over the job, in place.   [n] int64"""
        return _Done()

    def wait(self, future: "Future[None]") -> None:
        """Wait until a thread of this process has done its work; broadcasts go on meanwhile."""
        wait_for([future])

    def close(self) -> None:
        """Disconnect the circles."""


class _OverMPI(Exchange):
    """Nonblocking MPI broadcasts. They advance only inside MPI calls, so each wait, whatever it is for, calls MPI meanwhile."""

    name = "MPI"

    def __init__(self, world: Any) -> None:
        self._world = world.Dup()
        self._circles: list[Any] = []

    def open(self, lanes: Sequence[Sequence[Circle]], rank: int) -> None:
        for layer in range(max((len(lane) for lane in lanes), default=0)):
            circles = [lane[layer].ranks if layer < len(lane) else () for lane in lanes]
            color = next((number for number, ranks in enumerate(circles, 1) if rank in ranks), 0)
            self._circles.append(self._world.Split(color, rank))

    def spread(self, circle: Circle, block: np.ndarray, root: int) -> Pending:
        return _Request(self._circles[circle.layer].Ibcast(block, circle.ranks.index(root)))

    def add(self, values: np.ndarray) -> Pending:
        return _Request(self._world.Iallreduce(values.copy(), values))

    def wait(self, future: "Future[None]") -> None:
        def ready() -> bool:
            self._world.Iprobe()
            return future.done()

        _poll(ready)

    def close(self) -> None:
        for comm in [*self._circles, self._world]:
            comm.Free()


class _Request:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        _poll(self._request.Test)  # not Wait, which takes a whole core from the threads that read, hash and write


def _poll(ready: Callable[[], bool]) -> None:
    """A millisecond at full speed, for the many small steps of a broadcast; then mostly asleep."""
    soon = time.perf_counter() + 1e-3
    while not ready():
        if time.perf_counter() < soon:
            os.sched_yield()
        else:
            time.sleep(1e-4)


class _OverTorch(Exchange):
    """Broadcasts of torch.distributed over gloo, whose own threads carry them on."""

    name = "gloo"

    def __init__(self) -> None:
        self._everyone = torch_dist.new_group(backend="gloo")
        self._circles: dict[int, Any] = {}

    def open(self, lanes: Sequence[Sequence[Circle]], rank: int) -> None:
        for circle in (circle for lane in lanes for circle in lane if len(circle.ranks) > 1):
            group = torch_dist.new_group(list(circle.ranks), backend="gloo")  # all ranks make it, members or not
            if rank in circle.ranks:
                self._circles[circle.layer] = group

    def spread(self, circle: Circle, block: np.ndarray, root: int) -> Pending:
        return torch_dist.broadcast(torch.from_numpy(block), root, group=self._circles[circle.layer], async_op=True)

    def add(self, values: np.ndarray) -> Pending:
        return torch_dist.all_reduce(torch.from_numpy(values), group=self._everyone, async_op=True)

    def close(self) -> None:
        for group in [*self._circles.values(), self._everyone]:
            torch_dist.destroy_process_group(group)


def open_exchange(mesh: Mesh) -> Exchange:
    if mesh.world == 1:
        return Exchange()
    world = communicator()
    return _OverMPI(world) if world is not None else _OverTorch()
