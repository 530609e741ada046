"""Gated attention within each row, with a mask and a bias that all rows share (Algorithm 7 of AlphaFold's supplement).

On CUDA this is ``attention_triton``; elsewhere rows are computed in chunks whose logits stay in the cache of a CPU. Probabilities
are not saved; the backward pass recomputes them.   B batch, I rows, N entries of a row, H heads, C channels.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.chunking import chunk_size

_ABSENT = -1e9  # added to the logits of masked entries: a row that is masked as a whole gives the mean, not NaN
_CPU = 4 << 20  # bytes of the logits of a chunk on a CPU


def gated_attention(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(q k / sqrt(C) + bias) v * sigmoid(g + gate_bias), with softmax and sums in float32 at least.

    Shape: qkvg [B, I, N, 4, H, C] of any strides, gate_bias [H * C], mask [B, I, N] (1: present), bias [B, H, N, N]
        -> [B, I, N, H * C]
    """
    if _fused(qkvg):
        from hpcai.kernels import attention_triton  # torch.compile traces an import statement, and no import_module

        return attention_triton.gated_attention(qkvg, gate_bias, mask, bias)
    if triton_support.needs_plain_ops():
        return reference(qkvg, gate_bias, mask, bias)
    return _Attention.apply(qkvg, gate_bias, mask, bias)


def _fused(qkvg: Tensor) -> bool:
    """Whether the Triton kernels support this tensor."""
    return triton_support.is_supported_float(qkvg) and qkvg.shape[-1] <= 64


def reference(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute attention for all rows together."""
    q, k, v, g = qkvg.permute(3, 0, 1, 4, 2, 5)  # [B, I, H, N, C]
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).to(wide) + ((1 - mask) * _ABSENT).to(wide)[..., None, None, :]
    p = (logits if bias is None else logits + bias[:, None]).softmax(-1).to(v.dtype)
    o = (p @ v).transpose(-2, -3).flatten(-2)
    return o * (g.transpose(-2, -3).flatten(-2) + gate_bias.to(g.dtype)).sigmoid()


class _Chunk(NamedTuple):
    """Attention of a chunk of rows and heads, P in all."""

    q: Tensor  # [P, N, C]
    k: Tensor
    v: Tensor
    p: Tensor  # [P, N, N] probabilities
    o: Tensor  # [P, N, C] before the gate
    gate: Tensor  # [P, N, C]


def _compute_chunk(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> _Chunk:
    """Compute a chunk.   qkvg [I, N, 4, H, C], gate_bias [H, C], mask [I, N], bias [H, N, N]"""
    q, k, v, g = (x.flatten(0, 1) for x in qkvg.permute(2, 0, 3, 1, 4))  # views, for one head, that products can read
    rows, entries, _, heads, channels = qkvg.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    absent = ((1 - mask.to(wide)) * _ABSENT)[:, None, None]
    start = absent if bias is None else absent + bias
    logits = start.expand(rows, heads, entries, entries).reshape(-1, entries, entries)
    if q.dtype == wide:
        logits = torch.baddbmm(logits, q, k.transpose(1, 2), alpha=channels**-0.5)
    else:
        logits = logits.add((q @ k.transpose(1, 2)).to(wide), alpha=channels**-0.5)
    p = logits.softmax(-1)
    gate = (g.unflatten(0, (rows, heads)) + gate_bias.to(g.dtype)[:, None]).sigmoid_().flatten(0, 1)
    return _Chunk(q, k, v, p, p.to(v.dtype) @ v, gate)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(qkvg[..., 0, :, :])  # [B, I, N, H, C]
        with torch.autocast(qkvg.device.type, enabled=False):
            for chunk, at in _chunks(qkvg, gate_bias, mask, bias):
                target = out[at[0], at[1], :, at[2]].transpose(1, 2)  # [I, H, N, C]
                torch.mul(chunk.o.view(target.shape), chunk.gate.view(target.shape), out=target)
        ctx.save_for_backward(qkvg, gate_bias, mask, bias)
        return out.flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkvg, gate_bias, mask, bias = ctx.saved_tensors
        scale = qkvg.shape[-1] ** -0.5
        d, grad = torch.empty_like(qkvg), grad.unflatten(-1, qkvg.shape[-2:])
        d_bias = None if bias is None else torch.zeros_like(bias)
        for chunk, at in _chunks(qkvg, gate_bias, mask, bias):
            b, rows, heads = at
            q, k, v, g = d[b, rows, :, :, heads].permute(2, 0, 3, 1, 4)  # their gradients [I, H, N, C]
            d_o = grad[b, rows, :, heads].transpose(1, 2).flatten(0, 1) * chunk.gate
            torch.mul((d_o * chunk.o).view(g.shape), (1 - chunk.gate).view(g.shape), out=g)
            v.copy_((chunk.p.to(d_o.dtype).transpose(1, 2) @ d_o).view(v.shape))
            d_p = (d_o @ chunk.v.transpose(1, 2)).to(chunk.p.dtype)
            d_logits = torch.ops.aten._softmax_backward_data(d_p, chunk.p, -1, chunk.p.dtype)
            if d_bias is not None:
                d_bias[b, heads] += d_logits.unflatten(0, (-1, q.shape[1])).sum(0)
            d_logits = d_logits.to(q.dtype)
            torch.mul((d_logits @ chunk.k).view(q.shape), scale, out=q)
            torch.mul((d_logits.transpose(1, 2) @ chunk.q).view(k.shape), scale, out=k)
        return d, d[..., 3, :, :].sum((0, 1, 2)).flatten().to(gate_bias.dtype), None, d_bias


def _chunks(
    qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None
) -> Iterator[tuple[_Chunk, tuple[int, slice, slice]]]:
    """Yield each chunk, with its batch, rows and heads: one head on a CPU, which saves copies, and all heads on a GPU."""
    gates, (batch, rows, entries, _, heads, _) = gate_bias.view(qkvg.shape[-2:]), qkvg.shape
    heads_of_chunk = 1 if triton_support.on_cpu(qkvg) else heads
    step = chunk_size(qkvg, 4 * heads_of_chunk * entries * entries, _CPU)
    for b, first, head in product(range(batch), range(0, rows, step), range(0, heads, heads_of_chunk)):
        i, h = slice(first, first + step), slice(head, head + heads_of_chunk)
        yield _compute_chunk(qkvg[b, i, :, :, h], gates[h], mask[b, i], None if bias is None else bias[b, h]), (b, i, h)
