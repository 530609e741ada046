"""Batch, instance and group normalisation, local or synchronised, fused with a residual sum and an activation.

    y = act(weight * (x - mean) / sqrt(variance + eps) + bias + residual)

``x`` [B, C, ...] is float32, float64, bfloat16 or float16; ``weight``, ``bias`` [C] and statistics are float32 (float64 for a
float64 x). Statistics [S*C] are those of S samples: S = 1, one for the batch (batch norm, Ioffe and Szegedy 2015), or S = B, one
for each sample (instance norm, Ulyanov et al. 2016), which neighbouring channels may share (group norm, Wu and He 2018). They are
synchronised over the ranks over which ``all_reduce`` sums a small tensor in place: one all-reduce in the forward pass, one in the
backward pass.

On CUDA in channels-last memory each pass over ``x`` is one Triton kernel for all samples (``batchnorm_triton``); elsewhere it is
the reference in this file. Nothing is read back from the device. The kernels save ``x`` alone and recompute the input of the
activation, unless there is a residual; the reference saves y of a rectifier, which is faster.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import triton_support

AllReduce = Callable[[Tensor], Tensor]
ACTIVATIONS = ("relu", "silu")


class NormParams(NamedTuple):
    """Statistics [S*C], weight and bias [C], and the activation."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    act: str | None = None

    @property
    def samples(self) -> int:
        return self.mean.numel() // self.weight.numel()


def moments(x: Tensor, all_reduce: AllReduce | None, samples: int = 1, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of ``group`` neighbouring channels of each sample [S*C/group], and the number of their
    elements [] float64, over all ranks."""
    mean, variance = _passes(x).moments(x, samples, group)
    return all_reduce_moments(mean, variance, x.numel() // mean.numel(), all_reduce)


def all_reduce_moments(mean: Tensor, variance: Tensor, count: int, all_reduce: AllReduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """All-reduce means and biased variances of ``count`` local elements each. Return them, and their count [] float64."""
    if all_reduce is None:
        return mean, variance, torch.full((), count, dtype=torch.float64, device=mean.device)
    # Sums of squares in float64 lose no digits to a mean far larger than the deviation, and local counts may differ.
    wide = mean.double()
    sums = all_reduce(torch.cat((wide, variance.double() + wide.square(), wide.new_ones(1))) * count)
    means, squares = (sums[:-1] / sums[-1]).chunk(2)
    return means.to(mean.dtype), (squares - means.square()).clamp_(min=0).to(mean.dtype), sums[-1]


def repeat_groups(value: Tensor, group: int) -> Tensor:
    """Repeat the values of groups for their channels.   [..., C/group] -> [..., C] contiguous"""
    return value if group == 1 else value.unsqueeze(-1).expand(*value.shape, group).flatten(-2).contiguous()


def apply_activation(z: Tensor, act: str | None, inplace: bool = False) -> Tensor:
    """Return ``act`` of z, by torch."""
    if act == "relu":
        return F.relu(z, inplace)
    return F.silu(z, inplace) if act == "silu" else z


def normalise(x: Tensor, params: NormParams, residual: Tensor | None = None) -> Tensor:
    """Return y, in the dtype and memory format of ``x``."""
    return _passes(x).normalise(x, params, residual)


def saves_output(x: Tensor, params: NormParams, residual: bool) -> bool:
    """Whether ``gradients`` needs y."""
    return _passes(x).saves_output(params, residual)


def activation_backward(dy: Tensor, x: Tensor, y: Tensor | None, params: NormParams) -> Tensor:
    """Return the gradient of the input of the activation, by torch."""
    if params.act == "silu":
        return torch.ops.aten.silu_backward(dy, _Reference.normalise(x, params._replace(act=None), None))
    return torch.ops.aten.threshold_backward(dy, y, 0) if params.act == "relu" else dy


def gradients(dy: Tensor, x: Tensor, y: Tensor | None, params: NormParams, count: Tensor, all_reduce: AllReduce | None,
              group: int = 1, need_residual: bool = False) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Return gradients of x, residual, weight and bias; those of weight and bias are local. ``y``: output, if ``saves_output``."""
    passes, samples, channels = _passes(x), params.samples, x.shape[1]
    dz, both = passes.sums(dy.contiguous(memory_format=_format(x)), x, y, params)
    # The statistics of a group depend on all of its channels, each with its own weight.
    sums = (both.view(2, samples, channels) * params.weight).view(2, -1, group)
    sums = sums.squeeze(-1) if group == 1 else sums.sum(-1)
    if all_reduce is not None:
        sums = all_reduce(sums)
    means = repeat_groups(sums / count, group)
    dx = passes.grad_input(dz, x, params if y is None else params._replace(act=None), *means)
    dweight, dbias = both if samples == 1 else both.view(2, samples, channels).sum(1)
    return dx, dz if need_residual else None, dweight, dbias


def _format(x: Tensor) -> torch.memory_format:
    for ndim, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.ndim == ndim and x.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


def in_channels_last(x: Tensor) -> bool:
    """Whether a tensor of 4 or 5 dims is in channels-last memory."""
    return _format(x) is not torch.contiguous_format


def _passes(x: Tensor) -> Any:
    return _triton() if triton_support.is_supported(x) and x.dtype != torch.float64 and in_channels_last(x) else _Reference


@cache
def _triton() -> Any:
    return import_module("hpcai.kernels.batchnorm_triton")


class _Reference:
    """The passes by operations of torch, which on CPUs are vectorised over channels-last memory."""

    @staticmethod
    def saves_output(params: NormParams, residual: bool) -> bool:
        return params.act == "relu"

    @staticmethod
    def moments(x: Tensor, samples: int, group: int) -> Tensor:
        parts, _ = _parts(x, samples)
        both = _joined([_moments(part) for part in parts], -1)
        return _merged(both, group) if group > 1 else both

    @staticmethod
    def normalise(x: Tensor, params: NormParams, residual: Tensor | None) -> Tensor:
        parts, repeated = _parts(x, params.samples)
        weight, bias = (v.repeat(repeated) for v in params[2:4]) if repeated > 1 else params[2:4]
        each = zip(parts, params.mean.chunk(len(parts)), params.variance.chunk(len(parts)))
        y = _shaped([F.batch_norm(part, mean, variance, weight, bias, eps=params.eps) for part, mean, variance in each], x)
        return apply_activation(y if residual is None else y.add_(residual), params.act, inplace=True)

    @staticmethod
    def sums(dy: Tensor, x: Tensor, y: Tensor | None, params: NormParams) -> tuple[Tensor, Tensor]:
        """Return dz, the gradient of the input of the activation, and the sums of dz*(x - mean)*invstd and of dz [2, S*C]."""
        dz, invstd = activation_backward(dy, x, y, params), (params.variance + params.eps).rsqrt()
        parts, _ = _parts(x, params.samples)
        n = len(parts)
        each = zip(_parts(dz, params.samples)[0], parts, params.mean.chunk(n), invstd.chunk(n))
        return dz, _joined([_sums(*values) for values in each], -1)

    @staticmethod
    def grad_input(dz: Tensor, x: Tensor, params: NormParams, grad_weight: Tensor, grad_bias: Tensor) -> Tensor:
        """Return invstd * (weight*dz - grad_bias - (x - mean)*invstd*grad_weight), with the dz of ``sums``."""
        invstd = (params.variance + params.eps).rsqrt()
        (parts, _), (dzs, _) = _parts(x, params.samples), _parts(dz, params.samples)
        scale = invstd.view(params.samples, -1) * params.weight
        coefficients = (params.mean, -invstd.square() * grad_weight, -invstd * grad_bias, scale.flatten())
        return _shaped([_grad_input(*values) for values in zip(dzs, parts, *(v.chunk(len(parts)) for v in coefficients))], x)


def _moments(x: Tensor) -> Tensor:
    """Return mean and biased variance of each channel [2, C]."""
    if not triton_support.on_cpu(x):
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, [d for d in range(x.ndim) if d != 1], correction=0)
        return torch.stack((mean, variance))
    folded, fold = _folded(x)
    scratch = torch.zeros(folded.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    both = torch.stack(torch.batch_norm_update_stats(folded, scratch, scratch.clone(), 0.0))  # in the dtype of ``scratch``
    return both if fold == 1 else _merged(both.view(2, fold, -1).transpose(1, 2).flatten(1), fold)


def _merged(both: Tensor, group: int) -> Tensor:
    """Merge means and variances of equal counts over ``group`` neighbours.   [2, n] -> [2, n/group]"""
    means, variances = both.double().view(2, -1, group)
    every = means.mean(-1, keepdim=True)
    return torch.stack((every.squeeze(-1), (variances + (means - every).square()).mean(-1))).to(both.dtype)


def _sums(dz: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    (dz, fold), (x, _) = (_folded(dz), _folded(x)) if triton_support.on_cpu(x) else ((dz, 1), (x, 1))
    m, i = (v.repeat(fold) for v in (mean, invstd))
    _, *sums = torch.ops.aten.native_batch_norm_backward(dz, x, torch.ones_like(m), m, m, m, i, True, 0.0, (False, True, True))
    both = torch.stack(sums)
    return both if fold == 1 else both.view(2, fold, -1).sum(1, dtype=torch.float64).to(both.dtype)


def _grad_input(dz: Tensor, x: Tensor, mean: Tensor, slope: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return scale*dz + slope*(x - mean) + shift, in one pass or two."""
    half = torch.full_like(scale, 0.5)  # with eps, which torch 2.11 wants above 0, the root of the sum is exactly 1
    dx = F.batch_norm(x, mean, half, slope, shift, eps=0.5)
    if dx.dtype == scale.dtype:
        return dx.addcmul_(dz, scale.view(1, -1, *[1] * (x.ndim - 2)))
    return dx.add_(F.batch_norm(dz, torch.zeros_like(scale), half, scale, eps=0.5))


def _parts(x: Tensor, samples: int) -> tuple[tuple[Tensor, ...], int]:
    """Split ``x`` into batches whose channels have separate statistics. Return them, and the repetitions of the channels in each.
    In channels-last memory they are the samples; otherwise there is one, with the samples as channels."""
    if samples == 1:
        return (x,), 1
    return (x.split(1), 1) if in_channels_last(x) else ((x.reshape(1, -1, *x.shape[2:]),), samples)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _shaped(parts: list[Tensor], x: Tensor) -> Tensor:
    """Join results of the parts of ``x`` in its shape."""
    y = _joined(parts, 0)
    # Not always a view: autograd copies the gradients of a view that is changed in place.
    return y if y.shape == x.shape else y.view(x.shape)


def _folded(x: Tensor) -> tuple[Tensor, int]:
    """Return a view of ``x`` with ``fold`` neighbouring voxels as channels [rows, fold * C, 1, 1], and ``fold``, which is 1 outside
    channels-last memory and in float64.

    torch sums rows sequentially in float32, by which the variance of 64^3 voxels has a relative error of 7e-5. With 64 partial sums
    it is 3e-7, at no cost.
    """
    if not in_channels_last(x) or x.dtype == torch.float64:
        return x, 1
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    fold = next((n for n in range(min(64, rows // 16), 1, -1) if rows % n == 0), 1)
    return (x.movedim(1, -1).reshape(-1, fold * channels, 1, 1), fold) if fold > 1 else (x, 1)
