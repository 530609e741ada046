"""The mean of outer products over the sequences of an alignment, in its projection (Algorithm 10 of AlphaFold's supplement).

The outer products have a thousand channels for each pair of residues and are never there at once: they are made for a few residues
at a time, and again in the backward pass.   B batch, S sequences, I and J residues, A and C channels.
"""

from typing import Any

import torch
from torch import Tensor

_CPU, _GPU = 8 << 20, 1 << 28  # bytes of outer products at a time


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


def _parts(a: Tensor, b: Tensor) -> Any:
    several = max(1, (_CPU if a.device.type == "cpu" else _GPU) // (a.element_size() * b.shape[2] * a.shape[3] ** 2))
    return ((n, slice(first, first + several)) for n in range(len(a)) for first in range(0, a.shape[2], several))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left [A, I, S] contiguous, right [S, J, A] -> [I, J, A, A] as rows of [I * J, A * A], the channels of ``right`` inside"""
    channels, few, _ = left.shape
    found = left.flatten(0, 1) @ right.flatten(1)  # [A * I, J * A]
    return found.view(channels, few, -1, channels).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, weight, bias, count)
        out = a.new_empty(len(a), a.shape[2], b.shape[2], len(weight))
        for n, rows in _parts(a, b):
            left = a[n, :, rows].permute(2, 1, 0).contiguous()
            into = out[n, rows]
            torch.addmm(bias, _products(left, b[n].contiguous()), weight.T, out=into.flatten(0, 1))
            into /= count[n, rows, :, None]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, weight, bias, count = ctx.saved_tensors
        channels = a.shape[3]
        d_a, d_b = torch.empty_like(a), torch.zeros_like(b)
        d_weight, d_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for n, rows in _parts(a, b):
            left, right = a[n, :, rows].permute(2, 1, 0).contiguous(), b[n].contiguous()
            above = (grad[n, rows] / count[n, rows, :, None]).flatten(0, 1)  # [I * J, C]
            d_weight.addmm_(above.T, _products(left, right))
            d_bias += above.sum(0)
            d = (above @ weight).view(left.shape[1], -1, channels, channels).permute(2, 0, 1, 3).flatten(2).flatten(0, 1)
            d_a[n, :, rows] = (d @ right.flatten(1).T).view(left.shape).permute(2, 1, 0)
            d_b[n] += (left.flatten(0, 1).T @ d).view(right.shape)
        return d_a, d_b, d_weight, d_bias, None
