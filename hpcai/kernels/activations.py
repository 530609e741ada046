"""What is between the linear layers of a feed-forward part. For the backward pass both keep what they are given, nothing else."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.kernels import compiler
from hpcai.kernels.room import several

_CPU = 1 << 18  # bytes of one tensor that a CPU computes with at a time, in its cache
_MANY = 4  # times that: fewer bytes gain less by parts than the calls for them cost
_WIDE = (torch.float32, torch.float64)
_A, _B = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # gelu(x) = x sigmoid(a x + b x^3)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), of one shape; on CUDA one kernel each way (``activations_triton``)."""
    if torch.compiler.is_compiling():
        return plain_swiglu(gate, up)
    if compiler.takes(gate) and gate.dtype == up.dtype and gate.dtype in (torch.bfloat16, torch.float32):
        from hpcai.kernels import activations_triton

        return activations_triton.swiglu(gate, up)
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """value * gelu(gate) (Shazeer 2020) by the error function, where the last dim of ``x`` holds one beside the other.

    [..., 2C] -> [..., C]
    """
    return plain_geglu(x) if torch.compiler.is_compiling() else _GEGLU.apply(x)


def plain_geglu(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def gelu(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016).

    On a GPU torch's own; on a CPU x times a sigmoid, which is the same and takes two thirds of the time of torch's (2.13).
    """
    if torch.compiler.is_compiling() or not compiler.on_cpu(x) or x.dtype not in _WIDE:
        return F.gelu(x, approximate="tanh")
    return _GELU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        large = gate.nbytes > _MANY * _CPU and compiler.on_cpu(gate)
        if not large or gate.dtype not in _WIDE or not gate.dtype == up.dtype == grad.dtype:
            by_up = F.silu(gate).mul_(grad)
            return torch.ops.aten.silu_backward(grad * up, gate), by_up
        by_gate, by_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
        step = several(gate, gate.element_size(), _CPU)
        given = (x.contiguous().view(-1).split(step) for x in (gate, up, grad, by_gate, by_up))
        for a, b, d, first, second in zip(*given):
            share = torch.sigmoid(a, out=first)
            torch.mul(a, share, out=second).mul_(d)
            torch.lerp(second, d, share, out=first).mul_(b)  # silu' = y + s (1 - y), and second = y d
        return by_gate, by_up


class _GEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        value, gate = x.chunk(2, -1)
        return F.gelu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        (value, gate), found = x.chunk(2, -1), torch.empty_like(x)
        by_value, by_gate = found.chunk(2, -1)
        torch.mul(F.gelu(gate), grad, out=by_value)
        torch.ops.aten.gelu_backward.grad_input(grad * value, gate, grad_input=by_gate)
        return found


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y, a = torch.empty_like(x, memory_format=torch.contiguous_format), torch.full((), _A, dtype=x.dtype)
        step = several(x, x.element_size(), _CPU)
        for own, out in zip(x.contiguous().view(-1).split(step), y.view(-1).split(step)):
            torch.addcmul(a, own, own, value=_B, out=out).mul_(own).sigmoid_().mul_(own)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
