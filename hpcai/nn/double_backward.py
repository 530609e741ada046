"""SiLU with a cheap double backward pass, for networks whose loss contains a derivative of the network."""

from typing import Any

import torch
from torch import Tensor

from hpcai.dynamo import needs_plain_derivatives


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _SiLUBackward.apply(g, *ctx.saved_tensors)


class _SiLUBackward(torch.autograd.Function):
    """grad_output * s'(x) in one pass, and its derivatives h * s'(x) and h * grad_output * s''(x)."""

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
        return _SiLUBackward.apply(h, x), second


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x). Differentiated twice it takes two temporary tensors of the size of its input, torch's function six.

    Under ``torch.compile`` it is torch's: there the second derivative of a custom autograd function is wrong (torch 2.13).
    """
    return torch.nn.functional.silu(x) if needs_plain_derivatives() else _SiLU.apply(x)
