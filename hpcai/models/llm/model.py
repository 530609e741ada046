"""Decoder-only language models, of which ``LLMConfig`` selects the parts: Llama (Touvron et al. 2023, Dubey et al. 2024), GPT
(Radford et al. 2019), Mistral, Qwen, Gemma, OLMo, Phi, gpt-oss and DeepSeek-V3. Most parameters have the names of Llama's files.

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
from hpcai.kernels.causal_attention import causal_attention
from hpcai.kernels.rotary import apply_rotary
from hpcai.kernels.triton_support import on_cpu
from hpcai.models.llm.config import LatentConfig, LLMConfig, RotaryConfig
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.lm_head import LMHead
from hpcai.nn.matmul import fused_linear
from hpcai.nn.moe import Experts, MoE, Router
from hpcai.nn.recompute import cheap, run_block
from hpcai.nn.rmsnorm import RMSNorm
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin

Rotary = Sequence[tuple[Tensor, Tensor]]  # cosines and sines, of layers without a sliding window and with one


class CausalAttention(nn.Module):
    """Causal attention, with ``documents`` [B, S] within the document of each token only, as ``causal_attention`` computes it.

    Shape: q [B, H, T, D]; k and v [B, H or a divisor of it, S, D], of which the last T belong to the queries; sinks [H]
    -> [B, H, T, D]
    """

    def __init__(self, window: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.window, self.softcap = window, softcap

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        return causal_attention(q, k, v, documents, self.window, self.softcap, sinks)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023).   x [B, T, C] -> [B, T, C]"""

    def __init__(self, cfg: LLMConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim, self.qk_norm = cfg.head_dim, cfg.rotary_dim, cfg.qk_norm
        self.value_dim, self.scale = cfg.latent.value if cfg.latent else cfg.head_dim, _query_scale(cfg)
        self.rotary_index = int(cfg.layer_window(layer) is not None)
        self._add_projections(cfg)
        self.o_proj = nn.Linear(cfg.heads * self.value_dim, cfg.width, cfg.has_bias("out"))
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None
        # Seam: context parallelism replaces it.
        self.core_attention: nn.Module = CausalAttention(cfg.layer_window(layer), cfg.attention_softcap)
        self.update_cache: Any = None  # seam of generation: k, v of new tokens -> k, v of all
        self.fused_linear: Any = fused_linear  # seam of generation

    def _add_projections(self, cfg: LLMConfig) -> None:
        self.q_proj = nn.Linear(cfg.width, cfg.heads * cfg.head_dim, cfg.has_bias("qkv"))
        self.k_proj = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, cfg.has_bias("qkv"))
        self.v_proj = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_dim, cfg.has_bias("qkv"))
        if cfg.qk_norm is not None:
            is_all = cfg.qk_norm == "all"
            self.q_norm = _norm(cfg, cfg.head_dim * (cfg.heads if is_all else 1))
            self.k_norm = _norm(cfg, cfg.head_dim * (cfg.kv_heads if is_all else 1))

    @property
    def first_layers(self) -> tuple[nn.Linear, ...]:
        """The linear layers of the input."""
        return self.q_proj, self.k_proj, self.v_proj

    def _heads(self, projected: Sequence[Tensor], rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values from the outputs of ``first_layers``.   [B, T, C'] -> [B, H or fewer, T, D] each"""
        q, k, v = projected
        if self.qk_norm == "all":
            q, k = cheap(self.q_norm, q), cheap(self.k_norm, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = cheap(self.q_norm, q), cheap(self.k_norm, k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if rotary is None:
            return q, k, v
        if self.rotary_dim < self.head_dim:
            (q, q_rest), (k, k_rest) = (y.split((self.rotary_dim, self.head_dim - self.rotary_dim), -1) for y in (q, k))
            q, k = (torch.cat(pair, -1) for pair in zip(apply_rotary(q, k, *rotary), (q_rest, k_rest)))
            return q, k, v
        return *apply_rotary(q, k, *rotary), v  # not ``cheap``: nothing else saves its inputs

    def forward(self, x: Tensor, rotary: Rotary, documents: Tensor | None = None) -> Tensor:
        q, k, v = self._heads(self.fused_linear(x, *self.first_layers), rotary[self.rotary_index] if rotary else None)
        q = q if self.scale is None else q * self.scale
        if self.update_cache is not None:
            k, v = self.update_cache(k, v)
        y = self.core_attention(q, k, v, documents, self.sinks)
        if self.value_dim < self.head_dim:
            y = y[..., : self.value_dim]
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024). Values have zeros up to the channels of keys, as fused kernels require."""

    def _add_projections(self, cfg: LLMConfig) -> None:
        assert cfg.latent is not None
        self.latent: LatentConfig = cfg.latent
        rank, keys = cfg.latent.q_rank, cfg.heads * (cfg.latent.nope + cfg.latent.value)
        if rank is None:
            self.q_proj = nn.Linear(cfg.width, cfg.heads * cfg.head_dim, bias=False)
        else:
            self.q_a_proj, self.q_a_layernorm = nn.Linear(cfg.width, rank, cfg.has_bias("out")), _norm(cfg, rank)
            self.q_b_proj = nn.Linear(rank, cfg.heads * cfg.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(cfg.width, cfg.latent.kv_rank + cfg.latent.rope, cfg.has_bias("out"))
        self.kv_a_layernorm, self.kv_b_proj = _norm(cfg, cfg.latent.kv_rank), nn.Linear(cfg.latent.kv_rank, keys, bias=False)
        self.all_tokens: nn.Module = Seam()  # the heads of a rank of tensor need the rotated keys of all tokens

    @property
    def first_layers(self) -> tuple[nn.Linear, ...]:
        return self.q_proj if self.latent.q_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa

    def _heads(self, projected: Sequence[Tensor], rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        assert rotary is not None
        sizes, (q, compressed) = self.latent, projected
        if sizes.q_rank is not None:
            q = self.q_b_proj(cheap(self.q_a_layernorm, q))
        compressed, k_rot = compressed.split((sizes.kv_rank, sizes.rope), -1)
        q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        kv = self.kv_b_proj(cheap(self.kv_a_layernorm, compressed)).unflatten(-1, (-1, sizes.nope + sizes.value)).transpose(1, 2)
        (q, q_rot), (k, v) = q.split((sizes.nope, sizes.rope), -1), kv.split((sizes.nope, sizes.value), -1)
        q_rot, k_rot = apply_rotary(q_rot, self.all_tokens(k_rot).unsqueeze(1), *rotary)
        q, k = torch.cat((q, q_rot), -1), torch.cat((k, k_rot.expand(-1, k.shape[1], -1, -1)), -1)
        return q, k, F.pad(v, (0, self.head_dim - sizes.value))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with gelu (Shazeer 2020).   x [B, T, C] -> the same"""

    def __init__(self, cfg: LLMConfig, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(cfg.width, inner, bias), nn.Linear(cfg.width, inner, bias)
        self.down_proj = nn.Linear(inner, cfg.width, bias)
        self.activation = swiglu if cfg.feed == "swiglu" else _geglu
        self.fused_linear: Any = fused_linear  # seam of generation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(cheap(self.activation, *self.fused_linear(x, self.gate_proj, self.up_proj)))


class MLP(nn.Module):
    """down(gelu(up(x))) (Hendrycks and Gimpel 2016).   x [B, T, C] -> the same"""

    def __init__(self, cfg: LLMConfig) -> None:
        super().__init__()
        bias = cfg.has_bias("mlp")
        self.up_proj, self.down_proj = nn.Linear(cfg.width, cfg.inner, bias), nn.Linear(cfg.inner, cfg.width, bias)
        self.activation = gelu if cfg.feed == "gelu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(cheap(self.activation, self.up_proj(x)))


class Layer(nn.Module):
    """x [B, T, C] -> the same"""

    float8 = True  # its linear layers may multiply in FP8

    def __init__(self, cfg: LLMConfig, number: int) -> None:
        super().__init__()
        before, after = cfg.norm_position != "after", cfg.norm_position != "before"
        self.input_layernorm = _norm(cfg) if before else nn.Identity()
        self.self_attn = (LatentAttention if cfg.latent else Attention)(cfg, number)
        self.post_self_attn_layernorm = _norm(cfg) if after else None  # less than an identity in the time of a decode step
        self.post_attention_layernorm = _norm(cfg) if before else nn.Identity()
        self.mlp = _feed_forward(cfg, number)
        self.post_mlp_layernorm = _norm(cfg) if after else None
        self.drop = nn.Dropout(cfg.dropout) if cfg.dropout else nn.Identity()  # a third of Dropout's time in a decode step

    def forward(self, x: Tensor, rotary: Rotary, documents: Tensor | None = None) -> Tensor:
        y = self.self_attn(cheap(self.input_layernorm, x), rotary, documents)
        x = x + self.drop(y if self.post_self_attn_layernorm is None else self.post_self_attn_layernorm(y))
        y = self.mlp(cheap(self.post_attention_layernorm, x))
        return x + self.drop(y if self.post_mlp_layernorm is None else self.post_mlp_layernorm(y))


class MTPLayer(Layer):
    """A layer of multi-token prediction (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, equations 21 to 23), with the names and
    the order of concatenation of vLLM's ``deepseek_mtp.py``.   hidden, embedding [B, T, C] -> input of the head, likewise"""

    def __init__(self, cfg: LLMConfig, number: int) -> None:
        super().__init__(cfg, number)
        self.enorm, self.hnorm, self.norm = _norm(cfg), _norm(cfg), _norm(cfg)
        self.eh_proj = nn.Linear(2 * cfg.width, cfg.width, bias=False)

    def forward(self, hidden: Tensor, embedding: Tensor, rotary: Rotary, documents: Any) -> Tensor:  # type: ignore[override]
        x = self.eh_proj(cheap(lambda e, h: torch.cat((self.enorm(e), self.hnorm(h)), -1), embedding, hidden))
        return cast(Tensor, self.norm(super().forward(x, rotary, documents)))


class MultiTokenPrediction(nn.Module):
    """Predict further tokens, by layers in sequence. It returns ``losses`` and the cross entropy of each layer, [B, T] each.
    ``hidden`` [B, T, C]: The input of the output layer ``head``. ``further``: For each layer the tokens to embed, and targets."""

    def __init__(self, cfg: LLMConfig, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.cfg, self.embed_tokens = cfg, embed_tokens  # shared under a second name: the last pipeline stage has it, too
        self.layers = nn.ModuleList(MTPLayer(cfg, number) for number in range(cfg.layers, cfg.total_layers))

    def forward(self, losses: Tensor, hidden: Tensor, head: nn.Module, further: Any, rotary: Rotary, documents: Any) -> Any:
        outputs = [losses]
        for layer, (tokens, targets) in zip(self.layers, further):
            x = _scale_embedding(self.embed_tokens(tokens), self.cfg)
            hidden = run_block(layer, self.cfg.recompute, hidden, x, rotary, documents)
            outputs.append(head(hidden, targets))
        return tuple(outputs)


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
        self.layers, self.norm = nn.ModuleList(Layer(cfg, number) for number in range(cfg.layers)), _norm(cfg)
        self.mtp = MultiTokenPrediction(cfg, self.embed_tokens) if cfg.mtp_layers else None


class LLM(PretrainedMixin):
    """A language model: tokens [B, T] -> logits [B, T, V], or with ``targets`` [B, T] their cross entropy [B, T], which is 0 for
    targets ``hpcai.nn.lm_head.IGNORE_INDEX``.

    ``positions`` [B, T]: within a text, 0, 1, ... by default. ``documents`` [B, T], or [B, S] with a KV cache: the document of each
    token of packed rows, for attention within documents. ``further``: tokens and targets of multi-token prediction, as
    ``MultiTokenPrediction`` takes them, whose losses follow then: a tuple. ``temperature``: Divisor of the logits of ``targets``.
    Raises DataError for more tokens than ``cfg.positions``.
    """

    package = __package__

    def __init__(self, cfg: LLMConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or LLMConfig.preset("llama2-7b")
        self.folder: Path | None = None  # source of the weights
        self.local_tokens: nn.Module = Seam()  # takes the tokens of this rank
        self.text_length: Tensor | None = None  # seam of generation: the positions of a text that is not complete yet []
        self.model = Decoder(cfg)
        self.lm_head = LMHead(cfg.width, cfg.vocabulary, cfg.logit_softcap, cfg.z_loss)
        self.all_reduce: nn.Module = Seam()  # sums over the ranks of a text
        self.rotary_cfgs: list[RotaryConfig] = [] if cfg.rotary is None else [cfg.rotary]
        if cfg.rotary is not None and cfg.rotary.local_theta is not None:
            self.rotary_cfgs.append(RotaryConfig(theta=cfg.rotary.local_theta))
        if cfg.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:  # output layers of residual branches: 1/sqrt of the number of branches (Radford et al. 2019)
                is_last = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=cfg.deviation / (math.sqrt(2 * cfg.layers) if is_last else 1.0))

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
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None, documents: Tensor | None = None,
        further: Sequence[tuple[Tensor, Tensor]] = (), temperature: float = 1.0,
    ) -> Any:  # fmt: skip
        if positions is None:
            count = tokens.shape[1] if targets is None else targets.shape[1]  # later pipeline stages get hidden states
            if count > self.cfg.max_length:
                raise DataError(f"a text has {count} tokens, the model {self.cfg.max_length} positions; shorten the text")
            positions = torch.arange(count, device=tokens.device)[None]
        length = None
        if depends_on_length(self.cfg.rotary):
            length = positions.max() + 1 if self.text_length is None else self.text_length
        positions, targets = self.local_tokens(positions), None if targets is None else self.local_tokens(targets)
        x = self.model.embed_tokens(self.local_tokens(tokens) if tokens.ndim == 2 else tokens)
        if tokens.ndim == 2:
            x = _scale_embedding(x, self.cfg)
        if self.model.add_positions is not None:
            x = self.model.add_positions(x, positions)
        rotary = [rotary_cos_sin(cfg, self.cfg.rotary_dim, positions, x.dtype, length) for cfg in self.rotary_cfgs]
        rotary = rotary * (2 // max(len(rotary), 1))
        for layer in self.model.layers:
            x = run_block(layer, self.cfg.recompute, x, rotary, documents)
        x = self.model.norm(x)
        losses = self.lm_head(x, targets) if temperature == 1.0 else self.lm_head(x, targets, temperature)
        if not further:
            return losses
        further = [(self.local_tokens(tokens), self.local_tokens(targets)) for tokens, targets in further]
        return cast(Any, self.model.mtp)(losses, x, self.lm_head, further, rotary, documents)

    def output_files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        """Return the files of a run and their writers: a folder of Hugging Face, or of peft for adapters."""
        module = import_module(f"{__package__}.{'lora' if self.adapters else 'load'}")
        return cast("dict[str, Callable[[Path], Any]]", module.files(self, export))


def rotary_frequencies(
    cfg: RotaryConfig, dim: int, device: torch.device | str | None = None, length: Tensor | None = None
) -> Tensor:
    """Return the rotary frequencies of ``dim`` channels, in radians per position, in float32 as published.   [D/2]

    ``length``: The number of positions of a text [], for scaling by it; None: that of pretraining."""
    scaling, exponent = cfg.scaling, torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    kind = None if scaling is None else scaling.kind
    if scaling is None or kind == "dynamic":
        theta: Any = cfg.theta
        if scaling is not None and length is not None:
            longer = length.to(exponent).clamp(min=scaling.original) / scaling.original
            theta = theta * (scaling.factor * longer - (scaling.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / theta**exponent
    inv_freq = 1.0 / cfg.theta**exponent
    scaled = inv_freq / scaling.factor
    if kind == "linear":
        return scaled
    if kind == "longrope":
        short, long = (torch.cat([torch.full((1,), x, device=device) for x in each]) for each in (scaling.short, scaling.long))
        return 1.0 / ((short if length is None else torch.where(length > scaling.original, long, short)) * cfg.theta**exponent)
    if kind == "yarn":
        bounds = [
            dim * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(cfg.theta))
            for rotations in (scaling.beta_fast, scaling.beta_slow)
        ]
        first, last = (math.floor(bounds[0]), math.ceil(bounds[1])) if scaling.truncate else bounds
        first, last = max(first, 0), min(last, dim - 1)
        position = torch.arange(dim // 2, dtype=torch.float32, device=device)
        kept = 1 - ((position - first) / (last - first or 0.001)).clamp(0, 1)
        return 1.0 / (scaling.factor * cfg.theta**exponent) * (1 - kept) + inv_freq * kept
    wavelength = 2 * math.pi / inv_freq  # positions
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    blend = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    ends = torch.where(wavelength > scaling.original / scaling.low, scaled, inv_freq)
    is_medium = (wavelength >= scaling.original / scaling.high) & (wavelength <= scaling.original / scaling.low)
    return torch.where(is_medium, blend, ends)


@cache
@torch.inference_mode(False)
def _cached_frequencies(cfg: RotaryConfig, dim: int) -> Tensor:
    """Compute frequencies once: they take up to a twelfth of the time of a decode step of a small model."""
    return rotary_frequencies(cfg, dim, "cpu")


def rotary_cos_sin(
    cfg: RotaryConfig, dim: int, positions: Tensor, dtype: torch.dtype, length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for each position, concatenated with themselves.   positions [B, T] -> two of [B, T, D]"""
    with torch.autocast(positions.device.type, enabled=False):
        wide = torch.promote_types(dtype, torch.float32)
        use_cache = type(positions) is Tensor and on_cpu(positions) and not torch.compiler.is_compiling() and length is None
        # No cache on a GPU: memory of one CUDA graph or stream must not be used by another.
        inv_freq = _cached_frequencies(cfg, dim) if use_cache else rotary_frequencies(cfg, dim, positions.device, length)
        angles = positions[..., None].to(wide) * inv_freq.to(wide)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        if cfg.scaling is not None and (factor := cfg.scaling.angle_factor) != 1.0:
            cos, sin = cos.mul_(factor), sin.mul_(factor)
        return cos.to(dtype), sin.to(dtype)


def depends_on_length(cfg: RotaryConfig | None) -> bool:
    return cfg is not None and cfg.scaling is not None and cfg.scaling.kind in ("dynamic", "longrope")


def _query_scale(cfg: LLMConfig) -> float | None:
    """Return the factor of queries if that of their products with keys is not 1 / sqrt(D), otherwise None."""
    scale = (cfg.attention_scale or cfg.head_dim**-0.5) * math.sqrt(cfg.head_dim)
    scaling = cfg.rotary and cfg.rotary.scaling
    if cfg.latent is not None and scaling and scaling.mscale_all_dim:
        scale *= scaling.magnitude(scaling.mscale_all_dim) ** 2
    return None if math.isclose(scale, 1.0, rel_tol=1e-12) else scale


def _scale_embedding(x: Tensor, cfg: LLMConfig) -> Tensor:
    return x * _round_to(math.sqrt(cfg.width), x.dtype) if cfg.scaled_embedding else x


def _round_to(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` as a number of ``dtype``, or of float32 if that is narrower, as published models do."""
    mantissa, exponent = math.frexp(value)
    bits = 1 - round(math.log2(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)))
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return gelu(gate) * up


def _norm(cfg: LLMConfig, channels: int | None = None) -> nn.Module:
    if cfg.norm == "layer":
        return LayerNorm(channels or cfg.width, eps=cfg.eps, autocast_output=True)
    return RMSNorm(channels or cfg.width, cfg.eps, zero_centered=cfg.norm == "rms_zero_centered")


def _feed_forward(cfg: LLMConfig, layer: int) -> nn.Module:
    experts = cfg.experts
    if experts is None or not cfg.has_experts(layer):
        return GatedMLP(cfg, cfg.inner, cfg.has_bias("mlp")) if cfg.is_gated else MLP(cfg)
    router = Router(
        cfg.width, experts.count, experts.top_k, score=experts.score, normalize=experts.normalize, groups=experts.groups,
        top_groups=experts.top_groups, scale=experts.scale, bias=experts.bias, correction=experts.correction,
        balance_loss=experts.balance_loss, z_loss=experts.z_loss, bias_update_rate=experts.bias_update_rate,
    )  # fmt: skip
    activation: Any = "clipped_swiglu" if experts.clipped else "swiglu"
    return MoE(
        router, Experts(cfg.width, experts.inner, experts.count, bias=experts.bias, activation=activation),
        GatedMLP(cfg, experts.shared, False) if experts.shared else None,
        nn.Linear(cfg.width, 1, bias=False) if experts.shared_gate else None, experts.capacity,
    )  # fmt: skip
