"""A map or a volume of twice as many places along each dim, convolved, as one transposed convolution.

Of three doubled places along a dim two hold the same, so that their weights add up: 16 products for each place before instead of
36, in a volume 64 instead of 216.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.nn.conv import conv_transpose3d
from hpcai.nn.periodic import circular_pad


class UpsampleConv(nn.Module):
    """Each place twice along each dim, and a convolution of 3 places of them, given by what ``spread_weight`` makes of its weights.

    x [B, C, ...], weight [C, C', 4, ...], bias [C'] -> [B, C', 2...]. ``wrapped``: the periodic dims of ``x``.
    """

    transposed, groups, padding_mode = True, 1, "zeros"

    def __init__(self, dims: int, circular_dims: Sequence[int] = ()) -> None:
        super().__init__()
        self.circular_dims = tuple(circular_dims)
        self.kernel_size, self.stride, self.padding = (4,) * dims, (2,) * dims, (1,) * dims
        self.dilation, self.output_padding = (1,) * dims, (0,) * dims

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = tuple(p + 2 * (dim in self.circular_dims) for dim, p in enumerate(self.padding, 2))
        transposed: Any = F.conv_transpose2d if x.ndim == 4 else conv_transpose3d
        return transposed(circular_pad(x, self.circular_dims), weight, bias, self.stride, padding)


def fold_upsampling(weight: Any) -> Tensor:
    """The weights of a transposed convolution of stride 2 that doubles a map or a volume and convolves it.

    [C', C, 3, ...] -> [C, C', 4, ...] in channels-last memory; along each dim (a, b, c) becomes (c, b + c, a + b, a).
    """
    dims = weight.ndim - 2
    device = "cpu" if weight.is_meta else weight.device.type
    with torch.autocast(device, enabled=False):  # rounded once, when they are sums
        ends = torch.arange(4, device=weight.device)[:, None] + torch.arange(3, device=weight.device)
        sums = every = ((ends == 2) | (ends == 3)).to(weight.dtype)
        for _ in range(dims - 1):
            every = torch.kron(every, sums)
        taps = weight.movedim((0, 1), (-1, 0)).flatten(1, -2)  # [C, 3 * 3, C']
        return (every @ taps).unflatten(1, (4,) * dims).movedim(-1, 1)
