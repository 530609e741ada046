"""Rotary position embedding of queries and keys (Su et al. 2021).

The first half of the channels is paired with the second half, as in Llama, or, ``interleaved``, each even channel with the next
one, as in the paper and in Flux. On CUDA one Triton kernel rotates both tensors (``rotary_triton``). The saved tensors are cos and
sin alone, which all layers share.   B batch, T tokens, H heads, D channels of a head.
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import triton_support


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys.

    Shape: q [B, H, T, D], k [B, H or fewer, T, D], of any strides; cos and sin [B or 1, T, D]: those of the D / 2 pairs, twice
    """
    if triton_support.needs_plain_ops():
        return reference(q, cos, sin, interleaved), reference(k, cos, sin, interleaved)
    if triton_support.is_supported_float(q) and q.dtype == k.dtype:
        from hpcai.kernels import rotary_triton

        return rotary_triton.apply_rotary(q, k, cos, sin, interleaved)
    if torch.is_grad_enabled():
        return _Rotation.apply(q, cos, sin, interleaved), _Rotation.apply(k, cos, sin, interleaved)
    if q.shape[2] == 1:  # decoding: the time is that of starting operations
        both = _rotate(torch.cat((q, k), 1), cos, sin, 1, interleaved)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    return _rotate(q, cos, sin, 1, interleaved), _rotate(k, cos, sin, 1, interleaved)


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return one rotated tensor, by operations of torch."""
    first, second = _pairs(x, interleaved)
    c, s = (_pairs(angle[:, None].to(x.dtype), False)[0] for angle in (cos, sin))
    rotated = first * c - second * s, second * c + first * s
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, 1, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool) -> Tensor:
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1)[..., : x.shape[-1] // 2].to(x.dtype)
    if interleaved:
        cos = cos[..., : x.shape[-1] // 2].repeat_interleave(2, -1)
    y = x * cos
    (first, second), (own, other) = _pairs(x, interleaved), _pairs(y, interleaved)
    own.addcmul_(second, sin, value=-sign)
    other.addcmul_(first, sin, value=sign)
    return y
