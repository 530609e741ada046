"""Group and instance normalisation fused with an activation (Wu and He 2018, arXiv:1803.08494).   B batch, C channels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.dynamo import disable_dynamo, is_transformed
from hpcai.kernels.batchnorm import ACTIVATIONS, apply_activation, in_channels_last
from hpcai.kernels.triton_support import needs_plain_ops, on_gpu
from hpcai.nn.batchnorm import Normalise, is_local, wide_affine


class PerSampleNorm(nn.Module):
    """A norm with statistics of each sample and group of neighbouring channels, then ``activation``: relu, silu or None.
    [B, C, ...] -> [B, C, ...], in the same memory format

    Statistics are float32, or float64 for a float64 input. ``all_reduce`` is the seam for samples that are sharded over ranks: a
    module that sums a small tensor over them, in place. Raises ValueError for an unknown activation and, in
    ``forward``, for groups of one element, which have no statistics.
    """

    channels: int
    group: int  # channels that share their statistics
    eps: float
    weight: Any
    bias: Any

    def set_activation(self, channels: int, group: int, activation: str | None) -> None:
        """Set the sizes and the activation, after ``__init__`` of torch's norm."""
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")
        self.channels, self.group, self.activation = channels, group, activation
        self.all_reduce = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(f"input has shape {list(x.shape)}; expected [B, {self.channels}, ...]")
        local, plain = is_local(self.all_reduce), needs_plain_ops()
        if not local:
            return self._fused_eager(x) if torch.compiler.is_compiling() else self._fused(x)
        self._check_count(x, 1)
        if plain or self._prefers_torch(x):  # the compiler fuses the rest itself
            x = x.contiguous() if is_transformed() else x  # for vmap
            wide = x if self.weight is None else x.to(torch.promote_types(x.dtype, self.weight.dtype))
            y = F.group_norm(wide if plain else x, self.channels // self.group, self.weight, self.bias, self.eps).to(x.dtype)
            return apply_activation(y, self.activation, inplace=not plain and self.activation != "silu")
        return self._fused(x)

    def _prefers_torch(self, x: Tensor) -> bool:
        """Whether torch's group norm is faster and as exact. In channels-last memory it is slow for bfloat16 and for as many groups
        as channels, and it sums rows sequentially in float32: the error of 64^3 rows is 3e-5."""
        if on_gpu(x) or not in_channels_last(x):
            return not on_gpu(x)
        return self.group > 1 and x.dtype.itemsize >= 4 and x.shape[2:].numel() <= 2**15

    def _fused(self, x: Tensor) -> Tensor:
        all_reduce = None if is_local(self.all_reduce) else self.all_reduce
        args = self.eps, self.activation, all_reduce, len(x), self.group
        y, _, _, count = Normalise.apply(x, None, *wide_affine(x, self.weight, self.bias), *args)
        self._check_count(x, count)
        return y

    _fused_eager = disable_dynamo(_fused)  # communication is not traced

    def _check_count(self, x: Tensor, count: Tensor | int) -> None:
        # Nothing is read from the device if this rank alone has more than one element.
        if x.shape[2:].numel() * self.group < 2 and int(count) < 2:
            fault = f"input has shape {list(x.shape)}: one value per {'channel' if self.group == 1 else 'group'} has no statistics"
            raise ValueError(f"{fault}; expected more, give a larger volume")


class GroupNorm(PerSampleNorm, nn.GroupNorm):
    """``nn.GroupNorm`` of maps and volumes, then an activation (``PerSampleNorm``).   [B, C, ...] -> [B, C, ...]

    Keys are those of ``nn.GroupNorm``. Raises ValueError if ``groups`` does not divide ``channels``.
    """

    def __init__(self, groups: int, channels: int, activation: str | None = None, eps: float = 1e-5, affine: bool = True) -> None:
        if groups < 1 or channels % groups:
            raise ValueError(f"{channels} channels cannot make {groups} groups; give a number that divides {channels}")
        super().__init__(groups, channels, eps, affine)
        self.set_activation(channels, channels // groups, activation)


class InstanceNorm(PerSampleNorm, nn.modules.instancenorm._InstanceNorm):
    """``nn.InstanceNorm`` of any number of dims, with weights and without running statistics, then an activation (Ulyanov et al.
    2016, arXiv:1607.08022).

    It is a ``PerSampleNorm`` with a group for each channel. Keys are those of ``nn.InstanceNorm3d(affine=True)``.
    Shape: x [B, C, ...] -> [B, C, ...]
    """

    def __init__(self, channels: int, activation: str | None = None, eps: float = 1e-5) -> None:
        super().__init__(channels, eps, affine=True)
        self.set_activation(channels, 1, activation)
