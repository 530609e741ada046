"""Settings of denoising networks, prediction types and samplers. This module does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rate, Settings
from hpcai.settings import LoRAConfig

Recompute = Literal["none", "selective", "layers"]
Levels = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
TIME_CHANNELS = 256  # of the sinusoidal embedding of times in transformers


class UNetConfig(Settings):
    """A U-Net; the default is Stable Diffusion 2's with 865,910,724 parameters (Rombach et al. 2022)."""

    inputs: PositiveInt = 4
    """channels of a noisy sample, without those of a conditioning field"""
    outputs: PositiveInt = 4
    dims: Literal[2, 3] = 2
    """spatial dims: maps or volumes"""
    channels: Levels = (320, 640, 1280, 1280)
    """of each level; each level halves the resolution"""
    blocks: PositiveInt = 2
    """residual blocks of each level of the encoder; one more in the decoder"""
    attention: tuple[Literal["none", "self", "cross"], ...] = ("cross", "cross", "cross", "none")
    """after each block of a level. self: self-attention of pixels; cross: a transformer layer with cross-attention to tokens"""
    middle: Literal["none", "self", "cross"] = "cross"
    heads: Levels = (5, 10, 20, 20)
    """attention heads of each level; the middle has those of the lowest level"""
    transformer_layers: tuple[PositiveInt, ...] = ()
    """transformer layers with cross-attention in each block of a level, and in the middle those of the lowest; empty: one"""
    tokens: PositiveInt | None = 1024
    """channels of conditioning tokens; null: none"""
    pooled: PositiveInt | None = None
    """channels of the pooled text embedding, beside ``sizes``; null: none. Stable Diffusion XL: 1280 (Podell et al. 2023)"""
    sizes: PositiveInt | None = None
    """channels of the embedding of each of the six sizes of an image (``Condition.sizes``); null: none. Stable Diffusion XL: 256"""
    classes: PositiveInt | None = None
    parameters: NonNegativeInt = 0
    """number of conditioning physical parameters"""
    field: NonNegativeInt = 0
    """channels of a conditioning field, such as one of low resolution, concatenated with the noisy sample"""
    fine: NonNegativeInt = 0
    """channels of conditioning fields on the grid of a sample, such as static fields, or the state that a forecast starts from"""
    patch: PositiveInt = 1
    """pixels along each dim that are merged into channels"""
    groups: PositiveInt = 32
    """of group norms"""
    attention_groups: PositiveInt | None = None
    """of group norms before attention; null: as ``groups``. MLPerf's Stable Diffusion: groups 16, and these 32"""
    eps: PositiveFloat = 1e-5
    """of group norms in residual blocks"""
    dropout: Rate = 0.0
    periodic: tuple[bool, ...] = ()
    """whether each spatial dim is periodic, such as a simulation box or longitude; empty: none is"""
    zero: bool = True
    """initialize the last layer of each block to zero, as published networks were trained (diffusers does not)"""
    recompute: Recompute = "none"
    """activation recomputation in the backward pass. selective: norms and activation functions; layers: residual and attention
    blocks, of which only the inputs are saved"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        levels = len(self.channels)
        for name in ("attention", "heads", *(["transformer_layers"] if self.transformer_layers else [])):
            if len(getattr(self, name)) != levels:
                raise ValueError(f"{name} has {len(getattr(self, name))} values, channels {levels}; give one for each level")
        if self.periodic and len(self.periodic) != self.dims:
            raise ValueError(f"periodic has {len(self.periodic)} values for {self.dims} dims; give one for each, or none")
        kinds = (*self.attention, self.middle)
        if ("cross" in kinds) != (self.tokens is not None):
            raise ValueError("attention to tokens (cross) needs tokens, their channels, and tokens need attention to them")
        if (self.pooled is None) != (self.sizes is None) or (self.tokens is None and (self.pooled or self.transformer_layers)):
            raise ValueError("pooled and sizes go together, and they and transformer_layers beside tokens; give all, or none")
        for channels, kind, heads in zip((*self.channels, self.channels[-1]), kinds, (*self.heads, self.heads[-1])):
            for name in ("groups", "attention_groups") if kind != "none" and self.attention_groups else ("groups",):
                if channels % (groups := getattr(self, name)):
                    raise ValueError(f"{channels} channels cannot make {groups} groups ({name}); give a divisor of all channels")
            if kind != "none" and channels % heads:
                raise ValueError(f"{channels} channels are not a multiple of {heads} heads; give other heads")
        return self


class TransformerConfig(Settings):
    """Settings of all transformers."""

    heads: PositiveInt
    head: PositiveInt
    """channels of a head"""
    zero: bool = True
    """initialize modulations and the last layer to zero, as published"""
    recompute: Recompute = "none"
    """activation recomputation in the backward pass. selective: norms, rotary embeddings and activation functions; layers: whole
    layers, of which only the inputs are saved"""

    @property
    def width(self) -> int:
        return self.heads * self.head


class DiTConfig(TransformerConfig):
    """A transformer over patches of a sample (Peebles and Xie 2023); the default is DiT-XL/2."""

    inputs: PositiveInt = 4
    outputs: PositiveInt = 8
    """twice the inputs if it also predicts a variance"""
    size: PositiveInt = 32
    """pixels along each dim of a sample"""
    patch: PositiveInt = 2
    layers: PositiveInt = 28
    heads: PositiveInt = 16
    head: PositiveInt = 72
    classes: PositiveInt = 1000
    dropout: Rate = 0.0
    """fraction of samples whose class is dropped"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.size % self.patch:
            raise ValueError(f"a sample of {self.size} pixels cannot be divided into patches of {self.patch}; give a divisor")
        if self.heads * self.head % 4:
            raise ValueError(f"{self.heads} heads of {self.head} channels: positions of two dims need a multiple of 4 channels")
        return self


class FluxConfig(TransformerConfig):
    """A transformer over text and image tokens; the default is Flux.1 schnell with 11,891,178,560 parameters."""

    inputs: PositiveInt = 64
    """channels of an image token: 2 x 2 pixels of a latent with 16 channels"""
    double: NonNegativeInt = 19
    """number of double-stream blocks, with separate weights for text and image"""
    single: NonNegativeInt = 38
    """number of single-stream blocks, with shared weights"""
    heads: PositiveInt = 24
    head: PositiveInt = 128
    tokens: PositiveInt = 4096
    """channels of a text token (T5)"""
    pooled: PositiveInt = 768
    """channels of the pooled text embedding (CLIP)"""
    guidance: bool = False
    """whether the guidance strength is an input (dev)"""
    turned: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    """channels of a head with rotary embedding of each coordinate of a token: kind, row, column"""
    theta: PositiveFloat = 10_000.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.inputs % 4:
            raise ValueError(f"a token of {self.inputs} channels cannot hold 2 x 2 pixels; give a multiple of 4")
        if sum(self.turned) != self.head or any(n % 2 for n in self.turned):
            raise ValueError(f"turned {list(self.turned)} must be even and add up to the {self.head} channels of a head")
        return self


class SD3Config(TransformerConfig):
    """A transformer over text and image tokens; the default is Stable Diffusion 3.5 medium with 2,243,171,520 parameters."""

    inputs: PositiveInt = 16
    outputs: PositiveInt = 16
    size: PositiveInt = 128
    """pixels along each dim of a sample over which the table of positions is stretched, as in files"""
    positions: PositiveInt = 384
    """patches along each dim of the table of positions; samples of fewer patches have those of its middle"""
    patch: PositiveInt = 2
    layers: PositiveInt = 24
    heads: PositiveInt = 24
    head: PositiveInt = 64
    tokens: PositiveInt = 4096
    """channels of a text token (CLIP, padded, and T5)"""
    pooled: PositiveInt = 2048
    """channels of the pooled text embedding (both CLIP)"""
    dual_attention: tuple[NonNegativeInt, ...] = tuple(range(13))
    """numbers of the layers with a second attention, of the image alone"""
    qk_norm: Literal["rms_norm"] | None = "rms_norm"
    """of queries and keys; null: none (Stable Diffusion 3)"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.heads * self.head % 4:
            raise ValueError(f"{self.heads} heads of {self.head} channels: positions of two dims need a multiple of 4 channels")
        if max(self.dual_attention, default=0) >= self.layers:
            raise ValueError(f"dual_attention has layer {max(self.dual_attention)}; give numbers below {self.layers}, of layers")
        return self


class VAEConfig(Settings):
    """A variational autoencoder (Kingma and Welling 2014); the default is Stable Diffusion's with 83,653,863 parameters."""

    inputs: PositiveInt = 3
    outputs: PositiveInt = 3
    latents: PositiveInt = 4
    """channels of a latent"""
    channels: Levels = (128, 256, 512, 512)
    blocks: PositiveInt = 2
    groups: PositiveInt = 32
    quantised: bool = True
    """1 x 1 convolutions before and after the latent (not in Flux.1's)"""
    attention: bool = True
    """in the middle block"""
    scale: PositiveFloat = 0.18215
    shift: float = 0.0
    """inputs of a diffusion model are (latent - shift) * scale"""


class ObjectiveConfig(Settings):
    """The prediction type of a network, for noisy samples x_t = alpha x0 + sigma eps."""

    renamed = {"says": "prediction_type"}

    prediction_type: Literal["epsilon", "v", "x0", "edm", "flow", "regression"] = "v"
    """the target. epsilon: the noise (Ho et al. 2020); v: alpha eps - sigma x0 (Salimans and Ho 2022); x0: the sample; edm: the
    preconditioned target of Karras et al. 2022; flow: eps - x0, rectified flow (Liu et al. 2022); regression: the conditional mean
    of samples, without noise"""
    schedule: Literal["linear", "scaled_linear", "cosine"] = "scaled_linear"
    """noise schedule of epsilon, v and x0; scaled_linear: linear in the root of beta (Stable Diffusion)"""
    levels: PositiveInt = 1000
    """of the schedule"""
    first: PositiveFloat = 0.00085
    last: PositiveFloat = 0.012
    """first and last beta of the schedule"""
    zero_snr: bool = False
    """zero terminal SNR: the last level is pure noise (Lin et al. 2024)"""
    min_snr: PositiveFloat | None = None
    """gamma of min-SNR weighting, for epsilon, v and x0 (Hang et al. 2023); null: all levels have the same weight"""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """distribution of the training times of flow"""
    mean: float = 0.0
    """of logit-normal times; for edm of ln(sigma), usually -1.2"""
    deviation: PositiveFloat = 1.0
    """standard deviation of the same; for edm usually 1.2"""
    sigma_data: PositiveFloat = 0.5
    """for edm: the standard deviation of samples"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.min_snr is not None and self.prediction_type in ("edm", "flow"):
            raise ValueError(f"min_snr is for epsilon, v and x0; prediction_type is {self.prediction_type}")
        if self.times == "logit_normal" and self.prediction_type not in ("flow", "regression"):  # a regression has no times
            raise ValueError(f"times logit_normal is for flow; prediction_type is {self.prediction_type}")
        return self


class SamplerConfig(Settings):
    """A sampler of diffusion models."""

    renamed = {"together": "batch_guidance"}

    method: Literal["ddim", "ddpm", "dpm++", "euler", "heun"] = "dpm++"
    """ddim: Song et al. 2020; ddpm: Ho et al. 2020; dpm++: second order, Lu et al. 2022; euler and heun: Karras et al. 2022. The
    last three are also for edm and flow"""
    steps: PositiveInt = 25
    spacing: Literal["leading", "trailing", "linspace", "karras"] = "trailing"
    """levels of the schedule to visit; karras: powers of sigma, also between levels (the only one of edm). Times of flow: trailing:
    1 to 1/steps, then shifted, as in pipelines of Flux.1; linspace: the default of diffusers' flow schedulers, 1 to 1/levels, of
    which the last is shifted twice, and 1 - 1/levels to 0 with dpm++"""
    offset: NonNegativeInt = 0
    """for leading: added to each level; Stable Diffusion: 1"""
    clean: bool = True
    """for ddim and dpm++: the last step ends without noise; false: with the noise of the lowest level of the schedule (Stable
    Diffusion with ddim)"""
    eta: NonNegativeFloat = 0.0
    """for ddim: added noise, 1 for as much as ddpm"""
    guidance: NonNegativeFloat = 1.0
    """strength of classifier-free guidance (Ho and Salimans 2022)"""
    rescale: Annotated[float, Field(ge=0, le=1)] = 0.0
    """fraction of the guided prediction that is rescaled to the standard deviation of the conditional one (Lin et al. 2024)"""
    batch_guidance: bool = True
    """compute conditional and unconditional predictions in one batch of twice the size; false: separately, in less memory"""
    clip: PositiveFloat | None = None
    """largest absolute value of predicted x0"""
    low: PositiveFloat = 0.002
    high: PositiveFloat = 80.0
    rho: PositiveFloat = 7.0
    """sigmas of edm and karras (Karras et al. 2022, eq. 5); with a schedule sigma / alpha, within its range: the defaults cover all
    of Stable Diffusion's"""
    churn: NonNegativeFloat = 0.0
    """for heun with edm: S_churn; applied between churn_low (S_tmin) and churn_high (S_tmax), noise times churn_noise (S_noise)"""
    churn_low: NonNegativeFloat = 0.0
    churn_high: PositiveFloat = 1e9
    churn_noise: PositiveFloat = 1.0
    shift: PositiveFloat = 1.0
    """for flow: shift of times towards more noise (Esser et al. 2024, eq. 23)"""


def by_channel(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return an index or settings with a transform and a floor of each channel. Earlier versions had one ``floor``, or neither."""
    floor, count = about.get("floor"), len(about["mean"])
    default = {"transforms": ("none" if floor is None else "log",) * count, "floors": (floor or 0.0,) * count}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in about.items() if name != "floor"}
    return given | {name: given.get(name) or value for name, value in default.items()}


class ChannelsConfig(Settings):
    """Names and standardization of channels."""

    names: tuple[str, ...]
    """of the channels"""
    units: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[PositiveFloat, ...]
    """inputs of a network are (transform(field) - mean) / deviation"""
    transforms: tuple[Literal["none", "log", "sqrt"], ...] = ()
    """of each channel: none, the logarithm of field + floor, or the square root; empty: none"""
    floors: tuple[NonNegativeFloat, ...] = ()
    """of each channel, for the logarithm"""

    @model_validator(mode="before")
    @classmethod
    def _by_channel(cls, values: Any) -> Any:
        return by_channel(values) if isinstance(values, dict) and isinstance(values.get("mean"), list | tuple) else values

    @classmethod
    def from_index(cls, index: Mapping[str, Any]) -> Self:
        """Return the settings that the index of a data set describes."""
        renamed = {"channels": "names", "channel_units": "units", "units": "parameter_units"}
        values = {renamed.get(name, name): value for name, value in by_channel(index).items()}
        values |= {name: ChannelsConfig.from_index(values[name]) for name in ("coarse", "fine") if values.get(name)}
        return cls.model_validate({name: values[name] for name in cls.model_fields if name in values}, strict=False)


class FieldsConfig(ChannelsConfig):
    """Physical units of samples, and their conditioning fields."""

    coarse: ChannelsConfig | None = None
    """of the coarse field; null: those of samples"""
    fine: ChannelsConfig | None = None
    """of inputs on the grid of samples that differ between samples, such as sea surface temperature; null: there are none"""
    factor: NonNegativeInt = 0
    """resolution of a sample relative to its coarse field; 0: there is none"""
    static: tuple[str, ...] = ()
    """fields on the grid of samples that are the same for all, such as orography; a buffer of the model"""
    weighted: bool = False
    """whether cells have weights in loss and scores, by area, or 0 where they are masked; a buffer of the model"""
    interval: tuple[PositiveFloat, str] | None = None
    """for forecasts: the time between the state of ``Condition.fine`` and the sample, and its unit; null: none"""
    box: tuple[PositiveFloat, ...] = ()
    """length of each dim"""
    periodic: tuple[bool, ...] = ()
    """whether each dim is periodic"""
    box_units: str = ""
    parameters: tuple[str, ...] = ()
    """conditioning physical parameters, standardized from [low, high] to [-1, 1]"""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    parameter_units: tuple[str, ...] = ()


class LatentsConfig(Settings):
    """Latents in place of images, and conditioning texts."""

    scale: PositiveFloat = 0.18215
    shift: float = 0.0
    """inputs of a network are (latent - shift) * scale"""
    vae: str = ""
    """autoencoder of the latents"""
    tokens: tuple[PositiveInt, PositiveInt] | None = None
    """number of tokens of a text, and their channels"""
    pooled: PositiveInt | None = None
    """channels of the pooled text embedding"""
    encoders: tuple[str, ...] = ()
    """text encoders"""


class DiffusionLoRAConfig(LoRAConfig):
    """LoRA adapters of a denoising network; defaults of the training scripts of diffusers."""

    rank: PositiveInt = 4
    alpha: PositiveFloat = 4.0
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )  # fmt: skip
    """names of linear layers; by default those of the list that the network has"""


class DiffusionConfig(Settings):
    """One of four networks, its objective and its sampler."""

    unet: UNetConfig | None = UNetConfig()
    dit: DiTConfig | None = None
    flux: FluxConfig | None = None
    sd3: SD3Config | None = None
    objective: ObjectiveConfig = ObjectiveConfig()
    sampler: SamplerConfig = SamplerConfig()
    """default sampler"""
    unconditional: Rate = 0.0
    """fraction of training samples whose condition is dropped, for classifier-free guidance: zero fields and parameters, no class,
    and the empty text"""
    mean: dict[str, Any] | None = None
    """settings of the model of the regression mean, whose residual is generated (Mardani et al. 2025); from ``start.mean``"""
    residual: PositiveFloat | tuple[PositiveFloat, ...] | Literal["measured"] | None = None
    """standard deviation of the difference of samples from the regression mean, without one from the coarse field or the state
    before, of each channel or all: the network generates this difference, in this unit. The larger it is, the more noise a channel
    gets. measured: by samples of the training data; null: the network generates samples"""
    channel_weights: tuple[PositiveFloat, ...] = ()
    """of the squared error of each channel in the loss; empty: equal"""
    size: tuple[PositiveInt, ...] = ()
    """channels and sides of a training sample; empty: from the data"""
    fields: FieldsConfig | None = None
    """null: from the data, or no physical units"""
    latents: LatentsConfig | None = None
    """null: from the data, or no latents"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        named = [name for name in ("unet", "dit", "flux", "sd3") if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"expected one of unet, dit, flux and sd3, found {', '.join(named) or 'none'}; set the others to null")
        if self.mean is not None and self.residual is None:
            raise ValueError("mean needs residual, the deviation of samples from it; set it to measured")
        return self

    @property
    def network(self) -> Any:
        return self.unet or self.dit or self.flux or self.sd3
