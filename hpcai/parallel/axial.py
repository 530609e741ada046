"""Axial parallelism: a tensor with two long dims is cut along one of them, and its cut moves to the other (Cheng et al.,
"FastFold", 2022, after Ho et al., "Axial attention", 2019).

    part = Own(axis, 1)(x)                     # [B, R, C, ...] -> [B, R/n, C, ...]
    part = Move(axis, give=2, take=1)(part)    # [B, R/n, C, ...] -> [B, R, C/n, ...]
    x = Join(axis, 2)(part, C)                 # [B, R, C, ...]

Ranks hold equal parts: a dim that does not divide is filled with zeros behind its last place, and what is not cut has its true size
again. One rule makes all gradients right: what ranks count adds up. The adjoint of a cut is filling with zeros, that of a join is a
sum of which each rank gets its part, and what all ranks compute alike counts 1/n on each (``Once``). Nothing is approximate.
n the size of the axis.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from hpcai.dist.collect import Scattered, gather_shares, once, swap_shares
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError
from hpcai.nn.seam import Seam
from hpcai.parallel.halo import Traffic


class _Seam(Seam):
    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        super().__init__()
        self.axis, self.traffic = axis, traffic


class Own(_Seam):
    """This rank's part of a whole, along ``dim``. Raises DataError where there are fewer places than ranks."""

    def __init__(self, axis: Axis, traffic: Traffic, dim: int) -> None:
        super().__init__(axis, traffic)
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


class Join(_Seam):
    """The whole on every rank, from its parts along ``dim``, of the first of ``sizes`` places or, of a square, as many as the next
    dim has."""

    def __init__(self, axis: Axis, traffic: Traffic, dim: int) -> None:
        super().__init__(axis, traffic)
        self.dim = dim

    @torch.compiler.disable
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        size = sizes[0] if sizes else x.shape[self.dim + 1]
        return _Join.apply(x, self.axis, self.dim, size, self.traffic)


class Move(_Seam):
    """The cut moves from dim ``take``, which is put together, to dim ``give``. ``sizes`` are those of the whole from dim 1 on; a
    square needs none."""

    def __init__(self, axis: Axis, traffic: Traffic, give: int, take: int) -> None:
        super().__init__(axis, traffic)
        self.give, self.take = give, take

    @torch.compiler.disable
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        size = sizes[self.take - 1] if sizes else x.shape[self.give]
        return _Move.apply(x, self.axis, self.give, self.take, size, self.traffic)


class ToChannels(_Seam):
    """All edges of some channels, from all channels of some rows.   [B, 2 C, R/n, R] -> [B, 2 C/n, R, R], each half by itself"""

    @property
    def parts(self) -> int:  # type: ignore[override]
        return self.axis.size

    @torch.compiler.disable
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return _Move.apply(x.unflatten(1, (2, -1)), self.axis, 2, 3, x.shape[3], self.traffic).flatten(1, 2)


class ToRows(_Seam):
    """All channels of some rows, from all edges of some channels.   [B, C/n, R, R] -> [B, C, R/n, R]"""

    @torch.compiler.disable
    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return _Move.apply(x, self.axis, 2, 1, x.shape[1] * self.axis.size, self.traffic)


class Once(nn.Module):
    """Stands where ranks have computed the same tensors: what follows counts once, though each rank computes it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, every: Any) -> Any:
        n = self.axis.size
        return tree_map(lambda x: once(x, n) if isinstance(x, Tensor) and x.is_floating_point() else x, every)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, size: int, traffic: Traffic) -> Tensor:
        ctx.where = axis, dim, x.shape[dim], traffic
        own = x.contiguous()
        every = own.new_empty((axis.size, *own.shape))
        gather_shares(every.view(-1), own.view(-1), axis).wait()
        _told(traffic, own, axis.size - 1)
        return _together(every, dim, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, dim, each, traffic = ctx.where
        parts = _apart(grad, dim, axis.size, each)
        own = torch.empty_like(parts[0])
        Scattered(own.view(-1), parts.view(-1), axis).wait()
        _told(traffic, own, axis.size - 1)
        return own, None, None, None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, give: int, take: int, size: int, traffic: Traffic) -> Tensor:
        ctx.where = axis, take, give, x.shape[give], traffic
        return _moved(x, axis, give, take, size, traffic)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _moved(grad, *ctx.where), None, None, None, None, None


def _moved(x: Tensor, axis: Axis, give: int, take: int, size: int, traffic: Traffic) -> Tensor:
    parts = _apart(x, give, axis.size, -(-x.shape[give] // axis.size))
    every = torch.empty_like(parts)
    swap_shares(every.view(-1), parts.view(-1), axis).wait()
    _told(traffic, parts[0], axis.size - 1)
    return _together(every, take, size)


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


def _told(traffic: Traffic, part: Tensor, times: int) -> None:
    traffic.sent += times * part.numel() * part.element_size()
    traffic.messages += 1
