# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``graph_attention``: a program has one node with all heads, and reads each of its edges.

For 250,000 sources of 1,024 features in bf16 and 300,000 edges to 70,000 destinations the forward pass reads 0.6 GB of rows and
writes 0.6 GB of sums. All sums are in float32 in the order of the edges: there are no atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.segments import reduce_segments, segment_ends

WARPS, WIDE, EDGES = 4, 1024, 16  # channels of a tile of all heads; edges of which scores are read at once
LOWEST = tl.constexpr(-1e30)  # below every score: without the NaN of infinities


@triton.jit
def _row(x_, row, channel, head, C: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr):
    """Return a row of all heads, or one for each, in float32.   [1 or SLOTS, WIDE]"""
    if SHARED:
        x = tl.load(x_ + row * C + channel, channel < C, other=0.0)[None, :]
    else:
        x = tl.load(x_ + (row * H + head[:, None]) * C + channel[None, :], (head < H)[:, None] & (channel < C)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["count", "slope"])
def _forward(
    source_score_, score_, x_, source_, ends_, a_, out_, count, slope, C: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr,
    SLOTS: tl.constexpr, EDGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    node, channel, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, SLOTS)
    begin, end = tl.load(ends_ + node), tl.load(ends_ + node + 1)
    score = tl.load(score_ + node * H + head, head < H, other=0.0)
    top, total = tl.full((SLOTS,), LOWEST, tl.float32), tl.zeros((SLOTS,), tl.float32)
    for first in range(begin, end, EDGES):
        edge = first + tl.arange(0, EDGES)
        mask = (edge < end)[:, None] & (head < H)[None, :]
        source = tl.load(source_ + edge, edge < end, other=0)
        e = tl.load(source_score_ + source[:, None] * H + head[None, :], mask, other=0.0) + score[None, :]
        e = tl.where(mask, tl.where(e > 0, e, slope * e), LOWEST)
        new = tl.maximum(top, tl.max(e, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(e - new[None, :]), 0)
        top = new
    sums = tl.zeros((SLOTS, WIDE), tl.float32)
    for edge in range(begin, end):
        source = tl.load(source_ + edge)
        e = tl.load(source_score_ + source * H + head, head < H, other=0.0) + score
        a = tl.exp(tl.where(e > 0, e, slope * e) - top) / total
        if tl.program_id(1) == 0:
            tl.store(a_ + edge * H + head, a, head < H)
        sums += a[:, None] * _row(x_, source, channel, head, C, H, SHARED)
    mask = (head < H)[:, None] & (channel < C)[None, :]
    tl.store(out_ + (head[:, None] * count + node) * C + channel[None, :], sums.to(out_.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["count", "slope"])
def _backward_scores(
    source_score_, score_, x_, source_, ends_, a_, out_, dout_, de_, dscore_, count, slope, C: tl.constexpr, H: tl.constexpr,
    SHARED: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    node, head = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    begin, end = tl.load(ends_ + node), tl.load(ends_ + node + 1)
    score = tl.load(score_ + node * H + head, head < H, other=0.0)
    mean, sums = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.float32)  # sum of a da, which is that of out dout
    for first in range(0, C, WIDE):
        channel = first + tl.arange(0, WIDE)
        at, mask = (head[:, None] * count + node) * C + channel[None, :], (head < H)[:, None] & (channel < C)[None, :]
        out = tl.load(out_ + at, mask, other=0.0).to(tl.float32)
        mean += tl.sum(out * tl.load(dout_ + at, mask, other=0.0).to(tl.float32), 1)
    for edge in range(begin, end):
        source, da = tl.load(source_ + edge), tl.zeros((SLOTS,), tl.float32)
        for first in range(0, C, WIDE):
            channel = first + tl.arange(0, WIDE)
            at, mask = (head[:, None] * count + node) * C + channel[None, :], (head < H)[:, None] & (channel < C)[None, :]
            da += tl.sum(tl.load(dout_ + at, mask, other=0.0).to(tl.float32) * _row(x_, source, channel, head, C, H, SHARED), 1)
        e = tl.load(source_score_ + source * H + head, head < H, other=0.0) + score
        de = tl.load(a_ + edge * H + head, head < H, other=0.0) * (da - mean)
        de = tl.where(e > 0, de, slope * de)
        tl.store(de_ + edge * H + head, de, head < H)
        sums += de
    tl.store(dscore_ + node * H + head, sums, head < H)


@triton.jit(do_not_specialize=["count"])
def _backward_rows(
    dout_, destination_, order_, ends_, a_, dx_, count, C: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr, SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    node, channel, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE), tl.arange(0, SLOTS)
    mask, sums = (head < H)[:, None] & (channel < C)[None, :], tl.zeros((SLOTS, WIDE), tl.float32)
    for place in range(tl.load(ends_ + node), tl.load(ends_ + node + 1)):
        edge = tl.load(order_ + place)
        at = (head[:, None] * count + tl.load(destination_ + edge)) * C + channel[None, :]
        a = tl.load(a_ + edge * H + head, head < H, other=0.0)
        sums += a[:, None] * tl.load(dout_ + at, mask, other=0.0).to(tl.float32)
    if SHARED:
        tl.store(dx_ + node * C + channel, tl.sum(sums, 0).to(dx_.dtype.element_ty), channel < C)
    else:
        tl.store(dx_ + (node * H + head[:, None]) * C + channel[None, :], sums.to(dx_.dtype.element_ty), mask)


class GraphAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source_score: Tensor, destination_score: Tensor, x: Tensor, edges: Tensor, slope: float) -> Tensor:
        count, heads = destination_score.shape
        scores, x = [s.float().contiguous() for s in (source_score, destination_score)], x.contiguous()
        source, destination = edges
        ends, shape = segment_ends(destination, count), _shape(x, heads)
        a, out = scores[0].new_empty(len(source), heads), x.new_empty(heads, count, x.shape[-1])
        if count:
            with torch.cuda.device_of(x):
                grid = count, triton.cdiv(x.shape[-1], shape["WIDE"])
                _forward[grid](*scores, x, source, ends, a, out, count, slope, **shape, EDGES=EDGES, num_warps=WARPS)
        ctx.save_for_backward(*scores, x, source, destination, ends, a, out)
        ctx.slope = slope
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        *scores, x, source, destination, ends, a, out = ctx.saved_tensors
        (count, heads), dout = scores[1].shape, dout.to(out.dtype).contiguous()
        shape, de, dscore = _shape(x, heads), torch.empty_like(a), torch.zeros_like(scores[1])
        order = source.argsort(stable=True)
        by_source, dx = segment_ends(source.index_select(0, order), len(x)), None
        with torch.cuda.device_of(x):
            if count:
                inputs = *scores, x, source, ends, a, out, dout, de, dscore
                _backward_scores[(count,)](*inputs, count, ctx.slope, **shape, num_warps=WARPS)
            if ctx.needs_input_grad[2]:
                dx = torch.zeros_like(x)
                if len(x):
                    grid = len(x), triton.cdiv(x.shape[-1], shape["WIDE"])
                    _backward_rows[grid](dout, destination, order, by_source, a, dx, count, **shape, num_warps=WARPS)
        return reduce_segments(de.index_select(0, order), by_source, "sum"), dscore, dx, None, None


def _shape(x: Tensor, heads: int) -> dict[str, Any]:
    slots = triton.next_power_of_2(heads)
    wide = min(triton.next_power_of_2(x.shape[-1]), max(4 * WIDE // slots, 16))
    return {"C": x.shape[-1], "H": heads, "SHARED": x.ndim == 2, "SLOTS": slots, "WIDE": wide}
