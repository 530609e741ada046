"""RMS normalisation over the last dim (Zhang and Sennrich 2019): y = weight * x / sqrt(mean(x^2) + eps).

On CUDA and for up to 8,192 channels this is one Triton kernel for each pass (``layernorm_triton``). Arithmetic is in float32 at
least. The saved tensors are ``x`` and one element of each row.
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.chunking import chunk_size
from hpcai.kernels.layernorm import _autocast_dtype

MAX_CHANNELS = 8192  # a program of the kernels holds full rows
_CPU = 1 << 18  # bytes of a chunk of one tensor on a CPU: four of them fit its cache
_SMALL = 1 << 14  # elements that are not chunked


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, autocast_output: bool = False) -> Tensor:
    """Return the normalised ``x``, contiguous, in its dtype.

    ``autocast_output``: Return the dtype of autocast inside autocast, for results that only matrix products read; not of float64.
    Shape: x [..., C], weight [C] -> [..., C]
    """
    dtype = _autocast_dtype(x) if autocast_output else x.dtype
    if _is_small(x, weight):
        return (x * _rstd(x, eps, x.dtype)).mul_(weight).to(dtype)
    if triton_support.needs_plain_ops():
        return reference(x, weight, eps).to(dtype)
    if triton_support.is_supported_float(x) and 0 < x.shape[-1] <= MAX_CHANNELS:
        from hpcai.kernels import layernorm_triton

        return layernorm_triton.rms_norm(x, weight, eps, dtype)
    return _RMSNorm.apply(x, weight, eps, dtype)


def reference(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute ``rms_norm`` with operations of torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def _is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether these are few tokens on a CPU without gradients, where most of the time is that of starting operations. The result
    has the same bits with gradients."""
    small = not torch.is_grad_enabled() and x.numel() <= _SMALL and x.dtype == weight.dtype and triton_support.on_cpu(x)
    return small and x.dtype in (torch.float32, torch.float64) and not triton_support.needs_plain_ops()


class _RMSNorm(torch.autograd.Function):
    """RMS norm in chunks of rows, whose intermediate tensors fit the cache of a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide, rows = torch.promote_types(x.dtype, torch.float32), x.reshape(-1, x.shape[-1])
        y = torch.empty(rows.shape, dtype=dtype, device=x.device)
        rstd, factor = torch.empty(len(rows), 1, dtype=wide, device=x.device), weight.to(wide)
        for chunk, r, out in _chunks(rows, rstd, y):
            _rstd(chunk, eps, wide, r)
            out.copy_((chunk * r).mul_(factor))
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        rows, needs_grad = x.reshape(-1, x.shape[-1]), ctx.needs_input_grad[1]
        d, factor = torch.empty_like(rows), weight.to(rstd.dtype)
        grad_weight = torch.zeros_like(factor)
        for chunk, dy, r, out in _chunks(rows, grad.reshape(rows.shape), rstd, d):
            hat, g = chunk * r, dy * factor
            if needs_grad:
                grad_weight += (dy * hat).sum(0)
            mean_g = (g * hat).sum(-1, keepdim=True).div_(-x.shape[-1])
            out.copy_(g.addcmul_(hat, mean_g).mul_(r))
        return d.view(x.shape), grad_weight.to(weight.dtype) if needs_grad else None, None, None


def _rstd(x: Tensor, eps: float, wide: torch.dtype, out: Tensor | None = None) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide, out=out)
    return norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()


def _chunks(rows: Tensor, *others: Tensor) -> Any:
    step = chunk_size(rows, 4 * max(rows.shape[-1], 1), _CPU)
    return zip(rows.split(step), *(x.split(step) for x in others))
