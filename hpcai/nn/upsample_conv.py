"""Nearest upsampling by 2 and a convolution with kernel 3, as one transposed convolution.

Two of three upsampled neighbours along a dim are equal, so that their weights can be added: 16 products for each pixel before
upsampling instead of 36, or 64 instead of 216 for a voxel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.nn.conv import conv_transpose3d
from hpcai.nn.periodic import circular_pad


class UpsampleConv(nn.Module):
    """Nearest upsampling by 2 along each dim and a convolution with kernel 3, whose weights are from ``fold_upsampling``.

    x [B, C, ...], weight [C, C', 4, ...], bias [C'] -> [B, C', 2...]. ``circular_dims``: The dims of ``x`` with circular padding.
    """

    transposed, groups, padding_mode = True, 1, "zeros"

    def __init__(self, dims: int, circular_dims: Sequence[int] = ()) -> None:
        super().__init__()
        self.circular_dims = tuple(circular_dims)
        self.kernel_size, self.stride, self.padding = (4,) * dims, (2,) * dims, (1,) * dims
        self.dilation, self.output_padding = (1,) * dims, (0,) * dims

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = tuple(p + 2 * (dim in self.circular_dims) for dim, p in enumerate(self.padding, 2))
        conv_transpose: Any = F.conv_transpose2d if x.ndim == 4 else conv_transpose3d
        return conv_transpose(circular_pad(x, self.circular_dims), weight, bias, self.stride, padding)


def fold_upsampling(weight: Any) -> Tensor:
    """Return the weights of a transposed convolution with stride 2 that upsamples and convolves.

    [C', C, 3, ...] -> [C, C', 4, ...] in channels-last memory; along each dim (a, b, c) becomes (c, b + c, a + b, a).
    """
    dims = weight.ndim - 2
    device = "cpu" if weight.is_meta else weight.device.type
    with torch.autocast(device, enabled=False):  # the sums are rounded once
        offsets = torch.arange(4, device=weight.device)[:, None] + torch.arange(3, device=weight.device)
        fold = fold_all = ((offsets == 2) | (offsets == 3)).to(weight.dtype)
        for _ in range(dims - 1):
            fold_all = torch.kron(fold_all, fold)
        taps = weight.movedim((0, 1), (-1, 0)).flatten(1, -2)  # [C, 3 * 3, C']
        return (fold_all @ taps).unflatten(1, (4,) * dims).movedim(-1, 1)
