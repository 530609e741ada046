"""What U-Nets and autoencoders are made of. Parameters bear the names that the files of diffusers have.

Maps and volumes are channels-last from end to end: their places are tokens, and tokens their places, without a copy.
B samples, C channels, ... the places of a map (H, W) or a volume (D, H, W), N places in all or tokens, J channels of given tokens
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.kernels.activations import geglu
from hpcai.nn.conv import Conv2d, Conv3d
from hpcai.nn.upsample_conv import UpsampleConv, fold_upsampling
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.periodic import PeriodicConv2d, PeriodicConv3d
from hpcai.nn.matmul import fused_linear

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
# Places for each channel from which an ``Up`` gains more than sums of its weights take: 4 maps of 8 x 8 for 256 channels (25 ms
# instead of 36); of 2 only where freed memory is kept.
_WORTH = 1
_TRANSFORMER_EPS = 1e-6  # of the group norm before a transformer, whatever that of residual blocks is


class Space(NamedTuple):
    """The dims of a map or a volume, and whether each comes back to its beginning (none: none does)."""

    dims: int = 2
    periodic: tuple[bool, ...] = ()

    @property
    def wrapped(self) -> tuple[int, ...]:
        """The periodic dims of a tensor [B, C, ...]."""
        return tuple(dim for dim, is_periodic in enumerate(self.periodic, 2) if is_periodic)


# ---- places


def places_last(x: Tensor) -> Tensor:
    """[B, C, ...] in channels-last memory, copied where it is not."""
    return x.contiguous(memory_format=FORMATS[x.ndim - 2])


def to_tokens(x: Tensor) -> Tensor:
    """[B, C, ...] in channels-last memory -> [B, N, C], a view"""
    return x.movedim(1, -1).flatten(1, -2)


def to_places(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, N, C] -> [B, C, ...] of these sizes in channels-last memory, a view"""
    return x.unflatten(1, tuple(sizes)).movedim(-1, 1)


def resized(field: Tensor, sizes: Sequence[int], wrapped: Sequence[int] = (), box: Sequence[slice] = ()) -> Tensor:
    """``field`` [B, C, ...] at the places of a finer grid over the same space, linear between its own, as ``F.interpolate`` with
    ``align_corners=False``, but around the ends of the dims in ``wrapped``. ``box``: those places that are wanted, of each dim."""
    for dim, size in enumerate(sizes, 2):
        have, (first, end, _) = field.shape[dim], (box[dim - 2] if box else slice(None)).indices(size)
        if have == size:
            field = field.narrow(dim, first, end - first)
            continue
        at = (torch.arange(first, end, device=field.device, dtype=torch.float64) + 0.5) * (have / size) - 0.5
        if dim not in wrapped:
            at = at.clamp(0, have - 1)
        low = at.floor()
        share = (at - low).to(field.dtype).view(-1, *[1] * (field.ndim - dim - 1))
        low = low.long()
        ends = (low % have, (low + 1) % have) if dim in wrapped else (low, (low + 1).clamp(max=have - 1))
        field = torch.lerp(field.index_select(dim, ends[0]), field.index_select(dim, ends[1]), share)
    return field


# ---- convolutions


def convolution(space: Space, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    """A convolution that keeps the sides of its input, or halves them (an odd one upwards).   [B, C, ...] -> [B, C', ...]"""
    wrapped = space.wrapped if kernel > 1 else ()
    padding = tuple(0 if dim in wrapped else kernel // 2 for dim in range(2, space.dims + 2))
    kinds: Any = (PeriodicConv2d, PeriodicConv3d) if wrapped else (Conv2d, Conv3d)
    found: Any = kinds[space.dims - 2](inputs, outputs, kernel, stride, padding)
    if wrapped:
        found.circular_dims = wrapped
    return found


class Down(nn.Module):
    """Half as many places along each dim.   [B, C, ...] -> [B, C, .../2]

    ``centred``: the middle of a kernel lies on every other place, and an odd side is halved upwards; otherwise its beginning
    does, as in autoencoders, and downwards.
    """

    def __init__(self, space: Space, channels: int, centred: bool = True) -> None:
        super().__init__()
        self.conv = convolution(space, channels, channels, stride=2)
        self.more: tuple[int, ...] = ()
        if not centred:
            self.conv.padding, self.more = (0,) * space.dims, (0, 1) * space.dims  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.more) if self.more else x)


class Up(nn.Module):
    """Twice as many places along each dim, or one less, each with the value of the nearest, and a convolution of them.

    [B, C, ...] -> [B, C, ...] of ``sizes``, or twice as large. Where all sides are doubled the two may be one (``UpsampleConv``).
    """

    joined = True
    """False: always one after the other"""
    is_cut = False
    """whether places lie on several processes, and all sides are doubled"""

    def __init__(self, space: Space, channels: int) -> None:
        super().__init__()
        self.conv = convolution(space, channels, channels)
        self.doubled = UpsampleConv(space.dims, space.wrapped)

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        twice = tuple(2 * n for n in x.shape[2:])
        sizes = twice if sizes is None else tuple(sizes)
        if self.is_cut or (self.joined and sizes == twice and x.numel() >= _WORTH * x.shape[1] ** 2):
            return self.doubled(x, fold_upsampling(self.conv.weight), self.conv.bias)
        return self.conv(places_last(F.interpolate(x, size=sizes, mode="nearest")))


class ResBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))) + time))) (He et al. 2016, Ho et al. 2020).

    x [B, C, ...], time [B, T] after its activation (None for a block without) -> [B, C', ...]
    """

    def __init__(self, space: Space, inputs: int, outputs: int, time: int | None, groups: int, eps: float, dropout: float = 0.0,
                 zero: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = GroupNorm(groups, inputs, "silu", eps=eps)
        self.conv1 = convolution(space, inputs, outputs)
        self.time_emb_proj = None if time is None else nn.Linear(time, outputs)
        self.norm2 = GroupNorm(groups, outputs, "silu", eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = convolution(space, outputs, outputs)
        self.conv_shortcut = convolution(space, inputs, outputs, 1) if inputs != outputs else None
        if zero:
            zeroed(self.conv2)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.conv1(self.norm1(x))
        if self.time_emb_proj is not None and time is not None:
            y += self.time_emb_proj(time)[(..., *[None] * (x.ndim - 2))]  # nothing keeps what a convolution returns
        y = self.conv2(self.dropout(self.norm2(y)))
        y += x if self.conv_shortcut is None else self.conv_shortcut(x)
        return y


# ---- attention


class Attend(nn.Module):
    """Attention of so many heads of q [B, N, C] to k and v [B, N', C].   -> [B, N, C]"""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class AttendPlaces(Attend):
    """The same of all places of a map or a volume of these ``sizes``; a seam: places may lie on several processes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:  # type: ignore[override]
        return super().forward(q, k, v)


class Heads(nn.Module):
    """Attention of places to one another, or to given tokens.

    x [B, N, C], places of ``sizes``, others [B, N', J] -> [B, N, C]
    """

    def __init__(self, channels: int, heads: int, others: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, channels, bias)
        self.to_k = nn.Linear(others or channels, channels, bias)
        self.to_v = nn.Linear(others or channels, channels, bias)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])
        self.attend = AttendPlaces(heads) if others is None else Attend(heads)

    def forward(self, x: Tensor, sizes: Sequence[int], others: Tensor | None = None) -> Tensor:
        if others is None:
            return self.to_out[0](self.attend(*fused_linear(x, self.to_q, self.to_k, self.to_v), sizes))
        return self.to_out[0](self.attend(self.to_q(x), *fused_linear(others, self.to_k, self.to_v)))


class SelfAttention(Heads):
    """x + attention of all places to each other, after a group norm (Ho et al. 2020).   [B, C, ...] -> the same"""

    def __init__(self, channels: int, heads: int, groups: int, eps: float, zero: bool = False) -> None:
        super().__init__(channels, heads, bias=True)
        self.group_norm = GroupNorm(groups, channels, eps=eps)
        if zero:
            zeroed(self.to_out[0])

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:  # type: ignore[override]
        sizes = x.shape[2:]
        y = super().forward(to_tokens(self.group_norm(x)), sizes)
        return to_places(y + to_tokens(x), sizes)


class GEGLU(nn.Module):
    """value(x) * gelu(gate(x)), two products in one (Shazeer 2020).   [B, N, C] -> [B, N, C']"""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, 2 * inner)

    def forward(self, x: Tensor) -> Tensor:
        return geglu(self.proj(x))


class FeedForward(nn.Module):
    """[B, N, C] -> the same"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([GEGLU(channels, 4 * channels), nn.Identity(), nn.Linear(4 * channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


class TransformerLayer(nn.Module):
    """Attention of places to each other and to tokens, and a feed-forward part.

    x [B, N, C], places of ``sizes``, tokens [B, N', J] -> [B, N, C]
    """

    float8 = True  # its linear layers may multiply in FP8

    def __init__(self, channels: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = LayerNorm(channels, autocast_output=True), Heads(channels, heads)
        self.norm2, self.attn2 = LayerNorm(channels, autocast_output=True), Heads(channels, heads, tokens)
        self.norm3, self.ff = LayerNorm(channels, autocast_output=True), FeedForward(channels)

    def forward(self, x: Tensor, sizes: Sequence[int], tokens: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), sizes)
        x = x + self.attn2(self.norm2(x), sizes, tokens)
        return x + self.ff(self.norm3(x))


class CrossAttention(nn.Module):
    """x + a layer of a transformer over its places, which also sees tokens (Rombach et al. 2022).

    x [B, C, ...], tokens [B, N', J] -> [B, C, ...]
    """

    def __init__(self, channels: int, heads: int, tokens: int, groups: int, zero: bool = False) -> None:
        super().__init__()
        self.norm = GroupNorm(groups, channels, eps=_TRANSFORMER_EPS)
        self.proj_in, self.proj_out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList([TransformerLayer(channels, heads, tokens)])
        if zero:
            zeroed(self.proj_out)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y, sizes = self.proj_in(to_tokens(self.norm(x))), x.shape[2:]
        for layer in self.transformer_blocks:
            y = layer(y, sizes, tokens)
        return to_places(self.proj_out(y) + to_tokens(x), sizes)


# ---- time


def sinusoidal(
    time: Tensor, channels: int, dtype: torch.dtype = torch.float32, last: int | None = None, per: float = 1.0
) -> Tensor:
    """[cos(t f), sin(t f)] with f_i = per 10000^(-i / last), half of ``channels`` of each (Vaswani et al. 2017).   [B] -> [B, C]

    In float32 at least. ``last``: half of the channels, by default. The last channel of an odd number is 0.
    """
    wide, half = torch.promote_types(dtype, torch.float32), channels // 2
    turns = torch.exp(torch.arange(half, dtype=wide, device=time.device) * (-math.log(10_000) / (last or half)))
    angles = time.to(wide)[:, None] * per * turns
    found = torch.cat((angles.cos(), angles.sin()), -1)
    return (F.pad(found, (0, 1)) if channels % 2 else found).to(dtype)


class TimeEmbedding(nn.Module):
    """[B, C] -> [B, C']"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


def zeroed(layer: Any) -> None:
    """Let the weights of a layer start from zero."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
