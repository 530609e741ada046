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

from hpcai.dist.collect import Scattered, backend, gather_shares, once, swap_shares
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError
from hpcai.nn.seam import Seam
from hpcai.untraced import untraced


class _Seam(Seam):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis


class LocalSlice(_Seam):
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
        local_size = -(-size // n)
        first = min(self.axis.rank * local_size, size)
        return _pad(x.narrow(self.dim, first, min(local_size, size - first)), self.dim, local_size)


class _Collective(_Seam):
    """A seam that sends: whole, or in two halves with computation in between. ``_ways`` are those of a part and of its gradient."""

    def _collectives(self, x: Tensor, *sizes: int) -> tuple["StartCollective", "StartCollective"]:
        raise NotImplementedError

    @untraced
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return self.finish(self.begin(x, *sizes))

    @untraced
    def begin(self, x: Tensor, *sizes: int) -> "PendingCollective":
        collective = AsyncCollective(*self._collectives(x, *sizes))
        return PendingCollective(_Begin.apply(x, collective), collective)

    @untraced
    def finish(self, pending: "PendingCollective") -> Tensor:
        return _Finish.apply(*pending)


class AllGather(_Collective):
    """The whole on every rank, from its parts along ``dim``, of the first of ``sizes`` places or, of a square, as many as the next
    dim has."""

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__(axis)
        self.dim = dim

    def _collectives(self, x: Tensor, *sizes: int) -> tuple["StartCollective", "StartCollective"]:
        args, size = (self.axis, self.dim), sizes[0] if sizes else x.shape[self.dim + 1]
        return partial(_all_gather, *args, size), partial(_reduce_scatter, *args, x.shape[self.dim])


class AllToAll(_Collective):
    """The cut moves from dim ``take``, which is put together, to dim ``give``. ``sizes`` are those of the whole from dim 1 on; a
    square needs none."""

    def __init__(self, axis: Axis, give: int, take: int) -> None:
        super().__init__(axis)
        self.split_dim, self.concat_dim = give, take

    def _collectives(self, x: Tensor, *sizes: int) -> tuple["StartCollective", "StartCollective"]:
        size = sizes[self.concat_dim - 1] if sizes else x.shape[self.split_dim]
        start_forward = partial(_all_to_all, self.axis, self.split_dim, self.concat_dim, size)
        return start_forward, partial(_all_to_all, self.axis, self.concat_dim, self.split_dim, x.shape[self.split_dim])


class RowsToChannels(AllToAll):
    """All edges of some channels, from all channels of some rows.   [B, 2 C, R/n, R] -> [B, 2 C/n, R, R], each half by itself"""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, 2, 3)

    @property
    def parts(self) -> int:  # type: ignore[override]
        return self.axis.size

    @untraced
    def begin(self, x: Tensor, *sizes: int) -> "PendingCollective":
        return super().begin(x.unflatten(1, (2, -1)), 2, x.shape[1] // 2, x.shape[3], x.shape[3])

    @untraced
    def finish(self, pending: "PendingCollective") -> Tensor:
        return super().finish(pending).flatten(1, 2)


class ChannelsToRows(AllToAll):
    """All channels of some rows, from all edges of some channels.   [B, C/n, R, R] -> [B, C, R/n, R]"""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, 2, 1)

    @untraced
    def begin(self, x: Tensor, *sizes: int) -> "PendingCollective":
        return super().begin(x, x.shape[1] * self.axis.size)


class ReplicatedOnce(nn.Module):
    """Stands where ranks have computed the same tensors: what follows counts once, though each rank computes it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, tree: Any) -> Any:
        n = self.axis.size
        return tree_map(lambda x: once(x, n) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


class Work:
    """A tensor under way along ``axis``: ``work`` reads ``sent``, and fills what ``landed`` makes it of."""

    def __init__(self, work: Any, axis: Axis, buffer: Tensor, assemble: Callable[[], Tensor]) -> None:
        self.work, self.buffer, self.assemble = work, buffer, assemble
        self.in_stream = backend(buffer.device, axis) == "nccl"

    def wait(self) -> Tensor:
        self.work.wait()
        return self.assemble()


StartCollective = Callable[[Tensor], Work]


class AsyncCollective:
    """A part that crosses a seam, and its gradient on the way back: of one message at a time, for which one waits once."""

    def __init__(self, start_forward: StartCollective, start_backward: StartCollective) -> None:
        self.start_forward, self.start_backward = start_forward, start_backward
        self.pending: Work | None = None

    def wait(self) -> Tensor:
        work, self.pending = self.pending, None
        assert work is not None, "what passes a seam is finished once"
        return work.wait()

    def __del__(self) -> None:
        # A block that is computed again ends before the last of its messages is asked for. NCCL waits in the stream alone, and
        # in a graph nothing else keeps the memory that it writes; gloo keeps it.
        if self.pending is not None and self.pending.in_stream:
            self.pending.work.wait()


class PendingCollective(NamedTuple):
    """What lies between the halves of a seam. ``token`` has no values: it carries the order of the backward pass, and nobody can
    add to a gradient that has not come yet."""

    token: Tensor
    collective: AsyncCollective


class _Begin(torch.autograd.Function):
    """The backward pass runs, of what is ready, the node that was made last: what a model computes between the halves comes between
    ``_Finish.backward`` and ``_Begin.backward``, on every rank alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: AsyncCollective) -> Tensor:
        ctx.collective = collective
        collective.pending = collective.start_forward(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.collective.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, collective: AsyncCollective) -> Tensor:
        ctx.collective = collective
        return collective.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.collective.pending = ctx.collective.start_backward(grad)
        return grad.new_empty(0), None


def _all_gather(axis: Axis, dim: int, size: int, x: Tensor) -> Work:
    local = x.contiguous()
    gathered = local.new_empty((axis.size, *local.shape))
    work = gather_shares(gathered.view(-1), local.view(-1), axis)
    return Work(work, axis, local, lambda: _concat(gathered, dim, size))


def _reduce_scatter(axis: Axis, dim: int, local_size: int, grad: Tensor) -> Work:
    slices = _split(grad, dim, axis.size, local_size)
    local = torch.empty_like(slices[0])
    return Work(Scattered(local.view(-1), slices.view(-1), axis), axis, slices, lambda: local)


def _all_to_all(axis: Axis, split_dim: int, concat_dim: int, size: int, x: Tensor) -> Work:
    slices = _split(x, split_dim, axis.size, -(-x.shape[split_dim] // axis.size))
    received = torch.empty_like(slices)
    work = swap_shares(received.view(-1), slices.view(-1), axis)
    return Work(work, axis, slices, lambda: _concat(received, concat_dim, size))


def _split(x: Tensor, dim: int, count: int, local_size: int) -> Tensor:
    """Equal parts along ``dim``, one after another in memory, the last ones filled with zeros; no copy where they lie so."""
    return _pad(x, dim, count * local_size).unflatten(dim, (count, local_size)).movedim(dim, 0).contiguous()


def _concat(slices: Tensor, dim: int, size: int) -> Tensor:
    """The adjoint: the first ``size`` places along ``dim``."""
    local_size = slices.shape[dim + 1]
    if size == len(slices) * local_size:
        return slices.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, max(0, min(local_size, size - n * local_size))) for n, part in enumerate(slices)], dim)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with zeros behind its places along ``dim``, up to ``size`` of them."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x
