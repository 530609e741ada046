"""Products with a sigmoid that keep only what they are given for the backward pass."""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import compiler


def gate(x: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    """x * sigmoid(g) * mask, all of one shape or ``mask`` broadcast; on CUDA one kernel each way (``gates_triton``)."""
    if torch.compiler.is_compiling():
        return plain(x, g, mask)
    if _fused(x, g):
        from hpcai.kernels import gates_triton

        return gates_triton.gate(x, g, mask)
    return _Gate.apply(x, g, mask)


def _fused(x: Tensor, g: Tensor) -> bool:
    """Whether the kernels take it: on a GPU, of one shape, in a type that they have."""
    return compiler.takes(x) and x.dtype == g.dtype and x.dtype in (torch.bfloat16, torch.float32) and x.shape == g.shape


def halves(xg: Tensor, mask: Tensor | None = None) -> Tensor:
    """``gate`` of the halves of one tensor along dim 1, whose gradient is one tensor too.   [B, 2 C, ...] -> [B, C, ...]"""
    if torch.compiler.is_compiling():
        return plain_halves(xg, mask)
    x, g = xg.chunk(2, 1)
    if _fused(x, g):
        from hpcai.kernels import gates_triton

        return gates_triton.halves(xg, mask)
    return _Halves.apply(xg, mask)


def plain_halves(xg: Tensor, mask: Tensor | None = None) -> Tensor:
    x, g = xg.chunk(2, 1)
    return plain(x, g, mask)


def plain(x: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    y = x * g.sigmoid()
    return y if mask is None else y * mask


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, g, mask)
        y = g.sigmoid().mul_(x)
        return y if mask is None else y.mul_(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, g, mask = ctx.saved_tensors
        return *_gradients(grad, x, g, mask, torch.empty_like(grad), torch.empty_like(grad)), None


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, xg: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(xg, mask)
        x, g = xg.chunk(2, 1)
        y = g.sigmoid().mul_(x)
        return y if mask is None else y.mul_(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        xg, mask = ctx.saved_tensors
        d = torch.empty_like(xg)
        (x, g), (d_x, d_g) = xg.chunk(2, 1), d.chunk(2, 1)
        _gradients(grad, x, g, mask, d_x, d_g)
        return d, None


def _gradients(grad: Tensor, x: Tensor, g: Tensor, mask: Tensor | None, d_x: Tensor, d_g: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ``gate``, written into ``d_x`` and ``d_g``."""
    s = g.sigmoid()
    torch.mul(grad, s, out=d_x)
    if mask is not None:
        d_x.mul_(mask.to(grad.dtype))
    return d_x, torch.addcmul(d_x, d_x, s, value=-1, out=d_g).mul_(x)
