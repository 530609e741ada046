"""Outer product mean over the sequences of an alignment, with its projection (Algorithm 10 of AlphaFold's supplement).

The outer products have a thousand channels for each pair of residues. They are computed for a few residues at a time, and again in
the backward pass, so that they never are in memory together.   B batch, S sequences, I and J residues, A and C channels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpcai.kernels.chunking import chunk_size
from hpcai.kernels.triton_support import needs_plain_ops

_CPU = 8 << 20  # bytes of the outer products of a chunk on a CPU


def outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """Return (projection of the sum over s of a_si x b_sj, + bias) / count.

    Shape:
        a [B, S, I, A], b [B, S, J, A], weight [C, A * A] with the channels of a outside, bias [C], count [B, I, J] -> [B, I, J, C]
    """
    if needs_plain_ops():
        return reference(a, b, weight, bias, count)
    device = a.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.dtype
    with torch.autocast(device, enabled=False):  # chunks are written by out=, which autocast does not cast
        return _OuterProductMean.apply(a.to(dtype), b.to(dtype), weight.to(dtype), bias.to(dtype), count)


def reference(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """Compute the outer product mean from the outer products of all residues."""
    outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2)
    return torch.nn.functional.linear(outer, weight, bias) / count[..., None]


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[int, slice]]:
    step = chunk_size(a, a.element_size() * b.shape[2] * a.shape[3] ** 2, _CPU)
    return ((n, slice(first, first + step)) for n in range(len(a)) for first in range(0, a.shape[2], step))


def _outer_products(left: Tensor, right: Tensor) -> Tensor:
    """left [I, S, A], right [S, J, A] -> [I * J, A * A], with the channels of ``left`` inside, as the product writes them."""
    return (right.flatten(1).T.expand(len(left), -1, -1) @ left).view(-1, left.shape[2] ** 2)


def _transpose_weight(weight: Tensor, channels: int) -> Tensor:
    """Return the projection with the channels of a inside.   [C, A * A] -> [C, A * A]"""
    return weight.view(-1, channels, channels).transpose(1, 2).flatten(1)


class _OuterProductMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, weight, bias, count)
        output = a.new_empty(len(a), a.shape[2], b.shape[2], len(weight))
        transposed = _transpose_weight(weight, a.shape[3]).T
        for n, rows in _chunks(a, b):
            out = output[n, rows]
            torch.addmm(bias, _outer_products(a[n, :, rows].transpose(0, 1), b[n]), transposed, out=out.flatten(0, 1))
            out /= count[n, rows, :, None]
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        a, b, weight, _, count = ctx.saved_tensors
        channels = a.shape[3]
        grad_a, grad_b, transposed = torch.empty_like(a), torch.empty_like(b), _transpose_weight(weight, channels)
        grad_weight: Any = None
        grad_bias: Any = None
        for n, rows in _chunks(a, b):
            left, right = a[n, :, rows].transpose(0, 1), b[n]  # [I, S, A], [S, J, A]
            grad = (grad_output[n, rows] / count[n, rows, :, None]).flatten(0, 1)  # [I * J, C]
            outer = _outer_products(left, right)
            grad_weight = grad.T @ outer if grad_weight is None else grad_weight.addmm_(grad.T, outer)
            grad_bias = grad.sum(0) if grad_bias is None else grad_bias.add_(grad.sum(0))
            grad_outer = (grad @ transposed).view(len(left), -1, channels)  # [I, J * A, A]
            grad_a[n, :, rows] = (right.flatten(1).expand(len(left), -1, -1) @ grad_outer).transpose(0, 1)
            grad_right = (left @ grad_outer.transpose(1, 2)).sum(0).view(right.shape)
            grad_b[n] = grad_right if rows.start == 0 else grad_b[n] + grad_right
        return grad_a, grad_b, _transpose_weight(grad_weight, channels), grad_bias, None
