"""Convolutions of maps and volumes.   B batch, C channels, O output channels, D H W the volume."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch sends a 3 x 3 x 3 convolution of one float32 volume to oneDNN only when B*C*D*H is larger than this (2.11 to 2.13), and
# else unrolls it into a matrix product that takes 1.5 to 6 times as long (docs/benchmarks.md).
_UNROLLED_UP_TO = 20480


class Conv3d(nn.Conv3d):
    """``nn.Conv3d``, as fast for a single small volume on a CPU as for a batch, and right for a shallow one in bfloat16.

    The single volume goes through as two halves with a halo: two samples to torch, which then takes the oneDNN path. Values and
    gradients are those of ``nn.Conv3d``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, D, H, W] -> [B, O, D', H', W']"""
        if self._would_be_unrolled(x):
            return self._halves(x)
        if self._would_lose_gradients(x):
            with torch.autocast("cpu", enabled=False):
                bias = None if self.bias is None else self.bias.float()
                return self._conv_forward(x.float(), self.weight.float(), bias).bfloat16()
        return super().forward(x)

    def _would_lose_gradients(self, x: Tensor) -> bool:
        """In bfloat16 on a CPU, where a volume is less deep than the kernel, oneDNN's gradient of the weights holds memory that
        nobody wrote (torch 2.13: depth 2 with a kernel of 3, 3 and 4 with one of 5). So small a volume costs little in float32."""
        narrow = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        return x.device.type == "cpu" and x.shape[2] < self.kernel_size[0] and (narrow or self.weight.dtype == torch.bfloat16)

    def _would_be_unrolled(self, x: Tensor) -> bool:
        return (
            x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and x.shape[0] == 1
            and x.shape[1:4].numel() <= _UNROLLED_UP_TO
            and x.shape[2] % 2 == 0
            and x.shape[2] >= 4
            and self.kernel_size == (3, 3, 3)
            and self.stride == self.dilation == (1, 1, 1)
            and self.padding == (1, 1, 1)
            and self.padding_mode == "zeros"
            and self.groups == 1
            and not torch.is_autocast_enabled("cpu")
        )

    def _halves(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        edge = torch.zeros_like(x[:, :, :1])
        upper = torch.cat((edge, x[:, :, : half + 1]), 2)
        lower = torch.cat((x[:, :, half - 1 :], edge), 2)
        both = torch.cat((upper, lower)).contiguous(memory_format=torch.channels_last_3d)  # [2, C, D/2 + 2, H, W]
        y = nn.functional.conv3d(both, self.weight, self.bias, padding=(0, 1, 1))  # [2, O, D/2, H, W]
        # In channels-last memory two halves of a volume are the volume.
        y = y.permute(0, 2, 3, 4, 1)
        return y.reshape(1, 2 * half, *y.shape[2:]).permute(0, 4, 1, 2, 3)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d``, whose 1 x 1 form is on a CPU the matrix product that it is in channels-last memory.

    torch unrolls it where there is one thread, and oneDNN's gradient of strided weights ends the process for some widths (torch
    2.13: 8 channels to 16 in two maps of 48 x 72). Values and gradients are those of ``nn.Conv2d``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, O, H', W']"""
        if not self._is_product(x):
            return super().forward(x)
        down, across = self.stride
        return F.linear(x[:, :, ::down, ::across].permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)

    def _is_product(self, x: Tensor) -> bool:
        return (
            x.device.type == "cpu"
            and self.kernel_size == (1, 1)
            and self.padding == (0, 0)
            and self.groups == 1
            and x.is_contiguous(memory_format=torch.channels_last)
        )
