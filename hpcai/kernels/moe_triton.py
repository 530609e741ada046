# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of mixtures of experts. All sum in float32 in a fixed order, without atomics.

``combine`` sums the rows of each token. A program has some tokens, reads each of their rows once, and writes no other row: for
8,192 tokens of 4,096 channels with 2 rows each, in bf16, it moves 192 MiB, and the backward pass 320.

``grouped_mm`` multiplies groups of rows. Their ends stay on the GPU: each group has at most one partial tile, so that there are at
most ceil(R / TILE) + G tiles, and a program finds its group from all ends.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE, WARPS = 2048, 4  # of a tile of ``combine``: 16 elements a thread
TILE = 128  # rows and columns of a tile of a product, with 8 warps; a group of few rows has 16 to 64 with 4
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@triton.jit(do_not_specialize=["tokens"])
def _combine(
    rows_, index_, weights_, y_, tokens, C: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token, channel = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    exists, token, sums = token < tokens, token.to(tl.int64), tl.zeros((TOKENS, WIDE), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(index_ + token * K + j, exists, other=-1)
        x = tl.load(rows_ + row[:, None] * C + channel, (row >= 0)[:, None] & (channel < C), other=0.0).to(tl.float32)
        if weights_ is not None:
            x *= tl.load(weights_ + token * K + j, exists, other=0.0).to(tl.float32)[:, None]
        sums += x
    tl.store(y_ + token[:, None] * C + channel, sums.to(y_.dtype.element_ty), exists[:, None] & (channel < C))


@triton.jit(do_not_specialize=["tokens"])
def _combine_backward(
    dy_, rows_, index_, weights_, drows_, dweights_, tokens, C: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    WIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token, slot = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, SLOTS)[None, :]
    exists, token, dots = token < tokens, token.to(tl.int64), tl.zeros((TOKENS, SLOTS), tl.float32)
    for begin in range(0, C, WIDE):
        channel = begin + tl.arange(0, WIDE)[None, :]
        dy = tl.load(dy_ + token[:, None] * C + channel, exists[:, None] & (channel < C), other=0.0).to(tl.float32)
        for j in tl.static_range(K):
            row = tl.load(index_ + token * K + j, exists, other=-1)
            weight = tl.load(weights_ + token * K + j, exists, other=0.0).to(tl.float32)
            at, mask = row[:, None] * C + channel, (row >= 0)[:, None] & (channel < C)
            x = tl.load(rows_ + at, mask, other=0.0).to(tl.float32)
            tl.store(drows_ + at, (dy * weight[:, None]).to(drows_.dtype.element_ty), mask)
            dots += tl.where(slot == j, tl.sum(dy * x, 1)[:, None], 0.0)
    tl.store(dweights_ + token[:, None] * K + slot, dots.to(dweights_.dtype.element_ty), exists[:, None] & (slot < K))


@triton.jit
def _find_group(tile, ends_, G: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the group of a tile, its first row, and the end of the group; after the last tile both are 0."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_ + group, group < G, other=0)
    start = tl.load(ends_ + group - 1, (group > 0) & (group < G), other=0)
    tiles = (end - start + (ROWS - 1)) // ROWS
    after = tl.cumsum(tiles, 0)
    chosen = tl.sum((after <= tile).to(tl.int32), 0)
    first = tl.where(group == chosen, start + (tile - after + tiles) * ROWS, 0)
    return chosen, tl.sum(first, 0), tl.sum(tl.where(group == chosen, end, 0), 0)


@triton.jit
def _grouped_mm(
    a_, b_, ends_, scale_, y_, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, A_M: tl.constexpr, A_K: tl.constexpr,
    B_G: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows of groups, or sum over them: M or K is None. ``A_M`` and the like are strides."""
    tile, n = tl.program_id(0) // tl.cdiv(N, COLUMNS), tl.program_id(0) % tl.cdiv(N, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    if M is None:
        group, first, m_end = _find_group(tile, ends_, G, GROUPS, ROWS)
        k_begin, k_end = 0, tl.where(first < m_end, K, 0)
    else:
        group, first, m_end = tile // tl.cdiv(M, ROWS), tile % tl.cdiv(M, ROWS) * ROWS, M
        k_begin, k_end = tl.load(ends_ + group - 1, group > 0, other=0), tl.load(ends_ + group)
        y_ += group.to(tl.int64) * (M * N)
    m = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    b_ += group.to(tl.int64) * B_G
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(k_begin, k_end, INNER):
        k = begin + tl.arange(0, INNER).to(tl.int64)
        a = tl.load(a_ + m * A_M + k[None, :] * A_K, (m < m_end) & (k < k_end)[None, :], other=0.0)
        b = tl.load(b_ + k[:, None] * B_K + n[None, :] * B_N, (k < k_end)[:, None] & (n < N)[None, :], other=0.0)
        if a.dtype != b.dtype:  # E5M2 and E4M3, which Triton multiplies no faster
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if scale_ is not None:
        sums *= tl.load(scale_)
    tl.store(y_ + m * N + n[None, :], sums.to(y_.dtype.element_ty), (m < m_end) & (n < N)[None, :])


# For ``hpcai plan``: FLOPs, and bytes of an element.
_grouped_mm.work = lambda a, b, *_: (2 * a.numel() * b.shape[-1], a.element_size() if a.dtype == b.dtype else 2)


def combine(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of the rows of each token, times ``weights`` if given.

    Shape: rows [R, C], index [N, k], the row or -1 for none, weights [N, k] -> [N, C]
    """
    shape, y = _shape(rows, index), rows.new_empty(len(index), rows.shape[1])
    grid = triton.cdiv(len(index), shape["TOKENS"]), triton.cdiv(rows.shape[1], shape["WIDE"])
    with torch.cuda.device_of(rows):
        weights = None if weights is None else weights.contiguous()
        _combine[grid](rows.contiguous(), index.contiguous(), weights, y, len(index), **shape, num_warps=WARPS)
    return y


def combine_backward(dy: Tensor, rows: Tensor, index: Tensor, weights: Tensor, full: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights. ``full``: Each row is one of a token.   dy [N, C] -> [R, C], [N, k]"""
    shape = _shape(rows, index) | {"SLOTS": triton.next_power_of_2(index.shape[1])}
    inputs = dy, rows, index, weights = [x.contiguous() for x in (dy, rows, index, weights)]
    drows, dweights = torch.empty_like(rows) if full else torch.zeros_like(rows), torch.empty_like(weights)
    with torch.cuda.device_of(rows):
        grid = (triton.cdiv(len(index), shape["TOKENS"]),)
        _combine_backward[grid](*inputs, drows, dweights, len(index), **shape, num_warps=WARPS)
    return drows, dweights


def _shape(rows: Tensor, index: Tensor) -> dict[str, int]:
    wide = min(triton.next_power_of_2(rows.shape[1]), SIZE)
    return {"C": rows.shape[1], "K": index.shape[1], "TOKENS": SIZE // wide, "WIDE": wide}


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Compute ``hpcai.kernels.grouped_mm.grouped_mm``. Raises ValueError for sizes and dtypes that differ."""
    if a.shape[1] != b.shape[-2] or (b.ndim == 3 and len(b) != len(ends)) or (scale is None and a.dtype != b.dtype):
        operands = f"a is {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype}, in {len(ends)} groups"
        raise ValueError(f"{operands}; expected equal inner sizes, groups and dtypes")  # a kernel would read past the end
    shape = _product_shape(a, b, len(ends), "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee")
    tiles = triton.cdiv(len(a), shape["ROWS"])
    tiles, groups = (tiles + len(ends), ()) if b.ndim == 3 else (tiles * len(ends), ends.shape)
    y = torch.empty(*groups, len(a), b.shape[-1], dtype=dtype, device=a.device)
    with torch.cuda.device_of(a):
        grid = (tiles * triton.cdiv(b.shape[-1], shape["COLUMNS"]),)
        _grouped_mm[grid](a, b, ends, scale, y, **shape, num_warps=8 if shape["ROWS"] == TILE else 4, num_stages=3)
    return y


def _product_shape(a: Tensor, b: Tensor, groups: int, precision: str) -> dict[str, Any]:
    M, K, few = (None, a.shape[1], len(a) // groups) if b.ndim == 3 else (len(a), None, TILE)
    rows = min(max(triton.next_power_of_2(few), 16), TILE)
    inner, columns = 64 // (2 if a.dtype == FP8["fp8e5"] else a.element_size()), TILE if a.element_size() < 4 else TILE // 2
    strides = dict(zip(("A_M", "A_K", "B_G", "B_K", "B_N"), (*a.stride(), *(0,) * (3 - b.ndim), *b.stride())))
    sizes = {"M": M, "K": K, "N": b.shape[-1], "G": groups, "GROUPS": triton.next_power_of_2(groups), "ROWS": rows, **strides}
    return {**sizes, "COLUMNS": columns, "INNER": inner, "PRECISION": precision}
