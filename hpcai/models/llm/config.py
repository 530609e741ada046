"""Settings of decoder-only language models (Llama and GPT), of LoRA adapters and of sampling. This module does not import torch."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, PositiveFloat, PositiveInt, Rate, Settings, UnitInterval
from hpcai.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
"""published sizes, as fields of LLMConfig"""


class ScalingConfig(Settings):
    """Scaling of rotary frequencies for more positions than in pretraining (Llama 3.1)."""

    kind: Literal["llama3", "linear"] = "llama3"
    factor: PositiveFloat = 8.0
    """divisor of low frequencies"""
    low: PositiveFloat = 1.0
    """low frequencies: fewer rotations than this over ``original`` positions"""
    high: PositiveFloat = 4.0
    """high frequencies, which are unchanged: more rotations than this; interpolated in between"""
    original: PositiveInt = 8192
    """positions of pretraining"""


class RotaryConfig(Settings):
    """Rotary position embedding (Su et al. 2021)."""

    theta: PositiveFloat = 10_000.0
    scaling: ScalingConfig | None = None


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
    norm: Literal["rms", "layer"] = "rms"
    eps: PositiveFloat = 1e-5
    feed: Literal["swiglu", "gelu", "gelu_erf"] = "swiglu"
    """gelu: tanh approximation, as in GPT; gelu_erf: exact GELU, as in some of its successors"""
    bias: bool = False
    """whether linear layers have a bias"""
    tied: bool = False
    """whether the output layer shares the weights of the embedding"""
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
        if self.rotary is not None and self.head_dim % 2:
            raise ValueError(f"heads of {self.head_dim} channels cannot be rotated; give an even number")
        return self

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.head or self.width // self.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        c, bias = self.width, int(self.bias)
        norm = c * (2 if self.norm == "layer" else 1)
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = c * outputs + bias * outputs + self.heads * self.head_dim * c + bias * c
        ups = 2 if self.feed == "swiglu" else 1
        feed = (ups + 1) * c * self.inner + bias * (ups * self.inner + c)
        embeddings = (1 if self.tied else 2) * self.vocabulary * c + norm + (0 if self.rotary else self.positions * c)
        return self.layers * (attention + feed + 2 * norm) + embeddings

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a published size, with ``changes``. Raises ConfigError, which lists the sizes, for an unknown name."""
        if name not in PRESETS:
            raise ConfigError(f"there is no language model {name!r}; expected one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name] | changes)


FrozenStorage = Literal["as they are", "bf16", "8bit"]


class LoRAConfig(Settings):
    """LoRA adapters of linear layers; defaults of MLPerf for Llama 2 70B. Names of modules may begin after any dot, such as q_proj
    for a layer of each block and layers.0.self_attn.q_proj for one."""

    renamed = {"frozen": "base_dtype"}

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """the scale is alpha / rank"""
    stabilised: bool = False
    """rank-stabilized LoRA: the scale is alpha / sqrt(rank) (Kalajdzievski 2023)"""
    dropout: Rate = 0.0
    """of the inputs of A"""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rank_pattern: dict[str, PositiveInt] = {}
    """ranks of layers for which it is not ``rank``, by name; a longer name comes before a shorter one"""
    alpha_pattern: dict[str, PositiveFloat] = {}
    """likewise for ``alpha``"""
    modules_to_save: tuple[str, ...] = ()
    """embeddings, norms or the output layer (lm_head) if they are trained, too, and saved beside the adapters"""
    base_dtype: FrozenStorage = "as they are"
    """storage format of the frozen weights of all linear layers but the output layer; the step sets the compute dtype"""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.stabilised else self.rank)

    def for_layer(self, name: str) -> Self | None:
        """Return the settings with rank and alpha of one layer, or None if it has no adapter."""
        if not longest_end(name, self.targets):
            return None
        rank = self.rank_pattern.get(longest_end(name, self.rank_pattern), self.rank)
        alpha = self.alpha_pattern.get(longest_end(name, self.alpha_pattern), self.alpha)
        return self.model_copy(update={"rank": rank, "alpha": alpha})

    def alpha_for(self, rank: int) -> float:
        """Return the alpha with which adapters of another rank have the same scale."""
        return round(self.alpha * math.sqrt(rank / self.rank), 12) if self.stabilised else self.alpha * rank / self.rank

    def saves(self, parameter: str) -> bool:
        """Whether ``parameter`` belongs to one of ``modules_to_save``."""
        return bool(longest_end(parameter.rpartition(".")[0], self.modules_to_save))


def longest_end(name: str, ends: Iterable[str]) -> str:
    """Return the longest of ``ends`` that is ``name`` or follows a dot in it, or an empty string."""
    return max((end for end in ends if f".{name}".endswith(f".{end}")), key=len, default="")


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
