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
from torch.autograd.function import once_differentiable

from hpcai.kernels.activations import geglu
from hpcai.nn.conv import Conv2d, Conv3d, conv_transpose3d
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.products import together

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


def around(x: Tensor, dims: Sequence[int]) -> Tensor:
    """``x`` [B, C, ...] with one more place on both sides of each of these dims, the one at its other end, in channels-last memory
    (``F.pad`` with circular would lose that)."""
    found: Tensor = _Around.apply(x, tuple(dims))
    return found


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.dims = dims
        sizes = [n + 2 * (dim in dims) for dim, n in enumerate(x.shape)]
        y = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=FORMATS[x.ndim - 2])
        _within(y, dims).copy_(x)
        for dim in dims:  # one after the other, so that the last fills the corners
            n = x.shape[dim]
            y.narrow(dim, 0, 1).copy_(y.narrow(dim, n, 1))
            y.narrow(dim, n + 1, 1).copy_(y.narrow(dim, 1, 1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dy = dy.clone(memory_format=FORMATS[dy.ndim - 2])
        for dim in reversed(ctx.dims):
            n = dy.shape[dim] - 2
            dy.narrow(dim, n, 1).add_(dy.narrow(dim, 0, 1))
            dy.narrow(dim, 1, 1).add_(dy.narrow(dim, n + 1, 1))
        return places_last(_within(dy, ctx.dims)), None


def _within(y: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        y = y.narrow(dim, 1, y.shape[dim] - 2)
    return y


def resized(field: Tensor, sizes: Sequence[int], wrapped: Sequence[int] = ()) -> Tensor:
    """``field`` [B, C, ...] at the places of a finer grid over the same space, linear between its own, as ``F.interpolate`` with
    ``align_corners=False``, but around the ends of the dims in ``wrapped``."""
    for dim, size in enumerate(sizes, 2):
        have = field.shape[dim]
        if have == size:
            continue
        at = (torch.arange(size, device=field.device, dtype=torch.float64) + 0.5) * (have / size) - 0.5
        if dim not in wrapped:
            at = at.clamp(0, have - 1)
        low = at.floor()
        share = (at - low).to(field.dtype).view(-1, *[1] * (field.ndim - dim - 1))
        low = low.long()
        ends = (low % have, (low + 1) % have) if dim in wrapped else (low, (low + 1).clamp(max=have - 1))
        field = torch.lerp(field.index_select(dim, ends[0]), field.index_select(dim, ends[1]), share)
    return field


# ---- convolutions


class _Wrapped:
    """A convolution of whose dims some are periodic: 3 places wide, and without padding along these."""

    wrapped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(around(x, self.wrapped))  # type: ignore[misc]


class _Wrapped2d(_Wrapped, Conv2d):
    pass


class _Wrapped3d(_Wrapped, Conv3d):
    pass


def convolution(space: Space, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    """A convolution that keeps the sides of its input, or halves them (an odd one upwards).   [B, C, ...] -> [B, C', ...]"""
    wrapped = space.wrapped if kernel > 1 else ()
    padding = tuple(0 if dim in wrapped else kernel // 2 for dim in range(2, space.dims + 2))
    if not wrapped:
        return (Conv2d if space.dims == 2 else Conv3d)(inputs, outputs, kernel, stride, padding)  # type: ignore[arg-type]
    found = (_Wrapped2d if space.dims == 2 else _Wrapped3d)(inputs, outputs, kernel, stride, padding)  # type: ignore[arg-type]
    found.wrapped = wrapped
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

    [B, C, ...] -> [B, C, ...] of ``sizes``, or twice as large. Where all sides are doubled the two are one transposed convolution,
    of 4 x 4 weights that are sums of the 3 x 3: 16 products for each place before instead of 36, in a volume 64 instead of 216.
    """

    joined = True
    """False where ``conv`` was replaced by one that needs all places"""

    def __init__(self, space: Space, channels: int) -> None:
        super().__init__()
        self.wrapped, self.conv = space.wrapped, convolution(space, channels, channels)

    def forward(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        doubled = tuple(2 * n for n in x.shape[2:])
        sizes = doubled if sizes is None else tuple(sizes)
        if sizes != doubled or not self.joined or x.numel() < _WORTH * x.shape[1] ** 2:
            return self.conv(places_last(F.interpolate(x, size=sizes, mode="nearest")))
        if self.wrapped:
            x = around(x, self.wrapped)
        padding = tuple(3 if dim in self.wrapped else 1 for dim in range(2, x.ndim))
        transposed: Any = F.conv_transpose2d if x.ndim == 4 else conv_transpose3d
        return transposed(x, spread_weight(self.conv.weight), self.conv.bias, (2,) * (x.ndim - 2), padding)


def spread_weight(weight: Any) -> Tensor:
    """The weights of a transposed convolution of stride 2 that doubles a map or a volume and convolves it.

    [C', C, 3, ...] -> [C, C', 4, ...] in channels-last memory; along each dim (a, b, c) becomes (c, b + c, a + b, a).
    """
    dims = weight.ndim - 2
    with torch.autocast(weight.device.type, enabled=False):  # rounded once, when they are sums
        ends = torch.arange(4, device=weight.device)[:, None] + torch.arange(3, device=weight.device)
        sums = every = ((ends == 2) | (ends == 3)).to(weight.dtype)
        for _ in range(dims - 1):
            every = torch.kron(every, sums)
        taps = weight.movedim((0, 1), (-1, 0)).flatten(1, -2)  # [C, 3 * 3, C']
        return (every @ taps).unflatten(1, (4,) * dims).movedim(-1, 1)


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


class Heads(nn.Module):
    """Attention of tokens to themselves, or to others.   x [B, N, C], others [B, N', J] -> [B, N, C]"""

    def __init__(self, channels: int, heads: int, others: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(channels, channels, bias)
        self.to_k = nn.Linear(others or channels, channels, bias)
        self.to_v = nn.Linear(others or channels, channels, bias)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        if others is None:
            found = together(x, self.to_q, self.to_k, self.to_v)
        else:
            found = (self.to_q(x), *together(others, self.to_k, self.to_v))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in found)
        return self.to_out[0](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SelfAttention(Heads):
    """x + attention of all places to each other, after a group norm (Ho et al. 2020).   [B, C, ...] -> the same"""

    def __init__(self, channels: int, heads: int, groups: int, eps: float, zero: bool = False) -> None:
        super().__init__(channels, heads, bias=True)
        self.group_norm = GroupNorm(groups, channels, eps=eps)
        if zero:
            zeroed(self.to_out[0])

    def forward(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        y = super().forward(to_tokens(self.group_norm(x)))
        return to_places(y + to_tokens(x), x.shape[2:])


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
    """Attention of places to each other and to tokens, and a feed-forward part.   x [B, N, C], tokens [B, N', J] -> [B, N, C]"""

    eighths = True  # its linear layers may multiply in 8 bits

    def __init__(self, channels: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = LayerNorm(channels, narrow=True), Heads(channels, heads)
        self.norm2, self.attn2 = LayerNorm(channels, narrow=True), Heads(channels, heads, tokens)
        self.norm3, self.ff = LayerNorm(channels, narrow=True), FeedForward(channels)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), tokens)
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
        y = self.proj_in(to_tokens(self.norm(x)))
        for layer in self.transformer_blocks:
            y = layer(y, tokens)
        return to_places(self.proj_out(y) + to_tokens(x), x.shape[2:])


# ---- time


def sinusoidal(time: Tensor, channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[cos(t f), sin(t f)] with f_i = 10000^(-i / half), half of ``channels`` of each (Vaswani et al. 2017).   [B] -> [B, C]

    In float32 at least. The last channel of an odd number is 0.
    """
    wide, half = torch.promote_types(dtype, torch.float32), channels // 2
    turns = torch.exp(torch.arange(half, dtype=wide, device=time.device) * (-math.log(10_000) / half))
    angles = time.to(wide)[:, None] * turns
    return F.pad(torch.cat((angles.cos(), angles.sin()), -1), (0, channels % 2)).to(dtype)


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
