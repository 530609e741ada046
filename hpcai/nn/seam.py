"""Where the forms of parallelism take hold of a model."""

from typing import Any

from torch import Tensor, nn


class Seam(nn.Module):
    """A place where a process needs what others hold: nothing outside a cluster.

    ``parts``: into how many equal ones what passes here is divided. Sizes of the whole may be told. What a model computes between
    ``begin`` and ``finish`` does not wait for others, nor does its backward pass; what passes is finished once, or never.
    """

    parts = 1

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return x

    def begin(self, x: Tensor, *sizes: int) -> Any:
        return x

    def finish(self, passing: Any) -> Tensor:
        return passing
