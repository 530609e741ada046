"""What is between the linear layers of a feed-forward part. Both keep for the backward pass what they are given, and nothing else."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import compiler
from hpcai.kernels.room import several

_CPU = 1 << 18  # bytes of one tensor that a CPU computes with at a time: four of them stay in its cache
_A, _B = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # gelu(x) = x sigmoid(a x + b x^3)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), of one shape; on CUDA one kernel each way (``activations_triton``)."""
    if torch.compiler.is_compiling():
        return plain_swiglu(gate, up)
    if compiler.takes(gate) and gate.dtype == up.dtype and gate.dtype in (torch.bfloat16, torch.float32):
        from hpcai.kernels import activations_triton

        return activations_triton.swiglu(gate, up)
    return _SwiGLU.apply(gate, up)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016).

    On a GPU torch's own; on a CPU, whose tangent in torch 2.13 takes half as long again as this, x times a sigmoid, which is the same.
    """
    if torch.compiler.is_compiling() or not compiler.on_cpu(x) or x.dtype not in (torch.float32, torch.float64):
        return F.gelu(x, approximate="tanh")
    return _GELU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        by_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), by_up


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y, a = torch.empty_like(x, memory_format=torch.contiguous_format), _like(x, _A)
        for own, out in _parts(x, y):
            torch.addcmul(a, own, own, value=_B, out=out).mul_(own).sigmoid_().mul_(own)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d, a = torch.empty_like(x, memory_format=torch.contiguous_format), _like(x, _A)
        parts = list(_parts(x, grad, d))
        room = x.new_empty(max((len(own) for own, *_ in parts), default=0))
        for own, above, out in parts:
            s = torch.addcmul(a, own, own, value=_B, out=room[: len(own)]).mul_(own).sigmoid_()
            torch.addcmul(a, own, own, value=3 * _B, out=out).mul_(own)
            torch.ops.aten.sigmoid_backward.grad_input(out, s, grad_input=out)  # out s (1 - s)
            out.add_(s).mul_(above)
        return d


def _like(x: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=x.dtype, device=x.device)


def _parts(*tensors: Tensor) -> Any:
    """The same stretches of each."""
    step = several(tensors[0], tensors[0].element_size(), _CPU)
    return zip(*(x.contiguous().view(-1).split(step) for x in tensors))
