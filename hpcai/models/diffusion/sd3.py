"""Stable Diffusion 3 and 3.5: a transformer over text and image tokens (Esser et al. 2024).

Parameters have the names of diffusers' files. B samples of H x W pixels, N text tokens, T image tokens, C channels
"""

import torch
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.models.diffusion import transformer
from hpcai.models.diffusion.blocks import sinusoidal_embedding
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import TIME_CHANNELS, SD3Config
from hpcai.nn.recompute import run_block
from hpcai.nn.weights import PretrainedMixin


class PatchEmbed(nn.Module):
    """Patch embedding with the middle of a table of positions, which files contain.   x [B, C, H, W] -> [B, T, C']"""

    pos_embed: Tensor

    def __init__(self, cfg: SD3Config) -> None:
        super().__init__()
        self.positions, self.proj = cfg.positions, nn.Conv2d(cfg.inputs, cfg.width, cfg.patch, cfg.patch)
        places = torch.arange(cfg.positions) / (cfg.positions / (cfg.size // cfg.patch))
        self.register_buffer("pos_embed", transformer.position_embedding(places.double(), cfg.width, torch.float32)[None])

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        rows, columns = (slice((self.positions - n) // 2, (self.positions - n) // 2 + n) for n in y.shape[2:])
        table = self.pos_embed.unflatten(1, (self.positions, self.positions))[:, rows, columns].flatten(1, 2)
        return y.flatten(2).transpose(1, 2) + table.to(x.dtype)


class SD3(PretrainedMixin):
    """x [B, inputs, H, W], time [B] from 0 (sample) to 1 (noise), condition.tokens [B, N, J] and condition.pooled [B, J']
    -> [B, outputs, H, W]

    Sides are multiples of the patch, of at most ``positions`` patches. Raises DataError for other channels or sides, and for
    conditions that are missing, without use, or of other shapes.
    """

    package = __package__

    def __init__(self, cfg: SD3Config | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or SD3Config()
        self.pos_embed = PatchEmbed(cfg)
        self.time_text_embed = transformer.CombinedTimestepGuidanceTextProjEmbeddings(cfg.width, cfg.pooled)
        self.context_embedder = nn.Linear(cfg.tokens, cfg.width)
        self.transformer_blocks = nn.ModuleList(
            transformer.DoubleStreamBlock(cfg.width, cfg.head, bool(cfg.qk_norm), n in cfg.dual_attention, n == cfg.layers - 1)
            for n in range(cfg.layers)
        )
        self.norm_out, self.proj_out = transformer.Modulation(cfg.width, 2), nn.Linear(cfg.width, cfg.patch**2 * cfg.outputs)
        transformer.init_weights(self, cfg.zero)

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        cfg = self.cfg
        largest = cfg.patch * cfg.positions
        if x.ndim != 4 or x.shape[1] != cfg.inputs or any(n % cfg.patch or n > largest for n in x.shape[2:]):
            expected = f"[B, {cfg.inputs}, H, W] with multiples of {cfg.patch} up to {largest} as H and W"
            raise DataError(f"SD3: samples are {list(x.shape)}, expected {expected}; pad or crop them")
        tokens, pooled = transformer.check_inputs(self, x, time, condition, {"tokens": ("N", cfg.tokens), "pooled": (cfg.pooled,)})
        embedded = sinusoidal_embedding(time, TIME_CHANNELS, x.dtype, scale=transformer.FLOW_SCALE)
        c = self.time_text_embed(embedded, pooled.to(x.dtype))
        y, text = self.pos_embed(x), self.context_embedder(tokens.to(x.dtype))
        for block in self.transformer_blocks:
            y, text = run_block(block, cfg.recompute, y, text, c)
        scale, shift = self.norm_out(c)  # in this order here, as in Flux
        patches = self.proj_out(transformer.modulate(y, shift, scale))
        return transformer.unpatchify(patches, cfg.patch, *(n // cfg.patch for n in x.shape[2:]))
