"""Flux.1: a transformer over text and image tokens (Black Forest Labs 2024, after Esser et al. 2024).

Parameters have the names of diffusers' files. B samples, N text tokens, T image tokens, C channels, H heads, D channels of a head
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu
from hpcai.kernels.rotary import apply_rotary
from hpcai.models.diffusion.blocks import FeedForward, TimeEmbedding, sinusoidal_embedding
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import TIME_CHANNELS, FluxConfig
from hpcai.models.diffusion.transformer import GELUProjection, Modulation, attend, check_inputs, init_weights, modulate, split_heads
from hpcai.nn.matmul import fused_linear
from hpcai.nn.recompute import cheap, run_block
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.nn.weights import PretrainedMixin

CosSin = tuple[Tensor, Tensor]
_EPS, _TIME_SCALE = 1e-6, 1000.0


class Attention(nn.Module):
    """Attention with RMS norm and rotary embedding of queries and keys.   q, k, v [B, T, C] -> [B, T, C]"""

    def __init__(self, cfg: FluxConfig) -> None:
        super().__init__()
        self.size = cfg.head
        self.norm_q, self.norm_k = RMSNorm(cfg.head, _EPS), RMSNorm(cfg.head, _EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(cfg.width, cfg.width) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rotary: CosSin) -> Tensor:
        q, k = cheap(self.normalize_rotate, *rotary, q, k)  # q and k are saved for the norms anyway
        return attend(q, k, split_heads(v, self.size))

    def normalize_rotate(self, cosines: Tensor, sines: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.norm_q(q.unflatten(-1, (-1, self.size))), self.norm_k(k.unflatten(-1, (-1, self.size)))
        return apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cosines, sines, interleaved=True)


class JointAttention(Attention):
    """x [B, T, C], text [B, N, C] -> the same"""

    def __init__(self, cfg: FluxConfig) -> None:
        super().__init__(cfg)
        self.norm_added_q, self.norm_added_k = RMSNorm(cfg.head, _EPS), RMSNorm(cfg.head, _EPS)
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(cfg.width, cfg.width) for _ in range(3))
        self.to_out, self.to_add_out = nn.Sequential(nn.Linear(cfg.width, cfg.width)), nn.Linear(cfg.width, cfg.width)

    def forward(self, x: Tensor, text: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = fused_linear(x, self.to_q, self.to_k, self.to_v)
        text_q, text_k, text_v = fused_linear(text, self.add_q_proj, self.add_k_proj, self.add_v_proj)
        q, k = cheap(self.normalize_rotate_joint, *rotary, q, k, text_q, text_k)
        y = attend(q, k, split_heads(torch.cat((text_v, v), 1), self.size))
        text, x = y.split((text.shape[1], x.shape[1]), 1)
        return self.to_out(x), self.to_add_out(text)

    def normalize_rotate_joint(self, cosines: Tensor, sines: Tensor, *qk: Tensor) -> tuple[Tensor, Tensor]:
        q, k, text_q, text_k = (x.unflatten(-1, (-1, self.size)) for x in qk)
        q = torch.cat((self.norm_added_q(text_q), self.norm_q(q)), 1)
        k = torch.cat((self.norm_added_k(text_k), self.norm_k(k)), 1)
        return apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cosines, sines, interleaved=True)


class DoubleStreamBlock(nn.Module):
    """A block with separate weights for image and text.   x [B, T, C], text [B, N, C], c [B, C] -> x and text"""

    float8 = True  # linear layers may use FP8

    def __init__(self, cfg: FluxConfig) -> None:
        super().__init__()
        self.norm1, self.norm1_context = Modulation(cfg.width, 6), Modulation(cfg.width, 6)
        self.attn = JointAttention(cfg)
        self.ff, self.ff_context = (FeedForward(cfg.width, GELUProjection(cfg.width)) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, c: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        mod, text_mod = self.norm1(c), self.norm1_context(c)
        y, text_y = self.attn(cheap(modulate, x, *mod[:2]), cheap(modulate, text, *text_mod[:2]), rotary)
        return _feed_forward(x, y, self.ff, *mod[2:]), _feed_forward(text, text_y, self.ff_context, *text_mod[2:])


def _feed_forward(x: Tensor, y: Tensor, feed: nn.Module, gate: Tensor, shift: Tensor, scale: Tensor, feed_gate: Tensor) -> Tensor:
    x = x + gate[:, None] * y
    return x + feed_gate[:, None] * feed(cheap(modulate, x, shift, scale))


class SingleStreamBlock(nn.Module):
    """A block with shared weights and parallel attention and feed-forward layers.   x [B, N + T, C], c [B, C] -> x"""

    float8 = True

    def __init__(self, cfg: FluxConfig) -> None:
        super().__init__()
        self.norm, self.attn = Modulation(cfg.width, 3), Attention(cfg)
        self.proj_mlp, self.proj_out = nn.Linear(cfg.width, 4 * cfg.width), nn.Linear(5 * cfg.width, cfg.width)

    def forward(self, x: Tensor, c: Tensor, rotary: CosSin) -> Tensor:
        shift, scale, gate = self.norm(c)
        linears = self.attn.to_q, self.attn.to_k, self.attn.to_v, self.proj_mlp
        q, k, v, inner = fused_linear(cheap(modulate, x, shift, scale), *linears)
        return x + gate[:, None] * self.proj_out(cheap(_concat_gelu, self.attn(q, k, v, rotary), inner))


def _concat_gelu(attention: Tensor, inner: Tensor) -> Tensor:
    return torch.cat((attention, gelu(inner)), -1)


class CombinedTimestepGuidanceTextProjEmbeddings(nn.Module):
    """The conditioning embedding of adaptive layer norm: time, pooled text and guidance.

    Shape: sinusoidal time [B, 256], pooled text [B, J'], sinusoidal guidance [B, 256] -> [B, C]
    """

    def __init__(self, cfg: FluxConfig) -> None:
        super().__init__()
        self.timestep_embedder, self.text_embedder = TimeEmbedding(TIME_CHANNELS, cfg.width), TimeEmbedding(cfg.pooled, cfg.width)
        self.guidance_embedder = TimeEmbedding(TIME_CHANNELS, cfg.width) if cfg.guidance else None

    def forward(self, time: Tensor, pooled: Tensor, guidance: Tensor | None) -> Tensor:
        c = self.timestep_embedder(time) + self.text_embedder(pooled)
        return c if self.guidance_embedder is None else c + self.guidance_embedder(guidance)


class Flux(PretrainedMixin):
    """x [B, inputs / 4, H, W], time [B] from 0 (sample) to 1 (noise), condition.tokens [B, N, J], condition.pooled [B, J'] and, if
    guidance-distilled, condition.guidance [B] -> [B, inputs / 4, H, W]

    Raises DataError for other channels or odd sides, and for conditions that are missing, without use, or of other shapes.
    """

    package = __package__

    def __init__(self, cfg: FluxConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or FluxConfig()
        self.time_text_embed = CombinedTimestepGuidanceTextProjEmbeddings(cfg)
        self.context_embedder, self.x_embedder = nn.Linear(cfg.tokens, cfg.width), nn.Linear(cfg.inputs, cfg.width)
        self.transformer_blocks = nn.ModuleList(DoubleStreamBlock(cfg) for _ in range(cfg.double))
        self.single_transformer_blocks = nn.ModuleList(SingleStreamBlock(cfg) for _ in range(cfg.single))
        self.norm_out, self.proj_out = Modulation(cfg.width, 2), nn.Linear(cfg.width, cfg.inputs)
        init_weights(self, cfg.zero)

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        cfg = self.cfg
        if x.ndim != 4 or x.shape[1] != cfg.inputs // 4 or x.shape[2] % 2 or x.shape[3] % 2:
            expected = f"expected [B, {cfg.inputs // 4}, H, W] with even H and W"
            raise DataError(f"Flux: samples are {list(x.shape)}, {expected}; pad or crop them")
        guided = {"guidance": ()} if cfg.guidance else {}
        check_inputs(self, x, time, condition, {"tokens": ("N", cfg.tokens), "pooled": (cfg.pooled,), **guided})
        tokens: Tensor = condition.tokens  # type: ignore[assignment]
        pooled: Tensor = condition.pooled  # type: ignore[assignment]
        (rows, columns), count = (n // 2 for n in x.shape[2:]), tokens.shape[1]
        scalars = time, condition.guidance
        t, g = (None if s is None else sinusoidal_embedding(s, TIME_CHANNELS, x.dtype, scale=_TIME_SCALE) for s in scalars)
        c = self.time_text_embed(t, pooled.to(x.dtype), g)
        rotary = rotary_cos_sin(cfg, count, rows, columns, x.dtype, x.device)
        y, text = self.x_embedder(pack_latents(x)), self.context_embedder(tokens.to(x.dtype))
        for block in self.transformer_blocks:
            y, text = run_block(block, cfg.recompute, y, text, c, rotary)
        y = torch.cat((text, y), 1)
        for block in self.single_transformer_blocks:
            y = run_block(block, cfg.recompute, y, c, rotary)
        scale, shift = self.norm_out(c)  # in this order here only
        return unpack_latents(self.proj_out(modulate(y[:, count:], shift, scale)), rows, columns)


def pack_latents(x: Tensor) -> Tensor:
    """Return patches of 2 x 2 pixels as tokens; channels are ordered C, row, column.   [B, C, H, W] -> [B, H W / 4, 4 C]"""
    return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(y: Tensor, rows: int, columns: int) -> Tensor:
    """Invert ``pack_latents``, for ``rows`` x ``columns`` patches.   [B, T, 4 C] -> [B, C, 2 rows, 2 columns]"""
    return y.unflatten(2, (-1, 2, 2)).unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def rotary_cos_sin(
    cfg: FluxConfig, text: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> CosSin:
    """Return cosines and sines of rotary embedding, in float32 at least, concatenated with themselves. The position of a text token
    is (0, 0, 0), that of an image token (0, row, column).   two of [1, N + T, D]"""
    wide = torch.promote_types(dtype, torch.float32)
    image = torch.arange(rows * columns, device=device)
    positions = F.pad(torch.stack((torch.zeros_like(image), image // columns, image % columns), -1), (0, 0, text, 0)).to(wide)
    frequencies = (cfg.theta ** (torch.arange(0, n, 2, device=device, dtype=wide) / -n) for n in cfg.turned)
    angles = torch.cat([position[:, None] * f for position, f in zip(positions.unbind(-1), frequencies)], -1)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()
