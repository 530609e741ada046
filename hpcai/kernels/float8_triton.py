# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``quantize``: the first computes the amax of a matrix, the second reads the matrix again and writes it in FP8,
its transpose, or both.

For 8,192 tokens of 4,096 channels in bfloat16 the first reads 64 MiB, the second reads 64 and writes 32 or 64. Each of a fixed
number of programs writes a partial amax as an integer: float32 bits without the sign are ordered as the values are, with NaN above
all. Every program of the second kernel reduces the partial values to the scale, so that nothing runs between the two.
"""

from collections.abc import Iterator
from itertools import product
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


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Yield (name, kernel, signature, constexprs, options) of the launches of language models, to compile them ahead of time."""
    options = {"num_warps": WARPS}
    for kind in ("bf16", "fp32"):
        fixed: dict[str, Any] = {"UNIT": ALIGNMENT, "TILE": TILE}
        types = {n: {"x_": f"*{kind}", "amax_": "*i32"}.get(n, "i32") for n in _amax.arg_names}
        yield f"_amax {kind}", _amax, types | dict.fromkeys(fixed, "constexpr"), fixed, options
    forms = ("both", "rows", "columns"), (True, False), (("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2))
    for kind, form, finds, (name, dtype) in product(("bf16", "fp32"), *forms):
        if (kind, form) == ("fp32", "both"):
            continue
        fixed = {n: value for n, value in _shape(dtype, ALIGNMENT).items() if n != "num_warps"}
        absent = {"rows": ["columns_"], "columns": ["rows_"], "both": []}[form] + ([] if finds else ["amax_"])
        fixed |= dict.fromkeys(absent)
        types = {"x_": f"*{kind}", "amax_": "*i32", "scale_": "*fp32", "rows_": f"*{name}", "columns_": f"*{name}"}
        types = {n: types.get(n, "i32") for n in _cast.arg_names} | dict.fromkeys(fixed, "constexpr")
        yield f"_cast {kind} {name} {form} {'scale found' if finds else 'scale given'}", _cast, types, fixed, options
