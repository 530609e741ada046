# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of ``embedding_update``: its launch has the size of the padded batch, so that a step can be captured."""

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
    bag, last = tl.load(positions_ + first) // hotness, first + 1
    g = tl.load(grad_ + bag * stride + d, inside, other=0.0).to(w_.dtype.element_ty)
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


def update(
    weight: Tensor, sum: Tensor | None, ids: Tensor, grad: Tensor, lr: Tensor | None, scale: Tensor | None,
    found_inf: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """Update a table; without ``sum``, write the gradients of rows to ``weight``.   ids [N, H], grad [N, D]"""
    (rows, channels), n = weight.shape, ids.numel()
    if not n or not rows:
        return
    order, positions = torch.sort(ids.flatten(), stable=True)  # equal ids in a fixed order: sums are reproducible
    kind = "dense" if sum is None else "elementwise" if sum.shape == weight.shape else "rowwise"
    width = triton.next_power_of_2(channels)
    sizes = {"D": channels, "BLOCK": max(1024 // width, 1), "WIDTH": width, "num_warps": max(width // 128, 1)}
    with torch.cuda.device_of(weight):
        update_rows[(n,)](order, positions, grad, weight, sum, lr, scale, found_inf, n, rows, ids.shape[1], grad.stride(0), eps,
                          KIND=kind, **sizes)  # fmt: skip
