"""Gated attention of rows over their entries, with a mask and a bias that all rows share (Algorithm 7 of AlphaFold's supplement).

On CUDA the passes are the kernels of ``attention_triton``; elsewhere rows are computed a few at a time, so that their
logits stay in the cache of a CPU. The probabilities of each row are not kept; the backward pass computes them again.
B batch, I rows, N entries of a row, H heads, C channels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.kernels import compiler
from hpcai.kernels.room import several

_ABSENT = -1e9  # the logit of a masked entry: a row with none present gives a plain mean, not NaN
_CPU = 4 << 20  # bytes of logits that a CPU computes at a time


def gated_attention(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(C) + bias) v * sigmoid(g + gate_bias); softmax and sums in float32 at least.

    qkvg [B, I, N, 4, H, C] of any strides, gate_bias [H * C], mask [B, I, N] (1: present), bias [B, H, N, N] -> [B, I, N, H * C]
    """
    if _fused(qkvg):
        from hpcai.kernels import attention_triton  # a statement is traced by torch.compile, a call that imports is not

        return attention_triton.gated_attention(qkvg, gate_bias, mask, bias)
    if torch.compiler.is_compiling():
        return plain(qkvg, gate_bias, mask, bias)
    return _Attention.apply(qkvg, gate_bias, mask, bias)


def _fused(qkvg: Tensor) -> bool:
    """Whether the kernels take it: on a GPU, in a type and a width that they have."""
    return compiler.takes(qkvg) and qkvg.dtype in (torch.bfloat16, torch.float32) and qkvg.shape[-1] <= 64


def plain(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for all rows at once."""
    q, k, v, g = qkvg.permute(3, 0, 1, 4, 2, 5)  # [B, I, H, N, C]
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).to(wide) + ((1 - mask) * _ABSENT).to(wide)[..., None, None, :]
    p = (logits if bias is None else logits + bias[:, None]).softmax(-1).to(v.dtype)
    o = (p @ v).transpose(-2, -3).flatten(-2)
    return o * (g.transpose(-2, -3).flatten(-2) + gate_bias.to(g.dtype)).sigmoid()


class _Part(NamedTuple):
    """Some rows and heads, P of them together."""

    q: Tensor  # [P, N, C]
    k: Tensor
    v: Tensor
    p: Tensor  # [P, N, N] probabilities
    o: Tensor  # [P, N, C] before the gate
    gate: Tensor  # [P, N, C]


def _part(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> _Part:
    """qkvg [I, N, 4, H, C], gate_bias [H, C], mask [I, N], bias [H, N, N]"""
    q, k, v, g = (x.flatten(0, 1) for x in qkvg.permute(2, 0, 3, 1, 4))  # for one head these are views, which products can read
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
    return _Part(q, k, v, p, p.to(v.dtype) @ v, gate)


def _parts(qkvg: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """What is computed at a time: one head on a CPU, which costs it no copy; as much as fits on a GPU."""
    batch, rows, entries, _, heads, _ = qkvg.shape
    few = 1 if compiler.on_cpu(qkvg) else heads
    step = several(qkvg, 4 * few * entries * entries, _CPU)
    for b in range(batch):
        for first in range(0, rows, step):
            for head in range(0, heads, few):
                yield b, slice(first, first + step), slice(head, head + few)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(qkvg[..., 0, :, :])  # [B, I, N, H, C]
        with torch.autocast(qkvg.device.type, enabled=False):
            for part, at in _each(qkvg, gate_bias, mask, bias):
                into = out[at[0], at[1], :, at[2]].transpose(1, 2)  # [I, H, N, C]
                torch.mul(part.o.view(into.shape), part.gate.view(into.shape), out=into)
        ctx.save_for_backward(qkvg, gate_bias, mask, bias)
        return out.flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkvg, gate_bias, mask, bias = ctx.saved_tensors
        scale = qkvg.shape[-1] ** -0.5
        d, grad = torch.empty_like(qkvg), grad.unflatten(-1, qkvg.shape[-2:])
        d_bias = None if bias is None else torch.zeros_like(bias)
        for part, at in _each(qkvg, gate_bias, mask, bias):
            b, rows, heads = at
            q, k, v, g = d[b, rows, :, :, heads].permute(2, 0, 3, 1, 4)  # their gradients [I, H, N, C]
            d_o = grad[b, rows, :, heads].transpose(1, 2).flatten(0, 1) * part.gate
            torch.mul((d_o * part.o).view(g.shape), (1 - part.gate).view(g.shape), out=g)
            v.copy_((part.p.to(d_o.dtype).transpose(1, 2) @ d_o).view(v.shape))
            d_p = (d_o @ part.v.transpose(1, 2)).to(part.p.dtype)
            d_logits = torch.ops.aten._softmax_backward_data(d_p, part.p, -1, part.p.dtype)
            if d_bias is not None:
                d_bias[b, heads] += d_logits.unflatten(0, (-1, q.shape[1])).sum(0)
            d_logits = d_logits.to(q.dtype)
            torch.mul((d_logits @ part.k).view(q.shape), scale, out=q)
            torch.mul((d_logits.transpose(1, 2) @ part.q).view(k.shape), scale, out=k)
        return d, d[..., 3, :, :].sum((0, 1, 2)).flatten().to(gate_bias.dtype), None, d_bias


def _each(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Iterator[tuple[_Part, tuple[int, slice, slice]]]:
    gates = gate_bias.view(qkvg.shape[-2:])
    for b, rows, heads in _parts(qkvg):
        shared = None if bias is None else bias[b, heads]
        yield _part(qkvg[b, rows, :, :, heads], gates[heads], mask[b, rows], shared), (b, rows, heads)
