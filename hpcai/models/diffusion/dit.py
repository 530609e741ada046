"""DiT: a transformer over patches of a sample (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023).

Parameters bear the names that the files of diffusers have. B samples, S places along each of their dims, T patches, C channels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.models.diffusion.blocks import TimeEmbedding, sinusoidal_embedding
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import DiTConfig
from hpcai.models.diffusion.transformer import (
    TIME_CHANNELS,
    FeedForward,
    Modulation,
    attend,
    check_inputs,
    init_weights,
    modulate,
    run_block,
    split_heads,
)
from hpcai.nn.recompute import cheap
from hpcai.nn.matmul import fused_linear
from hpcai.nn.weights import PretrainedMixin


class PatchEmbed(nn.Module):
    """Patches as tokens, with their places.   x [B, C, S, S] -> [B, T, C']"""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.cfg, self.proj = cfg, nn.Conv2d(cfg.inputs, cfg.width, cfg.patch, cfg.patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2) + position_embedding(self.cfg, x.dtype, x.device)


class ClassEmbedding(nn.Module):
    """numbers of classes [B] -> [B, C]"""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, channels)  # the last: none of them

    def forward(self, classes: Tensor) -> Tensor:
        return self.embedding_table(classes)


class AdaLayerNorm(nn.Module):
    """What a sample is asked to be.   waves of the time [B, 256], classes [B] -> [B, C]"""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.timestep_embedder, self.class_embedder = TimeEmbedding(TIME_CHANNELS, cfg.width), ClassEmbedding(cfg.classes, cfg.width)

    def forward(self, time: Tensor, classes: Tensor) -> Tensor:
        return self.timestep_embedder(time) + self.class_embedder(classes)


class Attention(nn.Module):
    """x [B, T, C] -> the same"""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.size = cfg.head
        self.to_q, self.to_k, self.to_v = (nn.Linear(cfg.width, cfg.width) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(cfg.width, cfg.width))

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(attend(*(split_heads(y, self.size) for y in fused_linear(x, self.to_q, self.to_k, self.to_v))))


class Block(nn.Module):
    """x [B, T, C], waves of the time [B, 256], classes [B] -> the tokens, and what it was told [B, C]"""

    float8 = True  # its linear layers may multiply in FP8

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.norm1 = Modulation(cfg.width, 6, AdaLayerNorm(cfg))  # in every block, as in the files
        self.attn1, self.ff = Attention(cfg), FeedForward(cfg.width)

    def forward(self, x: Tensor, time: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        c = self.norm1.emb(time, classes)
        shift, scale, gate, feed_shift, feed_scale, feed_gate = self.norm1(c)
        x = x + gate[:, None] * self.attn1(cheap(modulate, x, shift, scale))
        return x + feed_gate[:, None] * self.ff(cheap(modulate, x, feed_shift, feed_scale, 1e-5)), c


class DiT(PretrainedMixin):
    """x [B, inputs, S, S], time [B] in levels of a schedule, condition.classes [B] -> [B, outputs, S, S]

    Without classes, and with as many as there are: none of them; in training ``cfg.dropout`` of the samples lose theirs (Ho and
    Salimans 2022). Raises DataError for samples of another size and for conditions that it does not know.
    """

    package = __package__

    def __init__(self, cfg: DiTConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or DiTConfig()
        self.pos_embed = PatchEmbed(cfg)
        self.transformer_blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.proj_out_1 = nn.Linear(cfg.width, 2 * cfg.width)
        self.proj_out_2 = nn.Linear(cfg.width, cfg.patch**2 * cfg.outputs)
        init_weights(self, cfg.zero)

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        cfg = self.cfg
        if x.ndim != 4 or x.shape[1:] != (cfg.inputs, cfg.size, cfg.size):
            expected = f"expected [B, {cfg.inputs}, {cfg.size}, {cfg.size}]"
            raise DataError(f"DiT: samples are {list(x.shape)}, {expected}; cut them, or set size")
        if condition.classes is None:
            condition = condition._replace(classes=torch.full((len(x),), cfg.classes, device=x.device))
        check_inputs(self, x, time, condition, {"classes": ()})
        classes: Tensor = condition.classes  # type: ignore[assignment]
        if self.training and cfg.dropout:
            classes = classes.where(torch.rand(len(x), device=x.device) >= cfg.dropout, cfg.classes)
        wave, y = sinusoidal_embedding(time, TIME_CHANNELS, x.dtype, TIME_CHANNELS // 2 - 1), self.pos_embed(x)
        told: list[Tensor] = []
        for block in self.transformer_blocks:
            y, c = run_block(block, cfg.recompute, y, wave, classes)
            told.append(c)
        shift, scale = self.proj_out_1(F.silu(told[0])).chunk(2, -1)  # by the first block's
        return self._unpatchify(self.proj_out_2(modulate(y, shift, scale)))

    def _unpatchify(self, y: Tensor) -> Tensor:
        """[B, T, patch patch C] -> [B, C, S, S]"""
        patch, n = self.cfg.patch, self.cfg.size // self.cfg.patch
        return y.unflatten(2, (patch, patch, -1)).unflatten(1, (n, n)).permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def position_embedding(cfg: DiTConfig, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Sines, then cosines, of each patch's column, then of its row, computed in float32 at least.   [T, C]"""
    wide, quarter = torch.promote_types(dtype, torch.float32), cfg.width // 4
    slower = torch.exp(torch.arange(quarter, device=device, dtype=wide) * (-math.log(10_000) / quarter))
    turned = torch.arange(cfg.size // cfg.patch, device=device, dtype=wide)[:, None] * slower
    one, n = torch.cat((turned.sin(), turned.cos()), -1), len(turned)
    return torch.cat((one[None].expand(n, -1, -1), one[:, None].expand(-1, n, -1)), -1).flatten(0, 1).to(dtype)
