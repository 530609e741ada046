"""Normalisation by the root of the mean square over the last dim (Zhang and Sennrich 2019): y = weight * x / sqrt(mean(x^2) + eps).

On CUDA and for up to 8,192 channels one Triton kernel each way (``rmsnorm_triton``); elsewhere the twin in this file. Both compute
in float32 at least and keep ``x`` and one number of each row.
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import compiler
from hpcai.kernels.layernorm import _narrow
from hpcai.kernels.room import several

WIDEST = 8192  # channels: a program of the kernels holds whole rows
_CPU = 1 << 18  # bytes of one tensor that a CPU computes with at a time: four of them stay in its cache
_FEW = 1 << 14  # values that are made at once


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, narrow: bool = False) -> Tensor:
    """x [..., C], weight [C] -> [..., C], contiguous, of the dtype of ``x``; inside autocast with ``narrow`` of autocast's, for
    what only products read. float64 stays float64."""
    dtype = _narrow(x) if narrow else x.dtype
    if _few(x, weight):
        return (x * _rstd(x, eps, x.dtype)).mul_(weight).to(dtype)
    if torch.compiler.is_compiling():
        return plain(x, weight, eps).to(dtype)
    if _fused(x):
        from hpcai.kernels import rmsnorm_triton

        return rmsnorm_triton.rms_norm(x, weight, eps, dtype)
    return _RMSNorm.apply(x, weight, eps, dtype)


def plain(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """The same by operations of torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def _few(x: Tensor, weight: Tensor) -> bool:
    """Whether these are a few tokens on a CPU without gradients, where starting operations is what takes the time.
    What is made of them has the bits that it has with gradients: ``hpcai.nn.again`` makes it so."""
    small = not torch.is_grad_enabled() and x.numel() <= _FEW and compiler.on_cpu(x) and not torch.compiler.is_compiling()
    return small and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)


def _fused(x: Tensor) -> bool:
    """Whether the kernels take it: on a GPU, in a type and a width that they have."""
    return compiler.takes(x) and x.dtype in (torch.bfloat16, torch.float32) and 0 < x.shape[-1] <= WIDEST


class _RMSNorm(torch.autograd.Function):
    """Some rows at a time, so that what is between lies in the cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide, rows = torch.promote_types(x.dtype, torch.float32), x.reshape(-1, x.shape[-1])
        y = torch.empty(rows.shape, dtype=dtype, device=x.device)
        rstd, factor = torch.empty(len(rows), 1, dtype=wide, device=x.device), weight.to(wide)
        for own, r, out in _parts(rows, rstd, y):
            _rstd(own, eps, wide, r)
            out.copy_((own * r).mul_(factor))
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        rows, learns = x.reshape(-1, x.shape[-1]), ctx.needs_input_grad[1]
        d, factor = torch.empty_like(rows), weight.to(rstd.dtype)
        by_weight = torch.zeros_like(factor)
        for own, above, r, out in _parts(rows, grad.reshape(rows.shape), rstd, d):
            hat, g = own * r, above * factor
            if learns:
                by_weight += (above * hat).sum(0)
            along = (g * hat).sum(-1, keepdim=True).div_(-x.shape[-1])
            out.copy_(g.addcmul_(hat, along).mul_(r))
        return d.view(x.shape), by_weight.to(weight.dtype) if learns else None, None, None


def _rstd(x: Tensor, eps: float, wide: torch.dtype, out: Tensor | None = None) -> Tensor:
    found = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide, out=out)
    return found.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _parts(rows: Tensor, *others: Tensor) -> Any:
    """The same rows of each."""
    step = several(rows, 4 * max(rows.shape[-1], 1), _CPU)
    return zip(rows.split(step), *(x.split(step) for x in others))
