"""Shape of a decoder-only language model (Llama's and GPT's families), of its adapters, and how it speaks. No torch here."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import PositiveFloat, PositiveInt, Rate, Settings, UnitInterval, NonNegativeFloat
from hpcai.errors import ConfigError


class ScalingConfig(Settings):
    """Rotary frequencies for more positions than a model was first trained with (Llama 3.1)."""

    kind: Literal["llama3", "linear"] = "llama3"
    factor: PositiveFloat = 8.0
    """slow waves turn so many times slower"""
    low: PositiveFloat = 1.0
    """waves that turn fewer times than this over ``original`` positions are slow"""
    high: PositiveFloat = 4.0
    """and those that turn more often stay as they are"""
    original: PositiveInt = 8192
    """positions of the first training"""


class RotaryConfig(Settings):
    """Positions as rotations of queries and keys (Su et al. 2021)."""

    theta: PositiveFloat = 10_000.0
    scaling: ScalingConfig | None = None


class LLMConfig(Settings):
    """A decoder: Llama 2 7B by default, 6,738,415,616 parameters."""

    vocabulary: PositiveInt = 32_000
    width: PositiveInt = 4096
    """channels of a token"""
    layers: PositiveInt = 32
    heads: PositiveInt = 32
    """of queries"""
    key_heads: PositiveInt | None = None
    """of keys and values, each for several of queries; null: as many"""
    head: PositiveInt | None = None
    """channels of a head; null: width / heads"""
    inner: PositiveInt = 11_008
    """channels inside a feed-forward part"""
    positions: PositiveInt = 4096
    """tokens that a text may have"""
    rotary: RotaryConfig | None = RotaryConfig()
    """null: learned positions, as GPT has them"""
    norm: Literal["rms", "layer"] = "rms"
    eps: PositiveFloat = 1e-5
    feed: Literal["swiglu", "gelu", "gelu_erf"] = "swiglu"
    """gelu: by the tangent, as GPT has it; gelu_erf: by the error function, as some that follow it have"""
    bias: bool = False
    """whether linear layers add one"""
    tied: bool = False
    """whether the last layer is the embedding"""
    deviation: PositiveFloat = 0.02
    """of the first weights"""
    dropout: Rate = 0.0
    recompute: Literal["none", "selective", "layers"] = "none"
    """what is computed again for the backward pass instead of kept. selective: norms, rotations and activations; layers: all of
    each, which keeps its input alone"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        keys = self.key_heads or self.heads
        if self.head is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads; give head, or other sizes")
        if self.heads % keys:
            raise ValueError(f"{self.heads} heads of queries cannot share {keys} heads of keys; give a divisor of {self.heads}")
        if self.rotary is not None and self.size % 2:
            raise ValueError(f"heads of {self.size} channels cannot be rotated; give an even number")
        return self

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.head or self.width // self.heads

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def parameters(self) -> int:
        """How many there are, tied ones once."""
        c, bias = self.width, int(self.bias)
        norm = c * (2 if self.norm == "layer" else 1)
        outputs = (self.heads + 2 * self.keys) * self.size
        attention = c * outputs + bias * outputs + self.heads * self.size * c + bias * c
        ups = 2 if self.feed == "swiglu" else 1
        feed = (ups + 1) * c * self.inner + bias * (ups * self.inner + c)
        around = (1 if self.tied else 2) * self.vocabulary * c + norm + (0 if self.rotary else self.positions * c)
        return self.layers * (attention + feed + 2 * norm) + around

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A published size with other values. Raises ConfigError, which lists them."""
        if name not in PRESETS:
            raise ConfigError(f"there is no language model {name!r}; expected one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name] | changes)


Frozenness = Literal["as they are", "bf16", "8bit"]


class LoRAConfig(Settings):
    """Adapters of the layers whose names end with one of ``targets``: by default MLPerf's for Llama 2 70B."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """the scale is alpha / rank"""
    stabilised: bool = False
    """the scale is alpha / sqrt(rank) (Kalajdzievski 2023)"""
    dropout: Rate = 0.0
    """of what goes into A"""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    frozen: Frozenness = "as they are"
    """in which bits the weights of all linear layers but the last lie in memory; computed with is what the step says"""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.stabilised else self.rank)


class SamplingConfig(Settings):
    """How the next token is chosen, in this order; the likeliest one where nothing is said."""

    most: PositiveInt = 256
    """tokens that are made at most"""
    repetition: PositiveFloat = 1.0
    """by how much tokens that were there, also in the prompt, are less likely (Keskar et al. 2019)"""
    temperature: NonNegativeFloat = 0.0
    """0: the likeliest token"""
    top_k: PositiveInt | None = None
    """so many of the likeliest tokens, and those as likely as the last of them"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """the likeliest tokens that together have this probability (Holtzman et al. 2020)"""
    min_p: UnitInterval = 0.0
    """those that have at least this share of the likeliest one's"""


_LLAMA31 = {
    "vocabulary": 128_256, "positions": 131_072, "key_heads": 8, "rotary": {"theta": 500_000.0, "scaling": {}},
}  # fmt: skip
_GPT: dict[str, Any] = {"rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": {},
    "llama2-13b": {"width": 5120, "layers": 40, "heads": 40, "inner": 13_824},
    "llama2-70b": {"width": 8192, "layers": 80, "heads": 64, "key_heads": 8, "inner": 28_672},
    "llama3-8b": {**_LLAMA31, "inner": 14_336, "positions": 8192, "rotary": {"theta": 500_000.0}},
    "llama3.1-8b": {**_LLAMA31, "inner": 14_336},
    "llama3.1-70b": {**_LLAMA31, "width": 8192, "layers": 80, "heads": 64, "inner": 28_672},
    "llama3.1-405b": {**_LLAMA31, "width": 16_384, "layers": 126, "heads": 128, "inner": 53_248},
    "llama3.2-1b": {
        **_LLAMA31, "width": 2048, "layers": 16, "head": 64, "inner": 8192, "tied": True,
        "rotary": {"theta": 500_000.0, "scaling": {"factor": 32.0}},
    },
    "gpt2": {**_GPT, "vocabulary": 50_257, "width": 768, "layers": 12, "heads": 12, "inner": 3072, "positions": 1024},
    "gpt3-175b": {**_GPT, "vocabulary": 51_200, "width": 12_288, "layers": 96, "heads": 96, "inner": 49_152, "positions": 2048},
}  # fmt: skip
