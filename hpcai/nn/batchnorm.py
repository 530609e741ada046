"""Batch normalisation fused with a residual sum and a rectifier.   B batch, C channels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.kernels import batchnorm
from hpcai.kernels.triton_support import needs_plain_ops, on_gpu


def is_local(all_reduce: nn.Module) -> bool:
    """Whether a seam of statistics communicates with no other rank: it is the identity, or its ``axes`` are empty."""
    return isinstance(all_reduce, nn.Identity) or not getattr(all_reduce, "axes", True)


def wide_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weight and bias [C] of a norm, 1 and 0 if it has none, in float32, or in float64 for a float64 input."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if weight is None or bias is None:
        return x.new_ones(x.shape[1], dtype=wide), x.new_zeros(x.shape[1], dtype=wide)
    return weight.to(wide), bias.to(wide)


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """``nn.BatchNorm`` of any number of dims, then ``+ residual``, then a rectifier (``relu``), in one pass.   [B, C, ...]

    Keys are those of ``nn.BatchNorm2d``. Statistics are float32, or float64 for a float64 input. ``all_reduce`` is the seam for
    synchronised statistics: ``hpcai.parallel.batchnorm`` substitutes a module that sums a small tensor over ranks.
    """

    def __init__(self, channels: int, relu: bool = False, eps: float = 1e-5, momentum: float | None = 0.1,
                 affine: bool = True, track_running_stats: bool = True) -> None:  # fmt: skip
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        self.relu = relu
        self.all_reduce = nn.Identity()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_input_dim(x)
        local, plain = is_local(self.all_reduce), needs_plain_ops()
        if not self.training and self.running_mean is not None:  # nothing to communicate, and gradients are rare
            if on_gpu(x) and not plain and not torch.is_grad_enabled():
                return self._fused_eval(x, residual)
        elif not local and torch.compiler.is_compiling():
            return self._fused_eager(x, residual)
        elif not local or (on_gpu(x) and not plain):
            return self._fused(x, residual)
        y = super().forward(x)  # on a CPU torch's is as fast, and the compiler fuses the rest itself
        if plain:
            y = y if residual is None else y + residual.to(y.dtype)
            return F.relu(y) if self.relu else y
        y = y if residual is None else y.add_(residual)
        return y.relu_() if self.relu else y

    def _fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        all_reduce, act = None if is_local(self.all_reduce) else self.all_reduce, "relu" if self.relu else None
        affine = wide_affine(x, self.weight, self.bias)
        residual = None if residual is None else residual.to(x.dtype)
        y, mean, variance, count = Normalise.apply(x, residual, *affine, self.eps, act, all_reduce, 1, 1)
        if self.training and self.running_mean is not None:
            self._update_running_stats(mean, variance, count)
        return y

    _fused_eager = disable_dynamo(_fused)  # communication is not traced

    def _fused_eval(self, x: Tensor, residual: Tensor | None) -> Tensor:
        affine, statistics = wide_affine(x, self.weight, self.bias), (self.running_mean, self.running_var)
        mean, variance = (value.to(affine[0].dtype) for value in statistics)  # type: ignore[union-attr]
        params = batchnorm.NormParams(mean, variance, *affine, self.eps, "relu" if self.relu else None)
        return batchnorm.normalise(x, params, None if residual is None else residual.to(x.dtype))

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None:  # the mean of all batches so far
            momentum = 1.0 / self.num_batches_tracked.to(mean.dtype)
        unbiased = variance * (count / (count - 1).clamp(min=1)).to(variance.dtype)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running.dtype), momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"input has shape {list(input.shape)}; expected [B, {self.num_features}, ...]")


class Normalise(UntransformedFunction):
    """Normalisation with the statistics of ``samples`` samples (1: the batch as one) and ``group`` neighbouring channels; residual
    sum and activation. There is one all-reduce in the forward pass and one in the backward pass, whatever the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, act: str | None,
                all_reduce: Any, samples: int, group: int) -> Any:  # fmt: skip
        mean, variance, count = batchnorm.moments(x, all_reduce, samples, group)
        per_channel = batchnorm.repeat_groups(mean, group), batchnorm.repeat_groups(variance, group)
        params = batchnorm.NormParams(*per_channel, weight, bias, eps, act)
        y = batchnorm.normalise(x, params, residual)
        ctx.rest, ctx.all_reduce, ctx.group, ctx.has_residual = params[4:], all_reduce, group, residual is not None
        ctx.save_for_backward(x, y if batchnorm.saves_output(x, params, ctx.has_residual) else None, count, *params[:4])
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, y, count, *values = ctx.saved_tensors
        params, need = batchnorm.NormParams(*values, *ctx.rest), ctx.has_residual and ctx.needs_input_grad[1]
        return *batchnorm.gradients(dy, x, y, params, count, ctx.all_reduce, ctx.group, need), *[None] * 5
