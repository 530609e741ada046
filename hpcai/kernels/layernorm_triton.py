# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``layer_norm``, in float32 arithmetic: a program holds whole rows, so each pass reads ``x`` once.

Of a pair representation of 256 x 256 x 128 values in float32 the forward pass reads 32 MiB and writes 16 for products in bfloat16;
the backward pass reads 48 MiB and writes 32. Sums over rows are parts of a fixed number of programs, added in a fixed order: no
atomics, the same input gives the same bits.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Values of a tile: 16 a thread, 8 KiB in bf16. At 3.35 TB/s (H100), with 0.8 us for a read, 20 KB must be on their way to each of
# 132 multiprocessors: four programs that read one tensor (64 registers a thread) ask for 32 KiB, two of the backward pass, which
# read two (128 registers), for as much. 4,096 values are 32 rows of 128 channels: where rows lie beside each other they are read in
# pieces of 64 bytes in bf16, of 128 in float32.
TILE, WARPS = 4096, 8
# More than these, and one program alone fits a multiprocessor; AMD's compiler takes no such number.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
# Programs of the backward pass: two rounds of two on each multiprocessor. Their sums of 128 channels are 0.5 MiB, a hundredth of
# what the pass moves. The number is not asked of the device, so that the order of the sums is the same on every GPU.
PROGRAMS = 2 * 2 * 132
# Adjacent values that one load may take: 16 bytes of a 16-bit type. Where a stride is no multiple of it, single values are moved.
UNIT = 8

# Only the number of channels, of which a network has few, is compiled in.
_jit = triton.jit(do_not_specialize=["inner", "over", "step", "across", "tiles", "span", "eps"])


@triton.jit
def _place(step, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Places in a tile [ROWS, WIDE], in 32 bits: channels are beside each other, or, if they come ``FIRST``, rows are."""
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    return row + channel * step if FIRST else row * step + channel


@triton.jit
def _start(tile, inner, over, step, across, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile begins, in 64 bits, its first row, and how many rows it has. It lies within ``inner`` rows, so that one division
    does for all of it."""
    outer, own = (tile // across).to(tl.int64), tile % across * ROWS
    return outer * over + own * (1 if FIRST else step.to(tl.int64)), outer * inner + own, inner - own


@_jit
def _forward(
    x_, weight_, bias_, y_, mean_, rstd_, inner, over, step, across, eps, C: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr,
    FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    number, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    start, row, own = _start(tl.program_id(0), inner * EACH, over.to(tl.int64) * UNIT, step * UNIT, across, FIRST, ROWS)
    known = (channel < C)[None, :]
    mask = (number < own)[:, None] & known
    x = tl.load(x_ + start + _place(step * UNIT, FIRST, ROWS, WIDE), mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(x, 1) * (1.0 / C)
    off = tl.where(known, x - mean[:, None], 0.0)
    rest = tl.sum(off, 1) * (1.0 / C)  # the digits that the first sum lost
    off = tl.where(known, off - rest[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(off * off, 1) * (1.0 / C) + eps)
    y = off * rstd[:, None] * weight + bias
    tl.store(y_ + row * C + _place(C, False, ROWS, WIDE), y.to(y_.dtype.element_ty), mask)
    if mean_ is not None:
        tl.store(mean_ + row + number, mean + rest, number < own)
        tl.store(rstd_ + row + number, rstd, number < own)


@_jit
def _backward(
    dy_, x_, weight_, mean_, rstd_, dx_, partial_, inner, over, step, across, tiles, span, C: tl.constexpr, EACH: tl.constexpr,
    UNIT: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    number, channel, begin = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.program_id(0) * span
    weight = tl.load(weight_ + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    kept: tl.constexpr = (WIDE,) if FIRST else (ROWS, WIDE)  # of rows that are beside each other a thread has several
    by_weight, by_bias = tl.zeros(kept, tl.float32), tl.zeros(kept, tl.float32)
    gap = inner * EACH if FIRST else C  # dx has none but this
    for tile in range(begin, tl.minimum(begin + span, tiles)):
        start, row, own = _start(tile, inner * EACH, over.to(tl.int64) * UNIT, step * UNIT, across, FIRST, ROWS)
        mask = (number < own)[:, None] & (channel < C)[None, :]
        x = tl.load(x_ + start + _place(step * UNIT, FIRST, ROWS, WIDE), mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ + row * C + _place(C, False, ROWS, WIDE), mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ + row + number, number < own, other=0.0)
        rstd = tl.load(rstd_ + row + number, number < own, other=0.0)
        off = tl.where(mask, x - mean[:, None], 0.0)
        off -= tl.sum(off, 1)[:, None] * (1.0 / C)  # a mean of 10,000 deviations is rounded by 0.0005 of one
        hat = off * rstd[:, None]
        by_weight += tl.sum(dy * hat, 0) if FIRST else dy * hat
        by_bias += tl.sum(dy, 0) if FIRST else dy
        dy *= weight
        along = tl.sum(dy * hat, 1) * (1.0 / C)
        dx = (dy - tl.sum(dy, 1)[:, None] * (1.0 / C) - hat * along[:, None]) * rstd[:, None]
        into = (tile // across).to(tl.int64) * (inner * EACH * C) + tile % across * ROWS if FIRST else row * C
        tl.store(dx_ + into + _place(gap, FIRST, ROWS, WIDE), dx.to(dx_.dtype.element_ty), mask)
    partial_ += tl.program_id(0) * (2 * C) + channel
    tl.store(partial_, by_weight if FIRST else tl.sum(by_weight, 0), channel < C)
    tl.store(partial_ + C, by_bias if FIRST else tl.sum(by_bias, 0), channel < C)


class _Form(NamedTuple):
    """How rows lie: ``outer`` times ``inner`` of them. ``first`` is the place of the channels among the dims in memory, where rows
    are beside each other and channels ``step`` apart; otherwise channels are beside each other and rows ``step`` apart."""

    first: int | None
    outer: int
    inner: int
    over: int
    step: int

    def words(self, C: int) -> dict[str, Any]:
        unit = UNIT if self.over % UNIT == self.step % UNIT == 0 and (self.first is None or self.inner % UNIT == 0) else 1
        words = {**_shape(C), "EACH": 1 if self.first is None else unit, "UNIT": unit, "FIRST": self.first is not None}
        sizes = {"inner": self.inner // words["EACH"], "over": self.over // unit, "step": self.step // unit}
        return {**sizes, "across": triton.cdiv(self.inner, words["ROWS"]), **words, "num_warps": WARPS}


def _shape(C: int) -> dict[str, Any]:
    wide = triton.next_power_of_2(C)
    return {"C": C, "ROWS": max(1, TILE // wide), "WIDE": wide}


def _run(x: Tensor, end: int, step: int) -> tuple[int, int, int]:
    """Where the dims before ``end`` begin that are one with a constant step, how long it is, and the step; ``step`` 0 is any."""
    size = 1
    for dim in reversed(range(end)):
        if x.shape[dim] != 1:
            step = x.stride(dim) if size == 1 and step == 0 else step
            if x.stride(dim) != step * size:
                return dim + 1, size, step
        size *= x.shape[dim]
    return 0, size, step


def _form(x: Tensor) -> _Form | None:
    """None for strides that the kernels do not read."""
    last = x.ndim - 1
    first = None if x.stride(last) == 1 or x.shape[last] == 1 else last
    shape = _shape(x.shape[last])
    middle, inner, step = _run(x, last, 0 if first is None else 1)
    begin, outer, over = _run(x, middle, 0)
    reach = shape["ROWS"] * step if first is None else shape["WIDE"] * x.stride(last)
    if begin != 0 or reach >= 1 << 31:
        return None
    if first is None:
        return _Form(None, outer, inner, over, step)
    while middle < last and x.shape[middle] == 1:  # no part of what is beside each other
        middle += 1
    return _Form(middle, outer, inner, over, x.stride(last))


def _like(x: Tensor, form: _Form) -> Tensor:
    """Empty, with the strides of ``x``, but without gaps."""
    if form.first is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    before, after = x.shape[: form.first], x.shape[form.first : -1]
    return x.new_empty(*before, x.shape[-1], *after).movedim(form.first, -1)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: _Form, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype,
                keep: bool) -> Tensor:  # fmt: skip
        words, rows = form.words(x.shape[-1]), form.outer * form.inner
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device).unbind() if keep else (None, None)
        with torch.cuda.device_of(x):
            _forward[(form.outer * words["across"],)](x, weight, bias, y, mean, rstd, eps=eps, **words)
        if keep:
            ctx.form = form
            ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, words = _like(x, ctx.form), ctx.form.words(x.shape[-1])
        tiles = ctx.form.outer * words["across"]
        span = max(1, triton.cdiv(tiles, PROGRAMS))
        partial = torch.empty(triton.cdiv(tiles, span), 2, x.shape[-1], dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _backward[(len(partial),)](
                dy.contiguous(), x, weight, mean, rstd, dx, partial, tiles=tiles, span=span, **words, **REGISTERS
            )
        by_weight, by_bias = partial.sum(0).to(weight.dtype)
        return dx, None, by_weight, by_bias, None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The norm [..., C] of ``x`` in ``dtype``, contiguous.

    Read as they are: rows whose channels are beside each other, with one or two steps between rows; and channels before the dims of
    a picture, [B, C, I, J] as [B, I, J, C], whose gradient lies as they do. Others are copied first. Raises ValueError for weights
    of another size.
    """
    for name, value in (("weight", weight), ("bias", bias)):  # a kernel would read past the end
        if value.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(x.shape[-1:])}, the channels of x")
    form = _form(x)
    if form is None:
        x = x.contiguous()
        form = _form(x)
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
    return _LayerNorm.apply(x, form, weight.contiguous(), bias.contiguous(), eps, dtype, keep)


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constexprs, options) of what OpenFold launches, for compilation ahead of time: rows of each width,
    and channels-first products, which have the precision of the step."""
    kinds = ("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")
    forms = *product((64, 128, 256, 384), (False,), kinds), *product((64, 128), (True,), kinds[::2])
    for kernel, (C, first, (x, y)) in product((_forward, _backward), forms):
        fixed = {**_shape(C), "EACH": UNIT if first else 1, "UNIT": UNIT, "FIRST": first}
        whole = {"x_": x, "dx_": x, "y_": y, "dy_": y}
        types = {n: f"*{whole.get(n, 'fp32')}" if n[-1] == "_" else "fp32" if n == "eps" else "i32" for n in kernel.arg_names}
        name = f"{kernel.fn.__name__} {x} {y} C={C}{' first' if first else ''}"
        options = {"num_warps": WARPS, **(REGISTERS if kernel is _backward else {})}
        yield name, kernel, types | dict.fromkeys(fixed, "constexpr"), fixed, options
