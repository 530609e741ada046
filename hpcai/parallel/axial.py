"""Axial parallelism: a tensor with two long dims is cut along one of them, and its cut moves to the other (Cheng et al.,
"FastFold", 2022, after Ho et al., "Axial attention", 2019).

    part = Own(axis, 1)(x)                     # [B, R, C, ...] -> [B, R/n, C, ...]
    part = Move(axis, give=2, take=1)(part)    # [B, R/n, C, ...] -> [B, R, C/n, ...]
    x = Join(axis, 2)(part, C)                 # [B, R, C, ...]

Ranks hold equal parts: a dim that does not divide is filled with zeros behind its last place, and what is not cut has its true size
again. One rule makes all gradients right: what ranks count adds up. The adjoint of a cut is filling with zeros, that of a join is a
sum of which each rank gets its part, and what all ranks compute alike counts 1/n on each (``Once``). Nothing is approximate.
n the size of the axis.

A message that a model asks for before it needs it hides behind what it computes meanwhile, and so does its gradient's:

    passing = join.begin(part, C)              # sent
    y = something(else)
    x = join.finish(passing)                   # there
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from hpcai.dist.collectives import ReduceScatter, get_backend, all_gather, sum_once, all_to_all
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError
from hpcai.nn.seam import Seam
from hpcai.untraced import untraced


class _Seam(Seam):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis


class Own(_Seam):
    """This rank's part of a whole, along ``dim``. Raises DataError where there are fewer places than ranks."""

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__(axis)
        self.dim = dim

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        size, n = x.shape[self.dim], self.axis.size
        if size < n:
            raise DataError(
                f"a tensor {list(x.shape)} has {size} places along dim {self.dim} for the {n} ranks of mesh.{self.axis.name}; give "
                f"longer samples, or set mesh.{self.axis.name} to {size} or less"
            )
        each = -(-size // n)
        first = min(self.axis.rank * each, size)
        return _filled(x.narrow(self.dim, first, min(each, size - first)), self.dim, each)


class _Crossed(_Seam):
    """A seam that sends: whole, or in two halves with computation in between. ``_ways`` are those of a part and of its gradient."""

    def _ways(self, x: Tensor, *sizes: int) -> tuple["Way", "Way"]:
        raise NotImplementedError

    @untraced
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return self.finish(self.begin(x, *sizes))

    @untraced
    def begin(self, x: Tensor, *sizes: int) -> "Passing":
        crossing = Crossing(*self._ways(x, *sizes))
        return Passing(_Begin.apply(x, crossing), crossing)

    @untraced
    def finish(self, passing: "Passing") -> Tensor:
        return _Finish.apply(*passing)


class Join(_Crossed):
    """The whole on every rank, from its parts along ``dim``, of the first of ``sizes`` places or, of a square, as many as the next
    dim has."""

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__(axis)
        self.dim = dim

    def _ways(self, x: Tensor, *sizes: int) -> tuple["Way", "Way"]:
        given, size = (self.axis, self.dim), sizes[0] if sizes else x.shape[self.dim + 1]
        return partial(_gathered, *given, size), partial(_scattered, *given, x.shape[self.dim])


class Move(_Crossed):
    """The cut moves from dim ``take``, which is put together, to dim ``give``. ``sizes`` are those of the whole from dim 1 on; a
    square needs none."""

    def __init__(self, axis: Axis, give: int, take: int) -> None:
        super().__init__(axis)
        self.give, self.take = give, take

    def _ways(self, x: Tensor, *sizes: int) -> tuple["Way", "Way"]:
        size = sizes[self.take - 1] if sizes else x.shape[self.give]
        there = partial(_moved, self.axis, self.give, self.take, size)
        return there, partial(_moved, self.axis, self.take, self.give, x.shape[self.give])


class ToChannels(Move):
    """All edges of some channels, from all channels of some rows.   [B, 2 C, R/n, R] -> [B, 2 C/n, R, R], each half by itself"""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, 2, 3)

    @property
    def parts(self) -> int:  # type: ignore[override]
        return self.axis.size

    @untraced
    def begin(self, x: Tensor, *sizes: int) -> "Passing":
        return super().begin(x.unflatten(1, (2, -1)), 2, x.shape[1] // 2, x.shape[3], x.shape[3])

    @untraced
    def finish(self, passing: "Passing") -> Tensor:
        return super().finish(passing).flatten(1, 2)


class ToRows(Move):
    """All channels of some rows, from all edges of some channels.   [B, C/n, R, R] -> [B, C, R/n, R]"""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, 2, 1)

    @untraced
    def begin(self, x: Tensor, *sizes: int) -> "Passing":
        return super().begin(x, x.shape[1] * self.axis.size)


class Once(nn.Module):
    """Stands where ranks have computed the same tensors: what follows counts once, though each rank computes it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, every: Any) -> Any:
        n = self.axis.size
        return tree_map(lambda x: sum_once(x, n) if isinstance(x, Tensor) and x.is_floating_point() else x, every)


class Message:
    """A tensor under way along ``axis``: ``work`` reads ``sent``, and fills what ``landed`` makes it of."""

    def __init__(self, work: Any, axis: Axis, sent: Tensor, landed: Callable[[], Tensor]) -> None:
        self.work, self.sent, self.landed = work, sent, landed
        self.in_stream = get_backend(sent.device, axis) == "nccl"

    def wait(self) -> Tensor:
        self.work.wait()
        return self.landed()


Way = Callable[[Tensor], Message]


class Crossing:
    """A part that crosses a seam, and its gradient on the way back: of one message at a time, for which one waits once."""

    def __init__(self, there: Way, back: Way) -> None:
        self.there, self.back = there, back
        self.message: Message | None = None

    def wait(self) -> Tensor:
        message, self.message = self.message, None
        assert message is not None, "what passes a seam is finished once"
        return message.wait()

    def __del__(self) -> None:
        # A block that is computed again ends before the last of its messages is asked for. NCCL waits in the stream alone, and
        # in a graph nothing else keeps the memory that it writes; gloo keeps it.
        if self.message is not None and self.message.in_stream:
            self.message.work.wait()


class Passing(NamedTuple):
    """What lies between the halves of a seam. ``token`` has no values: it carries the order of the backward pass, and nobody can
    add to a gradient that has not come yet."""

    token: Tensor
    crossing: Crossing


class _Begin(torch.autograd.Function):
    """The backward pass runs, of what is ready, the node that was made last: what a model computes between the halves comes between
    ``_Finish.backward`` and ``_Begin.backward``, on every rank alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        crossing.message = crossing.there(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.crossing.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.crossing.message = ctx.crossing.back(grad)
        return grad.new_empty(0), None


def _gathered(axis: Axis, dim: int, size: int, x: Tensor) -> Message:
    own = x.contiguous()
    every = own.new_empty((axis.size, *own.shape))
    work = all_gather(every.view(-1), own.view(-1), axis)
    return Message(work, axis, own, lambda: _together(every, dim, size))


def _scattered(axis: Axis, dim: int, each: int, grad: Tensor) -> Message:
    parts = _apart(grad, dim, axis.size, each)
    own = torch.empty_like(parts[0])
    return Message(ReduceScatter(own.view(-1), parts.view(-1), axis), axis, parts, lambda: own)


def _moved(axis: Axis, give: int, take: int, size: int, x: Tensor) -> Message:
    parts = _apart(x, give, axis.size, -(-x.shape[give] // axis.size))
    every = torch.empty_like(parts)
    work = all_to_all(every.view(-1), parts.view(-1), axis)
    return Message(work, axis, parts, lambda: _together(every, take, size))


def _apart(x: Tensor, dim: int, parts: int, each: int) -> Tensor:
    """Equal parts along ``dim``, one after another in memory, the last ones filled with zeros; no copy where they lie so."""
    return _filled(x, dim, parts * each).unflatten(dim, (parts, each)).movedim(dim, 0).contiguous()


def _together(every: Tensor, dim: int, size: int) -> Tensor:
    """The adjoint: the first ``size`` places along ``dim``."""
    each = every.shape[dim + 1]
    if size == len(every) * each:
        return every.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, max(0, min(each, size - n * each))) for n, part in enumerate(every)], dim)


def _filled(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with zeros behind its places along ``dim``, up to ``size`` of them."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x
