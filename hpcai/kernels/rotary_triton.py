# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel behind ``rotated``, in float32 arithmetic: queries and keys in one launch, each value read and written once."""

from collections.abc import Iterator
from itertools import product
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
def _turn(x_, y_, at, to, here, c, s, HALF: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    if NEIGHBOURS:  # read and written in their order: every other number of 16 bits would take twice the messages
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
    q_, k_, cosines_, sines_, y_, z_, tokens, queries, keys, qb, qh, qt, kb, kh, kt, rb, rh, rt, sb, sh, st, ab,
    SIGN: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head. Steps between texts, heads and tokens in units: of q, k and both results; ``ab`` that of cosines."""
    token, first = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDE)[None, :]
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    here = (token < tokens)[:, None]
    exists = here & (first < HALF)
    token = token.to(tl.int64)[:, None]
    angle = text * ab * UNIT + token * (2 * HALF) + first
    c = tl.load(cosines_ + angle, exists, other=0.0).to(tl.float32)
    s = tl.load(sines_ + angle, exists, other=0.0).to(tl.float32) * SIGN
    if head < queries:
        at, to = text * qb + head * qh + token * qt, text * rb + head * rh + token * rt
        _turn(q_, y_, at * UNIT, to * UNIT, here, c, s, HALF, TOKENS, WIDE, NEIGHBOURS)
    else:
        head -= queries
        at, to = text * kb + head * kh + token * kt, text * sb + head * sh + token * st
        _turn(k_, z_, at * UNIT, to * UNIT, here, c, s, HALF, TOKENS, WIDE, NEIGHBOURS)


def _shape(size: int) -> dict[str, Any]:
    half = size // 2
    wide = triton.next_power_of_2(half)
    return {"HALF": half, "TOKENS": max(1, PAIRS // wide), "WIDE": wide}


def _turned(q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, sign: int, neighbours: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    y, z = (torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k))
    (texts, queries, tokens, size), keys = q.shape, k.shape[1]
    steps = [step for x in (q, k, y, z) for step in x.stride()[:3]]
    steps.append(cosines.stride(0) if len(cosines) > 1 else 0)
    unit = 8 if all(step % 8 == 0 for step in (*steps, size // 2)) else 1  # 16 bytes of a 16-bit type
    shape, steps = _shape(size), [step // unit for step in steps]
    with torch.cuda.device_of(q):
        _rotate[(triton.cdiv(tokens, shape["TOKENS"]), queries + keys, texts)](
            q, k, cosines, sines, y, z, tokens, queries, keys, *steps, SIGN=sign, UNIT=unit, **shape,
            NEIGHBOURS=neighbours, num_warps=WARPS,
        )
    return y, z


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        ctx.neighbours = neighbours
        return _turned(q, k, cosines, sines, 1, neighbours)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_q: Tensor, by_k: Tensor) -> Any:
        cosines, sines = ctx.saved_tensors
        return *_turned(by_q, by_k, cosines, sines, -1, ctx.neighbours), None, None, None


def rotated(q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, neighbours: bool = False) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D] and k [B, H or fewer, T, D], turned, with the heads of each token beside each other. Raises ValueError for
    angles of other sizes."""
    texts, (tokens, size) = q.shape[0], q.shape[2:]
    expected = [(texts, tokens, size), (1, tokens, size)]
    if k.shape[0] != texts or k.shape[2:] != q.shape[2:] or cosines.shape not in expected or sines.shape != cosines.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, cosines, sines))
        raise ValueError(f"shapes {shapes} of q, k, cosines and sines; expected [B, H, T, D] twice and [B or 1, T, D] twice")
    return _Rotation.apply(q, k, cosines.contiguous(), sines.contiguous(), neighbours)


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constexprs, options) of what models launch, for compilation ahead of time."""
    kinds = ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")
    for (kind, angles), size, neighbours in product(kinds, (64, 128), (False, True)):
        fixed = {"SIGN": 1, "UNIT": 8, **_shape(size), "NEIGHBOURS": neighbours}
        types = {n: f"*{angles if n in ('cosines_', 'sines_') else kind}" if n[-1] == "_" else "i32" for n in _rotate.arg_names}
        types |= dict.fromkeys(fixed, "constexpr")
        yield f"_rotate {kind} {angles} D={size} {neighbours}", _rotate, types, fixed, {"num_warps": WARPS}
