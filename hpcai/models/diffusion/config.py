"""Shapes of networks that take noise away, what they are trained to say, and how samples are drawn with them. No torch here."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import PositiveFloat, NonNegativeInt, PositiveInt, Rate, Settings, NonNegativeFloat

Recompute = Literal["none", "selective", "layers"]
Levels = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class UNetConfig(Settings):
    """A U-Net of residual blocks: Stable Diffusion 2's by default, 865,910,724 parameters (Rombach et al. 2022)."""

    inputs: PositiveInt = 4
    """channels of a noisy sample, without those of a field that it is conditioned on"""
    outputs: PositiveInt = 4
    dims: Literal[2, 3] = 2
    """of space: maps or volumes"""
    channels: Levels = (320, 640, 1280, 1280)
    """of each level, each half as large as the one before"""
    blocks: PositiveInt = 2
    """residual blocks of a level on the way down; one more on the way up"""
    attention: tuple[Literal["none", "self", "cross"], ...] = ("cross", "cross", "cross", "none")
    """after each block of a level. self: of all places to each other; cross: that, to tokens, and a feed-forward part"""
    middle: Literal["none", "self", "cross"] = "cross"
    heads: Levels = (5, 10, 20, 20)
    """of the attention of each level; of the middle: as on the lowest level"""
    tokens: PositiveInt | None = 1024
    """channels of tokens that it is conditioned on; null: none"""
    classes: PositiveInt | None = None
    parameters: NonNegativeInt = 0
    """physical parameters that it is conditioned on"""
    field: NonNegativeInt = 0
    """channels of a field that it is conditioned on, such as one of low resolution, beside those of the noisy sample"""
    patch: PositiveInt = 1
    """places along each dim that are one for the network, which then has their channels beside one another"""
    groups: PositiveInt = 32
    """of group norms"""
    attention_groups: PositiveInt | None = None
    """of group norms before attention; null: as many. MLPerf's Stable Diffusion: groups 16, and these 32"""
    eps: PositiveFloat = 1e-5
    """of group norms in residual blocks"""
    dropout: Rate = 0.0
    periodic: tuple[bool, ...] = ()
    """whether each dim of space comes back to its beginning: a simulation's box, longitude; empty: none does"""
    zero: bool = True
    """first weights of the last layer of each block are zero, as published ones were trained (a fresh one of diffusers has none)"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        levels = len(self.channels)
        for name in ("attention", "heads"):
            if len(getattr(self, name)) != levels:
                raise ValueError(f"{name} has {len(getattr(self, name))} values, channels {levels}; give one for each level")
        if self.periodic and len(self.periodic) != self.dims:
            raise ValueError(f"periodic has {len(self.periodic)} values for {self.dims} dims; give one for each, or none")
        kinds = (*self.attention, self.middle)
        if ("cross" in kinds) != (self.tokens is not None):
            raise ValueError("attention to tokens (cross) needs tokens, their channels, and tokens need attention to them")
        for channels, kind, heads in zip((*self.channels, self.channels[-1]), kinds, (*self.heads, self.heads[-1])):
            if channels % self.groups or (kind != "none" and channels % (self.attention_groups or self.groups)):
                raise ValueError(f"{channels} channels cannot make {self.groups} groups; give a divisor of all channels")
            if kind != "none" and channels % heads:
                raise ValueError(f"{channels} channels are not a multiple of {heads} heads; give other heads")
        return self


class DiTConfig(Settings):
    """A transformer over patches of a sample (Peebles and Xie 2023): DiT-XL/2 by default."""

    inputs: PositiveInt = 4
    outputs: PositiveInt = 8
    """twice the inputs where it also says a variance"""
    size: PositiveInt = 32
    """places along each dim of a sample"""
    patch: PositiveInt = 2
    layers: PositiveInt = 28
    heads: PositiveInt = 16
    head: PositiveInt = 72
    """channels of a head"""
    classes: PositiveInt = 1000
    dropout: Rate = 0.0
    """share of samples whose class is left out"""
    zero: bool = True
    """first weights of modulations and of the last layer are zero, as published"""
    recompute: Recompute = "none"
    """what is computed again for the backward pass instead of kept. selective: norms, rotations and activations; layers: all of
    each, which keeps its input alone"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.size % self.patch:
            raise ValueError(f"a sample of {self.size} places cannot be cut into patches of {self.patch}; give a divisor")
        if self.heads * self.head % 4:
            raise ValueError(f"{self.heads} heads of {self.head} channels: positions of two dims need a multiple of 4 channels")
        return self

    @property
    def width(self) -> int:
        """Channels of a token between layers."""
        return self.heads * self.head


class FluxConfig(Settings):
    """A transformer over tokens of a text and of an image together: Flux.1 schnell by default, 11,891,178,560 parameters."""

    inputs: PositiveInt = 64
    """channels of a token of the image: 2 x 2 places of a latent of 16"""
    double: NonNegativeInt = 19
    """layers in which text and image have weights of their own"""
    single: NonNegativeInt = 38
    """and in which they share them"""
    heads: PositiveInt = 24
    head: PositiveInt = 128
    """channels of a head"""
    tokens: PositiveInt = 4096
    """channels of a token of the text (T5)"""
    pooled: PositiveInt = 768
    """channels of the whole text (CLIP)"""
    guidance: bool = False
    """whether it is told how much guidance it stands for (dev)"""
    turned: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    """channels of a head that are rotated by which number of a token: its kind, row, column"""
    theta: PositiveFloat = 10_000.0
    zero: bool = True
    """first weights of modulations and of the last layer are zero"""
    recompute: Recompute = "none"
    """what is computed again for the backward pass instead of kept. selective: norms, rotations and activations; layers: all of
    each, which keeps its input alone"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.inputs % 4:
            raise ValueError(f"a token of {self.inputs} channels cannot hold 2 x 2 places; give a multiple of 4")
        if sum(self.turned) != self.head or any(n % 2 for n in self.turned):
            raise ValueError(f"turned {list(self.turned)} must be even and add up to a head's {self.head} channels")
        return self

    @property
    def width(self) -> int:
        """Channels of a token between layers."""
        return self.heads * self.head


class VAEConfig(Settings):
    """An autoencoder of images (Kingma and Welling 2014): Stable Diffusion's by default, 83,653,863 parameters."""

    inputs: PositiveInt = 3
    outputs: PositiveInt = 3
    latents: PositiveInt = 4
    """channels of a latent"""
    channels: Levels = (128, 256, 512, 512)
    blocks: PositiveInt = 2
    groups: PositiveInt = 32
    quantised: bool = True
    """whether a convolution of 1 x 1 stands on both sides of a latent (not in Flux.1's)"""
    attention: bool = True
    """in the middle"""
    scale: PositiveFloat = 0.18215
    shift: float = 0.0
    """what a diffusion model sees is (latent - shift) * scale"""


class ObjectiveConfig(Settings):
    """The target of a network, given a noisy sample x_t = alpha x0 + sigma eps."""

    renamed = {"says": "prediction_type"}

    prediction_type: Literal["epsilon", "v", "x0", "edm", "flow"] = "v"
    """epsilon: the noise (Ho et al. 2020); v: alpha eps - sigma x0 (Salimans and Ho 2022); x0: the sample; edm: what Karras et al.
    2022 leave for it to say; flow: eps - x0, on a straight way (Liu et al. 2022)"""
    schedule: Literal["linear", "scaled_linear", "cosine"] = "scaled_linear"
    """of epsilon, v and x0: how the noise's variance grows; scaled_linear: linear in its root (Stable Diffusion)"""
    levels: PositiveInt = 1000
    """of that schedule"""
    first: PositiveFloat = 0.00085
    last: PositiveFloat = 0.012
    """its first and last step"""
    zero_snr: bool = False
    """whether nothing of the sample is left at its last level (Lin et al. 2024)"""
    min_snr: PositiveFloat | None = None
    """of epsilon, v and x0: the signal-to-noise ratio above which levels count no more (Hang et al. 2023); null: all count alike"""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """of flow: which times are trained"""
    mean: float = 0.0
    """of logit-normal times; of edm's logarithm of sigma, usually -1.2"""
    deviation: PositiveFloat = 1.0
    """the same; of edm usually 1.2"""
    sigma_data: PositiveFloat = 0.5
    """of edm: the standard deviation of samples"""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.min_snr is not None and self.prediction_type in ("edm", "flow"):
            raise ValueError(f"min_snr is for epsilon, v and x0; prediction_type is {self.prediction_type}")
        if self.times == "logit_normal" and self.prediction_type != "flow":
            raise ValueError(f"times logit_normal is for flow; prediction_type is {self.prediction_type}")
        return self


class SamplerConfig(Settings):
    """The sampler and its steps."""

    renamed = {"together": "batch_guidance"}

    method: Literal["ddim", "ddpm", "dpm++", "euler", "heun"] = "dpm++"
    """ddim: Song et al. 2020; ddpm: Ho et al. 2020; dpm++: second order, Lu et al. 2022; euler and heun: Karras et al. 2022, and
    along flows"""
    steps: PositiveInt = 25
    spacing: Literal["leading", "trailing", "linspace", "karras"] = "trailing"
    """which of a schedule's levels are visited; karras: powers of sigma, also between them (edm's only way). Of flow's times:
    trailing: 1 to 1/steps, then shifted, which is what users of Flux.1 get; linspace: the default list of diffusers' schedulers for
    flows, 1 to 1/levels, of which the last is shifted twice"""
    offset: NonNegativeInt = 0
    """of leading: added to each level; Stable Diffusion: 1"""
    clean: bool = True
    """of ddim and dpm++: whether the last step leaves no noise at all, or as much as the schedule's lowest level has. Stable
    Diffusion with ddim: false"""
    eta: NonNegativeFloat = 0.0
    """of ddim: noise that is added again, 1 as much as by ddpm"""
    guidance: NonNegativeFloat = 1.0
    """what a condition changes counts so many times (Ho and Salimans 2022)"""
    rescale: Annotated[float, Field(ge=0, le=1)] = 0.0
    """share of the guided prediction that has the deviation of the one with the condition (Lin et al. 2024)"""
    batch_guidance: bool = True
    """whether samples with and without the condition are one batch of twice the size; false: one after the other, in less memory"""
    clip: PositiveFloat | None = None
    """the greatest absolute value of x0 on the way"""
    low: PositiveFloat = 0.002
    high: PositiveFloat = 80.0
    rho: PositiveFloat = 7.0
    """of edm and karras: the sigmas that are visited (Karras et al. 2022, eq. 5); of a schedule, sigma / alpha, and no others than
    its own: the defaults are the whole of Stable Diffusion's"""
    churn: NonNegativeFloat = 0.0
    """of heun with edm: S_churn; between churn_low and churn_high noise is added, churn_noise times as much"""
    churn_low: NonNegativeFloat = 0.0
    churn_high: PositiveFloat = 1e9
    churn_noise: PositiveFloat = 1.0
    shift: PositiveFloat = 1.0
    """of flow: how much more steps are made where there is much noise (Esser et al. 2024, eq. 23)"""


class FieldsConfig(Settings):
    """What samples are in physical units, and the coarse fields that they are conditioned on."""

    names: tuple[str, ...]
    """of the channels"""
    units: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[PositiveFloat, ...]
    """a network sees (field - mean) / deviation"""
    floor: PositiveFloat | None = None
    """where it sees logarithms: what is added to a field before"""
    factor: NonNegativeInt = 0
    """places of a sample along one of the coarse field; 0: there is none"""
    box: tuple[PositiveFloat, ...] = ()
    """how long each dim is"""
    periodic: tuple[bool, ...] = ()
    """whether it comes back to its beginning"""
    box_units: str = ""
    parameters: tuple[str, ...] = ()
    """physical parameters that samples are conditioned on, each in [-1, 1] of its range"""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    parameter_units: tuple[str, ...] = ()


class LatentsConfig(Settings):
    """What latents are that a network sees in place of images, and the texts that it is conditioned on."""

    scale: PositiveFloat = 0.18215
    shift: float = 0.0
    """it sees (latent - shift) * scale"""
    vae: str = ""
    """which autoencoder made them"""
    tokens: tuple[PositiveInt, PositiveInt] | None = None
    """how many tokens a text has, and their channels"""
    pooled: PositiveInt | None = None
    """channels of a whole text"""
    encoders: tuple[str, ...] = ()
    """which networks made texts"""


class DiffusionConfig(Settings):
    """A network, one of three kinds, and what it says."""

    unet: UNetConfig | None = UNetConfig()
    dit: DiTConfig | None = None
    flux: FluxConfig | None = None
    objective: ObjectiveConfig = ObjectiveConfig()
    sampler: SamplerConfig = SamplerConfig()
    """how samples are drawn where nothing else is said"""
    unconditional: Rate = 0.0
    """share of training samples whose condition is left out, for guidance: zeros in place of fields and parameters, no class, and
    the empty text"""
    residual: PositiveFloat | None = None
    """deviation of samples from the coarse field that they are conditioned on: the network then makes this difference, in units of
    it (Mardani et al. 2025); null: it makes samples"""
    size: tuple[PositiveInt, ...] = ()
    """channels and places of a sample that it was trained on; empty: the data say it"""
    fields: FieldsConfig | None = None
    """null: the data say it, or samples have no physical units"""
    latents: LatentsConfig | None = None
    """null: the data say it, or samples are no latents"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        named = [name for name in ("unet", "dit", "flux") if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"expected one of unet, dit and flux, found {', '.join(named) or 'none'}; set the others to null")
        return self

    @property
    def network(self) -> Any:
        """The settings of the network."""
        return self.unet or self.dit or self.flux
