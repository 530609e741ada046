# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``batchnorm``, in float32 arithmetic. Code that depends on a pointer that is None is not compiled.

``x`` in channels-last memory is S matrices [M, C], one for each sample that has statistics of its own. A program goes down a strip
of one, tile by tile: what belongs to a channel is read once, and sums stay in registers until the strip ends. The strips' sums are
written, and ``_merge`` adds them, always in one order. Statistics [S*C] lie sample after sample.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.batchnorm import ACTIVATIONS, Rule

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
_jit = triton.jit(do_not_specialize=["rows", "units", "span", "parts", "columns", "group"])


@triton.jit
def _strip(rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The channels of this program, which of them exist, where their statistics lie; its first row in 64 bits, its count of rows,
    the places in a tile.

    Programs of neighbouring channels start together, so that they read whole rows.
    """
    across = tl.cdiv(units * UNIT, COLUMNS)
    sample = (tl.program_id(0) // across).to(tl.int64)
    channel = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.program_id(1).to(tl.int64) * span * ROWS
    own = tl.minimum(rows - before, span * ROWS).to(tl.int32)
    place = tl.arange(0, ROWS)[:, None] * (units * UNIT) + channel[None, :]
    return channel, channel < units * UNIT, sample * (units * UNIT) + channel, sample * rows + before, own, place


@triton.jit
def _keep(one, two, partial_, at, exists, units, UNIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Write this strip's two sums to ``partial_`` [strips, 2, S*C]."""
    columns = (tl.num_programs(0) // tl.cdiv(units * UNIT, COLUMNS)).to(tl.int64) * (units * UNIT)
    partial_ += tl.program_id(1) * 2 * columns + at
    tl.store(partial_, one, exists)
    tl.store(partial_ + columns, two, exists)


@triton.jit
def _rule(mean_, variance_, weight_, bias_, eps, channel, at, exists):
    """Mean, scale and shift of each channel [1, COLUMNS], and 1 / deviation [COLUMNS]."""
    invstd = tl.rsqrt(tl.load(variance_ + at, exists, other=1.0) + eps)
    mean, scale = tl.load(mean_ + at, exists, other=0.0), invstd * tl.load(weight_ + channel, exists, other=0.0)
    return mean[None, :], scale[None, :], tl.load(bias_ + channel, exists, other=0.0)[None, :], invstd


@triton.jit
def _activated(z, slope, ACT: tl.constexpr):
    """A NaN stays."""
    if ACT == "relu":
        z = tl.where(z <= 0.0, 0.0, z)
    elif ACT == "leaky_relu":
        z = tl.where(z <= 0.0, slope * z, z)
    elif ACT == "silu":
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def _through(dy, z, slope, ACT: tl.constexpr):
    """The gradient before the activation, from that after it. A NaN lets it through a rectifier, as in torch."""
    if ACT == "relu":
        dy = tl.where(z <= 0.0, 0.0, dy)
    elif ACT == "leaky_relu":
        dy = tl.where(z <= 0.0, slope * dy, dy)
    elif ACT == "silu":
        part = tl.sigmoid(z)
        dy = dy * (part * (1.0 + z * (1.0 - part)))
    return dy


@_jit
def _moments(x_, partial_, rows, units, span, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Welford's recurrence in each place of the tile, then Chan's formula over the places: mean and sum of squares about it."""
    _, exists, at, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
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
    _keep(middle, tl.sum(squares + count * off * off, 0), partial_, at, exists, units, UNIT, COLUMNS)


@_jit
def _sums(
    dy_, x_, y_, dz_, mean_, variance_, weight_, bias_, eps, slope, partial_, rows, units, span, ACT: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, at, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, scale, shift, _ = _rule(mean_, variance_, weight_, bias_, eps, channel, at, exists)
    by_weight, by_bias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.cdiv(own, ROWS)):
        here = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < own - tile * ROWS) & exists[None, :]
        dz = tl.load(dy_ + here, mask, other=0.0).to(tl.float32)
        off = tl.load(x_ + here, mask, other=0.0).to(tl.float32) - mean
        if y_ is None:
            dz = _through(dz, off * scale + shift, slope, ACT)
        else:  # something was added before the activation
            dz = _through(dz, tl.load(y_ + here, mask, other=0.0).to(tl.float32), slope, ACT)
            tl.store(dz_ + here, dz.to(dz_.dtype.element_ty), mask)
        by_weight += dz * off
        by_bias += dz
    invstd = tl.rsqrt(tl.load(variance_ + at, exists, other=1.0) + eps)  # not held during the loop, whose registers are few
    _keep(tl.sum(by_weight, 0) * invstd, tl.sum(by_bias, 0), partial_, at, exists, units, UNIT, COLUMNS)


@_jit
def _merge(
    partial_, one_, two_, rows, span, parts, columns, group, MOMENTS: tl.constexpr, GROUPED: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Two sums over strips of ``span`` rows; or mean and variance, from squares in float64, where a large mean costs no digits.

    Each statistic is that of ``group`` neighbouring channels of ``columns``, more than one if ``GROUPED``.
    """
    own = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    one, two = tl.zeros((PARTS, COLUMNS), tl.float64), tl.zeros((PARTS, COLUMNS), tl.float64)
    for start in range(0, parts * group, PARTS):
        piece = start + tl.arange(0, PARTS)[:, None]
        part, column = piece.to(tl.int64), own
        if GROUPED:
            part, column = (piece // group).to(tl.int64), own * group + piece % group
        mask, here = (part < parts) & (column < columns), partial_ + part * 2 * columns + column
        first = tl.load(here, mask, other=0.0).to(tl.float64)
        second = tl.load(here + columns, mask, other=0.0).to(tl.float64)
        if MOMENTS:
            count = tl.minimum(rows - part * span, span).to(tl.float64)
            second += count * first * first
            first *= count
        one += first
        two += second
    first, second, exists = tl.sum(one, 0)[None, :], tl.sum(two, 0)[None, :], own < columns // group
    if MOMENTS:
        first /= rows.to(tl.float64) * group
        second = second / (rows.to(tl.float64) * group) - first * first
        second = tl.where(second < 0.0, 0.0, second)  # a NaN stays
    tl.store(one_ + own, first.to(tl.float32), exists)
    tl.store(two_ + own, second.to(tl.float32), exists)


@_jit
def _normalise(
    x_, plus_, y_, mean_, variance_, weight_, bias_, eps, slope, rows, units, span, ACT: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, at, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, scale, shift, _ = _rule(mean_, variance_, weight_, bias_, eps, channel, at, exists)
    for tile in range(tl.cdiv(own, ROWS)):
        here = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < own - tile * ROWS) & exists[None, :]
        # The mean is taken off first: x*scale + (shift - mean*scale) would lose the digits of a mean far larger than the deviation.
        z = (tl.load(x_ + here, mask, other=0.0).to(tl.float32) - mean) * scale + shift
        if plus_ is not None:
            z += tl.load(plus_ + here, mask, other=0.0).to(tl.float32)
        tl.store(y_ + here, _activated(z, slope, ACT).to(y_.dtype.element_ty), mask)


@_jit
def _by_input(
    dy_, x_, dx_, mean_, variance_, weight_, bias_, eps, slope, by_weight_, by_bias_, rows, units, span, ACT: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    channel, exists, at, first, own, place = _strip(rows, units, span, UNIT, ROWS, COLUMNS)
    mean, scale, shift, invstd = _rule(mean_, variance_, weight_, bias_, eps, channel, at, exists)
    by_off = (invstd * invstd * tl.load(by_weight_ + at, exists, other=0.0))[None, :]
    by_one = (invstd * tl.load(by_bias_ + at, exists, other=0.0))[None, :]
    for tile in range(tl.cdiv(own, ROWS)):
        here = (first + tile * ROWS) * (units * UNIT) + place
        mask = (tl.arange(0, ROWS)[:, None] < own - tile * ROWS) & exists[None, :]
        dz = tl.load(dy_ + here, mask, other=0.0).to(tl.float32)
        off = tl.load(x_ + here, mask, other=0.0).to(tl.float32) - mean
        dz = _through(dz, off * scale + shift, slope, ACT)
        tl.store(dx_ + here, (scale * dz - by_one - off * by_off).to(dx_.dtype.element_ty), mask)


class _Plan(NamedTuple):
    """``grid``: programs across the channels of all samples, and ``strips`` of ``span`` tiles over the rows of each."""

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
    """Each tensor in the memory format of ``x``. A kernel would read past the end of one with another shape."""
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
    """Mean and biased variance [2, S*C/group] float32."""
    plan = _plan(x, samples)
    with torch.cuda.device_of(x):
        partial = _partial(x, plan, samples)
        _moments[plan.grid](x, partial, *plan.sizes, **plan.shape)
        return _merged(partial, plan, group, True)


def normalise(x: Tensor, rule: Rule, plus: Tensor | None) -> Tensor:
    """act(weight * (x - mean) / sqrt(variance + eps) + bias + plus), in the dtype and memory format of ``x``."""
    plan = _plan(x, rule.samples)
    (plus,) = _like(x, plan.form, plus=plus)
    y = torch.empty_like(x, memory_format=plan.form)
    with torch.cuda.device_of(x):
        _normalise[plan.grid](x, plus, y, *rule.numbers, *plan.sizes, ACT=rule.act, **plan.shape)
    return y


def keeps(rule: Rule, plus: bool) -> bool:
    """Whether the backward pass needs y: what ``x`` becomes is worked out anew, but not what was added to it."""
    return plus and rule.act is not None


def sums(dy: Tensor, x: Tensor, y: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """dz, the gradient before the activation, and the sums of dz*(x - mean)*invstd and of dz [2, S*C] float32.

    Without y the first is ``dy`` itself: ``by_input`` works dz out anew, and it is never written. With y, reading that again would
    cost as much as dz does.
    """
    plan = _plan(x, rule.samples)
    dy_, y_ = _like(x, plan.form, dy=dy, y=y)
    dz = None if y is None else torch.empty_like(dy, memory_format=plan.form)
    with torch.cuda.device_of(x):
        partial = _partial(x, plan, rule.samples)
        _sums[plan.grid](dy_, x, y_, dz, *rule.numbers, partial, *plan.sizes, ACT=rule.act, **plan.shape)
        return dy if dz is None else dz, _merged(partial, plan, 1, False)


def by_input(dy: Tensor, x: Tensor, rule: Rule, by_weight: Tensor, by_bias: Tensor) -> Tensor:
    """invstd * (weight*dz - by_bias - (x - mean)*invstd*by_weight), with dz the gradient before the activation of ``rule``."""
    plan = _plan(x, rule.samples)
    (dy_,) = _like(x, plan.form, dy=dy)
    dx = torch.empty_like(x, memory_format=plan.form)
    with torch.cuda.device_of(x):
        _by_input[plan.grid](dy_, x, dx, *rule.numbers, by_weight, by_bias, *plan.sizes, ACT=rule.act, **plan.shape)
    return dx


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constexprs) of what training launches, for compilation ahead of time."""
    acts, launched = [None, *ACTIVATIONS], list[tuple[Any, str, dict[str, Any]]]()
    launched += (
        (_moments, "", {}), *((_merge, "", {"MOMENTS": m, "GROUPED": g}) for m, g in ((True, False), (True, True), (False, False))),
        *((_normalise, "plus_", {"ACT": act}) for act in acts), (_normalise, "", {"ACT": "relu"}),
        *((_sums, "y_ dz_", {"ACT": act}) for act in acts), (_sums, "", {"ACT": "relu"}),
        *((_by_input, "", {"ACT": act}) for act in acts),
    )  # fmt: skip
    for kernel, absent, more in launched:
        shape = {"PARTS": PARTS, "COLUMNS": SECTOR} if kernel is _merge else {"UNIT": UNIT, "ROWS": TILE // 128, "COLUMNS": 128}
        names, fixed = kernel.arg_names, {**dict.fromkeys(absent.split()), **more, **shape}
        whole = [x for x in names if x in ("x_", "y_", "plus_", "dx_", "dy_", "dz_") and x not in fixed]
        for kind in ("bf16", "fp32") if whole else ("fp32",):
            scalar = {"eps": "fp32", "slope": "fp32"}
            types = {x: f"*{kind}" if x in whole else "*fp32" if x[-1] == "_" else scalar.get(x, "i32") for x in names}
            name = " ".join([kernel.fn.__name__, kind, *whole, *(f"{key}={value}" for key, value in more.items())])
            yield name, kernel, types | dict.fromkeys(fixed, "constexpr"), fixed
