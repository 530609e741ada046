# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``eighth``: one reads a matrix for its greatest absolute value, one reads it again and writes it in 8
bits, as it is, transposed, or both.

Of 8,192 tokens of 4,096 channels in bfloat16 the first reads 64 MiB, the second reads 64 and writes 32 or 64. The greatest value is
found in parts of a fixed number of programs, as a whole number: the bits of float32 without the sign are in the order of the
numbers, with NaN above all. Every program of the second kernel finds the scale in those parts, so nothing runs between the two.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.fp8 import HALVINGS, UNIT, width

TILE = 8192  # values that a program looks at together: 32 for each thread, as many in flight as keep memory busy
PROGRAMS = 512  # of the first kernel, at most: an H100 holds four on each multiprocessor, and all of these at once
ROWS, CHANNELS, WARPS = 128, 64, 8  # of a tile that is cast: both ways, whole sectors of memory are read and written


@triton.jit(do_not_specialize=["count", "span"])
def _most(x_, most_, count, span, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """``count`` is in units, so that the compiler knows of which number of values loads are multiples."""
    end, found = count.to(tl.int64) * WHOLE, tl.zeros((TILE,), tl.int32)
    begin = tl.program_id(0).to(tl.int64) * span * TILE
    for first in range(begin, tl.minimum(begin + span.to(tl.int64) * TILE, end), TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(x_ + at, at < end, other=0.0).to(tl.float32)
        found = tl.maximum(found, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(most_ + tl.program_id(0), tl.max(found, 0))


@triton.jit
def _scale(bits, HALVINGS: tl.constexpr):
    """As ``eighths._scale``."""
    exponent = tl.where(bits == 0, 127, tl.maximum(((bits + 0x1FFFFF) >> 23) - HALVINGS, 1))
    return tl.where(bits < 0x7F800000, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T", "C", "W", "programs"])
def _cast(
    x_, most_, scale_, rows_, columns_, T, C, W, programs, HALVINGS: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """x [T, C WHOLE], rows [T, C WHOLE], columns [C WHOLE, W UNIT]."""
    program, channels, wide = tl.program_id(0), C * WHOLE, W.to(tl.int64) * UNIT
    across = tl.cdiv(channels, CHANNELS)
    t = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = program % across * CHANNELS + tl.arange(0, CHANNELS)
    here, exists = t[:, None] * channels + c[None, :], (t < T)[:, None] & (c < channels)[None, :]
    x = tl.load(x_ + here, exists, other=0.0).to(tl.float32)
    if most_ is not None:
        part = tl.arange(0, PARTS)
        scale = _scale(tl.max(tl.load(most_ + part, part < programs, other=0), 0), HALVINGS)
        if program == 0:
            tl.store(scale_, scale)
    else:
        scale = tl.load(scale_)
    x *= tl.div_rn(1.0, scale)
    if rows_ is not None:
        tl.store(rows_ + here, x.to(rows_.dtype.element_ty), exists)
    if columns_ is not None:
        there = c.to(tl.int64)[:, None] * wide + t[None, :]
        tl.store(columns_ + there, tl.trans(x.to(columns_.dtype.element_ty)), (c < channels)[:, None] & (t < wide)[None, :])


def eighth(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Rows, columns and scale of x [T, C], which has a value at least."""
    x, (T, C), whole = x.contiguous(), x.shape, UNIT if x.shape[1] % UNIT == 0 else 1
    most, programs = None, 0
    with torch.cuda.device_of(x):
        if scale is None:
            tiles = triton.cdiv(x.numel(), TILE)
            span = triton.cdiv(tiles, PROGRAMS)
            programs = triton.cdiv(tiles, span)
            most = torch.empty(programs, dtype=torch.int32, device=x.device)
            scale = torch.empty((), dtype=torch.float32, device=x.device)
            _most[(programs,)](x, most, x.numel() // whole, span, WHOLE=whole, TILE=TILE, num_warps=WARPS)
        cast = torch.empty(T, C, dtype=dtype, device=x.device) if rows else None
        turned = torch.empty(C, width(T), dtype=dtype, device=x.device) if columns else None
        tiles = triton.cdiv(width(T), ROWS) * triton.cdiv(C, CHANNELS)
        # Of casts that are packed for one form and taken apart for the other, ptxas 12.8 and 12.9 may write the stack pointer.
        # Their code is right where rows of bfloat16 are whole vectors; other matrices are cast twice.
        single_pass = None in (cast, turned) or (whole == UNIT and x.dtype == torch.bfloat16)
        for forms in [(cast, turned)] if single_pass else [(cast, None), (None, turned)]:
            _cast[(tiles,)](x, most, scale, *forms, T, C // whole, width(T) // UNIT, programs, **_shape(dtype, whole))
    return cast, turned, scale


def _shape(dtype: torch.dtype, whole: int) -> dict[str, Any]:
    fixed = {"HALVINGS": HALVINGS[dtype], "WHOLE": whole, "UNIT": UNIT, "PARTS": triton.next_power_of_2(PROGRAMS)}
    return {**fixed, "ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS}


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constexprs, options) of what language models launch, for compilation ahead of time."""
    options = {"num_warps": WARPS}
    for kind in ("bf16", "fp32"):
        fixed: dict[str, Any] = {"WHOLE": UNIT, "TILE": TILE}
        types = {n: {"x_": f"*{kind}", "most_": "*i32"}.get(n, "i32") for n in _most.arg_names}
        yield f"_most {kind}", _most, types | dict.fromkeys(fixed, "constexpr"), fixed, options
    forms = ("both", "rows", "columns"), (True, False), (("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2))
    for kind, form, finds, (name, dtype) in product(("bf16", "fp32"), *forms):
        if (kind, form) == ("fp32", "both"):
            continue
        fixed = {n: value for n, value in _shape(dtype, UNIT).items() if n != "num_warps"}
        absent = {"rows": ["columns_"], "columns": ["rows_"], "both": []}[form] + ([] if finds else ["most_"])
        fixed |= dict.fromkeys(absent)
        types = {"x_": f"*{kind}", "most_": "*i32", "scale_": "*fp32", "rows_": f"*{name}", "columns_": f"*{name}"}
        types = {n: types.get(n, "i32") for n in _cast.arg_names} | dict.fromkeys(fixed, "constexpr")
        yield f"_cast {kind} {name} {form} {'scale found' if finds else 'scale given'}", _cast, types, fixed, options
