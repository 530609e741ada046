"""Rotations of queries and keys by their positions (Su et al. 2021): each channel with the one half of the channels on.

On CUDA one Triton kernel turns both (``rotary_triton``); elsewhere the twin in this file. The gradient is turned back, so nothing
is kept but cosines and sines, which all layers share.   B texts, T tokens, H heads, D channels of a head.
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import compiler


def rotated(q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D], k [B, H or fewer, T, D], of any strides; cosines and sines [B or 1, T, D], the second half of the channels
    that of the first again -> both turned, of their dtypes."""
    if torch.compiler.is_compiling():
        return plain(q, cosines, sines), plain(k, cosines, sines)
    if _fused(q, k):
        from hpcai.kernels import rotary_triton

        return rotary_triton.rotated(q, k, cosines, sines)
    if torch.is_grad_enabled():
        return _Rotation.apply(q, cosines, sines), _Rotation.apply(k, cosines, sines)
    if q.shape[2] == 1:  # a token after those remembered: few operations are what counts
        both = _turned(torch.cat((q, k), 1), cosines, sines, 1)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    return _turned(q, cosines, sines, 1), _turned(k, cosines, sines, 1)


def plain(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """One of them by operations of torch."""
    first, second = x.chunk(2, -1)
    return x * cosines[:, None].to(x.dtype) + torch.cat((-second, first), -1) * sines[:, None].to(x.dtype)


def _fused(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel takes them: on a GPU, of one type, which it has."""
    return compiler.takes(q) and q.dtype == k.dtype and q.dtype in (torch.bfloat16, torch.float32)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cosines, sines = ctx.saved_tensors
        return _turned(grad, cosines, sines, -1), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> Tensor:
    y, sines = x * cosines.unsqueeze(1).to(x.dtype), sines.unsqueeze(1)[..., : x.shape[-1] // 2].to(x.dtype)
    (first, second), (own, other) = x.chunk(2, -1), y.chunk(2, -1)
    own.addcmul_(second, sines, value=-sign)
    other.addcmul_(first, sines, value=sign)
    return y
