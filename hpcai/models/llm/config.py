"""Settings of decoder-only language models and of sampling. This module does not import torch."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rate, Settings, UnitInterval
from hpcai.errors import ConfigError
from hpcai.settings import LoRAConfig as LoRAConfig
from hpcai.settings import MeshConfig, Tensor

PRESETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
"""published sizes, as fields of LLMConfig"""


class ScalingConfig(Settings):
    """Scaling of rotary frequencies for more positions than in pretraining."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = "llama3"
    """dynamic: NTK-aware, for texts of more tokens than ``positions``; llama3: Llama 3.1; yarn: Peng et al. 2023; longrope: Ding et
    al. 2024"""
    factor: PositiveFloat = 8.0
    """divisor of low frequencies"""
    original: PositiveInt = 8192
    """positions of pretraining"""
    low: PositiveFloat = 1.0
    """llama3: low frequencies have fewer rotations than this over ``original`` positions"""
    high: PositiveFloat = 4.0
    """llama3: high frequencies, which are unchanged, have more rotations than this; interpolated in between"""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with more rotations than this over ``original`` positions are unchanged"""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with fewer rotations than this are divided by ``factor``; interpolated in between"""
    truncate: bool = True
    """yarn: round the bounds of the interpolation to whole channels"""
    attention_factor: PositiveFloat | None = None
    """yarn, longrope: factor of cosines and sines; null: that of the paper"""
    mscale: NonNegativeFloat = 0.0
    """yarn: with ``mscale_all_dim``, the factor of cosines and sines is that of ``mscale`` over that of the other (DeepSeek-V3)"""
    mscale_all_dim: NonNegativeFloat = 0.0
    """yarn: the logits of latent attention have its factor twice"""
    short: tuple[PositiveFloat, ...] = ()
    """longrope: divisor of each frequency in texts of at most ``original`` tokens"""
    long: tuple[PositiveFloat, ...] = ()
    """longrope: divisor of each frequency in longer texts"""

    def magnitude(self, scale: float = 1.0) -> float:
        """Return YaRN's factor of queries and keys, 0.1 scale ln(factor) + 1."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def angle_factor(self) -> float:
        """The factor of cosines and sines."""
        if self.attention_factor is not None or self.kind not in ("yarn", "longrope"):
            return self.attention_factor or 1.0
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude()


class RotaryConfig(Settings):
    """Rotary position embedding (Su et al. 2021)."""

    theta: PositiveFloat = 10_000.0
    scaling: ScalingConfig | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """fraction of the channels of a head that are rotated, from the first"""
    local_theta: PositiveFloat | None = None
    """theta of layers with a sliding window, without scaling (Gemma 3); null: as in the others"""


class LatentConfig(Settings):
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values are projections of one latent vector of a token."""

    q_rank: PositiveInt | None = None
    """channels of the latent vector of queries; null: queries are projections of the hidden state"""
    kv_rank: PositiveInt = 512
    """channels of the latent vector of keys and values"""
    nope: PositiveInt = 128
    """channels of a query or key without position"""
    rope: PositiveInt = 64
    """rotated channels of a query or key; all heads share those of keys"""
    value: PositiveInt = 128
    """channels of a value"""


class ExpertsConfig(Settings):
    """Mixture of experts in place of feed-forward layers (Shazeer et al. 2017)."""

    count: PositiveInt = 8
    top_k: PositiveInt = 2
    """experts of a token"""
    inner: PositiveInt = 14_336
    """channels of an expert"""
    score: Literal["softmax", "softmax_after_topk", "sigmoid", "sinkhorn"] = "softmax"
    """weights of experts: softmax over all, or over the selected; sigmoid (DeepSeek-V3); sinkhorn: balanced selection (Clark et al.
    2022)"""
    normalize: bool = True
    """divide the weights of the selected experts by their sum"""
    groups: PositiveInt = 1
    """groups of experts, such as those of a node"""
    top_groups: PositiveInt = 1
    """groups from which the experts of a token are selected"""
    scale: PositiveFloat = 1.0
    """factor of the weights"""
    bias: bool = False
    """whether router and experts have biases"""
    clipped: bool = False
    """clamped SwiGLU (gpt-oss)"""
    shared: PositiveInt | None = None
    """channels of the shared expert, which computes all tokens; null: none"""
    shared_gate: bool = False
    """whether the output of the shared expert has a sigmoid gate (Qwen 2)"""
    correction: bool = False
    """whether a bias of each expert, which balances their loads, is added for the selection only (DeepSeek-V3)"""
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """layers with an ordinary feed-forward layer"""
    balance_loss: NonNegativeFloat = 0.0
    """coefficient of the auxiliary loss that balances the loads of experts (Fedus et al. 2022)"""
    z_loss: NonNegativeFloat = 0.0
    """coefficient of the mean squared logsumexp of router logits (Zoph et al. 2022)"""
    bias_update_rate: NonNegativeFloat = 0.0
    """change of the ``correction`` of an expert per step (Wang et al. 2024)"""
    capacity: PositiveFloat | None = None
    """tokens of an expert, relative to a balanced load; further ones are dropped; null: none are"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_k > self.count // self.groups * self.top_groups or self.top_groups > self.groups or self.count % self.groups:
            given = f"{self.count} experts in {self.groups} groups, of which {self.top_groups}"
            raise ValueError(f"{given}, and top_k {self.top_k}: expected equal groups, at least top_k in the selected ones")
        if self.bias_update_rate and not self.correction:
            raise ValueError("bias_update_rate is given, but correction is false: there is no bias to update; set it to true")
        if self.shared_gate and self.shared is None:
            raise ValueError("shared_gate is true, but there is no shared expert; set shared to its channels")
        return self


class LLMConfig(Settings):
    """A decoder; the default is Llama 2 7B with 6,738,415,616 parameters."""

    vocabulary: PositiveInt = 32_000
    width: PositiveInt = 4096
    """hidden size"""
    layers: PositiveInt = 32
    heads: PositiveInt = 32
    """query heads"""
    key_heads: PositiveInt | None = None
    """key and value heads (grouped-query attention); null: as many as query heads"""
    head: PositiveInt | None = None
    """channels of a head; null: width / heads"""
    inner: PositiveInt = 11_008
    """channels of the feed-forward layer (intermediate size)"""
    positions: PositiveInt = 4096
    """maximum length of a text, in tokens"""
    rotary: RotaryConfig | None = RotaryConfig()
    """null: learned position embeddings, as in GPT"""
    norm: Literal["rms", "rms_zero_centered", "layer"] = "rms"
    """rms_zero_centered: the factor is 1 + weight (Gemma)"""
    norm_position: Literal["before", "after", "both"] = "before"
    """norms before attention and feed-forward layers, after them (OLMo 2), or both (Gemma 2)"""
    qk_norm: Literal["head", "all"] | None = None
    """norm of queries and keys, of each head (Qwen 3) or of all channels (OLMo 2)"""
    eps: PositiveFloat = 1e-5
    feed: Literal["swiglu", "geglu", "gelu", "gelu_erf"] = "swiglu"
    """geglu, gelu: with the tanh approximation of GELU, as in Gemma and GPT; gelu_erf: exact GELU"""
    bias: bool | Literal["qkv", "attention", "mlp"] = False
    """which linear layers have a bias: all, or those of queries, keys and values, of attention, or of feed-forward layers"""
    window: PositiveInt | None = None
    """tokens of a sliding window, to which attention is limited (Beltagy et al. 2020), with the token itself; null: no limit"""
    full_layers: tuple[NonNegativeInt, ...] = ()
    """layers without the sliding window"""
    attention_scale: PositiveFloat | None = None
    """factor of products of queries and keys; null: 1 / sqrt(channels of a head)"""
    attention_softcap: PositiveFloat | None = None
    """logits of attention are softcap * tanh(logits / softcap) (Gemma 2)"""
    logit_softcap: PositiveFloat | None = None
    """the same of the logits of tokens"""
    sinks: bool = False
    """whether softmax has a further, learned logit of each head, without a value (gpt-oss)"""
    latent: LatentConfig | None = None
    """multi-head latent attention, in place of grouped-query attention"""
    experts: ExpertsConfig | None = None
    scaled_embedding: bool = False
    """whether embeddings are multiplied by sqrt(width) (Gemma)"""
    tied: bool = False
    """whether the output layer shares the weights of the embedding"""
    z_loss: NonNegativeFloat = 0.0
    """coefficient of the squared logsumexp of the logits of tokens in the training loss (Chowdhery et al. 2022)"""
    mtp_layers: NonNegativeInt = 0
    """layers of multi-token prediction in training (DeepSeek-V3): the k-th predicts the token k + 1 places ahead"""
    mtp_loss: NonNegativeFloat = 0.1
    """coefficient of the mean loss of these layers (DeepSeek-V3: 0.3, after two thirds of the tokens 0.1)"""
    deviation: PositiveFloat = 0.02
    """standard deviation of initial weights"""
    dropout: Rate = 0.0
    recompute: Literal["none", "selective", "layers"] = "none"
    """activation recomputation in the backward pass. selective: norms, rotary embeddings and activation functions; layers: whole
    layers, of which only the inputs are saved"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        keys = self.key_heads or self.heads
        if self.head is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads; give head, or other sizes")
        if self.heads % keys:
            raise ValueError(f"{self.heads} heads of queries cannot share {keys} heads of keys; give a divisor of {self.heads}")
        if self.rotary is not None and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ValueError(f"heads of {self.rotary_dim} channels cannot be rotated; give an even number")
        if self.latent is not None and (self.rotary is None or self.qk_norm or self.key_heads not in (None, self.heads)):
            raise ValueError("latent attention has rotary positions, as many key_heads as heads, and no qk_norm; change these")
        if self.rotary and self.rotary.scaling and self.rotary.scaling.kind == "longrope":
            for name in ("short", "long"):
                if (count := len(getattr(self.rotary.scaling, name))) != self.rotary_dim // 2:
                    raise ValueError(f"rotary.scaling.{name} has {count} divisors, expected {self.rotary_dim // 2} of longrope")
        if self.mtp_layers and self.rotary is None:
            raise ValueError(f"mtp_layers is {self.mtp_layers}, but positions are learned (rotary is null); set one of the two")
        return self

    @property
    def head_dim(self) -> int:
        """Channels of a query or key."""
        return self.latent.nope + self.latent.rope if self.latent else self.head or self.width // self.heads

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a query or key."""
        return self.latent.rope if self.latent else int(self.head_dim * (self.rotary.fraction if self.rotary else 0))

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def max_length(self) -> int:
        """The maximum length of a text, in tokens."""
        scaling = self.rotary and self.rotary.scaling
        return int(self.positions * scaling.factor) if scaling and scaling.kind == "dynamic" else self.positions

    @property
    def total_layers(self) -> int:
        """Layers with those of multi-token prediction, which have the last numbers."""
        return self.layers + self.mtp_layers

    @property
    def is_gated(self) -> bool:
        """Whether feed-forward layers have a gate."""
        return self.feed in ("swiglu", "geglu")

    def has_bias(self, part: Literal["qkv", "out", "mlp"]) -> bool:
        """Return whether these linear layers have a bias."""
        return self.bias is True or self.bias in {"qkv": ("qkv", "attention"), "out": ("attention",), "mlp": ("mlp",)}[part]

    def layer_window(self, layer: int) -> int | None:
        """Return the sliding window of a layer."""
        return None if layer in self.full_layers else self.window

    def has_experts(self, layer: int) -> bool:
        """Return whether the feed-forward layer of a layer consists of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def count_parameters(self, per_layer: int | None = None) -> int:
        """Return the number of parameters; tied ones count once. ``per_layer``: of so many experts in a layer, instead of all."""
        c, experts = self.width, self.experts
        norm = c * (2 if self.norm == "layer" else 1)
        embeddings = (1 if self.tied else 2) * self.vocabulary * c + norm + (0 if self.rotary else self.positions * c)
        sparse = sum(map(self.has_experts, range(self.total_layers)))
        feed = (self.total_layers - sparse) * self._feed_parameters(self.inner, self.has_bias("mlp"))
        if experts is not None:
            router = experts.count * (c + experts.bias)
            shared = self._feed_parameters(experts.shared or 0, False) + c * experts.shared_gate
            number = experts.count if per_layer is None else per_layer
            feed += sparse * (router + shared + number * self._feed_parameters(experts.inner, experts.bias))
        layer = self._attention_parameters() + (4 if self.norm_position == "both" else 2) * norm
        return self.total_layers * layer + self.mtp_layers * (3 * norm + 2 * c * c) + feed + embeddings

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return self.count_parameters()

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that compute a token in training: of experts the selected ones."""
        return self.count_parameters(self.experts.top_k if self.experts else None)

    @property
    def active_inner(self) -> int:
        """Channels of feed-forward layers that compute a token, of all layers."""
        sparse = sum(map(self.has_experts, range(self.layers)))
        experts = self.experts.top_k * self.experts.inner + (self.experts.shared or 0) if self.experts else 0
        return (self.layers - sparse) * self.inner + sparse * experts

    def _feed_parameters(self, inner: int, bias: bool) -> int:
        ups = 2 if self.is_gated else 1
        return (ups + 1) * self.width * inner + (ups * inner + self.width) * bias * bool(inner)

    def _attention_parameters(self) -> int:
        c, d, out = self.width, self.head_dim, self.has_bias("out")
        if (latent := self.latent) is not None:
            q = c * self.heads * d if latent.q_rank is None else latent.q_rank * (c + out + 1 + self.heads * d)
            compressed = (c + out) * (latent.kv_rank + latent.rope) + latent.kv_rank
            expanded = latent.kv_rank * self.heads * (latent.nope + latent.value)
            return q + compressed + expanded + self.heads * latent.value * c + out * c + self.heads * self.sinks
        outputs = (self.heads + 2 * self.kv_heads) * d
        norms = {None: 0, "head": 2 * d, "all": (self.heads + self.kv_heads) * d}[self.qk_norm]
        projections = (c + self.has_bias("qkv")) * outputs + self.heads * d * c + out * c
        return projections + norms + self.heads * self.sinks

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        fields = type(self).model_fields.items()
        return {name: value for name, field in fields if (value := getattr(self, name)) != field.get_default()}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a published size, with ``changes``. Raises ConfigError, which lists the sizes, for an unknown name."""
        if name not in PRESETS:
            raise ConfigError(f"there is no language model {name!r}; expected one of {', '.join(PRESETS)}")
        published = cls.model_validate_json(json.dumps(PRESETS[name]))
        return cls(**{field: getattr(published, field) for field in published.model_fields_set} | changes)


class AxesConfig(MeshConfig, Tensor):
    """The mesh: model replicas, sharded over ``pipeline``, ``context`` and ``tensor``."""

    context: PositiveInt = 1
    """context parallelism: a long sequence is sharded along its tokens"""
    pipeline: PositiveInt = 1
    """pipeline parallelism: the layers are split into consecutive stages"""
    expert: PositiveInt = 1
    """expert parallelism: so many neighbouring replicas share the experts of a layer, and each has some of them"""


class SamplingConfig(Settings):
    """Sampling of the next token; rules apply in this order. The default is greedy decoding."""

    most: PositiveInt = 256
    """maximum number of new tokens"""
    repetition: PositiveFloat = 1.0
    """repetition penalty of tokens that occurred, also in the prompt (Keskar et al. 2019)"""
    temperature: NonNegativeFloat = 0.0
    """0: greedy decoding"""
    top_k: PositiveInt | None = None
    """keep the k most probable tokens, and ties with the last of them"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """nucleus sampling: keep the most probable tokens that together have this probability (Holtzman et al. 2020)"""
    min_p: UnitInterval = 0.0
    """keep tokens with at least this fraction of the largest probability"""


class EngineConfig(Settings):
    """Sizes of a generation engine, by vLLM's names, and the precision of its weights."""

    max_num_seqs: PositiveInt = 64
    """largest number of texts that are continued at the same time"""
    max_num_batched_tokens: PositiveInt = 1024
    """largest number of tokens of a step: prompts are computed in chunks, beside the texts that decode"""
    block_size: PositiveInt = 16
    """tokens of a block of the KV cache"""
    cache_tokens: PositiveInt | None = None
    """tokens of the KV cache; null: `max_num_seqs` texts of the largest length, in half of the free memory at most"""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=7)] = 4
    """tokens that a draft model proposes at a time"""
    quantization: Literal["none", "int8", "int4"] = "none"
    """weights of linear layers and experts, rounded when the engine is created and when it is reset; the model keeps its own. int8:
    a scale of each output; int4: a scale and a zero point of each group of its inputs"""
    quantization_group_size: PositiveInt = 128
    """int4: inputs of a group"""
