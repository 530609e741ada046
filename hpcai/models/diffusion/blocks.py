"""Building blocks of U-Nets and autoencoders. Parameters have the names of diffusers' files.

Maps and volumes are channels-last throughout: conversion to and from tokens needs no copy.
B samples, C channels, ... the sides of a map (H, W) or a volume (D, H, W), N pixels (or tokens), J channels of context tokens
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.kernels.activations import geglu
from hpcai.kernels.grouped_query_attention import grouped_query_attention
from hpcai.nn.batchnorm import is_local
from hpcai.nn.conv import Conv2d, Conv3d, channels_last
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.matmul import fused_linear
from hpcai.nn.periodic import PeriodicConv2d, PeriodicConv3d
from hpcai.nn.recompute import cheap
from hpcai.nn.upsample_conv import UpsampleConv, fold_upsampling

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
# Pixels per channel from which ``UpsampleConv`` gains more than its sums of weights cost: 4 maps of 8 x 8 for 256 channels (25 ms
# instead of 36); 2 maps only if freed memory is kept.
_FUSE_MIN_PIXELS = 1
_TRANSFORMER_EPS = 1e-6  # of the group norm before a transformer, independent of the eps of residual blocks


class Space(NamedTuple):
    """The number of spatial dims, and whether each is periodic (empty: none is)."""

    dims: int = 2
    periodic: tuple[bool, ...] = ()

    @property
    def periodic_dims(self) -> tuple[int, ...]:
        """The periodic dims of a tensor [B, C, ...]."""
        return tuple(dim for dim, is_periodic in enumerate(self.periodic, 2) if is_periodic)


def to_tokens(x: Tensor) -> Tensor:
    """Return the pixels of a channels-last tensor as tokens, a view.   [B, C, ...] -> [B, N, C]"""
    return x.movedim(1, -1).flatten(1, -2)


def from_tokens(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return tokens as a channels-last tensor with sides ``sizes``, a view.   [B, N, C] -> [B, C, ...]"""
    return x.unflatten(1, tuple(sizes)).movedim(-1, 1)


def resize(field: Tensor, sizes: Sequence[int], periodic_dims: Sequence[int] = (), box: Sequence[slice] = ()) -> Tensor:
    """Resize ``field`` [B, C, ...] by linear interpolation, like ``F.interpolate`` with ``align_corners=False``, but circularly
    along ``periodic_dims``. ``box``: compute only this slice of each dim of the result."""
    for dim, size in enumerate(sizes, 2):
        old, (first, end, _) = field.shape[dim], (box[dim - 2] if box else slice(None)).indices(size)
        if old == size:
            field = field.narrow(dim, first, end - first)
            continue
        at = (torch.arange(first, end, device=field.device, dtype=torch.float64) + 0.5) * (old / size) - 0.5
        if dim not in periodic_dims:
            at = at.clamp(0, old - 1)
        low = at.floor()
        weight = (at - low).to(field.dtype).view(-1, *[1] * (field.ndim - dim - 1))
        low = low.long()
        ends = (low % old, (low + 1) % old) if dim in periodic_dims else (low, (low + 1).clamp(max=old - 1))
        field = torch.lerp(field.index_select(dim, ends[0]), field.index_select(dim, ends[1]), weight)
    return field


def make_conv(space: Space, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    """Return a convolution with "same" padding; with stride 2, odd sides are rounded up.   [B, C, ...] -> [B, C', ...]"""
    periodic = space.periodic_dims if kernel > 1 else ()
    padding = tuple(0 if dim in periodic else kernel // 2 for dim in range(2, space.dims + 2))
    classes: Any = (PeriodicConv2d, PeriodicConv3d) if periodic else (Conv2d, Conv3d)
    conv: Any = classes[space.dims - 2](inputs, outputs, kernel, stride, padding)
    if periodic:
        conv.circular_dims = periodic
    return conv


class Downsample(nn.Module):
    """Halve all sides by a convolution with stride 2.   [B, C, ...] -> [B, C, .../2]

    ``centred``: Pad both ends of a side, so that odd sides are rounded up. Otherwise pad the upper end only, as autoencoders do, so
    that odd sides are rounded down.
    """

    def __init__(self, space: Space, channels: int, centred: bool = True) -> None:
        super().__init__()
        self.conv = make_conv(space, channels, channels, stride=2)
        self.padding: tuple[int, ...] = ()
        if not centred:
            self.conv.padding, self.padding = (0,) * space.dims, (0, 1) * space.dims  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.padding) if self.padding else x)


class Upsample(nn.Module):
    """Nearest-neighbour upsampling and a convolution.   [B, C, ...] -> [B, C, ...] of ``sizes``, by default doubled

    If all sides are doubled, the two may be fused (``UpsampleConv``).
    """

    fused = True
    """False: never fuse"""
    is_sharded = False
    """whether pixels are sharded; all sides are then doubled"""

    def __init__(self, space: Space, channels: int) -> None:
        super().__init__()
        self.conv = make_conv(space, channels, channels)
        self.upsample_conv = UpsampleConv(space.dims, space.periodic_dims)

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        twice = tuple(2 * n for n in x.shape[2:])
        sizes = twice if sizes is None else tuple(sizes)
        if self.is_sharded or (self.fused and sizes == twice and x.numel() >= _FUSE_MIN_PIXELS * x.shape[1] ** 2):
            return self.upsample_conv(x, fold_upsampling(self.conv.weight), self.conv.bias)
        return self.conv(channels_last(F.interpolate(x, size=sizes, mode="nearest")))


def group_norm(norm: GroupNorm, x: Tensor) -> Tensor:
    """Return ``norm(x)``, which the backward pass may recompute if its statistics are local."""
    return cheap(norm, x) if is_local(norm.all_reduce) else norm(x)


class ResBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))) + time))) (He et al. 2016, Ho et al. 2020).

    Shape: x [B, C, ...], time [B, T] after its activation (None for a block without), skip [B, C'', ...], whose channels follow
    those of x -> [B, C', ...]
    """

    def __init__(self, space: Space, inputs: int, outputs: int, time: int | None, groups: int, eps: float, dropout: float = 0.0,
                 zero: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = GroupNorm(groups, inputs, "silu", eps=eps)
        self.conv1 = make_conv(space, inputs, outputs)
        self.time_emb_proj = None if time is None else nn.Linear(time, outputs)
        self.norm2 = GroupNorm(groups, outputs, "silu", eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = make_conv(space, outputs, outputs)
        self.conv_shortcut = make_conv(space, inputs, outputs, 1) if inputs != outputs else None
        if zero:
            zero_init(self.conv2)

    def forward(self, x: Tensor, time: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        x = x if skip is None else torch.cat((x, skip), 1)
        y = self.conv1(group_norm(self.norm1, x))
        if self.time_emb_proj is not None and time is not None:
            y += self.time_emb_proj(time)[(..., *[None] * (x.ndim - 2))]  # in place: outputs of convolutions are not saved
        y = self.conv2(self.dropout(group_norm(self.norm2, y)))
        y += x if self.conv_shortcut is None else self.conv_shortcut(x)
        return y


class CoreAttention(nn.Module):
    """Scaled dot-product attention in ``heads`` heads.   q [B, N, C], k and v [B, N', C] -> [B, N, C]"""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return grouped_query_attention(q, k, v).transpose(1, 2).flatten(2)


class SpatialAttention(CoreAttention):
    """The same, over the pixels of a map or a volume with sides ``sizes``. A seam: pixels may be sharded."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:  # type: ignore[override]
        return super().forward(q, k, v)


class MultiHeadAttention(nn.Module):
    """Self-attention of pixels, or cross-attention to context tokens.

    Shape: x [B, N, C] with N the product of ``sizes``, context [B, N', J] -> [B, N, C]
    """

    def __init__(self, channels: int, heads: int, context_channels: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, channels, bias)
        self.to_k = nn.Linear(context_channels or channels, channels, bias)
        self.to_v = nn.Linear(context_channels or channels, channels, bias)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])
        self.core_attention = SpatialAttention(heads) if context_channels is None else CoreAttention(heads)

    def forward(self, x: Tensor, sizes: Sequence[int], context: Tensor | None = None) -> Tensor:
        if context is None:
            return self.to_out[0](self.core_attention(*fused_linear(x, self.to_q, self.to_k, self.to_v), sizes))
        return self.to_out[0](self.core_attention(self.to_q(x), *fused_linear(context, self.to_k, self.to_v)))


class SelfAttention(MultiHeadAttention):
    """x + self-attention of pixels after a group norm (Ho et al. 2020).   [B, C, ...] -> the same"""

    def __init__(self, channels: int, heads: int, groups: int, eps: float, zero: bool = False) -> None:
        super().__init__(channels, heads, bias=True)
        self.group_norm = GroupNorm(groups, channels, eps=eps)
        if zero:
            zero_init(self.to_out[0])

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:  # type: ignore[override]
        sizes = x.shape[2:]
        y = super().forward(to_tokens(group_norm(self.group_norm, x)), sizes)
        return from_tokens(y + to_tokens(x), sizes)


class GEGLU(nn.Module):
    """value(x) * gelu(gate(x)), with one matrix product (Shazeer 2020).   [B, N, C] -> [B, N, C']"""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, 2 * inner)

    def forward(self, x: Tensor) -> Tensor:
        return cheap(geglu, self.proj(x))


class FeedForward(nn.Module):
    """``proj``, [B, N, C] -> [B, N, 4 C], and a linear layer.   [B, N, C] -> the same"""

    def __init__(self, channels: int, proj: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(proj, nn.Identity(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention to tokens, and a feed-forward layer.

    Shape: x [B, N, C] with N the product of ``sizes``, tokens [B, N', J] -> [B, N, C]
    """

    float8 = True  # linear layers may use FP8

    def __init__(self, channels: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = LayerNorm(channels, autocast_output=True), MultiHeadAttention(channels, heads)
        self.norm2, self.attn2 = LayerNorm(channels, autocast_output=True), MultiHeadAttention(channels, heads, tokens)
        self.norm3 = LayerNorm(channels, autocast_output=True)
        self.ff = FeedForward(channels, GEGLU(channels, 4 * channels))

    def forward(self, x: Tensor, sizes: Sequence[int], tokens: Tensor) -> Tensor:
        x = x + self.attn1(cheap(self.norm1, x), sizes)
        x = x + self.attn2(cheap(self.norm2, x), sizes, tokens)
        return x + self.ff(cheap(self.norm3, x))


class CrossAttention(nn.Module):
    """x + transformer layers over pixels, with cross-attention to tokens (Rombach et al. 2022).

    Shape: x [B, C, ...], tokens [B, N', J] -> [B, C, ...]
    """

    def __init__(self, channels: int, heads: int, tokens: int, groups: int, zero: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.norm = GroupNorm(groups, channels, eps=_TRANSFORMER_EPS)
        self.proj_in, self.proj_out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList(TransformerLayer(channels, heads, tokens) for _ in range(layers))
        if zero:
            zero_init(self.proj_out)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y, sizes = self.proj_in(to_tokens(group_norm(self.norm, x))), x.shape[2:]
        for layer in self.transformer_blocks:
            y = layer(y, sizes, tokens)
        return from_tokens(self.proj_out(y) + to_tokens(x), sizes)


def sinusoidal_embedding(
    time: Tensor, channels: int, dtype: torch.dtype = torch.float32, last: int | None = None, scale: float = 1.0
) -> Tensor:
    """Return [cos(t f), sin(t f)] with f_i = scale 10000^(-i / last), in float32 at least (Vaswani et al. 2017).   [B] -> [B, C]

    ``last``: by default half of the channels. The last one of an odd number of channels is 0.
    """
    wide, half = torch.promote_types(dtype, torch.float32), channels // 2
    frequencies = torch.exp(torch.arange(half, dtype=wide, device=time.device) * (-math.log(10_000) / (last or half)))
    angles = time.to(wide)[:, None] * scale * frequencies
    embedding = torch.cat((angles.cos(), angles.sin()), -1)
    return (F.pad(embedding, (0, 1)) if channels % 2 else embedding).to(dtype)


class TimeEmbedding(nn.Module):
    """[B, C] -> [B, C']"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


def zero_init(layer: Any) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
