# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``embedding_update``: all sizes are those of the padded batch, so that a step can be captured."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def update_rows(
    order_, positions_, grad_, w_, s_, lr_, scale_, found_inf_, n, rows, hotness, stride, eps, D: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of all bags with one row, at the first of its ids in ascending order, and update the row."""
    first, lane, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    row = tl.load(order_ + first).to(tl.int64)
    begins = (row >= 0) & (row < rows) & (tl.load(order_ + first - 1, first > 0, other=-1) != row)
    if found_inf_ is not None:
        begins &= tl.load(found_inf_) != 1.0
    inside = d < tl.where(begins, D, 0)
    bag = tl.load(positions_ + first) // hotness
    g = tl.load(grad_ + bag * stride + d, inside, other=0.0).to(w_.dtype.element_ty)
    last = first + 1
    more = begins & (tl.load(order_ + last, last < n, other=-1) == row)
    while more:
        same = tl.load(order_ + last + lane, last + lane < n, other=-1) == row
        bags = tl.load(positions_ + last + lane, same, other=0) // hotness
        part = tl.load(grad_ + bags[:, None] * stride + d[None, :], same[:, None] & (d < D)[None, :], other=0.0)
        g += tl.sum(part.to(w_.dtype.element_ty), 0)
        more = tl.sum(same.to(tl.int32)) == BLOCK
        last += BLOCK
    if KIND == "dense":
        tl.store(w_ + row * D + d, g, inside)
    else:
        if scale_ is not None:
            g *= tl.load(scale_).to(g.dtype)
        w = tl.load(w_ + row * D + d, inside, other=0.0)
        if KIND == "rowwise":
            s = tl.load(s_ + row, begins, other=0.0) + tl.sum(g * g) / D
            tl.store(s_ + row, s, begins)
        else:
            s = tl.load(s_ + row * D + d, inside, other=0.0) + g * g
            tl.store(s_ + row * D + d, s, inside)
        tl.store(w_ + row * D + d, w - tl.load(lr_).to(g.dtype) * g / (tl.sqrt(s) + eps), inside)


@triton.jit
def pool_rows(
    ids_, w_, out_, rows, hotness, ids_stride, out_stride, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the rows of one bag."""
    bag, lane, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), w_.dtype.element_ty)
    for first in range(0, hotness, BLOCK):
        row = tl.load(ids_ + bag * ids_stride + first + lane, first + lane < hotness, other=-1).to(tl.int64)
        inside = ((row >= 0) & (row < rows))[:, None] & (d < D)[None, :]
        total += tl.sum(tl.load(w_ + row[:, None] * D + d[None, :], inside, other=0.0), 0)
    tl.store(out_ + bag * out_stride + d, total, d < D)


def update(
    weight: Tensor, sum: Tensor | None, ids: Tensor, grad: Tensor, lr: Tensor | None, scale: Tensor | None,
    found_inf: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """Launch the update; without ``sum``, write the gradients of rows to ``weight``."""
    (rows, channels), n = weight.shape, ids.numel()
    if not n or not rows:
        return
    order, positions = torch.sort(ids.flatten(), stable=True)  # equal ids in a fixed order: sums are reproducible
    kind = "dense" if sum is None else "elementwise" if sum.shape == weight.shape else "rowwise"
    width = triton.next_power_of_2(channels)
    with torch.cuda.device_of(weight):
        update_rows[(n,)](order, positions, grad, weight, sum, lr, scale, found_inf, n, rows, ids.shape[1], grad.stride(0), eps,
                          D=channels, KIND=kind, BLOCK=max(1024 // width, 1), WIDTH=width, num_warps=max(width // 128, 1))  # fmt: skip


def pool(ids: Tensor, weight: Tensor, out: Tensor) -> None:
    channels, hotness = weight.shape[1], ids.shape[1]
    width = triton.next_power_of_2(channels)
    block = min(triton.next_power_of_2(hotness), max(1024 // width, 1))
    with torch.cuda.device_of(weight):
        pool_rows[(len(ids),)](ids, weight, out, len(weight), hotness, ids.stride(0), out.stride(0), D=channels, BLOCK=block,
                               WIDTH=width, num_warps=max(width // 128, 1))  # fmt: skip
