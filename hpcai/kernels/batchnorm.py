"""Batch, instance and group normalisation, alone or over several processes, with the sum before and the activation after them.

    y = act(weight * (x - mean) / sqrt(variance + eps) + bias + plus)

``x`` [B, C, ...] float32, float64, bfloat16 or float16; ``weight``, ``bias`` [C] and statistics float32 (float64 for a float64 x).
Statistics are those of S samples, one after the other [S*C]: S = 1, all of a batch as one (batch norm, Ioffe and Szegedy 2015), or
S = B, each for itself (instance norm, Ulyanov et al. 2016), where neighbouring channels may share them (group norm, Wu and He
2018). They cover all processes over which ``total`` adds a small tensor, in place: one message forward, one backward.

On CUDA and channels-last memory each pass over ``x`` is one Triton kernel for all samples (``batchnorm_triton``); elsewhere it is
the plain-torch twin in this file. Nothing is read from the device. For the backward pass the kernels keep ``x`` alone, and work out
anew what the activation saw, unless something was added there; the twin keeps y where a rectifier made it, which is quicker.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import compiler

Total = Callable[[Tensor], Tensor]
ACTIVATIONS = ("relu", "leaky_relu", "silu")


class Rule(NamedTuple):
    """What becomes of each value: statistics [S*C], weight and bias [C], the activation and the slope of a leaky rectifier."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    act: str | None = None
    slope: float = 0.0

    @property
    def samples(self) -> int:
        return self.mean.numel() // self.weight.numel()

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All but the activation."""
        return *self[:5], self.slope


def moments(x: Tensor, total: Total | None, samples: int = 1, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance [S*C/group] of ``group`` neighbouring channels each, in each of S ``samples``, and the count of
    their values [] float64, over all processes."""
    mean, variance = _passes(x).moments(x, samples, group)
    return agreed(mean, variance, x.numel() // mean.numel(), total)


def agreed(mean: Tensor, variance: Tensor, count: int, total: Total | None) -> tuple[Tensor, Tensor, Tensor]:
    """Means, biased variances and count [] float64 over all processes, from those of this one's ``count`` values each."""
    if total is None:
        return mean, variance, torch.full((), count, dtype=torch.float64, device=mean.device)
    # Values and their squares are added in float64: a mean far larger than the deviation costs no digits, and counts may differ.
    wide = mean.double()
    message = torch.cat((wide, variance.double() + wide.square(), wide.new_ones(1))) * count
    sums = total(message)
    every, squares = (sums[:-1] / sums[-1]).chunk(2)
    return every.to(mean.dtype), (squares - every.square()).clamp_(min=0).to(mean.dtype), sums[-1]


def spread(value: Tensor, group: int) -> Tensor:
    """What ``group`` neighbouring channels share, for each of them.   [..., C/group] -> [..., C] contiguous"""
    return value if group == 1 else value.unsqueeze(-1).expand(*value.shape, group).flatten(-2).contiguous()


def activated(z: Tensor, act: str | None, slope: float, inplace: bool = False) -> Tensor:
    """The activation ``act`` of z, by torch."""
    if act == "relu":
        return F.relu(z, inplace)
    if act == "leaky_relu":
        return F.leaky_relu(z, slope, inplace)
    return F.silu(z, inplace) if act == "silu" else z


def normalise(x: Tensor, rule: Rule, plus: Tensor | None = None) -> Tensor:
    """y, in the dtype and memory format of ``x``."""
    return _passes(x).normalise(x, rule, plus)


def keeps(x: Tensor, rule: Rule, plus: bool) -> bool:
    """Whether ``gradients`` needs y, which is then to be kept."""
    return _passes(x).keeps(rule, plus)


def through(dy: Tensor, x: Tensor, y: Tensor | None, rule: Rule) -> Tensor:
    """The gradient before the activation, from that after it, by torch."""
    if rule.act == "silu":
        return torch.ops.aten.silu_backward(dy, _Plain.normalise(x, rule._replace(act=None), None))
    if rule.act == "leaky_relu":
        return torch.ops.aten.leaky_relu_backward(dy, y, rule.slope, True)
    return torch.ops.aten.threshold_backward(dy, y, 0) if rule.act == "relu" else dy


def gradients(dy: Tensor, x: Tensor, y: Tensor | None, rule: Rule, count: Tensor, total: Total | None, group: int = 1,
              need_plus: bool = False) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients by x, plus, weight, bias; those by weight and bias count this process's values alone.

    ``y``: what ``normalise`` returned, where ``keeps`` said so. dz, before the activation, is the gradient by plus.
    """
    passes, samples, channels = _passes(x), rule.samples, x.shape[1]
    dz, both = passes.sums(dy.contiguous(memory_format=_format(x)), x, y, rule)
    # A group's mean moves with each of its channels, as much as that one's weight says.
    sums = (both.view(2, samples, channels) * rule.weight).view(2, -1, group)
    sums = sums.squeeze(-1) if group == 1 else sums.sum(-1)
    if total is not None:
        sums = total(sums)
    over = spread(sums / count, group)
    dx = passes.by_input(dz, x, rule if y is None else rule._replace(act=None), *over)
    dweight, dbias = both if samples == 1 else both.view(2, samples, channels).sum(1)
    return dx, dz if need_plus else None, dweight, dbias


def _format(x: Tensor) -> torch.memory_format:
    for ndim, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.ndim == ndim and x.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


def in_channels_last(x: Tensor) -> bool:
    """Whether the channels of a map or a volume lie side by side in memory."""
    return _format(x) is not torch.contiguous_format


def _passes(x: Tensor) -> Any:
    return _triton() if compiler.takes(x) and x.dtype != torch.float64 and in_channels_last(x) else _Plain


@cache
def _triton() -> Any:
    return import_module("hpcai.kernels.batchnorm_triton")


class _Plain:
    """The passes over the values by operations of torch, whose CPU forms are vectorised over channels-last memory."""

    @staticmethod
    def keeps(rule: Rule, plus: bool) -> bool:
        return rule.act in ("relu", "leaky_relu")

    @staticmethod
    def moments(x: Tensor, samples: int, group: int) -> Tensor:
        parts, _ = _parts(x, samples)
        both = _joined([_moments(part) for part in parts], -1)
        return _merged(both, group) if group > 1 else both

    @staticmethod
    def normalise(x: Tensor, rule: Rule, plus: Tensor | None) -> Tensor:
        parts, repeated = _parts(x, rule.samples)
        weight, bias = (v.repeat(repeated) for v in rule[2:4]) if repeated > 1 else rule[2:4]
        each = zip(parts, rule.mean.chunk(len(parts)), rule.variance.chunk(len(parts)))
        y = _shaped([F.batch_norm(part, mean, variance, weight, bias, eps=rule.eps) for part, mean, variance in each], x)
        return activated(y if plus is None else y.add_(plus), rule.act, rule.slope, inplace=True)

    @staticmethod
    def sums(dy: Tensor, x: Tensor, y: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        """dz, the gradient before the activation, and the sums of dz*(x - mean)*invstd and of dz [2, S*C]."""
        dz, invstd = through(dy, x, y, rule), (rule.variance + rule.eps).rsqrt()
        parts, _ = _parts(x, rule.samples)
        n = len(parts)
        each = zip(_parts(dz, rule.samples)[0], parts, rule.mean.chunk(n), invstd.chunk(n))
        return dz, _joined([_sums(*values) for values in each], -1)

    @staticmethod
    def by_input(dz: Tensor, x: Tensor, rule: Rule, by_weight: Tensor, by_bias: Tensor) -> Tensor:
        """invstd * (weight*dz - by_bias - (x - mean)*invstd*by_weight); dz is what ``sums`` made: the activation has no part."""
        invstd = (rule.variance + rule.eps).rsqrt()
        (parts, _), (dzs, _) = _parts(x, rule.samples), _parts(dz, rule.samples)
        scale = invstd.view(rule.samples, -1) * rule.weight
        given = (rule.mean, -invstd.square() * by_weight, -invstd * by_bias, scale.flatten())
        return _shaped([_by_input(*values) for values in zip(dzs, parts, *(v.chunk(len(parts)) for v in given))], x)


def _moments(x: Tensor) -> Tensor:
    """Mean and biased variance of each channel [2, C]."""
    if not compiler.on_cpu(x):
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, [d for d in range(x.ndim) if d != 1], correction=0)
        return torch.stack((mean, variance))
    folded, fold = _folded(x)
    scratch = torch.zeros(folded.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    both = torch.stack(torch.batch_norm_update_stats(folded, scratch, scratch.clone(), 0.0))  # in the dtype of ``scratch``
    return both if fold == 1 else _merged(both.view(2, fold, -1).transpose(1, 2).flatten(1), fold)


def _merged(both: Tensor, group: int) -> Tensor:
    """Means and variances of as many values each [2, n], merged over ``group`` neighbours [2, n/group]."""
    means, variances = both.double().view(2, -1, group)
    every = means.mean(-1, keepdim=True)
    return torch.stack((every.squeeze(-1), (variances + (means - every).square()).mean(-1))).to(both.dtype)


def _sums(dz: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    (dz, fold), (x, _) = (_folded(dz), _folded(x)) if compiler.on_cpu(x) else ((dz, 1), (x, 1))
    m, i = (v.repeat(fold) for v in (mean, invstd))
    _, *found = torch.ops.aten.native_batch_norm_backward(dz, x, torch.ones_like(m), m, m, m, i, True, 0.0, (False, True, True))
    both = torch.stack(found)
    return both if fold == 1 else both.view(2, fold, -1).sum(1, dtype=torch.float64).to(both.dtype)


def _by_input(dz: Tensor, x: Tensor, mean: Tensor, slope: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """scale*dz + slope*(x - mean) + shift, in one pass or two."""
    half = torch.full_like(scale, 0.5)  # and eps, which torch 2.11 wants above 0: the root of their sum is exactly 1
    dx = F.batch_norm(x, mean, half, slope, shift, eps=0.5)
    if dx.dtype == scale.dtype:
        return dx.addcmul_(dz, scale.view(1, -1, *[1] * (x.ndim - 2)))
    return dx.add_(F.batch_norm(dz, torch.zeros_like(scale), half, scale, eps=0.5))


def _parts(x: Tensor, samples: int) -> tuple[tuple[Tensor, ...], int]:
    """``x`` as batches whose channels have statistics of their own, and how often the channels of ``x`` are repeated in each. In
    channels-last memory they are the samples; otherwise all samples stand beside each other as channels."""
    if samples == 1:
        return (x,), 1
    return (x.split(1), 1) if in_channels_last(x) else ((x.reshape(1, -1, *x.shape[2:]),), samples)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _shaped(parts: list[Tensor], x: Tensor) -> Tensor:
    """What became of the parts of ``x``, in its shape."""
    y = _joined(parts, 0)
    # A view is avoided where it can be: autograd copies gradients of a view that is changed in place.
    return y if y.shape == x.shape else y.view(x.shape)


def _folded(x: Tensor) -> tuple[Tensor, int]:
    """``x`` with ``fold`` neighbouring places as channels beside each other [rows, fold * C, 1, 1], and ``fold``. Outside
    channels-last memory, and in float64, ``x`` stays as it is and ``fold`` is 1.

    torch adds rows up in float32, one after the other. The variance of 64^3 voxels then has a relative error of 7e-5; with 64 sums
    instead of one it is 3e-7, at no cost.
    """
    if not in_channels_last(x) or x.dtype == torch.float64:
        return x, 1
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    fold = next((n for n in range(min(64, rows // 16), 1, -1) if rows % n == 0), 1)
    return (x.movedim(1, -1).reshape(-1, fold * channels, 1, 1), fold) if fold > 1 else (x, 1)
