"""A denoising U-Net for maps and volumes (Ronneberger et al. 2015, Ho et al. 2020, Rombach et al. 2022).

Parameters have the names of diffusers' files: of UNet2DConditionModel with cross-attention, of UNet2DModel without.
Shapes as in ``hpcai.models.diffusion.blocks``; T channels of the time embedding
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.models.diffusion import blocks
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import UNetConfig
from hpcai.models.diffusion.grid import Grid
from hpcai.models.diffusion.transformer import check_inputs
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.recompute import run_block

_Attention = Callable[[], nn.Module] | None


class _LayerFactory:
    def __init__(self, cfg: UNetConfig) -> None:
        self.cfg, self.time = cfg, 4 * cfg.channels[0]
        self.space = blocks.Space(cfg.dims, cfg.periodic)

    def block(self, inputs: int, outputs: int) -> blocks.ResBlock:
        cfg = self.cfg
        return blocks.ResBlock(self.space, inputs, outputs, self.time, cfg.groups, cfg.eps, cfg.dropout, cfg.zero)

    def attention(self, kind: str, level: int) -> _Attention:
        """Return the constructor of the attention of a level."""
        cfg, groups = self.cfg, self.cfg.attention_groups or self.cfg.groups
        channels, heads, layers = cfg.channels[level], cfg.heads[level], (cfg.transformer_layers or (1,) * len(cfg.heads))[level]
        if kind == "cross":
            assert cfg.tokens is not None
            return partial(blocks.CrossAttention, channels, heads, cfg.tokens, groups, cfg.zero, layers)
        return partial(blocks.SelfAttention, channels, heads, groups, cfg.eps, cfg.zero) if kind == "self" else None


class Level(nn.Module):
    """Residual blocks of one resolution, with attention after each.   ``inputs``: input channels of each block"""

    def __init__(self, shapes: _LayerFactory, inputs: Sequence[int], channels: int, attention: _Attention) -> None:
        super().__init__()
        self.recompute = shapes.cfg.recompute
        self.resnets = nn.ModuleList(shapes.block(n, channels) for n in inputs)
        if attention is not None:
            self.attentions = nn.ModuleList(attention() for _ in inputs)

    def parts(self) -> Iterator[tuple[nn.Module, nn.Module | None]]:
        """Yield each block with the attention after it."""
        yield from zip(self.resnets, getattr(self, "attentions", [None] * len(self.resnets)))


class DownLevel(Level):
    """x [B, C, ...] -> [B, C', .../2], and the outputs of all blocks and of the downsampling, for skip connections"""

    def __init__(self, shapes: _LayerFactory, inputs: Sequence[int], channels: int, attention: _Attention, last: bool) -> None:
        super().__init__(shapes, inputs, channels, attention)
        self.downsamplers = None if last else nn.ModuleList([blocks.Downsample(shapes.space, channels)])

    def forward(self, x: Tensor, time: Tensor, tokens: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        outputs = []
        for block, attention in self.parts():
            x = run_block(block, self.recompute, x, time)
            x = x if attention is None else run_block(attention, self.recompute, x, tokens)
            outputs.append(x)
        for down in self.downsamplers or ():
            x = down(x)
            outputs.append(x)
        return x, outputs


class UpLevel(Level):
    """x [B, C, ...] and a skip connection for each block -> [B, C', ...], upsampled to sides ``sizes`` unless the level is last"""

    def __init__(self, shapes: _LayerFactory, inputs: Sequence[int], channels: int, attention: _Attention, last: bool) -> None:
        super().__init__(shapes, inputs, channels, attention)
        self.upsamplers = None if last else nn.ModuleList([blocks.Upsample(shapes.space, channels)])

    def forward(self, x: Tensor, skips: list[Tensor], sizes: Sequence[int], time: Tensor, tokens: Tensor | None) -> Tensor:
        for (block, attention), skip in zip(self.parts(), skips):
            x = run_block(block, self.recompute, x, time, skip)
            x = x if attention is None else run_block(attention, self.recompute, x, tokens)
        for up in self.upsamplers or ():
            x = up(x, sizes)
        return x


class Middle(Level):
    """Two blocks with attention in between.   [B, C, ...] -> the same"""

    def __init__(self, shapes: _LayerFactory, channels: int, attention: _Attention) -> None:
        super().__init__(shapes, (channels, channels), channels, None)
        if attention is not None:
            self.attentions = nn.ModuleList([attention()])

    def forward(self, x: Tensor, time: Tensor, tokens: Tensor | None) -> Tensor:
        x = run_block(self.resnets[0], self.recompute, x, time)
        for attention in getattr(self, "attentions", ()):
            x = run_block(attention, self.recompute, x, tokens)
        return run_block(self.resnets[1], self.recompute, x, time)


class UNet(nn.Module):
    """x [B, C, ...], time [B], condition -> [B, C', ...] in channels-last memory

    Sides may be odd, except along periodic dims, which each level but the last must halve. A class equal to the number of classes
    means no class. Raises DataError for inputs of the wrong shape, and for conditions that are missing or not in the settings.
    """

    def __init__(self, cfg: UNetConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or UNetConfig()
        shapes = _LayerFactory(cfg)
        levels = [(n, shapes.attention(kind, level)) for level, (n, kind) in enumerate(zip(cfg.channels, cfg.attention))]
        first, last = cfg.channels[0], cfg.channels[-1]
        self.space, self.grid = shapes.space, Grid()  # a seam: pixels may be sharded
        cells = cfg.patch**cfg.dims
        self.conv_in = blocks.make_conv(self.space, cells * (cfg.inputs + cfg.field + cfg.fine), first)
        self.time_embedding = blocks.TimeEmbedding(first, shapes.time)
        self.class_embedding = nn.Embedding(cfg.classes, shapes.time) if cfg.classes else None
        self.parameter_embedding = blocks.TimeEmbedding(cfg.parameters, shapes.time) if cfg.parameters else None
        self.add_embedding = blocks.TimeEmbedding(cfg.pooled + 6 * cfg.sizes, shapes.time) if cfg.pooled and cfg.sizes else None
        self.down_blocks, skips, channels = nn.ModuleList(), [first], first
        for level, (width, attention) in enumerate(levels, 1):
            inputs, is_last = [channels] + [width] * (cfg.blocks - 1), level == len(levels)
            self.down_blocks.append(DownLevel(shapes, inputs, width, attention, is_last))
            skips += [width] * (cfg.blocks + (not is_last))
            channels = width
        self.mid_block = Middle(shapes, last, shapes.attention(cfg.middle, -1))
        self.up_blocks = nn.ModuleList()
        for level, (width, attention) in enumerate(reversed(levels), 1):
            inputs = [n + skips.pop() for n in (channels, *[width] * cfg.blocks)]
            self.up_blocks.append(UpLevel(shapes, inputs, width, attention, level == len(levels)))
            channels = width
        self.conv_norm_out = GroupNorm(cfg.groups, first, "silu", eps=cfg.eps)
        self.conv_out = blocks.make_conv(self.space, first, cells * cfg.outputs)
        if cfg.zero:
            blocks.zero_init(self.conv_out)
        self.to(memory_format=blocks.FORMATS[cfg.dims])  # type: ignore[call-overload]

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        cfg, size = self.cfg, self.grid.full_size(x.shape[2:])
        self._check(x, size, time, condition)
        embedded = F.silu(self.embed(x, time, condition))
        if condition.field is not None:
            x = torch.cat((x, blocks.resize(condition.field.to(x.dtype), size, self.space.periodic_dims, self.grid.box(size))), 1)
        if condition.fine is not None:
            x = torch.cat((x, condition.fine.to(x.dtype)), 1)
        tokens = None if condition.tokens is None else condition.tokens.to(x.dtype)
        x = self.conv_in(blocks.channels_last(pixel_unshuffle(x, cfg.patch)))
        skips = [x]
        for level in self.down_blocks:
            x, outputs = level(x, embedded, tokens)
            skips += outputs
        x = self.mid_block(x, embedded, tokens)
        for level in self.up_blocks:
            own = [skips.pop() for _ in range(cfg.blocks + 1)]
            x = level(x, own, skips[-1].shape[2:] if skips else (), embedded, tokens)
        return pixel_shuffle(self.conv_out(self.conv_norm_out(x)), cfg.patch)

    def embed(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Return the sum of the embeddings of time, class, physical parameters, and pooled text with sizes.   [B, T]"""
        embedding = self.time_embedding(blocks.sinusoidal_embedding(time, self.cfg.channels[0], x.dtype))
        if self.class_embedding is not None and condition.classes is not None:
            classes, count = condition.classes, self.class_embedding.num_embeddings
            row = self.class_embedding(classes.clamp(max=count - 1))
            embedding = embedding + row.masked_fill((classes == count)[:, None], 0.0)
        if self.parameter_embedding is not None and condition.parameters is not None:
            embedding = embedding + self.parameter_embedding(condition.parameters.to(x.dtype))
        if self.add_embedding is not None and condition.pooled is not None and condition.sizes is not None:
            sizes = blocks.sinusoidal_embedding(condition.sizes.flatten(), self.cfg.sizes or 0, x.dtype).view(len(x), -1)
            embedding = embedding + self.add_embedding(torch.cat((condition.pooled.to(x.dtype), sizes), 1))
        return embedding

    def _check(self, x: Tensor, size: Sequence[int], time: Tensor, condition: Condition) -> None:
        cfg, sides = self.cfg, " x ".join(map(str, size))
        if x.ndim != cfg.dims + 2 or x.shape[1] != cfg.inputs:
            raise DataError(f"the sample has shape {list(x.shape)}; expected [B, {cfg.inputs}" + ", size" * cfg.dims + "]")
        divisor = cfg.patch * 2 ** (len(cfg.channels) - 1)
        if any(n % cfg.patch for n in size):
            raise DataError(f"the sample has {sides} pixels; expected multiples of patch, {cfg.patch}")
        if odd := [size[dim - 2] for dim in self.space.periodic_dims if size[dim - 2] % divisor]:
            raise DataError(f"the sample has {sides} pixels, {odd[0]} along a periodic dim; expected a multiple of {divisor} there")
        sizes: dict[str, tuple[int | str, ...]] = {"classes": (), "parameters": (cfg.parameters,), "tokens": ("N", cfg.tokens or 0)}
        sizes |= {"field": (cfg.field, *"DHW"[3 - cfg.dims :]), "fine": (cfg.fine, *x.shape[2:])}
        sizes |= {"pooled": (cfg.pooled or 0,), "sizes": (6,)}
        check_inputs(self, x, time, condition, {name: size for name, size in sizes.items() if getattr(cfg, name)})
        field = condition.field
        if field is not None and any(coarse > fine for coarse, fine in zip(field.shape[2:], size)):
            raise DataError(f"condition.field has {list(field.shape[2:])} pixels, the sample {list(size)}; expected no more")


def pixel_unshuffle(x: Tensor, patch: int) -> Tensor:
    """``F.pixel_unshuffle`` in D dims.   [B, C, S...] -> [B, C P^D, S/P...]"""
    if patch == 1:
        return x
    dims = x.ndim - 2
    split = x.reshape(*x.shape[:2], *(k for n in x.shape[2:] for k in (n // patch, patch)))
    return split.permute(0, 1, *range(3, 3 + 2 * dims, 2), *range(2, 2 + 2 * dims, 2)).flatten(1, 1 + dims)


def pixel_shuffle(x: Tensor, patch: int) -> Tensor:
    """``F.pixel_shuffle`` in D dims.   [B, C P^D, S/P...] -> [B, C, S...]"""
    if patch == 1:
        return x
    dims, sizes = x.ndim - 2, x.shape[2:]
    split = x.unflatten(1, (-1, *(patch,) * dims))
    permuted = split.permute(0, 1, *(k for dim in range(dims) for k in (2 + dims + dim, 2 + dim)))
    return permuted.reshape(*permuted.shape[:2], *(patch * n for n in sizes))
