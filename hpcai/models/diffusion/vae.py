"""A variational autoencoder of images (Kingma and Welling 2014, Rombach et al. 2022).

Parameters have the names of diffusers' AutoencoderKL. B images, L channels of a latent, h x w its pixels
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.models.diffusion.blocks import FORMATS, Downsample, ResBlock, SelfAttention, Space, Upsample, channels_last, make_conv
from hpcai.models.diffusion.config import VAEConfig
from hpcai.nn.groupnorm import GroupNorm

EPS = 1e-6  # of all group norms
_MAPS = Space(2)


class Latents(NamedTuple):
    """The distribution of the latents of images."""

    moments: Tensor
    """[B, 2L, h, w] mean and log variance, the output of the encoder"""

    @property
    def mean(self) -> Tensor:
        """[B, L, h, w]"""
        return self.moments.chunk(2, 1)[0]

    @property
    def logvar(self) -> Tensor:
        """[B, L, h, w], from -30 to 20"""
        return self.moments.chunk(2, 1)[1].clamp(-30.0, 20.0)

    def sample(self, noise: Tensor) -> Tensor:
        """Sample latents, from standard normal ``noise`` [B, L, h, w]."""
        return self.mean + (0.5 * self.logvar).exp() * noise


class Level(nn.Module):
    """[B, C, H, W] -> [B, C', H/2, W/2] on the way down, [B, C', 2H, 2W] on the way up, [B, C', H, W] on the last level"""

    def __init__(self, cfg: VAEConfig, inputs: int, outputs: int, blocks: int, down: bool = False, up: bool = False) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * (blocks - 1)
        self.resnets = nn.ModuleList(ResBlock(_MAPS, n, outputs, None, cfg.groups, EPS) for n in widths)
        self.downsamplers = nn.ModuleList([Downsample(_MAPS, outputs, centred=False)]) if down else None
        self.upsamplers = nn.ModuleList([Upsample(_MAPS, outputs)]) if up else None

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.resnets, *(self.downsamplers or ()), *(self.upsamplers or ())):
            x = part(x)
        return x


class Middle(nn.Module):
    """[B, C, H, W] -> the same"""

    def __init__(self, cfg: VAEConfig, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(_MAPS, channels, channels, None, cfg.groups, EPS) for _ in range(2))
        self.attentions = nn.ModuleList([SelfAttention(channels, 1, cfg.groups, EPS)] if cfg.attention else [])

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.resnets[0], *self.attentions, self.resnets[1]):
            x = part(x)
        return x


class Encoder(nn.Module):
    """Encode images to mean and log variance of latents.   [B, 3, H, W] -> [B, 2L, h, w]"""

    def __init__(self, cfg: VAEConfig) -> None:
        super().__init__()
        widths, count = (cfg.channels[0], *cfg.channels), len(cfg.channels)
        self.conv_in = make_conv(_MAPS, cfg.inputs, widths[0])
        self.down_blocks = nn.ModuleList(Level(cfg, widths[n], widths[n + 1], cfg.blocks, down=n < count - 1) for n in range(count))
        self.mid_block = Middle(cfg, widths[-1])
        self.conv_norm_out = GroupNorm(cfg.groups, widths[-1], "silu", eps=EPS)
        self.conv_out = make_conv(_MAPS, widths[-1], 2 * cfg.latents)

    def forward(self, x: Tensor) -> Tensor:
        return _run_layers(self, (*self.down_blocks, self.mid_block), x)


class Decoder(nn.Module):
    """Decode latents to images.   [B, L, h, w] -> [B, 3, H, W]"""

    def __init__(self, cfg: VAEConfig) -> None:
        super().__init__()
        widths, count = (cfg.channels[-1], *reversed(cfg.channels)), len(cfg.channels)
        self.conv_in = make_conv(_MAPS, cfg.latents, widths[0])
        self.mid_block = Middle(cfg, widths[0])
        self.up_blocks = nn.ModuleList(Level(cfg, widths[n], widths[n + 1], cfg.blocks + 1, up=n < count - 1) for n in range(count))
        self.conv_norm_out = GroupNorm(cfg.groups, widths[-1], "silu", eps=EPS)
        self.conv_out = make_conv(_MAPS, widths[-1], cfg.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return _run_layers(self, (self.mid_block, *self.up_blocks), x)


def _run_layers(coder: Encoder | Decoder, parts: Sequence[nn.Module], x: Tensor) -> Tensor:
    x = coder.conv_in(channels_last(x))
    for part in parts:
        x = part(x)
    return coder.conv_out(coder.conv_norm_out(x))


class VAE(nn.Module):
    """images [B, 3, H, W] in [-1, 1] -> images, reconstructed from the means of their latents, in channels-last memory

    Inputs of a diffusion model are (latent - ``cfg.shift``) * ``cfg.scale``, of about unit variance. Raises DataError for other
    channels, and for images too small for the encoder.
    """

    def __init__(self, cfg: VAEConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or VAEConfig()
        self.encoder, self.decoder = Encoder(cfg), Decoder(cfg)
        self.quant_conv = make_conv(_MAPS, 2 * cfg.latents, 2 * cfg.latents, 1) if cfg.quantised else None
        self.post_quant_conv = make_conv(_MAPS, cfg.latents, cfg.latents, 1) if cfg.quantised else None
        self.to(memory_format=FORMATS[2])  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.encode(images).mean)

    def encode(self, images: Tensor) -> Latents:
        """Encode images [B, 3, H, W] to the distribution of their latents, unscaled."""
        least = 2 ** (len(self.cfg.channels) - 1)
        if images.ndim != 4 or images.shape[1] != self.cfg.inputs or min(images.shape[2:]) < least:
            expected = f"[B, {self.cfg.inputs}, H, W] with sides of at least {least}"
            raise DataError(f"images have shape {list(images.shape)}; expected {expected}")
        moments = self.encoder(images)
        return Latents(moments if self.quant_conv is None else self.quant_conv(moments))

    def decode(self, latents: Tensor) -> Tensor:
        """Decode unscaled latents.   [B, L, h, w] -> [B, 3, H, W]"""
        if latents.ndim != 4 or latents.shape[1] != self.cfg.latents:
            raise DataError(f"latents have shape {list(latents.shape)}; expected [B, {self.cfg.latents}, h, w]")
        return self.decoder(latents if self.post_quant_conv is None else self.post_quant_conv(channels_last(latents)))
