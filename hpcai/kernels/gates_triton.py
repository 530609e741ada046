# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``gate`` and ``swiglu``, in float32 arithmetic: one for each pass, which reads and writes every element once.

For the 256 projections of 256 x 256 pairs of a triangle multiplication in bf16, the forward pass moves 96 MiB and the backward pass
160; the reference, with its intermediate tensors, moves 224 and 416. SwiGLU moves 672 and 1,120 MiB for 8,192 tokens of 14,336
channels; operations of torch move 1,120 and 1,792, and save silu(gate), too.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.kernels.chunking import both

# Elements of a tile: 16 a thread of each tensor, 8 KiB in bf16. At 3.35 TB/s (H100) and a latency of 0.8 us, 20 KB must be in
# flight to each of 132 multiprocessors; five programs that read two tensors (48 registers a thread in bf16) load 80 KiB.
TILE, WARPS = 4096, 8
# Elements of a vector load: 16 bytes of a 16-bit type. Strides that are no multiples of it take scalar loads.
UNIT = 8

# Kernels are not specialised on sizes: each crop would be one more compilation.
_jit = triton.jit(do_not_specialize=["rows", "inner", "units", "x0", "x1", "g0", "g1", "m0", "m1"])


@triton.jit
def _tile(rows, inner, units, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows of this program, their indices in [outer, inner], its columns, and the mask of its elements."""
    columns = units.to(tl.int64) * UNIT
    across = tl.cdiv(columns, COLUMNS).to(tl.int32)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = ((tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, (row // inner).to(tl.int64), (row % inner).to(tl.int64), column, (row < rows)[:, None] & (column < columns)


@triton.jit
def _factor(g, SILU: tl.constexpr):
    """Return the factor of ``x``, sigmoid(g) or silu(g), and its derivative."""
    s = tl.sigmoid(g)
    return (g * s, s * (1.0 + g * (1.0 - s))) if SILU else (s, s * (1.0 - s))


@triton.jit
def _mask(mask_, row, rows, outer, own, m0, m1, column, exists, UNIT: tl.constexpr, SPREAD: tl.constexpr):
    if SPREAD:  # one value for a row
        value = tl.load(mask_ + (outer * m0 + own * m1)[:, None], (row < rows)[:, None], other=0.0)
    else:
        value = tl.load(mask_ + (outer * (m0 * UNIT) + own * (m1 * UNIT))[:, None] + column, exists, other=0.0)
    return value.to(tl.float32)


@_jit
def _forward(
    x_, g_, mask_, y_, rows, inner, units, x0, x1, g0, g1, m0, m1, UNIT: tl.constexpr, SPREAD: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, outer, own, column, exists = _tile(rows, inner, units, UNIT, ROWS, COLUMNS)
    x = tl.load(x_ + (outer * (x0 * UNIT) + own * (x1 * UNIT))[:, None] + column, exists, other=0.0).to(tl.float32)
    g = tl.load(g_ + (outer * (g0 * UNIT) + own * (g1 * UNIT))[:, None] + column, exists, other=0.0).to(tl.float32)
    y = x * _factor(g, SILU)[0]
    if mask_ is not None:
        y *= _mask(mask_, row, rows, outer, own, m0, m1, column, exists, UNIT, SPREAD)
    tl.store(y_ + row.to(tl.int64)[:, None] * (units * UNIT) + column, y.to(y_.dtype.element_ty), exists)


@_jit
def _backward(
    dy_, x_, g_, mask_, dx_, dg_, rows, inner, units, x0, x1, g0, g1, m0, m1, UNIT: tl.constexpr, SPREAD: tl.constexpr,
    SILU: tl.constexpr, LIKE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``LIKE``: gradients have the strides of ``x`` and ``g``; otherwise they are contiguous."""
    row, outer, own, column, exists = _tile(rows, inner, units, UNIT, ROWS, COLUMNS)
    here = row.to(tl.int64)[:, None] * (units * UNIT) + column
    x_here, g_here = (outer * (x0 * UNIT) + own * (x1 * UNIT))[:, None], (outer * (g0 * UNIT) + own * (g1 * UNIT))[:, None]
    x_here, g_here = x_here + column, g_here + column
    x = tl.load(x_ + x_here, exists, other=0.0).to(tl.float32)
    g = tl.load(g_ + g_here, exists, other=0.0).to(tl.float32)
    dy = tl.load(dy_ + here, exists, other=0.0).to(tl.float32)
    if mask_ is not None:
        dy *= _mask(mask_, row, rows, outer, own, m0, m1, column, exists, UNIT, SPREAD)
    factor, slope = _factor(g, SILU)
    tl.store(dx_ + (x_here if LIKE else here), (dy * factor).to(dx_.dtype.element_ty), exists)
    tl.store(dg_ + (g_here if LIKE else here), (dy * slope * x).to(dg_.dtype.element_ty), exists)


class _Plan(NamedTuple):
    x: Tensor
    g: Tensor
    mask: Tensor | None
    programs: int
    kwargs: dict[str, Any]


def _plan(x: Tensor, g: Tensor, mask: Tensor | None) -> _Plan:
    """Return the tensors in strides that the kernels can read, mostly their own, and the arguments of the launch."""
    dense = x.contiguous, g.contiguous
    for get_x, get_g, get_mask in (
        (lambda: x, lambda: g, lambda: mask),
        (lambda: x, lambda: g, lambda: mask if mask is None else mask.contiguous()),
        (*dense, lambda: mask if mask is None else mask.contiguous()),
        (*dense, lambda: mask if mask is None else mask.expand(x.shape).contiguous()),
    ):
        tensors = get_x(), get_g(), get_mask()
        kwargs = _launch_kwargs(*tensors)
        if kwargs is not None:
            columns = kwargs["units"] * kwargs["UNIT"]
            programs = triton.cdiv(kwargs["rows"], kwargs["ROWS"]) * triton.cdiv(columns, kwargs["COLUMNS"])
            return _Plan(*tensors, programs, kwargs)
    raise AssertionError("contiguous tensors are one row")


def _launch_kwargs(x: Tensor, g: Tensor, mask: Tensor | None) -> dict[str, Any] | None:
    """Return the arguments of a launch over [outer, inner, columns], with contiguous columns, or one element of the mask for a
    row; None if the strides do not allow it."""
    steps = [t.expand(x.shape).stride() for t in (x, g, *([] if mask is None else [mask]))]
    dims: list[tuple[int, list[int]]] = []
    for size, each in zip(x.shape, zip(*steps)):
        if size == 1:
            continue
        if dims and all(above == step * size for above, step in zip(dims[-1][1], each)):
            dims[-1] = dims[-1][0] * size, list(each)
        else:
            dims.append((size, list(each)))
    if len(dims) > 3 or (dims and dims[-1][1][:2] != [1, 1]) or (dims and mask is not None and dims[-1][1][2] not in (0, 1)):
        return None
    dims = [(1, [0] * len(steps))] * (3 - len(dims)) + dims
    (outer, over), (inner, step), (columns, last) = dims
    spread = mask is not None and last[2] == 0
    (x0, x1), (g0, g1), (m0, m1) = [*zip(over, step), (0, 0)][:3]
    even = all(n % UNIT == 0 for n in (columns, x0, x1, g0, g1, *(() if spread else (m0, m1))))
    unit = UNIT if even else 1
    wide = min(TILE, triton.next_power_of_2(max(1, columns)))
    apart = 1 if spread else unit
    return {
        "rows": outer * inner, "inner": inner, "units": columns // unit, "x0": x0 // unit, "x1": x1 // unit, "g0": g0 // unit,
        "g1": g1 // unit, "m0": m0 // apart, "m1": m1 // apart, "UNIT": unit, "SPREAD": spread, "ROWS": TILE // wide,
        "COLUMNS": wide, "num_warps": WARPS,
    }  # fmt: skip


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor | None, mask: Tensor | None, silu: bool) -> Tensor:
        plan = _plan(*both(x, g), mask)
        y = torch.empty_like(plan.x, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(x):
            _forward[(plan.programs,)](plan.x, plan.g, plan.mask, y, SILU=silu, **plan.kwargs)
        ctx.silu = silu
        ctx.save_for_backward(*((x, g) if g is None else (plan.x, plan.g)), mask)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, g, mask = ctx.saved_tensors
        plan, dx = _plan(*both(x, g), mask), torch.empty_like(x, memory_format=torch.contiguous_format)
        dg = None if g is None else torch.empty_like(dx)
        with torch.cuda.device_of(x):
            outputs = both(dx, dg)
            _backward[(plan.programs,)](dy.contiguous(), *plan[:3], *outputs, SILU=ctx.silu, LIKE=g is None, **plan.kwargs)
        return dx, dg, None, None


def glu_halves(xg: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``gate`` of the halves of one tensor along dim 1, contiguous. Its gradient is one tensor, too."""
    return _Gate.apply(xg.contiguous(), None, mask, False)


def gate(x: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return x * sigmoid(g) * mask, contiguous, as batched matrix products and linear layers read it.

    Chunks of a tensor along a dim before the last, and masks that are broadcast along adjacent dims, are read in place. Tensors
    with other strides are copied first.
    """
    return _Gate.apply(x, g, mask, False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous. Raises ValueError for tensors of two shapes."""
    if gate.shape != up.shape:  # a kernel would read past the end
        raise ValueError(f"gate has shape {list(gate.shape)}, up {list(up.shape)}; expected the same")
    return _Gate.apply(up, gate, None, True)
