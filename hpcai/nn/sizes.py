"""The sizes of maps and volumes that a network can halve."""

from torch import Tensor, nn


class Multiples(nn.Module):
    """Raises ValueError for sides that are no multiples of the network's output stride.   [B, C, ...] -> the same

    This is a seam: where a sample is cut over processes the whole must fit, and its parts are not looked at.
    """

    def __init__(self, of: int, places: str) -> None:
        super().__init__()
        self.of, self.places = of, places

    def forward(self, x: Tensor) -> Tensor:
        if any(n % self.of for n in x.shape[2:]):
            sides = " x ".join(map(str, x.shape[2:]))
            wanted = f"expected multiples of {self.of}, the output stride: crop it, or pad it at its edges"
            raise ValueError(f"the input is {sides} {self.places}; {wanted}")
        return x
