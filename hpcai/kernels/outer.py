"""The mean of outer products over the sequences of an alignment, in its projection (Algorithm 10 of AlphaFold's supplement).

The outer products have a thousand channels for each pair of residues and are never all in memory: they are made for a few residues
at a time, and again in the backward pass.   B batch, S sequences, I and J residues, A and C channels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpcai.kernels.room import several

_CPU = 8 << 20  # bytes of outer products that a CPU makes at a time


def outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    """(sum over s of a_si x b_sj, in projection, + bias) / count.

    a [B, S, I, A], b [B, S, J, A], weight [C, A * A] with the channels of a outside, bias [C], count [B, I, J] -> [B, I, J, C]
    """
    if torch.compiler.is_compiling():
        return plain(a, b, weight, bias, count)
    device = a.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.dtype
    with torch.autocast(device, enabled=False):  # the parts are written in place, where autocast does not reach
        return _Outer.apply(a.to(kind), b.to(kind), weight.to(kind), bias.to(kind), count)


def plain(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
    outer = torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2)
    return torch.nn.functional.linear(outer, weight, bias) / count[..., None]


def _parts(a: Tensor, b: Tensor) -> Iterator[tuple[int, slice]]:
    step = several(a, a.element_size() * b.shape[2] * a.shape[3] ** 2, _CPU)
    return ((n, slice(first, first + step)) for n in range(len(a)) for first in range(0, a.shape[2], step))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left [I, S, A], right [S, J, A] -> [I * J, A * A], the channels of ``left`` inside, as the product writes them"""
    return (right.flatten(1).T.expand(len(left), -1, -1) @ left).view(-1, left.shape[2] ** 2)


def _turned(weight: Tensor, channels: int) -> Tensor:
    """The projection, with the channels of a inside.   [C, A * A] -> [C, A * A]"""
    return weight.view(-1, channels, channels).transpose(1, 2).flatten(1)


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, weight, bias, count)
        out = a.new_empty(len(a), a.shape[2], b.shape[2], len(weight))
        turned = _turned(weight, a.shape[3]).T
        for n, rows in _parts(a, b):
            into = out[n, rows]
            torch.addmm(bias, _products(a[n, :, rows].transpose(0, 1), b[n]), turned, out=into.flatten(0, 1))
            into /= count[n, rows, :, None]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, weight, _, count = ctx.saved_tensors
        channels = a.shape[3]
        d_a, d_b, turned = torch.empty_like(a), torch.empty_like(b), _turned(weight, channels)
        d_weight: Any = None
        d_bias: Any = None
        for n, rows in _parts(a, b):
            left, right = a[n, :, rows].transpose(0, 1), b[n]  # [I, S, A], [S, J, A]
            above = (grad[n, rows] / count[n, rows, :, None]).flatten(0, 1)  # [I * J, C]
            made = _products(left, right)
            d_weight = above.T @ made if d_weight is None else d_weight.addmm_(above.T, made)
            d_bias = above.sum(0) if d_bias is None else d_bias.add_(above.sum(0))
            d = (above @ turned).view(len(left), -1, channels)  # [I, J * A, A]
            d_a[n, :, rows] = (right.flatten(1).expand(len(left), -1, -1) @ d).transpose(0, 1)
            by_right = (left @ d.transpose(1, 2)).sum(0).view(right.shape)
            d_b[n] = by_right if rows.start == 0 else d_b[n] + by_right
        return d_a, d_b, _turned(d_weight, channels), d_bias, None
