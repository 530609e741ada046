"""Activations of feed-forward layers whose saved tensors are their inputs alone."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.kernels import triton_support
from hpcai.kernels.chunking import chunk_size

_CPU = 1 << 18  # bytes of a chunk of one tensor on a CPU, which fit its cache
_MIN_CHUNKS = 4  # fewer chunks gain less than their calls cost
_WIDE = (torch.float32, torch.float64)
_A, _B = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # gelu(x) = x sigmoid(a x + b x^3)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020); on CUDA by one kernel for each pass (``gates_triton``)."""
    if triton_support.needs_plain_ops():
        return reference_swiglu(gate, up)
    if triton_support.is_supported_float(gate) and gate.dtype == up.dtype:
        from hpcai.kernels import gates_triton

        return gates_triton.swiglu(gate, up)
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``swiglu`` with operations of torch."""
    return F.silu(gate) * up


def geglu(x: Tensor) -> Tensor:
    """Return value * gelu(gate) (Shazeer 2020), with the exact GELU, of the halves of the last dim.   [..., 2 C] -> [..., C]"""
    return reference_geglu(x) if triton_support.needs_plain_ops() else _GEGLU.apply(x)


def reference_geglu(x: Tensor) -> Tensor:
    """Compute ``geglu`` with the gradient of autograd."""
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016).

    On a GPU this is torch's operation. On a CPU it is computed as x times a sigmoid, in two thirds of the time of torch 2.13.
    """
    if triton_support.needs_plain_ops() or not triton_support.on_cpu(x) or x.dtype not in _WIDE:
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
        large = gate.nbytes > _MIN_CHUNKS * _CPU and triton_support.on_cpu(gate)
        if not large or gate.dtype not in _WIDE or not gate.dtype == up.dtype == grad.dtype:
            grad_up = F.silu(gate).mul_(grad)
            return torch.ops.aten.silu_backward(grad * up, gate), grad_up
        grad_gate, grad_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
        step = chunk_size(gate, gate.element_size(), _CPU)
        chunks = (x.contiguous().view(-1).split(step) for x in (gate, up, grad, grad_gate, grad_up))
        for a, b, d, d_gate, d_up in zip(*chunks):
            sigmoid = torch.sigmoid(a, out=d_gate)
            torch.mul(a, sigmoid, out=d_up).mul_(d)
            torch.lerp(d_up, d, sigmoid, out=d_gate).mul_(b)  # silu' = y + s (1 - y), and d_up = y d
        return grad_gate, grad_up


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
        (value, gate), grad_input = x.chunk(2, -1), torch.empty_like(x)
        grad_value, grad_gate = grad_input.chunk(2, -1)
        torch.mul(F.gelu(gate), grad, out=grad_value)
        torch.ops.aten.gelu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return grad_input


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y, a = torch.empty_like(x, memory_format=torch.contiguous_format), torch.full((), _A, dtype=x.dtype)
        step = chunk_size(x, x.element_size(), _CPU)
        for chunk, out in zip(x.contiguous().view(-1).split(step), y.view(-1).split(step)):
            torch.addcmul(a, chunk, chunk, value=_B, out=out).mul_(chunk).sigmoid_().mul_(chunk)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
