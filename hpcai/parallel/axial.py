"""Axial parallelism: a tensor with two long dims is sharded along one of them, and resharded along the other by an all-to-all
(Cheng et al., "FastFold", 2022, after Ho et al., "Axial attention", 2019).

    x = LocalSlice(axis, 1)(x)                             # [B, R, C, ...] -> [B, R/n, C, ...]
    x = AllToAll(axis, split_dim=2, concat_dim=1)(x)       # [B, R/n, C, ...] -> [B, R, C/n, ...]
    x = AllGather(axis, 2)(x, C)                           # [B, R, C, ...]

Shards are equal: a dim that does not divide is padded with zeros at its end, and has its true size where it is not sharded. The
losses of the ranks add up to the loss, which determines every adjoint: that of a slice is padding with zeros, that of an all-gather
is a reduce-scatter, and replicated results count 1/n on each rank (``ReplicatedOnce``). Nothing is approximate. n the size of the
axis.

A collective that starts early overlaps with the computation between ``begin`` and ``finish``, in the backward pass too:

    pending = gather.begin(x, C)
    y = something(else)
    x = gather.finish(pending)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from hpcai.dist.collectives import ReduceScatter, all_gather, all_to_all, get_backend, sum_once
from hpcai.dist.mesh import Axis
from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.errors import DataError
from hpcai.nn.seam import Seam


class AxisSeam(Seam):
    """A seam at which the ranks along ``axis`` communicate."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis


class LocalSlice(AxisSeam):
    """Slice this rank's shard out of a full tensor along ``dim``. Raises DataError if there are fewer elements than ranks."""

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__(axis)
        self.dim = dim

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        size, n = x.shape[self.dim], self.axis.size
        if size < n:
            fault = f"a tensor {list(x.shape)} has {size} elements along dim {self.dim} for {n} ranks of mesh.{self.axis.name}"
            raise DataError(f"{fault}; use longer samples, or set mesh.{self.axis.name} to {size} or less")
        local_size = -(-size // n)
        first = min(self.axis.rank * local_size, size)
        return _pad(x.narrow(self.dim, first, min(local_size, size - first)), self.dim, local_size)


class _Collective(AxisSeam):
    """A seam that communicates. ``_collectives`` returns functions that start its forward collective and the adjoint."""

    def _collectives(self, x: Tensor, *sizes: int) -> tuple["StartCollective", "StartCollective"]:
        raise NotImplementedError

    @disable_dynamo
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return self.finish(self.begin(x, *sizes))

    @disable_dynamo
    def begin(self, x: Tensor, *sizes: int) -> "PendingCollective":
        collective = AsyncCollective(*self._collectives(x, *sizes))
        return PendingCollective(_Begin.apply(x, collective), collective)

    @disable_dynamo
    def finish(self, pending: "PendingCollective") -> Tensor:
        return _Finish.apply(*pending)


class AllGather(_Collective):
    """Gather the full tensor from its shards along ``dim``. The first of ``sizes`` is the full size; by default that of the next
    dim (square pair tensors)."""

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__(axis)
        self.dim = dim

    def _collectives(self, x: Tensor, *sizes: int) -> tuple["StartCollective", "StartCollective"]:
        args, size = (self.axis, self.dim), sizes[0] if sizes else x.shape[self.dim + 1]
        return partial(start_all_gather, *args, size), partial(start_reduce_scatter, *args, x.shape[self.dim])


class AllToAll(_Collective):
    """Reshard from ``concat_dim``, which becomes full, to ``split_dim``. ``sizes`` are the full sizes from dim 1 on; square tensors
    need none."""

    def __init__(self, axis: Axis, split_dim: int, concat_dim: int) -> None:
        super().__init__(axis)
        self.split_dim, self.concat_dim = split_dim, concat_dim

    def _collectives(self, x: Tensor, *sizes: int) -> tuple["StartCollective", "StartCollective"]:
        size = sizes[self.concat_dim - 1] if sizes else x.shape[self.split_dim]
        start_forward = partial(_all_to_all, self.axis, self.split_dim, self.concat_dim, size)
        return start_forward, partial(_all_to_all, self.axis, self.concat_dim, self.split_dim, x.shape[self.split_dim])


class RowsToChannels(AllToAll):
    """Reshard from rows to channels, each half of the channels separately.   [B, 2 C, R/n, R] -> [B, 2 C/n, R, R]"""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, 2, 3)

    @property
    def num_shards(self) -> int:  # type: ignore[override]
        return self.axis.size

    @disable_dynamo
    def begin(self, x: Tensor, *sizes: int) -> "PendingCollective":
        return super().begin(x.unflatten(1, (2, -1)), 2, x.shape[1] // 2, x.shape[3], x.shape[3])

    @disable_dynamo
    def finish(self, pending: "PendingCollective") -> Tensor:
        return super().finish(pending).flatten(1, 2)


class ChannelsToRows(AllToAll):
    """Reshard from channels to rows.   [B, C/n, R, R] -> [B, C, R/n, R]"""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, 2, 1)

    @disable_dynamo
    def begin(self, x: Tensor, *sizes: int) -> "PendingCollective":
        return super().begin(x, x.shape[1] * self.axis.size)


class ReplicatedOnce(AxisSeam):
    """Scale gradients of replicated tensors by 1/n: the computation that follows counts once, though every rank repeats it."""

    def forward(self, tree: Any, *sizes: int) -> Any:
        n = self.axis.size
        return tree_map(lambda x: sum_once(x, n) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


class Work:
    """A running collective along ``axis``: ``work`` reads ``buffer``, and ``assemble`` returns the result once it is complete."""

    def __init__(self, work: Any, axis: Axis, buffer: Tensor, assemble: Callable[[], Tensor]) -> None:
        self.work, self.buffer, self.assemble = work, buffer, assemble
        self.in_stream = get_backend(buffer.device, axis) == "nccl"

    def wait(self) -> Tensor:
        self.work.wait()
        return self.assemble()


StartCollective = Callable[[Tensor], Work]


class AsyncCollective:
    """The forward collective of a seam and its adjoint, of which one runs at a time and is waited for once."""

    def __init__(self, start_forward: StartCollective, start_backward: StartCollective) -> None:
        self.start_forward, self.start_backward = start_forward, start_backward
        self.pending: Work | None = None

    def wait(self) -> Tensor:
        work, self.pending = self.pending, None
        assert work is not None, "a collective was finished twice, or before it began"
        return work.wait()

    def __del__(self) -> None:
        # A recomputed block ends before its last collective is finished. NCCL waits in the stream alone, and in a graph nothing
        # else keeps the memory that it writes; gloo keeps it.
        if self.pending is not None and self.pending.in_stream:
            self.pending.work.wait()


class PendingCollective(NamedTuple):
    """A collective between ``begin`` and ``finish``. ``token`` [0] has no elements: it orders the backward pass, and nothing can be
    added to its gradient before the collective is complete."""

    token: Tensor
    collective: AsyncCollective


class _Begin(UntransformedFunction):
    """Start a collective; its adjoint ends here. The backward pass runs the ready node that was created last: nodes created between
    the two halves run between ``_Finish.backward`` and ``_Begin.backward``, in the same order on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: AsyncCollective) -> Tensor:
        ctx.collective = collective
        collective.pending = collective.start_forward(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.collective.wait(), None


class _Finish(UntransformedFunction):
    """Return the result of a collective; its adjoint begins here."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, collective: AsyncCollective) -> Tensor:
        ctx.collective = collective
        return collective.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.collective.pending = ctx.collective.start_backward(grad)
        return grad.new_empty(0), None


def start_all_gather(axis: Axis, dim: int, size: int, x: Tensor) -> Work:
    """Start to gather shards of ``dim``, of which the first ``size`` elements are kept."""
    local = x.contiguous()
    gathered = local.new_empty((axis.size, *local.shape))
    work = all_gather(gathered.view(-1), local.view(-1), axis)
    return Work(work, axis, local, lambda: _concat(gathered, dim, size))


def start_reduce_scatter(axis: Axis, dim: int, local_size: int, grad: Tensor) -> Work:
    """Start to sum ``grad`` over ranks; the result is the shard of this rank, ``local_size`` elements of ``dim``."""
    slices = _split(grad, dim, axis.size, local_size)
    local = torch.empty_like(slices[0])
    return Work(ReduceScatter(local.view(-1), slices.view(-1), axis), axis, slices, lambda: local)


def _all_to_all(axis: Axis, split_dim: int, concat_dim: int, size: int, x: Tensor) -> Work:
    slices = _split(x, split_dim, axis.size, -(-x.shape[split_dim] // axis.size))
    received = torch.empty_like(slices)
    work = all_to_all(received.view(-1), slices.view(-1), axis)
    return Work(work, axis, slices, lambda: _concat(received, concat_dim, size))


def _split(x: Tensor, dim: int, count: int, local_size: int) -> Tensor:
    """Split ``dim`` into equal slices, zero-padded, along a new first dim, contiguous; no copy if memory allows."""
    return _pad(x, dim, count * local_size).unflatten(dim, (count, local_size)).movedim(dim, 0).contiguous()


def _concat(slices: Tensor, dim: int, size: int) -> Tensor:
    """Concatenate slices along ``dim``, and keep the first ``size`` elements: the adjoint of ``_split``."""
    local_size = slices.shape[dim + 1]
    if size == len(slices) * local_size:
        return slices.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, max(0, min(local_size, size - n * local_size))) for n, part in enumerate(slices)], dim)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad ``x`` with zeros at the end of ``dim``, to ``size`` elements."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x
