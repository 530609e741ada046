"""DiT: a transformer over patches of a sample (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023).

Parameters have the names of diffusers' files. B samples of S x S pixels, T patches, C channels
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.models.diffusion import transformer
from hpcai.models.diffusion.blocks import FeedForward, TimeEmbedding, sinusoidal_embedding
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import TIME_CHANNELS, DiTConfig
from hpcai.nn.recompute import cheap, run_block
from hpcai.nn.weights import PretrainedMixin


class PatchEmbed(nn.Module):
    """Patch embedding with position embedding.   x [B, C, S, S] -> [B, T, C']"""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.cfg, self.proj = cfg, nn.Conv2d(cfg.inputs, cfg.width, cfg.patch, cfg.patch)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.cfg.size // self.cfg.patch, device=x.device)
        return self.proj(x).flatten(2).transpose(1, 2) + transformer.position_embedding(places, self.cfg.width, x.dtype)


class CombinedTimestepLabelEmbeddings(nn.Module):
    """The conditioning embedding of adaptive layer norm: time and class.   sinusoidal time [B, 256], classes [B] -> [B, C]"""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.timestep_embedder = TimeEmbedding(TIME_CHANNELS, cfg.width)
        self.class_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(cfg.classes + 1, cfg.width)})  # the last: no class

    def forward(self, time: Tensor, classes: Tensor) -> Tensor:
        return self.timestep_embedder(time) + self.class_embedder["embedding_table"](classes)


class Block(nn.Module):
    """x [B, T, C], sinusoidal time [B, 256], classes [B] -> x, and the conditioning embedding [B, C]"""

    float8 = True  # linear layers may use FP8

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.norm1 = transformer.Modulation(cfg.width, 6, CombinedTimestepLabelEmbeddings(cfg))  # in every block, as in the files
        self.attn1 = transformer.SelfAttention(cfg.width, cfg.head, False)
        self.ff = FeedForward(cfg.width, transformer.GELUProjection(cfg.width))

    def forward(self, x: Tensor, time: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        c = self.norm1.emb(time, classes)
        shift, scale, gate, feed_shift, feed_scale, feed_gate = self.norm1(c)
        x = x + gate[:, None] * self.attn1(cheap(transformer.modulate, x, shift, scale))
        return x + feed_gate[:, None] * self.ff(cheap(transformer.modulate, x, feed_shift, feed_scale, 1e-5)), c


class DiT(PretrainedMixin):
    """x [B, inputs, S, S], time [B] in levels of a schedule, condition.classes [B] -> [B, outputs, S, S]

    Classes None, or the number of classes: unconditional. In training a fraction ``cfg.dropout`` of the samples is unconditional
    (Ho and Salimans 2022). Raises DataError for samples of another size, and for conditions without use.
    """

    package = __package__

    def __init__(self, cfg: DiTConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or DiTConfig()
        self.pos_embed = PatchEmbed(cfg)
        self.transformer_blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.proj_out_1 = nn.Linear(cfg.width, 2 * cfg.width)
        self.proj_out_2 = nn.Linear(cfg.width, cfg.patch**2 * cfg.outputs)
        transformer.init_weights(self, cfg.zero)

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        cfg = self.cfg
        if x.ndim != 4 or x.shape[1:] != (cfg.inputs, cfg.size, cfg.size):
            expected = f"expected [B, {cfg.inputs}, {cfg.size}, {cfg.size}]"
            raise DataError(f"DiT: samples are {list(x.shape)}, {expected}; crop them, or set size")
        if condition.classes is None:
            condition = condition._replace(classes=torch.full((len(x),), cfg.classes, device=x.device))
        (classes,) = transformer.check_inputs(self, x, time, condition, {"classes": ()})
        if self.training and cfg.dropout:
            classes = classes.where(torch.rand(len(x), device=x.device) >= cfg.dropout, cfg.classes)
        embedded, y = sinusoidal_embedding(time, TIME_CHANNELS, x.dtype, TIME_CHANNELS // 2 - 1), self.pos_embed(x)
        conditions: list[Tensor] = []
        for block in self.transformer_blocks:
            y, c = run_block(block, cfg.recompute, y, embedded, classes)
            conditions.append(c)
        shift, scale = self.proj_out_1(F.silu(conditions[0])).chunk(2, -1)  # the embedding of the first block
        n = cfg.size // cfg.patch
        return transformer.unpatchify(self.proj_out_2(transformer.modulate(y, shift, scale)), cfg.patch, n, n)
