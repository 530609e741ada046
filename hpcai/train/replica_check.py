"""Detection of replicas whose weights diverged, by a faulty processor or a bit flip in memory.

Each rank computes a fingerprint of each parameter: the sum of its bits times odd factors that depend on the position, in wrapping
integers. One flipped bit always changes it. Minimum and maximum are reduced over the ranks that hold the same elements, in one
collective for each axis. Only the index of the first parameter that differs is read from the device.
"""

from collections import Counter
from functools import cache

import torch
from torch import Tensor

from hpcai.dist.collectives import all_gather_object, all_reduce_min
from hpcai.dist.mesh import Mesh
from hpcai.errors import DivergedError
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.parallel.fsdp import FSDP
from hpcai.train.optim import Optimizer

NEVER = 2**62
_BLOCK = 2**18  # elements that are multiplied at a time, which bounds scratch memory
_BLOCK_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd factor of the running sum before the next block is added
_INT_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """A comparison of the weights of all replicas. ``first_divergent_parameter`` compares them after a step, on the device.
    ``raise_if_divergent`` names the ranks, once the index has been read."""

    def __init__(self, reducer: GradientReducer | FSDP, optimizer: Optimizer, mesh: Mesh) -> None:
        self.reducer, self.optimizer, self.mesh = reducer, optimizer, mesh
        self._names, _, self._axes = zip(*reducer.replicated_tensors())
        positions = {axes: [i for i, each in enumerate(self._axes) if each == axes] for axes in dict.fromkeys(self._axes) if axes}
        self._groups = [(axes, torch.tensor(indices, device=mesh.device)) for axes, indices in positions.items()]
        self._fingerprints = torch.zeros(0, dtype=torch.int64)
        stage = mesh["pipeline"]
        self._first_index = sum(all_gather_object(len(self._names), stage)[: stage.rank])  # parameters of earlier stages come first

    @property
    def has_replicas(self) -> bool:
        """Whether any two ranks hold the same parameter."""
        return bool(self._groups)

    @torch.no_grad()
    def first_divergent_parameter(self) -> Tensor:
        """Return the index of the first parameter that differs between this rank and a replica of it, or ``NEVER``, on the device.
        [] int64"""
        # Master weights: bf16 weights are rounded from them in every step, which would hide a flipped bit.
        master = self.optimizer.full_weights()
        first = torch.full((), NEVER, dtype=torch.int64, device=self.mesh.device)
        replicated = self.reducer.replicated_tensors()  # others, such as shards of embedding tables, are not read
        prints = [fingerprint(master.get(name, numbers)) if axes else first for name, numbers, axes in replicated]
        self._fingerprints = torch.stack(prints)
        for axes, indices in self._groups:
            local = self._fingerprints[indices]
            extremes = torch.stack((local, ~local))  # the minimum of ~x belongs to the maximum of x
            for axis in axes:
                all_reduce_min(extremes, axis)
            first = torch.minimum(first, torch.where(extremes[0] == ~extremes[1], NEVER, indices + self._first_index).amin())
        return first

    def raise_if_divergent(self, index: int, step: int) -> None:
        """Raise DivergedError on all ranks if ``index`` is that of a parameter that differed after ``step`` steps."""
        if index == NEVER:
            return
        local = index - self._first_index
        local_name = self._names[local] if 0 <= local < len(self._names) else ""
        name = max(all_gather_object(local_name, self.mesh.peers))  # a weight that stages share has an index on each
        ranks = self._divergent_ranks(self._names.index(name)) if name in self._names else set()
        rank_sets = all_gather_object(ranks, self.mesh.peers)
        rank_names = " and ".join(f"rank {rank}" for rank in sorted(set().union(*rank_sets)))
        raise DivergedError(
            f"step {step}: the weights of {rank_names} differ from their replicas, first in {name}; a processor or a "
            "memory is faulty there, or types of processors are mixed; resume from the last checkpoint without these nodes, or set "
            "train.replica_check_every=null"
        )

    def _divergent_ranks(self, index: int) -> set[int]:
        """Return the ranks that differ from the majority of a parameter's replicas, or all of them if there is no majority."""
        fingerprints = [(self.mesh.rank, int(self._fingerprints[index].item()))]
        for axis in self._axes[index]:
            fingerprints = [each for part in all_gather_object(fingerprints, axis) for each in part]
        counts = [*Counter(fingerprint for _, fingerprint in fingerprints).most_common(), (None, 0)]
        majority = counts[0][0] if counts[0][1] > counts[1][1] else None
        return {rank for rank, fingerprint in fingerprints if fingerprint != majority} if len(counts) > 2 else set()


def fingerprint(x: Tensor) -> Tensor:
    """Return an integer that depends on all bits of ``numbers`` and their order, on the same device.   [] int64"""
    bits = x.flatten().view(_INT_OF_WIDTH[x.element_size()])
    odd, total = _odd_factors(bits.device), torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK):
        total = total * _BLOCK_FACTOR + (block * odd[: len(block)]).sum()
    return total


@cache
def _odd_factors(device: torch.device) -> Tensor:
    """Return random odd factors, the same on all ranks.   [_BLOCK] int64"""
    return torch.randint(-(2**62), 2**62, (_BLOCK,), generator=torch.Generator().manual_seed(0)).mul_(2).add_(1).to(device)
