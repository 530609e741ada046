"""Flux.1: a transformer over text and image tokens (Black Forest Labs 2024, after Esser et al. 2024).

Parameters have the names of diffusers' files. B samples, N text tokens, T image tokens, C channels, H heads, D channels of a head
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu
from hpcai.models.diffusion import transformer
from hpcai.models.diffusion.blocks import from_tokens, sinusoidal_embedding, to_tokens
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import TIME_CHANNELS, FluxConfig
from hpcai.nn.matmul import fused_linear
from hpcai.nn.recompute import cheap, run_block
from hpcai.nn.weights import PretrainedMixin


class SingleStreamBlock(nn.Module):
    """A block with shared weights and parallel attention and feed-forward layers.   x [B, N + T, C], c [B, C] -> x"""

    float8 = True

    def __init__(self, cfg: FluxConfig) -> None:
        super().__init__()
        self.norm, self.attn = transformer.Modulation(cfg.width, 3), transformer.Attention(cfg.width, cfg.head)
        self.proj_mlp, self.proj_out = nn.Linear(cfg.width, 4 * cfg.width), nn.Linear(5 * cfg.width, cfg.width)

    def forward(self, x: Tensor, c: Tensor, rotary: transformer.Rotary) -> Tensor:
        shift, scale, gate = self.norm(c)
        linears = self.attn.to_q, self.attn.to_k, self.attn.to_v, self.proj_mlp
        q, k, v, inner = fused_linear(cheap(transformer.modulate, x, shift, scale), *linears)
        return x + gate[:, None] * self.proj_out(cheap(_concat_gelu, self.attn(v, rotary, q, k), inner))


def _concat_gelu(attention: Tensor, inner: Tensor) -> Tensor:
    return torch.cat((attention, gelu(inner)), -1)


class Flux(PretrainedMixin):
    """x [B, inputs / 4, H, W], time [B] from 0 (sample) to 1 (noise), condition.tokens [B, N, J], condition.pooled [B, J'] and, if
    guidance-distilled, condition.guidance [B] -> [B, inputs / 4, H, W]

    Raises DataError for other channels or odd sides, and for conditions that are missing, without use, or of other shapes.
    """

    package = __package__

    def __init__(self, cfg: FluxConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or FluxConfig()
        self.time_text_embed = transformer.CombinedTimestepGuidanceTextProjEmbeddings(cfg.width, cfg.pooled, cfg.guidance)
        self.context_embedder, self.x_embedder = nn.Linear(cfg.tokens, cfg.width), nn.Linear(cfg.inputs, cfg.width)
        self.transformer_blocks = nn.ModuleList(transformer.DoubleStreamBlock(cfg.width, cfg.head) for _ in range(cfg.double))
        self.single_transformer_blocks = nn.ModuleList(SingleStreamBlock(cfg) for _ in range(cfg.single))
        self.norm_out, self.proj_out = transformer.Modulation(cfg.width, 2), nn.Linear(cfg.width, cfg.inputs)
        transformer.init_weights(self, cfg.zero)

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        cfg = self.cfg
        if x.ndim != 4 or x.shape[1] != cfg.inputs // 4 or x.shape[2] % 2 or x.shape[3] % 2:
            expected = f"expected [B, {cfg.inputs // 4}, H, W] with even H and W"
            raise DataError(f"Flux: samples are {list(x.shape)}, {expected}; pad or crop them")
        guided = {"guidance": ()} if cfg.guidance else {}
        needs: dict[str, tuple[int | str, ...]] = {"tokens": ("N", cfg.tokens), "pooled": (cfg.pooled,), **guided}
        tokens, pooled, *_ = transformer.check_inputs(self, x, time, condition, needs)
        (rows, columns), count = (n // 2 for n in x.shape[2:]), tokens.shape[1]
        scalars = time, condition.guidance
        t, g = (s if s is None else sinusoidal_embedding(s, TIME_CHANNELS, x.dtype, scale=transformer.FLOW_SCALE) for s in scalars)
        c = self.time_text_embed(t, pooled.to(x.dtype), g)
        rotary = rotary_cos_sin(cfg, count, rows, columns, x.dtype, x.device)
        y, text = self.x_embedder(pack_latents(x)), self.context_embedder(tokens.to(x.dtype))
        for block in self.transformer_blocks:
            y, text = run_block(block, cfg.recompute, y, text, c, rotary)
        y = torch.cat((text, y), 1)
        for block in self.single_transformer_blocks:
            y = run_block(block, cfg.recompute, y, c, rotary)
        scale, shift = self.norm_out(c)  # in this order here only
        return F.pixel_shuffle(from_tokens(self.proj_out(transformer.modulate(y[:, count:], shift, scale)), (rows, columns)), 2)


def pack_latents(x: Tensor) -> Tensor:
    """Return patches of 2 x 2 pixels as tokens; channels are ordered C, row, column.   [B, C, H, W] -> [B, H W / 4, 4 C]"""
    return to_tokens(F.pixel_unshuffle(x, 2))


def rotary_cos_sin(
    cfg: FluxConfig, text: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary embedding, in float32 at least, concatenated with themselves. The position of a text token
    is (0, 0, 0), that of an image token (0, row, column).   two of [1, N + T, D]"""
    wide = torch.promote_types(dtype, torch.float32)
    image = torch.arange(rows * columns, device=device)
    positions = F.pad(torch.stack((torch.zeros_like(image), image // columns, image % columns), -1), (0, 0, text, 0)).to(wide)
    frequencies = (cfg.theta ** (torch.arange(0, n, 2, device=device, dtype=wide) / -n) for n in cfg.turned)
    angles = torch.cat([position[:, None] * f for position, f in zip(positions.unbind(-1), frequencies)], -1)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()
