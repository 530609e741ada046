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
        if not local and torch.compiler.is_compiling():
            return self._fused_eager(x, residual)
        if not local or (on_gpu(x) and not plain):
            return self._fused(x, residual)
        y = super().forward(x)  # on a CPU torch's is as fast, and the compiler fuses the rest itself
        if plain:
            y = y if residual is None else y + residual.to(y.dtype)
            return F.relu(y) if self.relu else y
        y = y if residual is None else y.add_(residual)
        return y.relu_() if self.relu else y

    def _fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        local = is_local(self.all_reduce)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if self.weight is None:
            weight, bias = (x.new_full((self.num_features,), value, dtype=wide) for value in (1.0, 0.0))
        else:
            weight, bias = self.weight.to(wide), self.bias.to(wide)
        if residual is not None:
            residual = residual.to(x.dtype)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return _NormaliseEval.apply(x, residual, weight, bias, self.running_mean.to(wide), self.running_var.to(wide), self.eps,
                                        self.relu)  # fmt: skip
        all_reduce, act = None if local else self.all_reduce, "relu" if self.relu else None
        y, mean, variance, count = Normalise.apply(x, residual, weight, bias, self.eps, act, 0.0, all_reduce, 1, 1)
        if self.training and self.running_mean is not None:
            self._update_running_stats(mean, variance, count)
        return y

    _fused_eager = disable_dynamo(_fused)  # communication is not traced

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
                slope: float, all_reduce: Any, samples: int, group: int) -> Any:  # fmt: skip
        mean, variance, count = batchnorm.moments(x, all_reduce, samples, group)
        per_channel = batchnorm.repeat_groups(mean, group), batchnorm.repeat_groups(variance, group)
        params = batchnorm.NormParams(*per_channel, weight, bias, eps, act, slope)
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
        return *batchnorm.gradients(dy, x, y, params, count, ctx.all_reduce, ctx.group, need), *[None] * 6


class _NormaliseEval(torch.autograd.Function):
    """Normalisation with running statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor,
                eps: float, relu: bool) -> Tensor:  # fmt: skip
        y = batchnorm.normalise(x, batchnorm.NormParams(mean, variance, weight, bias, eps, "relu" if relu else None), residual)
        ctx.eps, ctx.has_residual = eps, residual is not None
        ctx.save_for_backward(x, y if relu else None, mean, variance, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, y, mean, variance, weight = ctx.saved_tensors
        dz = dy if y is None else torch.ops.aten.threshold_backward(dy, y, 0)
        shape = [1, -1] + [1] * (x.ndim - 2)
        invstd = (variance + ctx.eps).rsqrt()
        wide = dz.to(weight.dtype)
        dims = [d for d in range(x.ndim) if d != 1]
        dweight = (wide * (x - mean.view(shape)) * invstd.view(shape)).sum(dims)
        dx = (wide * (weight * invstd).view(shape)).to(x.dtype)
        return dx, dz if ctx.has_residual else None, dweight, wide.sum(dims), None, None, None, None
