"""Batch normalisation, alone or over several processes, with the sum and the rectifier that follow it (Ioffe and Szegedy 2015).

    y = relu(weight * (x - mean) / sqrt(variance + eps) + bias + plus)

``x`` [B, C, ...] float32, float64, bfloat16 or float16; ``weight``, ``bias``, statistics [C] float32 (float64 for a float64 ``x``).
Statistics cover all B*... values of a channel on all processes over which ``total`` adds a small tensor, in place: one message
forward, one backward. On CUDA and channels-last memory each pass over ``x`` is one Triton kernel (``batchnorm_triton``); elsewhere
it is the plain-torch twin in this file. Nothing is read from the device.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import compiler

Total = Callable[[Tensor], Tensor]


def moments(x: Tensor, total: Total | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance [C] of each channel, and the count of its values [] float64, over all processes."""
    mean, variance = _passes(x).moments(x)
    return agreed(mean, variance, x.numel() // x.shape[1], total)


def agreed(mean: Tensor, variance: Tensor, count: int, total: Total | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance [C] and count [] float64 over all processes, from those of this one's ``count`` values a channel."""
    if total is None:
        return mean, variance, torch.full((), count, dtype=torch.float64, device=mean.device)
    # Values and their squares are added in float64: a mean far larger than the deviation costs no digits, and counts may differ.
    wide = mean.double()
    message = torch.cat((wide, variance.double() + wide.square(), wide.new_ones(1))) * count
    sums = total(message)
    every, squares = (sums[:-1] / sums[-1]).chunk(2)
    return every.to(mean.dtype), (squares - every.square()).clamp_(min=0).to(mean.dtype), sums[-1]


def normalise(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, plus: Tensor | None,
              relu: bool) -> Tensor:  # fmt: skip
    """y, in the dtype and memory format of ``x``."""
    return _passes(x).normalise(x, mean, variance, weight, bias, eps, plus, relu)


def gradients(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, count: Tensor, weight: Tensor, eps: float,
              total: Total | None, need_plus: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients by x, plus, weight, bias; those by weight and bias count this process's values alone.

    ``y``: what ``normalise`` returned, where it was rectified, otherwise None.
    """
    invstd = (variance + eps).rsqrt()
    dz, dweight, dbias = sums(dy, x, y, mean, invstd, need_plus)
    over = shares(dweight, dbias, count, total)
    masked = need_plus or y is None  # then dz is the gradient before the rectifier; otherwise it may be dy
    return by_input(dz, x, None if masked else y, mean, invstd, weight, *over), dz if need_plus else None, dweight, dbias


def sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, invstd: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dz, and the sums of dz*(x - mean)*invstd and of dz [C] over this process's values. dz is the gradient before the rectifier;
    without ``keep`` it may be ``dy``, which ``by_input`` then rectifies."""
    return _passes(x).sums(dy.contiguous(memory_format=_format(x)), x, y, mean, invstd, keep)


def shares(dweight: Tensor, dbias: Tensor, count: Tensor, total: Total | None) -> tuple[Tensor, Tensor]:
    """The two sums over all processes, divided by ``count`` values [C]."""
    both = torch.cat((dweight, dbias))
    if total is not None:
        both = total(both)
    by_weight, by_bias = (both / count.to(both.dtype)).chunk(2)
    return by_weight, by_bias


def by_input(dz: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, invstd: Tensor, weight: Tensor, by_weight: Tensor,
             by_bias: Tensor) -> Tensor:  # fmt: skip
    """The gradient by x, from what ``sums`` and ``shares`` found; ``y`` where dz is not rectified yet."""
    return _passes(x).by_input(dz, x, y, mean, invstd, weight, by_weight, by_bias)


def _format(x: Tensor) -> torch.memory_format:
    for ndim, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.ndim == ndim and x.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


def _passes(x: Tensor) -> Any:
    if compiler.takes(x) and x.dtype != torch.float64 and _format(x) is not torch.contiguous_format:
        return _triton()
    return _Plain


@cache
def _triton() -> Any:
    return import_module("hpcai.kernels.batchnorm_triton")


class _Plain:
    """The passes over the values by operations of torch, whose CPU forms are vectorised over channels-last memory."""

    @staticmethod
    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.device.type == "cpu":
            folded, fold = _folded(x)
            scratch = torch.zeros(folded.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
            mean, variance = torch.batch_norm_update_stats(folded, scratch, scratch.clone(), 0.0)  # in the dtype of ``scratch``
            if fold == 1:
                return mean, variance
            means, variances = mean.double().view(fold, -1), variance.double().view(fold, -1)
            every = means.mean(0)
            return every.to(mean.dtype), (variances + (means - every).square()).mean(0).to(mean.dtype)
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, [d for d in range(x.ndim) if d != 1], correction=0)
        return mean, variance

    @staticmethod
    def normalise(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float, plus: Tensor | None,
                  relu: bool) -> Tensor:  # fmt: skip
        y = F.batch_norm(x, mean, variance, weight, bias, eps=eps)
        if plus is not None:
            y.add_(plus)
        return y.relu_() if relu else y

    @staticmethod
    def sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, invstd: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """dz, the gradient before the rectifier, and the sums of dz*(x - mean)*invstd and of dz [C]."""
        dz = dy if y is None else torch.ops.aten.threshold_backward(dy, y, 0)
        (dz_, fold), (x_, _) = (_folded(dz), _folded(x)) if x.device.type == "cpu" else ((dz, 1), (x, 1))
        m, i = (v.repeat(fold) for v in (mean, invstd))
        _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dz_, x_, torch.ones_like(m), m, m, m, i, True, 0.0, (False, True, True)
        )
        if fold > 1:
            dweight, dbias = (v.view(fold, -1).sum(0, dtype=torch.float64).to(v.dtype) for v in (dweight, dbias))
        return dz, dweight, dbias

    @staticmethod
    def by_input(dz: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, invstd: Tensor, weight: Tensor, by_weight: Tensor,
                 by_bias: Tensor) -> Tensor:  # fmt: skip
        """weight*invstd * (dz - by_bias - (x - mean)*invstd*by_weight); ``y`` has no part: dz is rectified already."""
        scale = weight * invstd
        one, slope = torch.ones_like(scale), -scale * invstd * by_weight
        dx = F.batch_norm(x, mean, one, slope, -scale * by_bias, eps=0.0)
        if dx.dtype == scale.dtype:
            return dx.addcmul_(dz, scale.view(1, -1, *[1] * (x.ndim - 2)))
        return dx.add_(F.batch_norm(dz, torch.zeros_like(scale), one, scale, eps=0.0))


def _folded(x: Tensor) -> tuple[Tensor, int]:
    """``x`` with ``fold`` neighbouring places as channels beside each other [rows, fold * C, 1, 1], and ``fold``. Outside
    channels-last memory, and in float64, ``x`` stays as it is and ``fold`` is 1.

    torch adds rows up in float32, one after the other. The variance of 64^3 voxels then has a relative error of 7e-5; with 64 sums
    instead of one it is 3e-7, at no cost.
    """
    if _format(x) is torch.contiguous_format or x.dtype == torch.float64:
        return x, 1
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    fold = next((n for n in range(min(64, rows // 16), 1, -1) if rows % n == 0), 1)
    return (x.movedim(1, -1).reshape(-1, fold * channels, 1, 1), fold) if fold > 1 else (x, 1)
