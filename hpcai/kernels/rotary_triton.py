# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of ``apply_rotary``, in float32 arithmetic: one launch reads and writes queries and keys once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PAIRS, WARPS = 2048, 4  # of a tile: 16 a thread

_jit = triton.jit(do_not_specialize=[
    "tokens", "queries", "keys", "qb", "qh", "qt", "kb", "kh", "kt", "rb", "rh", "rt", "sb", "sh", "st", "ab",
])  # fmt: skip


@triton.jit
def _rotate_tile(
    x_, y_, at, to, here, c, s, HALF: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:  # loads of pairs: every second element of 16 bits would double the transactions
        channel = tl.arange(0, 2 * WIDE)[None, :]
        exists = here & (channel < 2 * HALF)
        x = tl.load(x_ + at + channel, exists, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (TOKENS, WIDE, 2)))
        y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (TOKENS, 2 * WIDE))
        tl.store(y_ + to + channel, y.to(y_.dtype.element_ty), exists)
    else:
        channel = tl.arange(0, WIDE)[None, :]
        exists = here & (channel < HALF)
        a = tl.load(x_ + at + channel, exists, other=0.0).to(tl.float32)
        b = tl.load(x_ + at + channel + HALF, exists, other=0.0).to(tl.float32)
        tl.store(y_ + to + channel, (a * c - b * s).to(y_.dtype.element_ty), exists)
        tl.store(y_ + to + channel + HALF, (b * c + a * s).to(y_.dtype.element_ty), exists)


@_jit
def _rotate(
    q_, k_, cos_, sin_, y_, z_, tokens, queries, keys, qb, qh, qt, kb, kh, kt, rb, rh, rt, sb, sh, st, ab,
    SIGN: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of tokens of one head. Strides of batch, heads and tokens, in units of ``UNIT`` elements: of q, k and both
    results; ``ab`` is the batch stride of the cos."""
    token, first = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDE)[None, :]
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    here = (token < tokens)[:, None]
    exists = here & (first < HALF)
    token = token.to(tl.int64)[:, None]
    angle = sample * ab * UNIT + token * (2 * HALF) + first
    c = tl.load(cos_ + angle, exists, other=0.0).to(tl.float32)
    s = tl.load(sin_ + angle, exists, other=0.0).to(tl.float32) * SIGN
    if head < queries:
        at, to = sample * qb + head * qh + token * qt, sample * rb + head * rh + token * rt
        _rotate_tile(q_, y_, at * UNIT, to * UNIT, here, c, s, HALF, TOKENS, WIDE, INTERLEAVED)
    else:
        head -= queries
        at, to = sample * kb + head * kh + token * kt, sample * sb + head * sh + token * st
        _rotate_tile(k_, z_, at * UNIT, to * UNIT, here, c, s, HALF, TOKENS, WIDE, INTERLEAVED)


def _shape(size: int) -> dict[str, Any]:
    half = size // 2
    wide = triton.next_power_of_2(half)
    return {"HALF": half, "TOKENS": max(1, PAIRS // wide), "WIDE": wide}


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    y, z = (torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k))
    (batch, queries, tokens, size), keys = q.shape, k.shape[1]
    steps = [step for x in (q, k, y, z) for step in x.stride()[:3]]
    steps.append(cos.stride(0) if len(cos) > 1 else 0)
    unit = 8 if all(step % 8 == 0 for step in (*steps, size // 2)) else 1  # 16 bytes of a 16-bit type
    shape, steps = _shape(size), [step // unit for step in steps]
    with torch.cuda.device_of(q):
        _rotate[(triton.cdiv(tokens, shape["TOKENS"]), queries + keys, batch)](
            q, k, cos, sin, y, z, tokens, queries, keys, *steps, SIGN=sign, UNIT=unit, **shape,
            INTERLEAVED=interleaved, num_warps=WARPS,
        )
    return y, z


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _launch(q, k, cos, sin, 1, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *_launch(grad_q, grad_k, cos, sin, -1, ctx.interleaved), None, None, None


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Return q [B, H, T, D] and k [B, H or fewer, T, D], rotated, in the memory order [B, T, H, D]. Raises ValueError for shapes
    that do not fit."""
    batch, (tokens, size) = q.shape[0], q.shape[2:]
    expected = [(batch, tokens, size), (1, tokens, size)]
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:] or cos.shape not in expected or sin.shape != cos.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, cos, sin))
        raise ValueError(f"shapes {shapes} of q, k, cos and sin; expected [B, H, T, D] twice and [B or 1, T, D] twice")
    return _Rotation.apply(q, k, cos.contiguous(), sin.contiguous(), interleaved)
