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
        s = g.sigmoid()
        grad = grad * s if mask is None else (grad * mask.to(grad.dtype)).mul_(s)
        return grad, torch.addcmul(grad, grad, s, value=-1).mul_(x), None
