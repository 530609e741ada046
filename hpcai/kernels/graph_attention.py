"""Attention of nodes over their incoming edges (GAT: Velickovic et al. 2018).

N sources, M destinations, E edges in ascending order of their destination, H heads, C channels of a head
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.segments import reduce_segments, segment_ends


def graph_attention(source_score: Tensor, destination_score: Tensor, x: Tensor, edges: Tensor, slope: float = 0.2) -> Tensor:
    """Return sum_j a_ij x_j over the edges j -> i, with a_ij the softmax over them of LeakyReLU(source_score_j +
    destination_score_i); on CUDA by the kernels of ``graph_attention_triton``. Destinations without edges get 0. All sums are in a
    fixed order, also those of gradients.

    ``edges``: sources and destinations, the latter ascending. The softmax has the dtype of the scores, the result that of ``x``.
    Shape: source_score [N, H], destination_score [M, H], x [N, H, C], or [N, C] for all heads, edges [2, E] -> [H, M, C]
    """
    if triton_support.needs_plain_ops():
        return reference(source_score, destination_score, x, edges, slope)
    if triton_support.is_supported_float(x) and source_score.dtype == torch.float32:
        from hpcai.kernels.graph_attention_triton import GraphAttention

        return GraphAttention.apply(source_score, destination_score, x, edges, slope)
    return _GraphAttention.apply(source_score, destination_score, x, edges, slope)


def reference(source_score: Tensor, destination_score: Tensor, x: Tensor, edges: Tensor, slope: float = 0.2) -> Tensor:
    """Compute ``graph_attention`` with differentiable operations of torch."""
    (source, destination), (count, heads) = edges, destination_score.shape
    e = F.leaky_relu(source_score[source] + destination_score[destination], slope)
    index = destination[:, None].expand(-1, heads)
    top = e.new_full((count, heads), -torch.inf).scatter_reduce(0, index, e.detach(), "amax")
    p = (e - top[destination]).exp()
    a = p / p.new_zeros(count, heads).index_add(0, destination, p)[destination]
    values = (x if x.ndim == 3 else x[:, None])[source] * a[..., None].to(x.dtype)
    return x.new_zeros(count, heads, x.shape[-1]).index_add(0, destination, values).transpose(0, 1)


class _GraphAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source_score: Tensor, destination_score: Tensor, x: Tensor, edges: Tensor, slope: float
    ) -> Tensor:  # fmt: skip
        (source, destination), (count, heads) = edges, destination_score.shape
        ends = segment_ends(destination, count)
        e = source_score.index_select(0, source).add_(destination_score.index_select(0, destination))
        is_positive = e > 0
        e = F.leaky_relu_(e, slope)
        e = e.sub_(reduce_segments(e, ends, "max").index_select(0, destination)).exp_()
        a = e.div_(reduce_segments(e, ends, "sum").index_select(0, destination))
        rows, bags = _bags(source, ends, x, heads)
        out = F.embedding_bag(rows, x.flatten(0, -2), bags, mode="sum", per_sample_weights=a.t().flatten().to(x.dtype))
        ctx.save_for_backward(x, edges, a, is_positive)
        ctx.slope, ctx.sizes = slope, (len(source_score), count)
        return out.view(heads, count, x.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, (source, destination), a, is_positive = ctx.saved_tensors
        (sources, count), heads = ctx.sizes, a.shape[1]
        grad, ends = grad.contiguous(), segment_ends(destination, count)
        numbers = torch.arange(heads, device=x.device)
        rows = source[:, None] * heads + numbers if x.ndim == 3 else source[:, None].expand(-1, heads)
        bag_of_row = destination[:, None] + count * numbers  # by edge, so that the heads of an edge find its rows in the cache
        grad_a = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad.flatten(0, 1), x.flatten(0, -2), rows.flatten(), ends, bag_of_row.flatten(), 0
        )  # fmt: skip
        grad_e = grad_a.view_as(a).to(a.dtype) * a
        grad_e = grad_e - a * reduce_segments(grad_e, ends, "sum").index_select(0, destination)
        grad_e = torch.where(is_positive, grad_e, ctx.slope * grad_e)
        order = source.argsort(stable=True)
        by_source = segment_ends(source.index_select(0, order), sources)
        grad_x = None
        if ctx.needs_input_grad[2]:
            rows = bag_of_row.index_select(0, order)
            weights, first = a.index_select(0, order).to(x.dtype), by_source[:-1]
            if x.ndim == 3:
                rows, weights, first = rows.t(), weights.t(), first + len(source) * numbers[:, None]
            else:
                first = first * heads
            grad_x = F.embedding_bag(
                rows.flatten(), grad.flatten(0, 1), first.flatten(), mode="sum", per_sample_weights=weights.flatten()
            )  # fmt: skip
            grad_x = grad_x.view(heads, sources, x.shape[-1]).transpose(0, 1) if x.ndim == 3 else grad_x
        sums = reduce_segments(grad_e.index_select(0, order), by_source, "sum"), reduce_segments(grad_e, ends, "sum")
        return *sums, grad_x, None, None


def _bags(source: Tensor, ends: Tensor, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return rows of ``x`` [N H, C] or [N, C] for each head and edge, and their first one of each head and destination.
    [H E], [H M]"""
    numbers = torch.arange(heads, device=source.device)[:, None]
    rows = source * heads + numbers if x.ndim == 3 else source.expand(heads, -1)
    return rows.flatten(), (ends[:-1] + len(source) * numbers).flatten()
