"""Copies of the weights that have come to differ: a processor that computes wrongly, a bit that flipped in memory.

Every process sums the bits of each parameter, times odd numbers that depend on their place, in integers that wrap around: one
flipped bit always changes the sum. The least and the greatest sum are found over the processes that hold the same numbers, in one
message for each axis, and nothing is read from the device but the number of the first parameter whose sums differ.
"""

from collections import Counter
from functools import cache

import torch
from torch import Tensor

from hpcai.dist.collectives import all_gather_object, all_reduce_min
from hpcai.dist.mesh import Mesh
from hpcai.errors import DivergedError
from hpcai.parallel.replicate import GradientSums
from hpcai.parallel.shard import FullySharded
from hpcai.train.optim import Optimizer

NEVER = 2**62
_BLOCK = 2**18  # numbers that are multiplied at a time, which bounds the memory for that
_NEXT = 0x9E3779B97F4A7C15 - 2**64  # odd: what the sum of a block is multiplied with before the next one is added
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Agreement:
    """``first_unlike()`` compares the weights after a step; ``tell()`` says who holds others, once its number was read."""

    def __init__(self, sums: GradientSums | FullySharded, optimizer: Optimizer, mesh: Mesh) -> None:
        self.sums, self.optimizer, self.mesh = sums, optimizer, mesh
        self._names, _, self._axes = zip(*sums.alike())
        places = {axes: [i for i, each in enumerate(self._axes) if each == axes] for axes in dict.fromkeys(self._axes) if axes}
        self._groups = [(axes, torch.tensor(found, device=mesh.device)) for axes, found in places.items()]
        self._prints = torch.zeros(0, dtype=torch.int64)
        stage = mesh["pipeline"]
        self._first = sum(all_gather_object(len(self._names), stage)[: stage.rank])  # parameters are numbered across the stages

    @property
    def needed(self) -> bool:
        """Whether any two processes hold the same."""
        return bool(self._groups)

    @torch.no_grad()
    def first_unlike(self) -> Tensor:
        """The number of the first parameter of which this process and another hold different bits, or a huge one, on the device."""
        # Of weights in full precision a bit lasts: narrow ones are rounded anew from them in every step.
        full = self.optimizer.whole()
        self._prints = torch.stack([fingerprint(full.get(name, numbers)) for name, numbers, _ in self.sums.alike()])
        first = torch.full((), NEVER, dtype=torch.int64, device=self.mesh.device)
        for axes, places in self._groups:
            own = self._prints[places]
            ends = torch.stack((own, ~own))  # the greatest x has the least ~x
            for axis in axes:
                all_reduce_min(ends, axis)
            first = torch.minimum(first, torch.where(ends[0] == ~ends[1], NEVER, places + self._first).amin())
        return first

    def tell(self, number: int, step: int) -> None:
        """Raise DivergedError on every process where ``number`` is that of a parameter that was unlike after ``step`` steps."""
        if number == NEVER:
            return
        own = number - self._first
        told = self._names[own] if 0 <= own < len(self._names) else ""
        name = max(all_gather_object(told, self.mesh.peers))  # stages that share a weight number it each for themselves
        ranks = self._unlike(self._names.index(name)) if name in self._names else set()
        found = all_gather_object(ranks, self.mesh.peers)
        where = " and ".join(f"rank {rank}" for rank in sorted(set().union(*found)))
        raise DivergedError(
            f"step {step}: the weights of {where} differ from those of processes that should hold the same, first in "
            f"{name}; a processor or a memory there is wrong, or kinds of processors are mixed; go on "
            "from the last checkpoint without these nodes, or do not compare: train.agree_every=null"
        )

    def _unlike(self, number: int) -> set[int]:
        """The ranks that hold another parameter than most: all where as many hold the one as the other."""
        seen = [(self.mesh.rank, int(self._prints[number].item()))]
        for axis in self._axes[number]:
            seen = [each for part in all_gather_object(seen, axis) for each in part]
        counts = [*Counter(found for _, found in seen).most_common(), (None, 0)]
        usual = counts[0][0] if counts[0][1] > counts[1][1] else None
        return {rank for rank, found in seen if found != usual} if len(counts) > 2 else set()


def fingerprint(numbers: Tensor) -> Tensor:
    """An integer of all bits of ``numbers`` and their order, on its device."""
    bits = numbers.flatten().view(_INTEGERS[numbers.element_size()])
    odd, total = _odd(bits.device), torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK):
        total = total * _NEXT + (block * odd[: len(block)]).sum()
    return total


@cache
def _odd(device: torch.device) -> Tensor:
    """Random odd numbers, the same on all processes.   [_BLOCK] int64"""
    return torch.randint(-(2**62), 2**62, (_BLOCK,), generator=torch.Generator().manual_seed(0)).mul_(2).add_(1).to(device)
