"""Rotations of queries and keys by their positions (Su et al. 2021): each channel with the one half of the channels on, as Llama
has it, or of ``neighbours`` the first with the second, the third with the fourth and so on, as the paper and Flux have it.

On CUDA one Triton kernel turns both (``rotary_triton``); elsewhere the twin in this file. The gradient is turned back, so nothing
is kept but cosines and sines, which all layers share.   B texts, T tokens, H heads, D channels of a head.
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import compiler


def rotated(q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, neighbours: bool = False) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D], k [B, H or fewer, T, D], of any strides; cosines and sines [B or 1, T, D] of the pairs in their order, twice
    beside one another -> both turned, of their dtypes."""
    if torch.compiler.is_compiling():
        return plain(q, cosines, sines, neighbours), plain(k, cosines, sines, neighbours)
    if _fused(q, k):
        from hpcai.kernels import rotary_triton

        return rotary_triton.rotated(q, k, cosines, sines, neighbours)
    if torch.is_grad_enabled():
        return _Rotation.apply(q, cosines, sines, neighbours), _Rotation.apply(k, cosines, sines, neighbours)
    if q.shape[2] == 1:  # a token after those remembered: few operations are what counts
        both = _turned(torch.cat((q, k), 1), cosines, sines, 1, neighbours)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    return _turned(q, cosines, sines, 1, neighbours), _turned(k, cosines, sines, 1, neighbours)


def plain(x: Tensor, cosines: Tensor, sines: Tensor, neighbours: bool = False) -> Tensor:
    """One of them by operations of torch."""
    first, second = _pairs(x, neighbours)
    c, s = (_pairs(angle[:, None].to(x.dtype), False)[0] for angle in (cosines, sines))
    turned = first * c - second * s, second * c + first * s
    return torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)


def _pairs(x: Tensor, neighbours: bool) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (-1, 2)).unbind(-1) if neighbours else x.chunk(2, -1)


def _fused(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel takes them: on a GPU, of one type, which it has."""
    return compiler.takes(q) and q.dtype == k.dtype and q.dtype in (torch.bfloat16, torch.float32)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.neighbours = neighbours
        return _turned(x, cosines, sines, 1, neighbours)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cosines, sines = ctx.saved_tensors
        return _turned(grad, cosines, sines, -1, ctx.neighbours), None, None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, sign: int, neighbours: bool) -> Tensor:
    cosines, sines = cosines.unsqueeze(1).to(x.dtype), sines.unsqueeze(1)[..., : x.shape[-1] // 2].to(x.dtype)
    if neighbours:
        cosines = cosines[..., : x.shape[-1] // 2].repeat_interleave(2, -1)
    y = x * cosines
    (first, second), (own, other) = _pairs(x, neighbours), _pairs(y, neighbours)
    own.addcmul_(second, sines, value=-sign)
    other.addcmul_(first, sines, value=sign)
    return y
