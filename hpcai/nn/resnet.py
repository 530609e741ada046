"""The body of a residual network: its stem and four stages of blocks (He et al. 2016; ResNeXt: Xie et al. 2017).

Names are those of torchvision. The stride of a bottleneck is in its 3 x 3 convolution (v1.5).
B batch, C channels, O output channels, H W the image
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.nn.batchnorm import BatchNorm
from hpcai.nn.conv import Conv2d

Norm = Callable[[int, bool], nn.Module]
"""makes a norm from its channels, and whether ReLU follows it; ``forward(x, residual=None)``"""


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a skip connection.   [B, C, H, W] -> [B, O, H/stride, W/stride]"""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, inner: int, stride: int, groups: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = Conv2d(inputs, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn1 = norm(inner, True)
        self.conv2 = Conv2d(inner, outputs, 3, 1, 1, groups=groups, bias=False)
        self.bn2 = norm(outputs, True)
        self.downsample = _projection(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else convolve(self.downsample[0], self.downsample[1], x)
        return convolve(self.conv2, self.bn2, convolve(self.conv1, self.bn1, x), skip)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and a skip connection.   [B, C, H, W] -> [B, O, H/stride, W/stride]"""

    expansion = 4

    def __init__(self, inputs: int, outputs: int, inner: int, stride: int, groups: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = norm(inner, True)
        self.conv2 = Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = norm(inner, True)
        self.conv3 = Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = norm(outputs, True)
        self.downsample = _projection(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else convolve(self.downsample[0], self.downsample[1], x)
        y = convolve(self.conv2, self.bn2, convolve(self.conv1, self.bn1, x))
        return convolve(self.conv3, self.bn3, y, skip)


def convolve(conv: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the norm of the convolution. One whose statistics are frozen is part of the weights."""
    return norm.after(conv, x, residual) if isinstance(norm, FrozenBatchNorm) else norm(conv(x), residual=residual)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with frozen statistics and weights, then ``+ residual``, then a rectifier, in float32 or wider.

    ``after(conv, x)`` is that of a convolution, whose weights it scales: it costs no pass over the maps.   [B, C, H, W]
    """

    def __init__(self, channels: int, relu: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.relu, self.eps = relu, eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return the factor of each channel and what is added to it.   [C] twice"""
        weight, bias, mean, variance = (x if x.dtype == torch.float64 else x.float() for x in self.buffers())
        scale = weight * (variance + self.eps).rsqrt()
        return scale, bias - mean * scale

    def after(self, conv: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B, C, H, W] -> [B, O, H', W']"""
        scale, shift = self.affine()
        y = conv(x, conv.weight * scale[:, None, None, None], shift)
        return self._activate(y, residual)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        scale, shift = (values[:, None, None] for values in self.affine())
        return self._activate((x * scale).add_(shift).to(x.dtype), residual)

    def _activate(self, y: Tensor, residual: Tensor | None) -> Tensor:
        y = y if residual is None else y.add_(residual)
        return y.relu_() if self.relu else y


def _projection(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs, False))


class ResNetBody(nn.Module):
    """Features of the four stages: 1/4, 1/8, 1/16 and 1/32 of the size of the image.

    Args:
        layers: Blocks of each stage.
        base_width: Width of the first stage; the widths of the others, and of the stem, follow from it (64 in the paper).
        width_per_group: Channels of a group of the 3 x 3 convolutions, for a stage of 64; 4 with 32 groups in ResNeXt-50.
        norm: Makes the norms, by default batch norms.
    """

    def __init__(
        self, layers: Sequence[int] = (3, 4, 6, 3), base_width: int = 64, *, block: type[BasicBlock | Bottleneck] = Bottleneck,
        groups: int = 1, width_per_group: int = 64, channels: int = 3, norm: Norm = BatchNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv1 = Conv2d(channels, base_width, 7, 2, 3, bias=False)
        self.bn1 = norm(base_width, True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs, self.widths = base_width, [base_width * block.expansion << stage for stage in range(len(layers))]
        for stage, (count, outputs) in enumerate(zip(layers, self.widths)):
            inner = int((base_width << stage) * width_per_group / 64) * groups
            strides = [1 if stage == 0 else 2, *[1] * (count - 1)]
            blocks = [block(inputs if i == 0 else outputs, outputs, inner, s, groups, norm) for i, s in enumerate(strides)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            inputs = outputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> list[Tensor]:
        """Return the output of each stage.   [B, C, H, W]"""
        x, result = self.maxpool(convolve(self.conv1, self.bn1, x)), []
        for stage in range(1, len(self.widths) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
            result.append(x)
        return result
