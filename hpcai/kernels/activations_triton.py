# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``swiglu``, in float32 arithmetic: one for each pass, which reads and writes every element once.

For 8,192 tokens of 14,336 channels in bf16 the forward pass moves 672 MiB and the backward pass 1,120; operations of torch, with an
intermediate tensor, move 1,120 and 1,792, and save silu(gate), too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE, WARPS = 4096, 8  # 16 elements a thread of each tensor, as in gates_triton

_jit = triton.jit(do_not_specialize=["count"])


@triton.jit
def _tile(count, UNIT: tl.constexpr, TILE: tl.constexpr):
    """``count`` is in units of ``UNIT`` elements, by which the compiler proves that loads are aligned."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return at, at < count.to(tl.int64) * UNIT


@_jit
def _forward(x_, g_, y_, count, UNIT: tl.constexpr, TILE: tl.constexpr):
    at, exists = _tile(count, UNIT, TILE)
    x = tl.load(x_ + at, exists, other=0.0).to(tl.float32)
    g = tl.load(g_ + at, exists, other=0.0).to(tl.float32)
    tl.store(y_ + at, (x * g * tl.sigmoid(g)).to(y_.dtype.element_ty), exists)


@_jit
def _backward(dy_, x_, g_, dx_, dg_, count, UNIT: tl.constexpr, TILE: tl.constexpr):
    at, exists = _tile(count, UNIT, TILE)
    x = tl.load(x_ + at, exists, other=0.0).to(tl.float32)
    g = tl.load(g_ + at, exists, other=0.0).to(tl.float32)
    dy = tl.load(dy_ + at, exists, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dx_ + at, (dy * g * s).to(dx_.dtype.element_ty), exists)
    tl.store(dg_ + at, (dy * x * s * (1.0 + g * (1.0 - s))).to(dg_.dtype.element_ty), exists)


def _launch_kwargs(x: Tensor) -> dict[str, Any]:
    unit = 8 if x.numel() % 8 == 0 else 1  # 16 bytes of a 16-bit type
    return {"count": x.numel() // unit, "UNIT": unit, "TILE": TILE, "num_warps": WARPS}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(up)
        with torch.cuda.device_of(up):
            _forward[(triton.cdiv(up.numel(), TILE),)](up, gate, y, **_launch_kwargs(up))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        with torch.cuda.device_of(up):
            _backward[(triton.cdiv(up.numel(), TILE),)](grad.contiguous(), up, gate, grad_up, grad_gate, **_launch_kwargs(up))
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous. Raises ValueError for tensors of two shapes."""
    if gate.shape != up.shape:  # a kernel would read past the end
        raise ValueError(f"gate has shape {list(gate.shape)}, up {list(up.shape)}; expected the same")
    return _SwiGLU.apply(gate.contiguous(), up.contiguous())
