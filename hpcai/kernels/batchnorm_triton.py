# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``batchnorm``, in float32 arithmetic. Code that depends on a pointer that is None is not compiled.

``x`` in channels-last memory is a matrix [M, C]. A program goes down a strip of it, tile by tile: what belongs to a channel is read
once, and sums stay in registers until the strip ends. The strips' sums are written, and ``_merge`` adds them, always in one order.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# These passes only move memory. At 3.35 TB/s (H100), with 0.8 us for a read, 20 KB must be on their way to each of 132
# multiprocessors. A program asks for 16 values a thread, 8 KiB or more, of each tensor at a time. A multiprocessor holds four
# programs that read one tensor (64 registers a thread), or two that sum over two or three (128): 32 KiB or more are on their way.
TILE, WARPS = 4096, 8
# Two rounds of four programs on each multiprocessor: the last round costs little, and partial sums are below a hundredth of a large
# x. The number is not asked of the device, so that the order of the sums is the same on every GPU.
PROGRAMS = 2 * 4 * 132
# Channels of a tile, whose rows are whole 128-byte lines; 64 where 128 would leave more threads idle at the edge (304 channels).
COLUMNS = (128, 64)
# Adjacent channels that one load may take: 16 bytes of a 16-bit type. Another number of channels is moved by single values.
UNIT = 8
# Partial sums that one program of _merge takes at a time, and their channels: one 32-byte sector, for many programs on a narrow x.
PARTS, SECTOR = 256, 8

# Kernels are not specialised on sizes: otherwise every layer geometry would be one more compilation.
_jit = triton.jit(do_not_specialize=["rows", "units", "span", "parts", "channels"])


@triton.jit
def _strip(rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The channels of this program and which of them exist, its first row in 64 bits, its count of rows, the places in a tile.

    Programs of neighbouring channels start together, so that they read whole rows.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * span * ROWS
    own = tl.minimum(rows - first, span * ROWS).to(tl.int32)
    place = tl.arange(0, ROWS)[:, None] * (units * UNIT) + channel[None, :]
    return channel, channel < units * UNIT, first, own, place


@_jit
def _moments(x_, partial_, rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Welford's recurrence in each place of the tile, then Chan's formula over the places: mean and sum of squares about it."""
    channel, exists, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    mean, squares = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.cdiv(own, ROWS)):
        inside = row < own - tile * ROWS
        x = tl.load(x_ + (first + tile * ROWS) * (units * UNIT) + place, inside & exists[None, :], other=0.0).to(tl.float32)
        off = tl.where(inside, x - mean, 0.0)
        mean += off * (1.0 / (tile + 1.0))
        squares += off * (x - mean)
    count = ((own + ROWS - 1 - row) // ROWS).to(tl.float32)
    middle = tl.sum(count * mean, 0) / own
    middle += tl.sum(count * (mean - middle[None, :]), 0) / own  # the digits that the first sum lost
    off = mean - middle[None, :]
    partial_ += tl.program_id(1).to(tl.int64) * 2 * (units * UNIT) + channel
    tl.store(partial_, middle, exists)
    tl.store(partial_ + units * UNIT, tl.sum(squares + count * off * off, 0), exists)


@_jit
def _sums(
    dy_, x_, y_, dz_, mean_, invstd_, partial_, rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean = tl.load(mean_ + channel, exists, other=0.0)[None, :]
    by_weight, by_bias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.cdiv(own, ROWS)):
        here = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < own - tile * ROWS) & exists[None, :]
        dz = tl.load(dy_ + here, mask, other=0.0)
        x = tl.load(x_ + here, mask, other=0.0).to(tl.float32)
        if y_ is not None:  # a NaN lets the gradient through, as in torch
            dz = tl.where(tl.load(y_ + here, mask, other=0.0).to(tl.float32) <= 0.0, 0.0, dz)
        if dz_ is not None:
            tl.store(dz_ + here, dz, mask)
        dz = dz.to(tl.float32)
        by_weight += dz * (x - mean)
        by_bias += dz
    partial_ += tl.program_id(1).to(tl.int64) * 2 * (units * UNIT) + channel
    tl.store(partial_, tl.sum(by_weight, 0) * tl.load(invstd_ + channel, exists, other=0.0), exists)
    tl.store(partial_ + units * UNIT, tl.sum(by_bias, 0), exists)


@_jit
def _merge(
    partial_, one_, two_, rows, span, parts, channels, MOMENTS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Two sums over strips of ``span`` rows; or mean and variance, from squares in float64, where a large mean costs no digits."""
    channel = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    one, two = tl.zeros((PARTS, COLUMNS), tl.float64), tl.zeros((PARTS, COLUMNS), tl.float64)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS).to(tl.int64)[:, None]
        mask, here = (part < parts) & (channel < channels), partial_ + part * 2 * channels + channel
        first = tl.load(here, mask, other=0.0).to(tl.float64)
        second = tl.load(here + channels, mask, other=0.0).to(tl.float64)
        if MOMENTS:
            count = tl.minimum(rows - part * span, span).to(tl.float64)
            second += count * first * first
            first *= count
        one += first
        two += second
    first, second, exists = tl.sum(one, 0)[None, :], tl.sum(two, 0)[None, :], channel < channels
    if MOMENTS:
        first /= rows
        second = second / rows - first * first
        second = tl.where(second < 0.0, 0.0, second)  # a NaN stays
    tl.store(one_ + channel, first.to(tl.float32), exists)
    tl.store(two_ + channel, second.to(tl.float32), exists)


@_jit
def _normalise(
    x_, plus_, y_, mean_, variance_, weight_, bias_, eps, rows, units, span, RELU: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean = tl.load(mean_ + channel, exists, other=0.0)[None, :]
    scale = tl.load(weight_ + channel, exists, other=0.0) * tl.rsqrt(tl.load(variance_ + channel, exists, other=1.0) + eps)
    scale, shift = scale[None, :], tl.load(bias_ + channel, exists, other=0.0)[None, :]
    for tile in range(tl.cdiv(own, ROWS)):
        here = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < own - tile * ROWS) & exists[None, :]
        # The mean is taken off first: x*scale + (shift - mean*scale) would lose the digits of a mean far larger than the deviation.
        y = (tl.load(x_ + here, mask, other=0.0).to(tl.float32) - mean) * scale + shift
        if plus_ is not None:
            y += tl.load(plus_ + here, mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y <= 0.0, 0.0, y)  # a NaN stays
        tl.store(y_ + here, y.to(y_.dtype.element_ty), mask)


@_jit
def _by_input(
    dz_, x_, y_, dx_, mean_, invstd_, weight_, by_weight_, by_bias_, rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, by_bias = tl.load(mean_ + channel, exists, other=0.0)[None, :], tl.load(by_bias_ + channel, exists, other=0.0)[None, :]
    invstd = tl.load(invstd_ + channel, exists, other=0.0)
    scale = (invstd * tl.load(weight_ + channel, exists, other=0.0))[None, :]
    slope = (invstd * tl.load(by_weight_ + channel, exists, other=0.0))[None, :]
    for tile in range(tl.cdiv(own, ROWS)):
        here = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < own - tile * ROWS) & exists[None, :]
        dz = tl.load(dz_ + here, mask, other=0.0).to(tl.float32)
        x = tl.load(x_ + here, mask, other=0.0).to(tl.float32)
        if y_ is not None:
            dz = tl.where(tl.load(y_ + here, mask, other=0.0).to(tl.float32) <= 0.0, 0.0, dz)
        dx = scale * (dz - by_bias - (x - mean) * slope)
        tl.store(dx_ + here, dx.to(dx_.dtype.element_ty), mask)


class _Plan(NamedTuple):
    """``strips`` strips of ``span`` tiles over the rows, ``across`` over the channels."""

    form: torch.memory_format
    across: int
    strips: int
    sizes: tuple[int, int, int]
    shape: dict[str, int]


def _plan(x: Tensor) -> _Plan:
    channels = x.shape[1]
    rows, unit = x.numel() // channels, UNIT if channels % UNIT == 0 else 1
    columns = min(triton.next_power_of_2(channels), min(COLUMNS, key=lambda n: triton.cdiv(channels, n) * n))
    across, tiles = triton.cdiv(channels, columns), triton.cdiv(rows, TILE // columns)
    span = max(1, triton.cdiv(tiles, max(1, PROGRAMS // across)))
    shape = {"UNIT": unit, "ROWS": TILE // columns, "COLUMNS": columns, "num_warps": WARPS}
    form = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return _Plan(form, across, max(1, triton.cdiv(tiles, span)), (rows, channels // unit, span), shape)


def _like(x: Tensor, form: torch.memory_format, **given: Tensor | None) -> list[Tensor | None]:
    """Each tensor in the memory format of ``x``. A kernel would read past the end of one with another shape."""
    for name, value in given.items():
        if value is not None and value.shape != x.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(x.shape)}, that of x")
    return [None if value is None else value.contiguous(memory_format=form) for value in given.values()]


def _merged(partial: Tensor, plan: _Plan, MOMENTS: bool) -> tuple[Tensor, Tensor]:
    (rows, _, span), (parts, _, channels) = plan.sizes, partial.shape
    one, two = torch.empty_like(partial[0, 0]), torch.empty_like(partial[0, 0])
    _merge[(triton.cdiv(channels, SECTOR),)](
        partial, one, two, rows, span * plan.shape["ROWS"], parts, channels, MOMENTS=MOMENTS, PARTS=PARTS, COLUMNS=SECTOR,
        num_warps=WARPS,
    )  # fmt: skip
    return one, two


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [C] float32."""
    plan = _plan(x)
    with torch.cuda.device_of(x):
        partial = torch.empty(plan.strips, 2, x.shape[1], dtype=torch.float32, device=x.device)
        _moments[(plan.across, plan.strips)](x, partial, *plan.sizes, **plan.shape)
        return _merged(partial, plan, True)


def normalise(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, plus: Tensor | None,
              relu: bool) -> Tensor:  # fmt: skip
    """relu(weight * (x - mean) / sqrt(variance + eps) + bias + plus), in the dtype and memory format of ``x``."""
    plan = _plan(x)
    (plus,) = _like(x, plan.form, plus=plus)
    y = torch.empty_like(x, memory_format=plan.form)
    with torch.cuda.device_of(x):
        _normalise[(plan.across, plan.strips)](x, plus, y, mean, variance, weight, bias, eps, *plan.sizes, RELU=relu, **plan.shape)
    return y


def sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, invstd: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dz, the gradient before the rectifier, and the sums of dz*(x - mean)*invstd and of dz [C] float32.

    Without ``keep`` the first is ``dy`` itself: ``by_input`` rectifies what it reads, and dz is never written.
    """
    plan = _plan(x)
    dy_, y_ = _like(x, plan.form, dy=dy, y=y)
    dz = torch.empty_like(dy, memory_format=plan.form) if keep and y is not None else None
    with torch.cuda.device_of(x):
        partial = torch.empty(plan.strips, 2, x.shape[1], dtype=torch.float32, device=x.device)
        _sums[(plan.across, plan.strips)](dy_, x, y_, dz, mean, invstd, partial, *plan.sizes, **plan.shape)
        return (dy if dz is None else dz, *_merged(partial, plan, False))


def by_input(dz: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, invstd: Tensor, weight: Tensor, by_weight: Tensor,
             by_bias: Tensor) -> Tensor:  # fmt: skip
    """weight*invstd * (dz - by_bias - (x - mean)*invstd*by_weight), with dz rectified by ``y`` where that is given."""
    plan = _plan(x)
    dz_, y_ = _like(x, plan.form, dz=dz, y=y)
    dx = torch.empty_like(x, memory_format=plan.form)
    with torch.cuda.device_of(x):
        _by_input[(plan.across, plan.strips)](dz_, x, y_, dx, mean, invstd, weight, by_weight, by_bias, *plan.sizes, **plan.shape)
    return dx


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constexprs) of what training launches, for compilation ahead of time."""
    for kernel, absent, more in (
        (_moments, "", {}), (_sums, "y_ dz_", {}), (_sums, "dz_", {}), (_sums, "", {}), (_by_input, "y_", {}), (_by_input, "", {}),
        (_normalise, "plus_", {"RELU": False}), (_normalise, "plus_", {"RELU": True}), (_normalise, "", {"RELU": True}),
        (_merge, "", {"MOMENTS": True}), (_merge, "", {"MOMENTS": False}),
    ):  # fmt: skip
        shape = {"PARTS": PARTS, "COLUMNS": SECTOR} if kernel is _merge else {"UNIT": UNIT, "ROWS": TILE // 128, "COLUMNS": 128}
        names, fixed = kernel.arg_names, {**dict.fromkeys(absent.split()), **more, **shape}
        whole = [x for x in names if x in ("x_", "y_", "plus_", "dx_", "dy_", "dz_") and x not in fixed]
        for kind in ("bf16", "fp32") if whole else ("fp32",):
            types = {x: f"*{kind}" if x in whole else "*fp32" if x[-1] == "_" else "fp32" if x == "eps" else "i32" for x in names}
            name = " ".join([kernel.fn.__name__, kind, *whole, *(f"{key}={value}" for key, value in more.items())])
            yield name, kernel, types | dict.fromkeys(fixed, "constexpr"), fixed
