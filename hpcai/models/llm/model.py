"""Decoder-only language models: Llama 2, 3 and 3.1 (Touvron et al. 2023, Dubey et al. 2024) and GPT (Radford et al. 2019, Brown et
al. 2020). Parameters have the names of Llama's files.

B texts, T tokens of each, C channels, H heads, D channels of a head, V vocabulary entries
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

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu, swiglu
from hpcai.kernels.grouped_query_attention import grouped_query_attention
from hpcai.kernels.rotary import apply_rotary
from hpcai.kernels.triton_support import on_cpu
from hpcai.kernels.varlen_attention import varlen_attention
from hpcai.models.llm.config import LLMConfig, RotaryConfig
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.lm_head import LMHead
from hpcai.nn.matmul import fused_linear
from hpcai.nn.recompute import cheap, run_block
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin


class CausalAttention(nn.Module):
    """Causal attention; with ``documents`` [B, S] within the document of each token only.

    Shape: q [B, H, T, D]; k and v [B, H or a divisor of it, S, D], of which the last T belong to the queries -> [B, H, T, D]
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            return varlen_attention(q, k, v, documents)
        mask, new, past = None, q.shape[2], k.shape[2] - q.shape[2]
        if past and new > 1:
            mask = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)
        causal = mask is None and new > 1
        return grouped_query_attention(q, k, v, mask, causal)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023).   x [B, T, C], rotary two of [B, T, D] -> [B, T, C]"""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q_proj = nn.Linear(cfg.width, cfg.heads * cfg.head_dim, cfg.bias)
        self.k_proj = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, cfg.bias)
        self.v_proj = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, cfg.bias)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.width, cfg.bias)
        self.core_attention: nn.Module = CausalAttention()  # seam: context parallelism replaces it
        self.update_cache: Any = None  # seam of generation: k, v of new tokens -> k, v of all

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None = None) -> Tensor:
        qkv = fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in qkv)
        if rotary is not None:
            q, k = apply_rotary(q, k, *rotary)  # not ``cheap``: nothing else saves its inputs
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
        self.drop = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()  # a third of Dropout's time in a decode step

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.self_attn(cheap(self.input_layernorm, x), rotary, documents))
        return x + self.drop(self.mlp(cheap(self.post_attention_layernorm, x)))


class PositionEmbedding(nn.Embedding):
    """Learned position embedding, added to tokens.   x [B, T, C], positions [B, T] -> [B, T, C]"""

    def __init__(self, positions: int, channels: int) -> None:
        super().__init__(positions, channels)
        self.local_tokens: nn.Module = Seam()  # takes the tokens of this rank between layers

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.local_tokens(super().forward(positions))


class Decoder(nn.Module):
    """All but the output layer, ``model`` in Llama's files."""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocabulary, cfg.width)
        self.add_positions = None if cfg.rotary else PositionEmbedding(cfg.positions, cfg.width)
        self.layers, self.norm = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers)), _norm(cfg)


class LLM(PretrainedMixin):
    """A language model: tokens [B, T] -> logits [B, T, V], or with ``targets`` [B, T] their cross entropy [B, T], which is 0 for
    targets ``hpcai.nn.lm_head.IGNORE_INDEX``.

    ``positions`` [B, T]: within a text, 0, 1, ... by default. ``documents`` [B, T], or [B, S] with a KV cache: the document of each
    token of packed rows, for attention within documents. Raises DataError for more tokens than ``cfg.positions``.
    """

    package = __package__
    adapters: Any = None
    """settings of its adapters (``hpcai.models.llm.lora``), if any"""

    def __init__(self, cfg: LLMConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or LLMConfig.preset("llama2-7b")
        self.folder: Path | None = None  # source of the weights
        self.local_tokens: nn.Module = Seam()  # takes the tokens of this rank
        self.model, self.lm_head = Decoder(cfg), LMHead(cfg.width, cfg.vocabulary)
        self.all_reduce: nn.Module = Seam()  # sums over the ranks of a text
        if cfg.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # output layers of residual branches: 1/sqrt of the number of branches (Radford et al. 2019)
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=cfg.deviation / (math.sqrt(2 * cfg.layers) if is_last else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was set, or the one in the folder of the weights. Raises DataError if there is none, and if one is set
        that has more tokens than the vocabulary."""
        return import_module(f"{self.package}.text").get_tokenizer(self)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        import_module(f"{self.package}.text").set_tokenizer(self, tokenizer)

    def generate(self, prompts: str | Sequence[str], *, stop: str | Sequence[str] = (), seed: int = 0, **sampling: Any) -> Any:
        """Continue a prompt, by ``hpcai.models.llm.text.continue_text``: print the result, or iterate over its pieces as they are
        generated; a list of prompts gives a list of str. ``sampling``: fields of ``SamplingConfig`` (most, temperature, ...)."""
        return import_module(f"{self.package}.text").continue_text(self, prompts, stop=stop, seed=seed, **sampling)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), seed: int = 0, **sampling: Any) -> Any:
        """Generate the next message of the assistant, by the chat template, for messages {"role": ..., "content": ...}."""
        return import_module(f"{self.package}.text").chat_reply(self, messages, stop=stop, seed=seed, **sampling)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            count = tokens.shape[1] if targets is None else targets.shape[1]  # later pipeline stages get hidden states
            if count > self.cfg.positions:
                raise DataError(f"a text has {count} tokens, the model {self.cfg.positions} positions; shorten the text")
            positions = torch.arange(count, device=tokens.device)[None]
        positions, targets = self.local_tokens(positions), None if targets is None else self.local_tokens(targets)
        x = self.model.embed_tokens(self.local_tokens(tokens) if tokens.ndim == 2 else tokens)
        if self.model.add_positions is not None:
            x = self.model.add_positions(x, positions)
        rotary = None if self.cfg.rotary is None else rotary_cos_sin(self.cfg.rotary, self.cfg.head_dim, positions, x.dtype)
        for layer in self.model.layers:
            x = run_block(layer, self.cfg.recompute, x, rotary, documents)
        return self.lm_head(self.model.norm(x), targets)

    def output_files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        """Return the files of a run and their writers: a folder of Hugging Face, or of peft for adapters."""
        module = import_module(f"{__package__}.{'lora' if self.adapters else 'load'}")
        return cast("dict[str, Callable[[Path], Any]]", module.files(self, export))


def rotary_frequencies(cfg: RotaryConfig, dim: int, device: torch.device | str | None = None) -> Tensor:
    """Return the rotary frequencies of a head of ``dim`` channels, in radians per position, in float32 as published.   [D/2]"""
    inv_freq = 1.0 / cfg.theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim)
    scaling = cfg.scaling
    if scaling is None:
        return inv_freq
    scaled = inv_freq / scaling.factor
    if scaling.kind == "linear":
        return scaled
    wavelength = 2 * math.pi / inv_freq  # positions
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    blend = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    ends = torch.where(wavelength > scaling.original / scaling.low, scaled, inv_freq)
    is_medium = (wavelength >= scaling.original / scaling.high) & (wavelength <= scaling.original / scaling.low)
    return torch.where(is_medium, blend, ends)


@cache
def _cached_frequencies(cfg: RotaryConfig, dim: int) -> Tensor:
    """Compute frequencies once: they take up to a twelfth of the time of a decode step of a small model."""
    return rotary_frequencies(cfg, dim, "cpu")


def rotary_cos_sin(cfg: RotaryConfig, dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for each position, concatenated with themselves.   positions [B, T] -> two of [B, T, D]"""
    with torch.autocast(positions.device.type, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        use_cache = type(positions) is Tensor and on_cpu(positions) and not torch.compiler.is_compiling()
        # No cache on a GPU: memory of one CUDA graph or stream must not be used by another.
        inv_freq = _cached_frequencies(cfg, dim) if use_cache else rotary_frequencies(cfg, dim, positions.device)
        angles = positions[..., None].to(wide) * inv_freq.to(wide)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _norm(cfg: LLMConfig) -> nn.Module:
    return RMSNorm(cfg.width, cfg.eps) if cfg.norm == "rms" else LayerNorm(cfg.width, eps=cfg.eps, autocast_output=True)
