"""The points of a model at which ``hpcai.parallel`` inserts communication."""

from typing import Any

from torch import Tensor, nn


class Seam(nn.Module):
    """A submodule that communicates with the other ranks of a model-parallel group; the default is the identity.

    ``begin`` starts the communication and returns a handle, ``finish`` waits for it: the computation between them overlaps with it,
    as does its backward pass. Each handle is finished at most once. ``sizes``: Sizes of the unsharded tensor. ``num_shards``: The
    number of equal shards of the tensor that passes here.
    """

    num_shards = 1

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return x

    def begin(self, x: Tensor, *sizes: int) -> Any:
        return x

    def finish(self, handle: Any) -> Tensor:
        return handle
