"""Which places of a sample a process holds.   B samples, C channels, S places along each dim, of which a process holds S/n"""

from collections.abc import Sequence

from torch import Tensor


class Grid:
    """All of them: a seam, for what is computed of all places together. ``hpcai.models.diffusion.parallel`` has those of a cut."""

    def expect(self, size: Sequence[int]) -> None:
        """Samples of ``size`` will come."""

    def full_size(self, held: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the sample of which this process holds so many places along each dim."""
        return tuple(held)

    def box(self, size: Sequence[int]) -> tuple[slice, ...]:
        """Which places this process holds of a sample of ``size``."""
        return tuple(slice(0, n) for n in size)

    def shard(self, x: Tensor) -> Tensor:
        """Its part of samples.   [B, C, S...] -> [B, C, S/n...]"""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Samples of which each process of the copy holds a part.   [B, C, S/n...] -> [B, C, S...]"""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Of each sample, over all its channels and places. What follows from it counts once.   [B, C, S/n...] -> [B]"""
        return x.mean(tuple(range(1, x.ndim)))

    def std(self, x: Tensor) -> Tensor:
        """The standard deviation of each sample.   [B, C, S/n...] -> [B, 1, ...]"""
        return x.std(tuple(range(1, x.ndim)), keepdim=True)


UNSHARDED = Grid()
