# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``quantize``: the first computes the amax of a matrix, the second reads the matrix again and writes it in FP8,
its transpose, or both.

For 8,192 tokens of 4,096 channels in bfloat16 the first reads 64 MiB, the second reads 64 and writes 32 or 64. Each of a fixed
number of programs writes a partial amax as an integer: float32 bits without the sign are ordered as the values are, with NaN above
all. Every program of the second kernel reduces the partial values to the scale, so that nothing runs between the two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.float8_formats import ALIGNMENT, MAX_EXPONENT, padded_width

TILE = 8192  # elements that a program reads together: 32 a thread, enough loads in flight to saturate memory
PROGRAMS = 512  # of the first kernel, at most: an H100 runs four on each multiprocessor, all of them at once
ROWS, CHANNELS, WARPS = 128, 64, 8  # of a tile of the second kernel: full sectors of memory, for the matrix and for its transpose


@triton.jit(do_not_specialize=["count", "span"])
def _amax(x_, amax_, count, span, UNIT: tl.constexpr, TILE: tl.constexpr):
    """``count`` is in units of ``UNIT`` elements, by which the compiler proves that loads are aligned."""
    end, bits = count.to(tl.int64) * UNIT, tl.zeros((TILE,), tl.int32)
    begin = tl.program_id(0).to(tl.int64) * span * TILE
    for first in range(begin, tl.minimum(begin + span.to(tl.int64) * TILE, end), TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(x_ + at, at < end, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(amax_ + tl.program_id(0), tl.max(bits, 0))


@triton.jit
def _scale(bits, EXPONENT: tl.constexpr):
    """As ``float8._scale``."""
    exponent = tl.where(bits == 0, 127, tl.maximum(((bits + 0x1FFFFF) >> 23) - EXPONENT, 1))
    return tl.where(bits < 0x7F800000, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T", "C", "W", "programs"])
def _cast(
    x_, amax_, scale_, rows_, columns_, T, C, W, programs, EXPONENT: tl.constexpr, UNIT: tl.constexpr, PAD: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """x [T, C UNIT], rows [T, C UNIT], columns [C UNIT, W PAD]"""
    program, channels, wide = tl.program_id(0), C * UNIT, W.to(tl.int64) * PAD
    across = tl.cdiv(channels, CHANNELS)
    t = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = program % across * CHANNELS + tl.arange(0, CHANNELS)
    offsets, exists = t[:, None] * channels + c[None, :], (t < T)[:, None] & (c < channels)[None, :]
    x = tl.load(x_ + offsets, exists, other=0.0).to(tl.float32)
    if amax_ is not None:
        part = tl.arange(0, PARTS)
        scale = _scale(tl.max(tl.load(amax_ + part, part < programs, other=0), 0), EXPONENT)
        if program == 0:
            tl.store(scale_, scale)
    else:
        scale = tl.load(scale_)
    x *= tl.div_rn(1.0, scale)
    if rows_ is not None:
        tl.store(rows_ + offsets, x.to(rows_.dtype.element_ty), exists)
    if columns_ is not None:
        transposed = c.to(tl.int64)[:, None] * wide + t[None, :]
        tl.store(columns_ + transposed, tl.trans(x.to(columns_.dtype.element_ty)), (c < channels)[:, None] & (t < wide)[None, :])


def quantize(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return rows, columns and scale of a matrix [T, C] that is not empty."""
    x, (T, C), unit = x.contiguous(), x.shape, ALIGNMENT if x.shape[1] % ALIGNMENT == 0 else 1
    amax, programs = None, 0
    with torch.cuda.device_of(x):
        if scale is None:
            tiles = triton.cdiv(x.numel(), TILE)
            span = triton.cdiv(tiles, PROGRAMS)
            programs = triton.cdiv(tiles, span)
            amax = torch.empty(programs, dtype=torch.int32, device=x.device)
            scale = torch.empty((), dtype=torch.float32, device=x.device)
            _amax[(programs,)](x, amax, x.numel() // unit, span, UNIT=unit, TILE=TILE, num_warps=WARPS)
        cast = torch.empty(T, C, dtype=dtype, device=x.device) if rows else None
        transposed = torch.empty(C, padded_width(T), dtype=dtype, device=x.device) if columns else None
        tiles = triton.cdiv(padded_width(T), ROWS) * triton.cdiv(C, CHANNELS)
        # ptxas 12.8 and 12.9 may overwrite the stack pointer where one kernel stores both layouts, unless rows of bfloat16 are full
        # vectors. Other matrices are cast by two launches.
        single_pass = None in (cast, transposed) or (unit == ALIGNMENT and x.dtype == torch.bfloat16)
        for forms in [(cast, transposed)] if single_pass else [(cast, None), (None, transposed)]:
            _cast[(tiles,)](x, amax, scale, *forms, T, C // unit, padded_width(T) // ALIGNMENT, programs, **_shape(dtype, unit))
    return cast, transposed, scale


def _shape(dtype: torch.dtype, unit: int) -> dict[str, Any]:
    fixed = {"EXPONENT": MAX_EXPONENT[dtype], "UNIT": unit, "PAD": ALIGNMENT, "PARTS": triton.next_power_of_2(PROGRAMS)}
    return {**fixed, "ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS}
