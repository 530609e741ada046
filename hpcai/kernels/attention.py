"""Gated attention of rows over their entries, with a mask and a bias that all rows share (Algorithm 7 of AlphaFold's supplement).

No row's probabilities outlive it: rows are computed a few at a time, so that logits stay in the cache of a CPU, and the backward
pass computes them again from the projections, which is all that is kept.
B batch, I rows, N entries of a row, H heads, C channels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ABSENT = -1e9  # the logit of a masked entry: a row with none present is a plain mean, not NaN
_CPU, _GPU = 4 << 20, 1 << 28  # bytes of logits at a time


def gated_attention(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(C) + bias) v * sigmoid(g + gate_bias); softmax and sums in float32 at least.

    qkvg [B, I, N, 4, H, C] of any strides, gate_bias [H * C], mask [B, I, N] (1: present), bias [B, H, N, N] -> [B, I, N, H * C]
    """
    if torch.compiler.is_compiling():
        return plain(qkvg, gate_bias, mask, bias)
    return _Attention.apply(qkvg, gate_bias, mask, bias)


def plain(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, of all rows at once."""
    q, k, v, g = qkvg.permute(3, 0, 1, 4, 2, 5)  # [B, I, H, N, C]
    p = _logits(q, k, mask, bias).softmax(-1).to(v.dtype)
    o = (p @ v).transpose(-2, -3).flatten(-2)
    return o * (g.transpose(-2, -3).flatten(-2) + gate_bias.to(g.dtype)).sigmoid()


def _logits(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    """[..., I, H, N, C] -> [..., I, H, N, N]"""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).to(wide)
    if bias is not None:
        logits += bias.unsqueeze(-4)
    return logits.add_(((1 - mask) * _ABSENT).to(wide)[..., None, None, :])


class _Row(NamedTuple):
    q: Tensor  # [I, H, N, C]
    k: Tensor
    v: Tensor
    p: Tensor  # [I, H, N, N] probabilities
    o: Tensor  # [I, H, N, C] before the gate
    gate: Tensor  # [I, H, N, C]


def _row(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> _Row:
    q, k, v, g = qkvg.permute(2, 0, 3, 1, 4).contiguous()
    p = _logits(q, k, mask, bias).softmax(-1)
    return _Row(q, k, v, p, p.to(v.dtype) @ v, (g + gate_bias.to(g.dtype).view(len(g[0]), 1, -1)).sigmoid())


def _parts(qkvg: Tensor) -> Iterator[tuple[int, slice]]:
    batch, rows, entries, _, heads, _ = qkvg.shape
    several = max(1, (_CPU if qkvg.device.type == "cpu" else _GPU) // (4 * heads * entries * entries))
    return ((b, slice(first, first + several)) for b in range(batch) for first in range(0, rows, several))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(qkvg[..., 0, :, :])  # [B, I, N, H, C]
        for b, rows in _parts(qkvg):
            row = _row(qkvg[b, rows], gate_bias, mask[b, rows], None if bias is None else bias[b])
            torch.mul(row.o, row.gate, out=out[b, rows].transpose(1, 2))
        ctx.save_for_backward(qkvg, gate_bias, mask, bias)
        return out.flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkvg, gate_bias, mask, bias = ctx.saved_tensors
        scale = qkvg.shape[-1] ** -0.5
        d, grad = torch.empty_like(qkvg), grad.unflatten(-1, qkvg.shape[-2:])
        d_bias = None if bias is None else torch.zeros_like(bias)
        for b, rows in _parts(qkvg):
            row = _row(qkvg[b, rows], gate_bias, mask[b, rows], None if bias is None else bias[b])
            q, k, v, g = d[b, rows].permute(2, 0, 3, 1, 4)  # of each its gradient
            d_out = grad[b, rows].transpose(1, 2)
            d_o = d_out * row.gate
            torch.mul(d_o * row.o, 1 - row.gate, out=g)
            v.copy_(row.p.to(d_o.dtype).transpose(-1, -2) @ d_o)
            d_p = (d_o @ row.v.transpose(-1, -2)).to(row.p.dtype)
            d_logits = torch.ops.aten._softmax_backward_data(d_p, row.p, -1, row.p.dtype)
            if d_bias is not None:
                d_bias[b] += d_logits.sum(0)
            d_logits = d_logits.to(q.dtype)
            torch.mul(d_logits @ row.k, scale, out=q)
            torch.mul(d_logits.transpose(-1, -2) @ row.q, scale, out=k)
        return d, d[..., 3, :, :].sum((0, 1, 2)).flatten().to(gate_bias.dtype), None, d_bias
