# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``batchnorm``, in float32 arithmetic. Code that depends on a pointer that is None is not compiled.

``x`` in channels-last memory is S matrices [M, C], one for each sample with its own statistics. A program processes a strip of rows
of one matrix, tile by tile: the parameters of its channels are loaded once, and sums stay in registers. ``_merge`` adds the partial
sums of the strips in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.batchnorm import NormParams

# These passes are bound by memory. At 3.35 TB/s (H100) and a latency of 0.8 us, 20 KB must be in flight to each of 132
# multiprocessors. A program loads 16 elements a thread, 8 KiB or more, of each tensor at a time. A multiprocessor runs four
# programs that read one tensor (64 registers a thread), or two that sum over two or three (128): 32 KiB or more are in flight.
TILE, WARPS = 4096, 8
# Two waves of four programs on each multiprocessor: the tail is short, and partial sums are below a hundredth of a large x. The
# number is fixed, so that sums are added in the same order on every GPU.
PROGRAMS = 2 * 4 * 132
# Channels of a tile, whose rows are full 128-byte lines; 64 where 128 would leave more threads idle at the edge (304 channels).
COLUMNS = (128, 64)
# Channels of a vector load: 16 bytes of a 16-bit type. Numbers of channels that are no multiples of it take scalar loads.
UNIT = 8
# Partial sums of a tile of _merge, and their channels: one 32-byte sector, so that a narrow x has many programs.
PARTS, SECTOR = 256, 8

# Kernels are not specialised on sizes: each geometry of a layer would be one more compilation.
_jit = triton.jit(do_not_specialize=["rows", "units", "span", "parts", "columns", "group"])


@triton.jit
def _strip(rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the channels of this program, their mask, the indices of their statistics, its first row in 64 bits, its number of
    rows, and the offsets within a tile. Programs of neighbouring channels start together, so that they read full rows."""
    across = tl.cdiv(units * UNIT, COLUMNS)
    sample = (tl.program_id(0) // across).to(tl.int64)
    channel = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.program_id(1).to(tl.int64) * span * ROWS
    height = tl.minimum(rows - before, span * ROWS).to(tl.int32)
    place = tl.arange(0, ROWS)[:, None] * (units * UNIT) + channel[None, :]
    return channel, channel < units * UNIT, sample * (units * UNIT) + channel, sample * rows + before, height, place


@triton.jit
def _store_partial(first, second, partial_, at, exists, units, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the two sums of this strip to ``partial_`` [strips, 2, S*C]."""
    columns = (tl.num_programs(0) // tl.cdiv(units * UNIT, COLUMNS)).to(tl.int64) * (units * UNIT)
    partial_ += tl.program_id(1) * 2 * columns + at
    tl.store(partial_, first, exists)
    tl.store(partial_ + columns, second, exists)


@triton.jit
def _params(mean_, variance_, weight_, bias_, eps, channel, at, exists):
    """Return mean, scale and shift of each channel [1, COLUMNS], and 1 / deviation [COLUMNS]."""
    invstd = tl.rsqrt(tl.load(variance_ + at, exists, other=1.0) + eps)
    mean, scale = tl.load(mean_ + at, exists, other=0.0), invstd * tl.load(weight_ + channel, exists, other=0.0)
    return mean[None, :], scale[None, :], tl.load(bias_ + channel, exists, other=0.0)[None, :], invstd


@triton.jit
def _activation(z, ACT: tl.constexpr):
    """Return the activation. It propagates NaN."""
    if ACT == "relu":
        z = tl.where(z <= 0.0, 0.0, z)
    elif ACT == "silu":
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def _activation_backward(dy, z, ACT: tl.constexpr):
    """Return the gradient of the input of the activation. A rectifier passes the gradient at NaN, as in torch."""
    if ACT == "relu":
        dy = tl.where(z <= 0.0, 0.0, dy)
    elif ACT == "silu":
        part = tl.sigmoid(z)
        dy = dy * (part * (1.0 + z * (1.0 - part)))
    return dy


@_jit
def _moments(x_, partial_, rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and sum of squared deviations: Welford's recurrence in each element of the tile, then Chan's formula over its rows."""
    _, exists, at, first, height, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    mean, squares = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.cdiv(height, ROWS)):
        inside = row < height - tile * ROWS
        x = tl.load(x_ + (first + tile * ROWS) * (units * UNIT) + place, inside & exists[None, :], other=0.0).to(tl.float32)
        off = tl.where(inside, x - mean, 0.0)
        mean += off * (1.0 / (tile + 1.0))
        squares += off * (x - mean)
    count = ((height + ROWS - 1 - row) // ROWS).to(tl.float32)
    middle = tl.sum(count * mean, 0) / height
    middle += tl.sum(count * (mean - middle[None, :]), 0) / height  # the rounding error of the first sum
    off = mean - middle[None, :]
    _store_partial(middle, tl.sum(squares + count * off * off, 0), partial_, at, exists, units, UNIT, COLUMNS)


@_jit
def _sums(
    dy_, x_, y_, dz_, mean_, variance_, weight_, bias_, eps, partial_, rows, units, span, ACT: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, at, first, height, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, scale, shift, _ = _params(mean_, variance_, weight_, bias_, eps, channel, at, exists)
    grad_weight, grad_bias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.cdiv(height, ROWS)):
        offsets = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < height - tile * ROWS) & exists[None, :]
        dz = tl.load(dy_ + offsets, mask, other=0.0).to(tl.float32)
        off = tl.load(x_ + offsets, mask, other=0.0).to(tl.float32) - mean
        if y_ is None:
            dz = _activation_backward(dz, off * scale + shift, ACT)
        else:  # there is a residual
            dz = _activation_backward(dz, tl.load(y_ + offsets, mask, other=0.0).to(tl.float32), ACT)
            tl.store(dz_ + offsets, dz.to(dz_.dtype.element_ty), mask)
        grad_weight += dz * off
        grad_bias += dz
    invstd = tl.rsqrt(tl.load(variance_ + at, exists, other=1.0) + eps)  # loaded here: the loop needs the registers
    _store_partial(tl.sum(grad_weight, 0) * invstd, tl.sum(grad_bias, 0), partial_, at, exists, units, UNIT, COLUMNS)


@_jit
def _merge(
    partial_, one_, two_, rows, span, parts, columns, group, MOMENTS: tl.constexpr, GROUPED: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reduce two sums over strips of ``span`` rows, or, ``MOMENTS``, mean and variance, in float64, where a large mean loses no
    digits. Each statistic is that of ``group`` neighbouring channels of ``columns``, more than one if ``GROUPED``."""
    own = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    sum_1, sum_2 = tl.zeros((PARTS, COLUMNS), tl.float64), tl.zeros((PARTS, COLUMNS), tl.float64)
    for start in range(0, parts * group, PARTS):
        piece = start + tl.arange(0, PARTS)[:, None]
        part, column = piece.to(tl.int64), own
        if GROUPED:
            part, column = (piece // group).to(tl.int64), own * group + piece % group
        mask, offsets = (part < parts) & (column < columns), partial_ + part * 2 * columns + column
        first = tl.load(offsets, mask, other=0.0).to(tl.float64)
        second = tl.load(offsets + columns, mask, other=0.0).to(tl.float64)
        if MOMENTS:
            count = tl.minimum(rows - part * span, span).to(tl.float64)
            second += count * first * first
            first *= count
        sum_1 += first
        sum_2 += second
    first, second, exists = tl.sum(sum_1, 0)[None, :], tl.sum(sum_2, 0)[None, :], own < columns // group
    if MOMENTS:
        first /= rows.to(tl.float64) * group
        second = second / (rows.to(tl.float64) * group) - first * first
        second = tl.where(second < 0.0, 0.0, second)  # propagates NaN
    tl.store(one_ + own, first.to(tl.float32), exists)
    tl.store(two_ + own, second.to(tl.float32), exists)


@_jit
def _normalise(
    x_, plus_, y_, mean_, variance_, weight_, bias_, eps, rows, units, span, ACT: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, at, first, height, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, scale, shift, _ = _params(mean_, variance_, weight_, bias_, eps, channel, at, exists)
    for tile in range(tl.cdiv(height, ROWS)):
        offsets = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < height - tile * ROWS) & exists[None, :]
        # x*scale + (shift - mean*scale) would lose digits to a mean far larger than the deviation.
        z = (tl.load(x_ + offsets, mask, other=0.0).to(tl.float32) - mean) * scale + shift
        if plus_ is not None:
            z += tl.load(plus_ + offsets, mask, other=0.0).to(tl.float32)
        tl.store(y_ + offsets, _activation(z, ACT).to(y_.dtype.element_ty), mask)


@_jit
def _grad_input(
    dy_, x_, dx_, mean_, variance_, weight_, bias_, eps, grad_weight_, grad_bias_, rows, units, span, ACT: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, at, first, height, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, scale, shift, invstd = _params(mean_, variance_, weight_, bias_, eps, channel, at, exists)
    x_coefficient = (invstd * invstd * tl.load(grad_weight_ + at, exists, other=0.0))[None, :]
    constant = (invstd * tl.load(grad_bias_ + at, exists, other=0.0))[None, :]
    for tile in range(tl.cdiv(height, ROWS)):
        offsets = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < height - tile * ROWS) & exists[None, :]
        dz = tl.load(dy_ + offsets, mask, other=0.0).to(tl.float32)
        off = tl.load(x_ + offsets, mask, other=0.0).to(tl.float32) - mean
        dz = _activation_backward(dz, off * scale + shift, ACT)
        tl.store(dx_ + offsets, (scale * dz - constant - off * x_coefficient).to(dx_.dtype.element_ty), mask)


class _Plan(NamedTuple):
    """``grid``: programs over the channels of all samples, and strips of ``span`` tiles over the rows of each."""

    form: torch.memory_format
    grid: tuple[int, int]
    sizes: tuple[int, int, int]
    shape: dict[str, int]


def _plan(x: Tensor, samples: int) -> _Plan:
    channels = x.shape[1]
    rows, unit = x.numel() // (channels * samples), UNIT if channels % UNIT == 0 else 1
    columns = min(triton.next_power_of_2(channels), min(COLUMNS, key=lambda n: triton.cdiv(channels, n) * n))
    across, tiles = triton.cdiv(channels, columns) * samples, triton.cdiv(rows, TILE // columns)
    span = max(1, triton.cdiv(tiles, max(1, PROGRAMS // across)))
    shape = {"UNIT": unit, "ROWS": TILE // columns, "COLUMNS": columns, "num_warps": WARPS}
    form = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return _Plan(form, (across, max(1, triton.cdiv(tiles, span))), (rows, channels // unit, span), shape)


def _like(x: Tensor, form: torch.memory_format, **given: Tensor | None) -> list[Tensor | None]:
    """Return the tensors in the memory format of ``x``. Raises ValueError for another shape, past whose end a kernel would read."""
    for name, value in given.items():
        if value is not None and value.shape != x.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected {list(x.shape)}, that of x")
    return [None if value is None else value.contiguous(memory_format=form) for value in given.values()]


def _partial(x: Tensor, plan: _Plan, samples: int) -> Tensor:
    return torch.empty(plan.grid[1], 2, samples * x.shape[1], dtype=torch.float32, device=x.device)


def _merged(partial: Tensor, plan: _Plan, group: int, MOMENTS: bool) -> Tensor:
    (rows, _, span), (parts, _, columns) = plan.sizes, partial.shape
    both = torch.empty(2, columns // group, dtype=torch.float32, device=partial.device)
    _merge[(triton.cdiv(columns // group, SECTOR),)](
        partial, *both, rows, span * plan.shape["ROWS"], parts, columns, group, MOMENTS=MOMENTS, GROUPED=group > 1, PARTS=PARTS,
        COLUMNS=SECTOR, num_warps=WARPS,
    )  # fmt: skip
    return both


def moments(x: Tensor, samples: int, group: int) -> Tensor:
    """Return mean and biased variance [2, S*C/group] float32."""
    plan = _plan(x, samples)
    with torch.cuda.device_of(x):
        partial = _partial(x, plan, samples)
        _moments[plan.grid](x, partial, *plan.sizes, **plan.shape)
        return _merged(partial, plan, group, True)


def normalise(x: Tensor, params: NormParams, residual: Tensor | None) -> Tensor:
    """Return act(weight * (x - mean) / sqrt(variance + eps) + bias + residual), in the dtype and memory format of ``x``."""
    plan = _plan(x, params.samples)
    (residual,) = _like(x, plan.form, residual=residual)
    y = torch.empty_like(x, memory_format=plan.form)
    with torch.cuda.device_of(x):
        _normalise[plan.grid](x, residual, y, *params[:5], *plan.sizes, ACT=params.act, **plan.shape)
    return y


def saves_output(params: NormParams, residual: bool) -> bool:
    """Whether the backward pass needs y: the input of the activation is recomputed, unless there is a residual."""
    return residual and params.act is not None


def sums(dy: Tensor, x: Tensor, y: Tensor | None, params: NormParams) -> tuple[Tensor, Tensor]:
    """Return dz, the gradient of the input of the activation, and the sums of dz*(x - mean)*invstd and of dz [2, S*C] float32.

    Without y the first is ``dy``: ``grad_input`` recomputes dz, which is never written. With y, reading y again would cost as much
    as reading dz.
    """
    plan = _plan(x, params.samples)
    dy_, y_ = _like(x, plan.form, dy=dy, y=y)
    dz = None if y is None else torch.empty_like(dy, memory_format=plan.form)
    with torch.cuda.device_of(x):
        partial = _partial(x, plan, params.samples)
        _sums[plan.grid](dy_, x, y_, dz, *params[:5], partial, *plan.sizes, ACT=params.act, **plan.shape)
        return dy if dz is None else dz, _merged(partial, plan, 1, False)


def grad_input(dy: Tensor, x: Tensor, params: NormParams, grad_weight: Tensor, grad_bias: Tensor) -> Tensor:
    """Return invstd * (weight*dz - grad_bias - (x - mean)*invstd*grad_weight), with dz the gradient of the input of the
    activation."""
    plan = _plan(x, params.samples)
    (dy_,) = _like(x, plan.form, dy=dy)
    dx = torch.empty_like(x, memory_format=plan.form)
    with torch.cuda.device_of(x):
        _grad_input[plan.grid](dy_, x, dx, *params[:5], grad_weight, grad_bias, *plan.sizes, ACT=params.act, **plan.shape)
    return dx
