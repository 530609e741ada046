"""Random numbers of a sample, counted and not followed (``kernels.philox``): they depend on the run's seed, on what they are for,
on the sample's index, on the epoch and on the place in the sample, and on nothing else. So they are the same for any number of
processes, any order of the samples, any micro-batches, any cut of a sample and after any resume, and no state is saved for them.

A number's block is counted by 128 bits under a key of 64, each part of which has bits of its own: no two numbers of a run share
words, except where one is asked for again.

    key               the seed, times an odd number: one to one, and no small number, which a generator of torch may have
    bits 0 to 41      the place in the sample, in blocks of 4 numbers (of 2 in float64)
    bits 42 to 60     what it is for
    bits 64 to 103    the sample's index
    bits 104 to 126   the epoch, or the member of an ensemble

Numbers of one use in float32 and in float64 share words: draw each use in one of them. Nothing is read from the device.

B samples
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import philox

NOISE, TIMES, DROPPED, LATENTS, INITIAL = range(5)
"""What is added to a training sample; how much of it; which conditions are left out; a latent's draw from what the encoder says;
what a sampler begins with."""
EVAL_NOISE, _, EVAL_LATENTS = range(5, 8)
"""The same of samples that are not trained on, whose indices may be those of training samples."""
SAMPLER_STEPS = 1024
"""``STEPS + i``: what a sampler adds in its step i."""

_BLOCKS, _USES, _INDICES, _EPOCHS = 42, 19, 40, 23  # bits
Box = tuple[slice, ...]


def normals(
    seed: int, use: int, index: Tensor, epoch: Tensor | int, size: Sequence[int] = (), *, box: Box | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Numbers of the normal distribution of mean 0 and deviation 1, on the device of ``index``.   [B, *size], or [B, *box]

    index [B] from 0 to 2^40 - 1; epoch [B] or one for all, to 2^23 - 1; ``size`` of a whole sample. ``box``: the places that are
    wanted of it, a slice of step 1 for each dim or for the first ones; they have the numbers that they have in the whole.
    bfloat16 and float16 are float32 numbers, rounded. Raises ConfigError for a seed, use, epoch, size or box out of bounds.
    """
    return _draw(philox.normal, seed, use, index, epoch, size, box, dtype)


def uniforms(
    seed: int, use: int, index: Tensor, epoch: Tensor | int, size: Sequence[int] = (), *, box: Box | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Numbers of [0, 1), of the same arguments as ``numbers``.   [B, *size], or [B, *box]"""
    return _draw(philox.uniform, seed, use, index, epoch, size, box, dtype)


def philox_key(seed: int) -> int:
    """The key of a run's numbers: another one for each of 2^64 seeds."""
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"noise: seed is {seed}; expected 0 to 2^64 - 1")
    return (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)


def _draw(
    draw: Callable[..., Tensor], seed: int, use: int, index: Tensor, epoch: Tensor | int, size: Sequence[int], box: Box | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if index.ndim != 1 or (isinstance(epoch, Tensor) and epoch.shape not in ((), index.shape)):
        given = list(epoch.shape) if isinstance(epoch, Tensor) else epoch
        raise ConfigError(f"noise: index is {list(index.shape)} and epoch {given}; expected [B], and [B] or one number")
    if not 0 <= use < 1 << _USES or (isinstance(epoch, int) and not 0 <= epoch < 1 << _EPOCHS):
        raise ConfigError(f"noise: use {use} in epoch {epoch}; expected uses below 2^{_USES} and epochs below 2^{_EPOCHS}")
    shift = _BLOCKS + (1 if dtype == torch.float64 else 2)
    if prod(size) > 1 << shift:
        raise ConfigError(f"noise: a sample of {list(size)} has more than 2^{shift} numbers")
    ranges = _ranges(tuple(size), box or ())
    begins, count = _runs(tuple(size), ranges, index.device)
    first = (begins + (use << shift)).expand(len(index), -1)
    high: Any = (epoch.long() if isinstance(epoch, Tensor) else epoch) << _INDICES
    upper = (index.long() + high)[:, None].expand(first.shape)
    found: Tensor = draw(philox_key(seed), first, count, upper=upper, dtype=dtype)
    return found.view(len(index), *(stop - start for start, stop in ranges))


def _ranges(size: tuple[int, ...], box: Box) -> list[tuple[int, int]]:
    """First place and the one after the last, of each dim."""
    found = [part.indices(n) for part, n in zip(box, size)]
    if len(box) > len(size) or any(step != 1 or stop < start for start, stop, step in found):
        raise ConfigError(f"noise: box {box} of a sample of {list(size)}; expected slices of step 1, one for each dim at most")
    return [(start, stop) for start, stop, _ in found] + [(0, n) for n in size[len(box) :]]


def _runs(size: tuple[int, ...], ranges: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, int]:
    """A box is runs of places that follow one another: where each begins [R], and how long they are."""
    count, dim = 1, len(size)
    while dim and count == prod(size[dim:]):
        dim -= 1
        count *= ranges[dim][1] - ranges[dim][0]
    strides = [prod(size[k + 1 :]) for k in range(len(size))]
    start = ranges[dim][0] * strides[dim] if size else 0
    begins = torch.full((1,), start, device=device)  # filled, not copied: a graph can hold it
    for k in reversed(range(dim)):
        begins = (torch.arange(*ranges[k], device=device)[:, None] * strides[k] + begins).flatten()
    return begins, count
