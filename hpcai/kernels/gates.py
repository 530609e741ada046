"""Products with a sigmoid whose saved tensors are their inputs alone."""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.chunking import both


def gate(x: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return x * sigmoid(g) * mask; on CUDA by one kernel for each pass (``gates_triton``). ``mask`` is broadcast to ``x``."""
    if triton_support.needs_plain_ops():
        return reference(x, g, mask)
    if _fused(x, g):
        from hpcai.kernels import gates_triton

        return gates_triton.gate(x, g, mask)
    return _Gate.apply(x, g, mask)


def _fused(x: Tensor, g: Tensor) -> bool:
    """Whether the Triton kernels support these tensors."""
    return triton_support.is_supported_float(x) and x.dtype == g.dtype and x.shape == g.shape


def glu_halves(xg: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``gate`` of the halves of one tensor along dim 1. Its gradient is one tensor, too.   [B, 2 C, ...] -> [B, C, ...]"""
    if triton_support.needs_plain_ops():
        return reference_glu_halves(xg, mask)
    x, g = xg.chunk(2, 1)
    if _fused(x, g):
        from hpcai.kernels import gates_triton

        return gates_triton.glu_halves(xg, mask)
    return _Gate.apply(xg, None, mask)


def reference_glu_halves(xg: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ``glu_halves`` with operations of torch."""
    x, g = xg.chunk(2, 1)
    return reference(x, g, mask)


def reference(x: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ``gate`` with operations of torch."""
    y = x * g.sigmoid()
    return y if mask is None else y * mask


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor | None, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, g, mask)
        x, g = both(x, g)
        y = g.sigmoid().mul_(x)
        return y if mask is None else y.mul_(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, g, mask = ctx.saved_tensors
        d_x, d_g = (torch.empty_like(x), None) if g is None else (torch.empty_like(grad), torch.empty_like(grad))
        _write_gradients(grad, *both(x, g), mask, *both(d_x, d_g))
        return d_x, d_g, None


def _write_gradients(grad: Tensor, x: Tensor, g: Tensor, mask: Tensor | None, d_x: Tensor, d_g: Tensor) -> None:
    s = g.sigmoid()
    torch.mul(grad, s, out=d_x)
    if mask is not None:
        d_x.mul_(mask.to(grad.dtype))
    torch.addcmul(d_x, d_x, s, value=-1, out=d_g).mul_(x)
