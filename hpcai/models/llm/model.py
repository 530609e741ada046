"""A decoder of text: Llama 2, 3 and 3.1 (Touvron et al. 2023, Dubey et al. 2024) and GPT (Radford et al. 2019, Brown et al. 2020).

Parameters bear the names that Llama's files have. B texts, T tokens of each, C channels, H heads, D channels of a head, V words;
n the size of the axis tensor, 1 outside a cluster.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu, swiglu
from hpcai.kernels.grouped_query_attention import grouped_query_attention
from hpcai.kernels.rotary import apply_rotary
from hpcai.kernels.triton_support import on_cpu
from hpcai.kernels.varlen_attention import varlen_attention
from hpcai.models.llm.config import LLMConfig, RotaryConfig
from hpcai.nn.recompute import recompute_cheap, cheap
from hpcai.nn.lm_head import LMHead
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.matmul import fused_linear
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin


class CausalAttention(nn.Module):
    """Attention of each token to itself and those before it; with ``documents`` [B, S] to those of its own document only.

    q [B, H, T, D], k and v [B, H or fewer, S, D] -> [B, H, T, D]; the last T of S keys are those of the queries.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            return varlen_attention(q, k, v, documents)
        mask, new, before = None, q.shape[2], k.shape[2] - q.shape[2]
        if before and new > 1:
            mask = torch.ones(new, before + new, dtype=torch.bool, device=q.device).tril(before)
        causal = mask is None and new > 1
        return grouped_query_attention(q, k, v, mask, causal)


class Attention(nn.Module):
    """Queries that share heads of keys and values (Ainslie et al. 2023).   x [B, T, C], turn two of [B, T, D] -> [B, T, C]"""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q_proj = nn.Linear(cfg.width, cfg.heads * cfg.head_dim, cfg.bias)
        self.k_proj = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, cfg.bias)
        self.v_proj = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, cfg.bias)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.width, cfg.bias)
        self.core_attention: nn.Module = CausalAttention()  # seam: the tokens of a text may lie on several processes
        self.update_cache: Any = None  # seam: what generation keeps of the tokens before, (k, v) -> (k, v) of all

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, documents: Tensor | None = None) -> Tensor:
        found = fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in found)
        if turn is not None:
            q, k = apply_rotary(q, k, *turn)  # not ``cheap``: nothing else keeps what they are made of
        if self.update_cache is not None:
            k, v = self.update_cache(k, v)
        return self.o_proj(self.core_attention(q, k, v, documents).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020).   x [B, T, C] -> the same"""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(cfg.width, cfg.inner, cfg.bias), nn.Linear(cfg.width, cfg.inner, cfg.bias)
        self.down_proj = nn.Linear(cfg.inner, cfg.width, cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(cheap(swiglu, *fused_linear(x, self.gate_proj, self.up_proj)))


class GELU(nn.Module):
    """down(gelu(up(x))) (Hendrycks and Gimpel 2016).   x [B, T, C] -> the same"""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(cfg.width, cfg.inner, cfg.bias), nn.Linear(cfg.inner, cfg.width, cfg.bias)
        self.activation = gelu if cfg.feed == "gelu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(cheap(self.activation, self.up_proj(x)))


class Layer(nn.Module):
    """x [B, T, C] -> the same"""

    float8 = True  # its linear layers may multiply in FP8

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = _norm(cfg), Attention(cfg)
        self.post_attention_layernorm, self.mlp = _norm(cfg), SwiGLU(cfg) if cfg.feed == "swiglu" else GELU(cfg)
        self.drop = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()  # which for one token takes a third of the time

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None, documents: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.self_attn(cheap(self.input_layernorm, x), turn, documents))
        return x + self.drop(self.mlp(cheap(self.post_attention_layernorm, x)))


class PositionEmbedding(nn.Embedding):
    """Learned positions, added to tokens.   x [B, T, C], positions [B, T] -> [B, T, C]"""

    def __init__(self, positions: int, channels: int) -> None:
        super().__init__(positions, channels)
        self.local_tokens: nn.Module = Seam()  # where a process has some of the tokens between layers

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.local_tokens(super().forward(positions))


class Decoder(nn.Module):
    """All but the last layer, which Llama's files call ``model``."""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocabulary, cfg.width)
        self.add_positions = None if cfg.rotary else PositionEmbedding(cfg.positions, cfg.width)
        self.layers, self.norm = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers)), _norm(cfg)


class LLM(PretrainedMixin):
    """tokens [B, T] -> logits [B, T, V]; with ``targets`` [B, T] the cross entropy of each token instead [B, T], 0 where the target
    is ``hpcai.nn.lm_head.IGNORE_INDEX``.

    ``positions`` [B, T] count within a text, 0, 1, ... unless they are given; ``documents`` [B, T] keep those that lie one behind
    another in a row apart (with tokens remembered: of all of them). Raises DataError for more tokens than there are positions.
    """

    package = __package__
    adapters: Any = None
    """settings of its adapters (``hpcai.models.llm.lora``), if it has some"""

    def __init__(self, cfg: LLMConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or LLMConfig.preset("llama2-7b")
        self.folder: Path | None = None  # the folder that weights came from
        self.local_tokens: nn.Module = Seam()  # a process may have some of the tokens
        self.model, self.lm_head = Decoder(cfg), LMHead(cfg.width, cfg.vocabulary)
        self.all_reduce: nn.Module = Seam()  # and what it has counted of them is a part
        if cfg.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # the last of a residual branch smaller, by the number of branches (Radford et al. 2019)
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=cfg.deviation / (math.sqrt(2 * cfg.layers) if last else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def tokenizer(self) -> Any:
        """What makes tokens of text: the one that lies beside the weights, or that was set. Raises DataError where there is none,
        and when one is set that has more tokens than the model."""
        return import_module(f"{self.package}.text").get_tokenizer(self)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        import_module(f"{self.package}.text").set_tokenizer(self, tokenizer)

    def generate(self, prompts: str | Sequence[str], *, stop: str | Sequence[str] = (), seed: int = 0, **sampling: Any) -> Any:
        """How a text goes on: ``print`` it, or iterate for its pieces as they come; for a list of prompts a list of texts.
        ``sampling`` is what ``SamplingConfig`` has (most, temperature, top_k, ...), ``hpcai.models.llm.speech`` the rest."""
        return import_module(f"{self.package}.text").continue_text(self, prompts, stop=stop, seed=seed, **sampling)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), seed: int = 0, **sampling: Any) -> Any:
        """What the assistant says next in a conversation of {"role": ..., "content": ...}, by the template of the tokenizer."""
        return import_module(f"{self.package}.text").chat_reply(self, messages, stop=stop, seed=seed, **sampling)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            count = tokens.shape[1] if targets is None else targets.shape[1]  # a later stage of a pipeline has no tokens
            if count > self.cfg.positions:
                raise DataError(f"a text of {count} tokens for a model of {self.cfg.positions} positions; cut it, or take another")
            positions = torch.arange(count, device=tokens.device)[None]
        positions, targets = self.local_tokens(positions), None if targets is None else self.local_tokens(targets)
        x = self.model.embed_tokens(self.local_tokens(tokens) if tokens.ndim == 2 else tokens)
        if self.model.add_positions is not None:
            x = self.model.add_positions(x, positions)
        turn = None if self.cfg.rotary is None else rotary_cos_sin(self.cfg.rotary, self.cfg.head_dim, positions, x.dtype)
        for layer in self.model.layers:
            if self.cfg.recompute == "layers" and torch.is_grad_enabled():
                x = checkpoint(layer, x, turn, documents, use_reentrant=False)
                continue
            with recompute_cheap(self.cfg.recompute == "selective"):
                x = layer(x, turn, documents)
        return self.lm_head(self.model.norm(x), targets)

    def output_files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        """The folder that Hugging Face's libraries read where they know such a model, or that of its adapters, as peft has it."""
        other = import_module(f"{__package__}.{'lora' if self.adapters else 'load'}")
        return cast("dict[str, Callable[[Path], Any]]", other.files(self, export))


def rotary_frequencies(cfg: RotaryConfig, size: int, device: torch.device | str | None = None) -> Tensor:
    """Radians that each pair of channels turns from one position to the next, in float32 as published.   [D/2]"""
    turns = 1.0 / cfg.theta ** (torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size)
    scaling = cfg.scaling
    if scaling is None:
        return turns
    slow = turns / scaling.factor
    if scaling.kind == "linear":
        return slow
    waves = 2 * math.pi / turns  # positions
    between = (scaling.original / waves - scaling.low) / (scaling.high - scaling.low)
    blend = (1 - between) * turns / scaling.factor + between * turns
    found = torch.where(waves > scaling.original / scaling.low, slow, turns)
    middle = (waves >= scaling.original / scaling.high) & (waves <= scaling.original / scaling.low)
    return torch.where(middle, blend, found)


@cache
def _cached_frequencies(cfg: RotaryConfig, size: int) -> Tensor:
    """Made once: for one token of a small model that is up to a twelfth of the time."""
    return rotary_frequencies(cfg, size, "cpu")


def rotary_cos_sin(cfg: RotaryConfig, size: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, twice beside one another.   positions [B, T] -> two of [B, T, D]"""
    with torch.autocast(positions.device.type, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        same = type(positions) is Tensor and on_cpu(positions) and not torch.compiler.is_compiling()
        # On a GPU not: the memory of one graph, or of one stream, is not for others.
        turns = _cached_frequencies(cfg, size) if same else rotary_frequencies(cfg, size, positions.device)
        turned = positions[..., None].to(wide) * turns.to(wide)
        turned = torch.cat((turned, turned), -1)
        return turned.cos().to(dtype), turned.sin().to(dtype)


def _norm(cfg: LLMConfig) -> nn.Module:
    return RMSNorm(cfg.width, cfg.eps) if cfg.norm == "rms" else LayerNorm(cfg.width, eps=cfg.eps, autocast_output=True)
