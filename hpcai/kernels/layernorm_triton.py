# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``layer_norm`` and ``rms_norm``, in float32 arithmetic: a program holds full rows; each pass reads ``x`` once.

For a pair representation of 256 x 256 x 128 in float32 the forward pass reads 32 MiB and writes 16 for products in bfloat16; the
backward pass reads 48 MiB and writes 32. For 8,192 tokens of 4,096 channels these are 128, 64, 192 and 128. Sums over rows are
partial sums of a fixed number of programs, added in a fixed order: there are no atomics, and the same input gives the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of a tile: 16 a thread, 8 KiB in bf16. At 3.35 TB/s (H100) and a latency of 0.8 us, 20 KB must be in flight to each of
# 132 multiprocessors: four programs that read one tensor (64 registers a thread) load 32 KiB, and so do two of the backward pass,
# which read two (128 registers). 4,096 elements are 32 rows of 128 channels: channels-first tiles are read in segments of 64 bytes
# in bf16, of 128 in float32.
TILE, WARPS = 4096, 8
# With more registers one program alone fits a multiprocessor; an RMS norm needs fewer. AMD's compiler takes no maxnreg.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
# Programs of the backward pass: two waves of two on each multiprocessor. Their partial sums of 128 channels are 0.5 MiB, a
# hundredth of the bytes of the pass. The number is fixed, so that sums are added in the same order on every GPU.
PROGRAMS = 2 * 2 * 132
# Elements of a vector load: 16 bytes of a 16-bit type. Strides that are no multiples of it take scalar loads.
UNIT = 8

# Kernels are specialised on the number of channels alone: a network has few of them.
_jit = triton.jit(do_not_specialize=["inner", "over", "step", "across", "tiles", "span", "eps"])


@triton.jit
def _offsets(step, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets within a tile [ROWS, WIDE], in 32 bits: channels are contiguous, or, ``FIRST``, rows are."""
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    return row + channel * step if FIRST else row * step + channel


@triton.jit
def _start(tile, inner, over, step, across, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Return the offset of a tile, in 64 bits, its first row, and its number of rows. A tile lies within ``inner`` rows, so that
    one division serves all of it."""
    outer, inside = (tile // across).to(tl.int64), tile % across * ROWS
    return outer * over + inside * (1 if FIRST else step.to(tl.int64)), outer * inner + inside, inner - inside


@_jit
def _forward(
    x_, weight_, bias_, y_, mean_, rstd_, inner, over, step, across, eps, C: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr,
    FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Without ``bias_`` this is the RMS norm."""
    number, channel = tl.arange(0, ROWS), tl.arange(0, WIDE)
    start, row, count = _start(tl.program_id(0), inner * EACH, over.to(tl.int64) * UNIT, step * UNIT, across, FIRST, ROWS)
    valid = (channel < C)[None, :]
    mask = (number < count)[:, None] & valid
    off = tl.load(x_ + start + _offsets(step * UNIT, FIRST, ROWS, WIDE), mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    if bias_ is not None:
        mean = tl.sum(off, 1) * (1.0 / C)
        off = tl.where(valid, off - mean[:, None], 0.0)
        rest = tl.sum(off, 1) * (1.0 / C)  # the rounding error of the first sum
        off = tl.where(valid, off - rest[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(off * off, 1) * (1.0 / C) + eps)
    y = off * rstd[:, None] * weight
    if bias_ is not None:
        y += tl.load(bias_ + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ + row * C + _offsets(C, False, ROWS, WIDE), y.to(y_.dtype.element_ty), mask)
    if mean_ is not None:
        tl.store(mean_ + row + number, mean + rest, number < count)
    if rstd_ is not None:
        tl.store(rstd_ + row + number, rstd, number < count)


@_jit
def _backward(
    dy_, x_, weight_, mean_, rstd_, dx_, partial_, inner, over, step, across, tiles, span, C: tl.constexpr, EACH: tl.constexpr,
    UNIT: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Without ``mean_`` this is the RMS norm, and without ``partial_`` only the gradient of ``x``."""
    number, channel, begin = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.program_id(0) * span
    weight = tl.load(weight_ + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    sums: tl.constexpr = (WIDE,) if FIRST else (ROWS, WIDE)  # a thread holds several of contiguous rows
    grad_weight, grad_bias = tl.zeros(sums, tl.float32), tl.zeros(sums, tl.float32)
    gap = inner * EACH if FIRST else C  # of dx
    for tile in range(begin, tl.minimum(begin + span, tiles)):
        start, row, count = _start(tile, inner * EACH, over.to(tl.int64) * UNIT, step * UNIT, across, FIRST, ROWS)
        mask = (number < count)[:, None] & (channel < C)[None, :]
        off = tl.load(x_ + start + _offsets(step * UNIT, FIRST, ROWS, WIDE), mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ + row * C + _offsets(C, False, ROWS, WIDE), mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ + row + number, number < count, other=0.0)
        if mean_ is not None:
            mean = tl.load(mean_ + row + number, number < count, other=0.0)
            off = tl.where(mask, off - mean[:, None], 0.0)
            off -= tl.sum(off, 1)[:, None] * (1.0 / C)  # a mean of 10,000 deviations has a rounding error of 0.0005 deviations
            grad_bias += tl.sum(dy, 0) if FIRST else dy
        hat = off * rstd[:, None]
        if partial_ is not None:
            grad_weight += tl.sum(dy * hat, 0) if FIRST else dy * hat
        dy *= weight
        mean_g = tl.sum(dy * hat, 1) * (1.0 / C)
        if mean_ is not None:
            dy -= tl.sum(dy, 1)[:, None] * (1.0 / C)
        dx = (dy - hat * mean_g[:, None]) * rstd[:, None]
        into = (tile // across).to(tl.int64) * (inner * EACH * C) + tile % across * ROWS if FIRST else row * C
        tl.store(dx_ + into + _offsets(gap, FIRST, ROWS, WIDE), dx.to(dx_.dtype.element_ty), mask)
    if partial_ is not None:
        partial_ += tl.program_id(0) * (C if mean_ is None else 2 * C) + channel
        tl.store(partial_, grad_weight if FIRST else tl.sum(grad_weight, 0), channel < C)
        if mean_ is not None:
            tl.store(partial_ + C, grad_bias if FIRST else tl.sum(grad_bias, 0), channel < C)


class _Form(NamedTuple):
    """Strides of ``outer`` times ``inner`` rows. With channels first, ``first`` is the position of their dim in memory, rows are
    contiguous and channels ``step`` apart; otherwise channels are contiguous and rows ``step`` apart."""

    first: int | None
    outer: int
    inner: int
    over: int
    step: int

    def kwargs(self, C: int) -> dict[str, Any]:
        unit = UNIT if self.over % UNIT == self.step % UNIT == 0 and (self.first is None or self.inner % UNIT == 0) else 1
        kwargs = {**_shape(C), "EACH": 1 if self.first is None else unit, "UNIT": unit, "FIRST": self.first is not None}
        sizes = {"inner": self.inner // kwargs["EACH"], "over": self.over // unit, "step": self.step // unit}
        warps = max(WARPS, kwargs["WIDE"] // 512)
        return {**sizes, "across": triton.cdiv(self.inner, kwargs["ROWS"]), **kwargs, "num_warps": warps}


def _shape(C: int) -> dict[str, Any]:
    wide = triton.next_power_of_2(C)
    return {"C": C, "ROWS": max(1, TILE // wide), "WIDE": wide}


def _run(x: Tensor, end: int, step: int) -> tuple[int, int, int]:
    """Merge the dims before ``end`` that have one stride, ``step`` unless 0. Return the first of them, their size, and the
    stride."""
    size = 1
    for dim in reversed(range(end)):
        if x.shape[dim] != 1:
            step = x.stride(dim) if size == 1 and step == 0 else step
            if x.stride(dim) != step * size:
                return dim + 1, size, step
        size *= x.shape[dim]
    return 0, size, step


def _form(x: Tensor) -> _Form | None:
    """Return the strides of ``x``, or None if the kernels do not support them."""
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
    while middle < last and x.shape[middle] == 1:  # outside the contiguous rows
        middle += 1
    return _Form(middle, outer, inner, over, x.stride(last))


def _like(x: Tensor, form: _Form) -> Tensor:
    """Return an empty tensor in the memory order of ``x``, without gaps."""
    if form.first is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    before, after = x.shape[: form.first], x.shape[form.first : -1]
    return x.new_empty(*before, x.shape[-1], *after).movedim(form.first, -1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: _Form, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype,
                save: bool) -> Tensor:  # fmt: skip
        kwargs, rows = form.kwargs(x.shape[-1]), form.outer * form.inner
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if save else None
        mean = None if bias is None or rstd is None else torch.empty_like(rstd)
        with torch.cuda.device_of(x):
            _forward[(form.outer * kwargs["across"],)](x, weight, bias, y, mean, rstd, eps=eps, **kwargs)
        if save:
            ctx.form = form
            ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, kwargs = _like(x, ctx.form), ctx.form.kwargs(x.shape[-1])
        tiles = ctx.form.outer * kwargs["across"]
        span = max(1, triton.cdiv(tiles, PROGRAMS))
        programs, needs_sums = triton.cdiv(tiles, span), mean is not None or ctx.needs_input_grad[2]
        shape = programs, 1 if mean is None else 2, x.shape[-1]
        partial = torch.empty(shape, dtype=torch.float32, device=x.device) if needs_sums else None
        limit = REGISTERS if mean is not None else {}
        with torch.cuda.device_of(x):
            _backward[(programs,)](dy.contiguous(), x, weight, mean, rstd, dx, partial, tiles=tiles, span=span, **kwargs, **limit)
        sums = () if partial is None else partial.sum(0).to(weight.dtype)
        grad_weight, grad_bias = [*sums, None, None][:2]
        return dx, None, grad_weight, grad_bias, None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the norm [..., C] of ``x`` in ``dtype``, contiguous: the RMS norm without ``bias``.

    Rows of contiguous channels with one or two strides, and channels-first tensors, [B, C, I, J] as [B, I, J, C], are read in
    place. Tensors with other strides are copied first.

    Raises ValueError if weight or bias have another size.
    """
    for name, value in (("weight", weight), ("bias", bias)):  # a kernel would read past the end
        if value is not None and value.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(x.shape[-1:])}, the channels of x")
    form = _form(x)
    if form is None:
        x = x.contiguous()
        form = _form(x)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _Norm.apply(x, form, weight.contiguous(), None if bias is None else bias.contiguous(), eps, dtype, save)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the RMS norm [..., C] of ``x`` in ``dtype``, contiguous. Raises ValueError for weights of another size."""
    return layer_norm(x.contiguous(), weight, None, eps, dtype)
