"""The pixels of a sample that a rank holds.   B samples, C channels, S pixels along each dim, S/n of them on this rank"""

from collections.abc import Sequence

from torch import Tensor


class Grid:
    """The layout of unsharded samples. A seam: ``hpcai.models.diffusion.parallel`` has the layout of sharded ones."""

    def expect(self, size: Sequence[int]) -> None:
        """Prepare for samples of ``size``."""

    def full_size(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the size of the full sample for the size of the local shard."""
        return tuple(local)

    def box(self, size: Sequence[int]) -> tuple[slice, ...]:
        """Return the local slices of a sample of ``size``."""
        return tuple(slice(0, n) for n in size)

    def shard(self, x: Tensor) -> Tensor:
        """Return the local shard of full samples.   [B, C, S...] -> [B, C, S/n...]"""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All-gather shards to full samples.   [B, C, S/n...] -> [B, C, S...]"""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of each full sample; in the backward pass it counts once.   [B, C, S/n...] -> [B]"""
        return x.mean(tuple(range(1, x.ndim)))

    def std(self, x: Tensor) -> Tensor:
        """Return the standard deviation of each full sample.   [B, C, S/n...] -> [B, 1, ...]"""
        return x.std(tuple(range(1, x.ndim)), keepdim=True)


UNSHARDED = Grid()
