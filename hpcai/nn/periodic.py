"""Convolutions of maps and volumes with circular padding along some dims: periodic boxes, the longitude of a globe.

B samples, C channels, ... the pixels of a map (H, W) or the voxels of a volume (D, H, W)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.dynamo import is_transformed
from hpcai.nn.conv import Conv2d, Conv3d

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def circular_pad(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Pad ``x`` [B, C, ...] circularly by one element on both sides of ``dims``, in channels-last memory, which ``F.pad`` would not
    keep."""
    if is_transformed():
        return F.pad(x, [int(dim in dims) for dim in range(x.ndim - 1, 1, -1) for _ in range(2)], "circular")
    padded: Tensor = _CircularPad.apply(x, tuple(dims)) if dims else x
    return padded


class _CircularPad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.dims = dims
        sizes = [n + 2 * (dim in dims) for dim, n in enumerate(x.shape)]
        y = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=_FORMATS[x.ndim])
        _interior(y, dims).copy_(x)
        for dim in dims:  # in order, so that the last fills the corners
            n = x.shape[dim]
            y.narrow(dim, 0, 1).copy_(y.narrow(dim, n, 1))
            y.narrow(dim, n + 1, 1).copy_(y.narrow(dim, 1, 1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dy = dy.clone(memory_format=_FORMATS[dy.ndim])
        for dim in reversed(ctx.dims):
            n = dy.shape[dim] - 2
            dy.narrow(dim, n, 1).add_(dy.narrow(dim, 0, 1))
            dy.narrow(dim, 1, 1).add_(dy.narrow(dim, n + 1, 1))
        return _interior(dy, ctx.dims).contiguous(memory_format=_FORMATS[dy.ndim]), None


def _interior(y: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        y = y.narrow(dim, 1, y.shape[dim] - 2)
    return y


class _CircularConv:
    """A convolution with kernel 3 and circular padding along some dims, along which its own padding is 0."""

    circular_dims: tuple[int, ...] = ()
    """dims of its input [B, C, ...]"""

    def forward(self, x: Tensor, *params: Any) -> Tensor:
        return super().forward(circular_pad(x, self.circular_dims), *params)  # type: ignore[misc]


class PeriodicConv2d(_CircularConv, Conv2d):
    """``hpcai.nn.Conv2d`` with circular padding along ``circular_dims``.   [B, C, H, W] -> [B, O, H', W']"""


class PeriodicConv3d(_CircularConv, Conv3d):
    """``hpcai.nn.Conv3d`` with circular padding along ``circular_dims``.   [B, C, D, H, W] -> [B, O, D', H', W']"""
