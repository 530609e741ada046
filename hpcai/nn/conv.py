"""Convolutions of maps and volumes.   B batch, C channels, O output channels, D H W the volume."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
            return _Apart.of(self, x) if self.dilation != (1, 1) and _slow_weights(self, x) else super().forward(x)
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


class ConvTranspose2d(nn.ConvTranspose2d):
    """``nn.ConvTranspose2d``, whose gradient of the weights is on a CPU computed in contiguous memory (``_Apart``)."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """[B, C, H, W] -> [B, O, H', W']"""
        if output_size is None and _slow_weights(self, x):
            return _Apart.of(self, x)
        return super().forward(x, output_size)


def _slow_weights(conv: nn.Conv2d | nn.ConvTranspose2d, x: Tensor) -> bool:
    """Whether oneDNN's gradient of the weights is so slow in channels-last memory that copies pay: in float32, of transposed
    convolutions (0.46 s and 0.22 s for 256 to 256 channels at 96 x 144) and of those with holes (0.20 s and 0.15 s for 2,048 to
    256 at 24 x 36), but not where there are few output channels."""
    return (
        x.device.type == "cpu"
        and x.dtype == conv.weight.dtype == torch.float32
        and conv.groups == 1
        and conv.out_channels >= 16
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and not torch.is_autocast_enabled("cpu")
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
    )


class _Apart(torch.autograd.Function):
    """A convolution whose gradient of the input is computed in channels-last memory and that of the weights in contiguous."""

    @staticmethod
    def of(conv: nn.Conv2d | nn.ConvTranspose2d, x: Tensor) -> Tensor:
        transposed = isinstance(conv, nn.ConvTranspose2d)
        how = (conv.stride, conv.padding, conv.dilation, transposed, conv.output_padding, conv.groups)
        return _Apart.apply(x, conv.weight, conv.bias, how)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.bias = how, bias is not None
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_input, by_weight, by_bias = ctx.needs_input_grad[:3]
        sizes = [dy.shape[1]] if ctx.bias else None

        def gradients(form: torch.memory_format, want: list[bool]) -> Any:
            dy_, x_, weight_ = (t.contiguous(memory_format=form) for t in (dy, x, weight))
            return torch.ops.aten.convolution_backward(dy_, x_, weight_, sizes, *ctx.how, want)

        dx = gradients(torch.channels_last, [True, False, False])[0] if by_input else None
        want = [False, by_weight, ctx.bias and by_bias]
        _, dweight, dbias = gradients(torch.contiguous_format, want) if any(want) else (None, None, None)
        return dx, dweight, dbias, None
