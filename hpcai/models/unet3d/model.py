"""3D U-Net: segmentation of volumes (Cicek et al. 2016, arXiv:1606.06650, in the form of Isensee et al. 2019, nnU-Net).

The network is that of MLPerf Training's KiTS19 benchmark; parameter names are those of its reference. B batch, C channels, O
output channels, D H W the volume.
"""

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcai.arrays import to_array
from hpcai.models.unet3d.config import UNet3DConfig
from hpcai.models.unet3d.volume import check_likeness, normalise, resample, resampled_shape, validate
from hpcai.models.unet3d.windows import SlidingWindow
from hpcai.nn import Conv3d, ConvTranspose3d, DivisibleShape, InstanceNorm
from hpcai.nn.conv import channels_last
from hpcai.nn.inference import inference_mode
from hpcai.nn.weights import PretrainedMixin


class ConvNormReLU(nn.Sequential):
    """Convolution, instance norm, ReLU.   [B, C, D, H, W] -> [B, O, D/stride, H/stride, W/stride]"""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(Conv3d(inputs, outputs, 3, stride, padding=1, bias=False), InstanceNorm(outputs, "relu"))


class DoubleConv(nn.Module):
    """Two ``ConvNormReLU``, the first with ``stride``.   [B, C, D, H, W] -> [B, O, D/stride, H/stride, W/stride]"""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = ConvNormReLU(inputs, outputs, stride)
        self.conv2 = ConvNormReLU(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x))


class UpBlock(nn.Module):
    """Transposed convolution, concatenation with the skip connection, two ``ConvNormReLU``.

    [B, C, D, H, W] and [B, O, 2D, 2H, 2W] -> [B, O, 2D, 2H, 2W]
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.upsample_conv = nn.Sequential(ConvTranspose3d(inputs, outputs, 2, 2))
        self.conv1 = ConvNormReLU(2 * outputs, outputs)
        self.conv2 = ConvNormReLU(outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv2(self.conv1(torch.cat((self.upsample_conv(x), skip), 1)))


class UNet3D(PretrainedMixin):
    """Maps [B, C, D, H, W] normalised intensities to [B, classes, D, H, W] logits.

    D, H and W are any multiples of ``cfg.stride``; raises ValueError for others.
    """

    package = __package__
    to_layout = staticmethod(channels_last)

    def __init__(self, cfg: UNet3DConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or UNet3DConfig()
        widths = cfg.filters
        self.input_block = DoubleConv(cfg.channels, widths[0])
        self.downsample = nn.ModuleList(DoubleConv(i, o, 2) for i, o in pairwise(widths))
        self.bottleneck = DoubleConv(widths[-1], widths[-1], 2)
        self.upsample = nn.ModuleList(UpBlock(i, o) for i, o in pairwise((widths[-1], *reversed(widths))))
        self.output: Any = nn.Sequential(OrderedDict(conv=Conv3d(widths[0], len(cfg.classes), 1)))  # [B, classes, D, H, W]
        self.spatial_sum: nn.Module = nn.Identity()  # seam: all-reduce of sums over a sharded volume
        self.check_divisible: nn.Module = DivisibleShape(cfg.stride, "voxels")
        self.sliding_window = SlidingWindow(cfg.window, cfg.overlap)
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        # oneDNN and, in bf16, cuDNN reorder contiguous volumes before each convolution; norms read channels contiguously.
        x = self.input_block(self.to_layout(self.check_divisible(x)))
        skips = [x]
        for down in self.downsample:
            skips.append(x := down(x))
        x = self.bottleneck(x)
        for up, skip in zip(self.upsample, reversed(skips)):
            x = up(x, skip)
        return self.output(x)

    def segment(self, volume: Any, spacing_mm: Any) -> dict[str, Any]:
        """Return the masks {class: bool [D, H, W]} of a CT volume.

        ``volume`` [D, H, W] is in Hounsfield units, D along the body; ``spacing_mm`` are its voxel sizes along D, H, W. The volume
        is resampled to ``cfg.spacing_mm``, segmented in overlapping windows, and the logits are resampled back before the argmax.
        Raises DataError for a wrong shape, values that are not finite, and spacings outside the range of scanners in mm. Logs a
        warning for values that do not look like HU, and dims that seem to be in another order.
        """
        image = to_array(volume, "volume")
        validate(image, None, spacing_mm)
        check_likeness(image, spacing_mm)
        shape = resampled_shape(image.shape, spacing_mm, self.cfg.spacing_mm)
        weight, values = self.output.conv.weight, torch.from_numpy(normalise(resample(image, shape, "linear")))[None, None]
        with inference_mode(self, weight) as dtype:
            logits, _ = self.sliding_window(self, values.to(weight.device, dtype), crop=False)
        best, mask = None, np.zeros(image.shape, np.uint8)
        for k in range(len(self.cfg.classes)):  # one class at a time: the original grid may be large
            logit = resample(logits[0, k].float().cpu().numpy(), image.shape, "linear")
            mask = mask if best is None else np.where(logit > best, np.uint8(k), mask)
            best = logit if best is None else np.maximum(logit, best)
        return {name: mask == k for k, name in enumerate(self.cfg.classes)}
