"""DeepCAM: segmentation of tropical cyclones and atmospheric rivers in weather maps (Kurth et al., SC18, arXiv:1810.01993).

The network is that of MLPerf HPC: an Xception encoder (Chollet 2017, as in Chen et al. 2018, DeepLabv3+), atrous pooling and a
decoder of transposed convolutions; parameter names are those of its reference. B batch, V variables, C channels, O output
channels, H W the map.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError
from hpcai.models.deepcam.config import STRIDE, DeepCamConfig
from hpcai.models.deepcam.fields import pad_fields, stack_fields
from hpcai.nn import BatchNorm, Conv2d, ConvTranspose2d, DivisibleShape
from hpcai.nn.conv import channels_last
from hpcai.nn.inference import inference_mode
from hpcai.nn.weights import PretrainedMixin

FusedReLU = nn.Identity  # in place of a ReLU of the reference, fused into Norm, so that keys keep their numbers


def _init_kaiming(module: nn.Module) -> None:
    """Initialise convolutions after a module's construction, as the reference does: the same seed gives the same weights."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)


class Norm(nn.Module):
    """Batch normalisation, optional addition of a residual, ReLU.   [B, C, H, W] -> the same"""

    def __init__(self, channels: int, relu: bool = True) -> None:
        super().__init__()
        self.bn = BatchNorm(channels, relu)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.bn(x, residual)


class SeparableConv(nn.Module):
    """Depthwise, then pointwise convolution.   [B, C, H, W] -> [B, O, H/stride, W/stride]"""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = Conv2d(inputs, inputs, 3, stride, dilation, dilation, groups=inputs, bias=False)
        self.pointwise = Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.conv1(x))


class Block(nn.Module):
    """Three separable convolutions, the last with a stride, and a skip connection.   [B, C, H, W] -> [B, O, H/stride, W/stride]"""

    def __init__(self, inputs: int, outputs: int, stride: int, relu: bool, grow_first: bool = True) -> None:
        super().__init__()
        self.skip = Conv2d(inputs, outputs, 1, stride, bias=False)
        self.skipbn = Norm(outputs, relu)
        inner = outputs if grow_first else inputs
        self.rep = nn.Sequential(
            SeparableConv(inputs, inner), Norm(inner), FusedReLU(),
            SeparableConv(inner, outputs), Norm(outputs, relu=False),
            SeparableConv(outputs, outputs, stride),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.skipbn(self.skip(x), residual=self.rep(x))


class MiddleBlock(nn.Module):
    """Three separable convolutions with an identity skip connection.   [B, C, H, W] -> the same"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rep = nn.Sequential(
            SeparableConv(channels, channels), Norm(channels), FusedReLU(),
            SeparableConv(channels, channels), Norm(channels), FusedReLU(),
            SeparableConv(channels, channels), Norm(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        *inner, norm = self.rep
        y = x
        for layer in inner:
            y = layer(y)
        return norm(y, residual=x)


class Xception(nn.Module):
    """Maps [B, V, H, W] to features [B, 2048, H/16, W/16] and those of the first block [B, 128, H/4, W/4]."""

    def __init__(self, cfg: DeepCamConfig) -> None:
        super().__init__()

        def width(full: int) -> int:
            return full // cfg.divide

        self.conv1 = Conv2d(len(cfg.variables), width(32), 3, 2, 1, bias=False)
        self.bn1 = Norm(width(32))
        self.conv2 = Conv2d(width(32), width(64), 3, 1, 1, bias=False)
        self.bn2 = Norm(width(64))
        self.block1 = Block(width(64), width(128), 2, relu=cfg.skip == "after")
        self.block2 = Block(width(128), width(256), 2, relu=True)
        self.block3 = Block(width(256), width(728), 2, relu=True)
        for i in range(cfg.middle):
            self.add_module(f"block{4 + i}", MiddleBlock(width(728)))
        self.add_module(f"block{4 + cfg.middle}", Block(width(728), width(1024), 1, relu=False, grow_first=False))
        for i, (inputs, outputs) in enumerate(((1024, 1536), (1536, 1536), (1536, 2048)), 3):
            self.add_module(f"conv{i}", SeparableConv(width(inputs), width(outputs), dilation=2))
            self.add_module(f"bn{i}", Norm(width(outputs)))
        self.blocks = 4 + cfg.middle
        _init_kaiming(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bn1(self.conv1(x))
        low = self.block1(self.bn2(self.conv2(x)))
        x = low if self.block1.skipbn.bn.relu else low.relu()
        for i in range(2, self.blocks + 1):
            x = self.get_submodule(f"block{i}")(x)
        for i in (3, 4, 5):
            x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))
        return x, low


class AtrousConv(nn.Module):
    """Dilated convolution.   [B, C, H, W] -> [B, O, H, W]"""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        if rate == 1:
            self.atrous_convolution = Conv2d(inputs, outputs, 1, bias=False)
        else:
            self.atrous_convolution = Conv2d(inputs, outputs, 3, 1, rate, rate, bias=False)
        self.bn = Norm(outputs)
        _init_kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.atrous_convolution(x))


class Affine(nn.Module):
    """Scale and shift per channel.   [B, C, 1, 1] -> the same"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weights * x + self.bias


class GlobalPool(nn.Module):
    """Global average pooling with a projection.   [B, C, H, W] -> [B, O, 1, 1]"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.global_average_pool = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)), Conv2d(inputs, outputs, 1, bias=False), Affine(outputs), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.global_average_pool(x)


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: features at four scales and their global mean.   [B, C, H, W] -> [B, O, H, W]"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        for i, rate in enumerate((1, 6, 12, 18), 1):
            self.add_module(f"aspp{i}", AtrousConv(inputs, outputs, rate))
        self.global_avg_pool = GlobalPool(inputs, outputs)
        self.conv = Conv2d(5 * outputs, outputs, 1, bias=False)
        self.bn = Norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        scales = [self.get_submodule(f"aspp{i}")(x) for i in (1, 2, 3, 4)]
        mean = channels_last(self.global_avg_pool(x).expand(-1, -1, *x.shape[2:]))
        return self.bn(self.conv(torch.cat((*scales, mean), 1)))


def _upsample_conv(channels: int, outputs: int) -> ConvTranspose2d:
    return ConvTranspose2d(channels, outputs, 3, 2, 1, 1, bias=False)


class Decoder(nn.Module):
    """Maps [B, 256, H/16, W/16] and [B, 48, H/4, W/4] to [B, classes, H, W]."""

    def __init__(self, channels: int, low: int, classes: int) -> None:
        super().__init__()
        self.deconv1 = nn.Sequential(
            _upsample_conv(channels, channels), Norm(channels), FusedReLU(),
            _upsample_conv(channels, channels), Norm(channels), FusedReLU(),
        )  # fmt: skip
        self.conv1 = nn.Sequential(
            Conv2d(channels + low, channels, 3, padding=1, bias=False), Norm(channels), FusedReLU(),
            Conv2d(channels, channels, 3, padding=1, bias=False), Norm(channels), FusedReLU(),
            Conv2d(channels, channels, 1),
        )  # fmt: skip
        self.deconv2 = nn.Sequential(_upsample_conv(channels, channels), Norm(channels), FusedReLU())
        self.last_deconv = nn.Sequential(_upsample_conv(channels, classes))

    def forward(self, x: Tensor, low: Tensor) -> Tensor:
        x = torch.cat((self.deconv1(x), low), 1)
        return self.last_deconv(self.deconv2(self.conv1(x)))


class DeepCam(PretrainedMixin):
    """Maps [B, V, H, W] variables scaled to [0, 1] to [B, classes, H, W] logits. Weights and activations are channels-last.

    H and W are any multiples of 16; raises ValueError for others.
    """

    package = __package__
    class_weights: Tensor  # [K] of the loss
    low: Tensor  # [V] physical value that is scaled to 0
    scale: Tensor  # [V]

    def __init__(self, cfg: DeepCamConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or DeepCamConfig()
        self.xception_features = Xception(cfg)
        self.bottleneck = ASPP(2048 // cfg.divide, 256 // cfg.divide)
        self.conv2 = Conv2d(128 // cfg.divide, 48 // cfg.divide, 1, bias=False)
        self.bn2 = Norm(48 // cfg.divide)
        self.upsample = Decoder(256 // cfg.divide, 48 // cfg.divide, len(cfg.classes))
        self.spatial_sum: nn.Module = nn.Identity()  # seam: all-reduce of sums over a sharded map
        self.gather_map: nn.Module = nn.Identity()  # seam: all-gather of a sharded map
        self.check_divisible: nn.Module = DivisibleShape(STRIDE, "cells")
        # Not persistent, since they follow from the settings: the keys of a checkpoint are those of the benchmark.
        self.register_buffer("class_weights", torch.tensor(cfg.frequencies or [1.0] * len(cfg.classes)) ** -0.125, persistent=False)
        low, high = (torch.tensor(cfg.low or 0.0), torch.tensor(cfg.high or 1.0))
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("scale", 1.0 / (high - low), persistent=False)
        if cfg.init == "vendor":
            for layer in self.modules():
                if isinstance(layer, nn.Conv2d):
                    fan = layer.kernel_size[0] * layer.kernel_size[1] * layer.out_channels
                    nn.init.normal_(layer.weight, 0.0, (2.0 / fan) ** 0.5)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        features, low = self.xception_features(channels_last(self.check_divisible(x)))
        return self.upsample(self.bottleneck(features), self.bn2(self.conv2(low)))

    def scaled(self, fields: Tensor) -> Tensor:
        """Return the input of the network: each variable scaled to [0, 1] (``cfg.low``, ``cfg.high``).

        [B, H, W, V] in physical units -> [B, V, H, W], a permuted view of channels-last memory
        """
        return ((fields.to(self.scale.dtype) - self.low) * self.scale).permute(0, 3, 1, 2)

    def segment(self, fields: Mapping[str, Any], units: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the masks {class: bool [H, W] or [N, H, W]} of one map or several.

        ``fields`` contains the variables of ``cfg`` by name, [H, W] or [N, H, W] arrays of any size; ``units`` those that differ
        from ``cfg.units`` (xarray's own are read). Raises DataError for fields that are missing, empty, not finite, or in a wrong
        unit, and ConfigError if the model has no ranges of its variables.
        """
        if self.cfg.low is None:
            raise ConfigError("this model has no ranges of its variables; set cfg.low and cfg.high when it is constructed")
        maps = stack_fields(fields, self.cfg, units)
        weight, (height, width) = self.conv2.weight, maps.shape[1:3]
        masks = []
        with inference_mode(self, weight) as dtype:
            for field in pad_fields(maps):  # maps are large: no batch
                values = torch.from_numpy(field[None]).to(weight.device, dtype)
                masks.append(self(self.scaled(values)).argmax(1)[0, :height, :width].cpu().numpy())
        classes = np.stack(masks) if np.ndim(fields[self.cfg.variables[0]]) == 3 else masks[0]
        return {name: classes == k for k, name in enumerate(self.cfg.classes)}
