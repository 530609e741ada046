"""A check of the size of maps and volumes that a network downsamples."""

from torch import Tensor, nn


class DivisibleShape(nn.Module):
    """The identity [B, C, ...]. Raises ValueError if a side is no multiple of the output stride of the network. This is a seam: the
    full size of a sharded sample must be divisible; shards are not checked. ``unit``: cells or voxels."""

    def __init__(self, divisor: int, unit: str) -> None:
        super().__init__()
        self.divisor, self.unit = divisor, unit

    def forward(self, x: Tensor) -> Tensor:
        if any(n % self.divisor for n in x.shape[2:]):
            sides = " x ".join(map(str, x.shape[2:]))
            expected = f"expected multiples of {self.divisor}, the output stride: crop it, or pad it at its edges"
            raise ValueError(f"the input is {sides} {self.unit}; {expected}")
        return x
