"""What a map or a volume must measure for a network that halves it."""

from torch import Tensor, nn


class Multiples(nn.Module):
    """Raises ValueError for sides that are no multiples of the network's output stride.   [B, C, ...] -> the same

    A seam: of a sample that is cut over processes the whole is what must fit, and its parts are not looked at.
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
