"""x * sigmoid(x), for networks whose loss holds a derivative of the network."""

from typing import Any

import torch
from torch import Tensor


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _Slope.apply(g, *ctx.saved_tensors)


class _Slope(torch.autograd.Function):
    """g * s'(x) in one pass, and its derivatives g' * s'(x) and g' * g * s''(x)."""

    @staticmethod
    def forward(g: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(g, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        g, x = ctx.saved_tensors
        y = x.sigmoid()
        # s'' = y (1 - y) (2 + x (1 - 2 y))
        curve = torch.addcmul(x, x, y, value=-2).add_(2)
        second = torch.ops.aten.sigmoid_backward(h * g, y) * curve
        return _Slope.apply(h, x), second


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x). torch's own, differentiated twice, keeps six temporary tensors of the size of its input; this keeps two.

    Under torch.compile it is torch's own: there the second derivative of a function like ours comes out wrong (torch 2.13).
    """
    return torch.nn.functional.silu(x) if torch.compiler.is_compiling() else _Swish.apply(x)
