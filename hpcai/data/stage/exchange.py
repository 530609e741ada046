"""Broadcasts of blocks between nodes: by MPI if the job was initialized by it, otherwise by gloo."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.launch import mpi_communicator
from hpcai.dist.mesh import Mesh


class Exchange:
    """Broadcasts within a ring by gloo, and sums over the job. One thread makes all calls; construction and ``close`` are
    collective.   ``rings``: the ranks of every ring, equal on all ranks"""

    def __init__(self, mesh: Mesh, rings: Sequence[Sequence[int]]) -> None:
        self._everyone, self.name = mesh.peers, "gloo" if mesh.world > 1 and rings else "none"
        groups = [torch_dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None for ranks in rings]
        self._ring: Any = next((group for group, ranks in zip(groups, rings) if mesh.rank in ranks), None)

    def broadcast(self, block: np.ndarray, root: int) -> None:
        """Broadcast ``block`` from the rank at position ``root`` of the ring.   [n] uint8"""
        if self._ring is not None:
            torch_dist.broadcast(torch.from_numpy(block), group=self._ring, group_src=root)

    def sum(self, values: np.ndarray) -> None:
        """Sum ``values`` over the job, in place.   [n] int64"""
        all_reduce_(torch.from_numpy(values), self._everyone)

    def close(self) -> None:
        if self._ring is not None:
            torch_dist.destroy_process_group(self._ring)


class _MPIExchange(Exchange):
    """MPI progresses only within its calls: a rank must not wait for anything else while a collective is in flight."""

    def __init__(self, mesh: Mesh, rings: Sequence[Sequence[int]]) -> None:
        super().__init__(mesh, [])
        self.name, self._world = "MPI", mpi_communicator().Dup()
        number = next((number for number, ranks in enumerate(rings) if mesh.rank in ranks), len(rings))
        self._ring = self._world.Split(number, mesh.rank)

    def broadcast(self, block: np.ndarray, root: int) -> None:
        if self._ring.size > 1:
            _wait(self._ring.Ibcast(block, root))

    def sum(self, values: np.ndarray) -> None:
        _wait(self._world.Iallreduce(values.copy(), values))

    def close(self) -> None:
        self._ring.Free()
        self._world.Free()


def _wait(request: Any) -> None:
    """Wait for an MPI request. MPI's Wait would occupy a core, which the threads that read, hash and write need."""
    soon = time.perf_counter() + 1e-3  # poll without sleeping, for the many small steps of a broadcast
    while not request.Test():
        time.sleep(0 if time.perf_counter() < soon else 1e-4)


def open_exchange(mesh: Mesh, rings: Sequence[Sequence[int]]) -> Exchange:
    return (Exchange if mesh.world == 1 or mpi_communicator() is None else _MPIExchange)(mesh, rings)
