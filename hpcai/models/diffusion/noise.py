"""Counter-based random numbers of samples (``kernels.philox``). They are a function of the seed of the run, their use, the index of
the sample, the epoch and the position in the sample only. They are therefore the same for any number of ranks, order of samples,
micro-batches and sharding, and after a resume, without saved state.

The counter has 128 bits and the key 64. Each component has its own bits: no two elements of a run share random bits.

    key               the seed times an odd number: injective, and never small, as seeds of torch's generators may be
    bits 0 to 41      the position in the sample, in blocks of 4 elements (of 2 in float64)
    bits 42 to 60     the use
    bits 64 to 103    the index of the sample
    bits 104 to 126   the epoch, or the ensemble member

Float32 and float64 numbers of one use share random bits: draw each use in one dtype. Nothing is read from the device.   B samples
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import philox

NOISE, TIMES, DROPPED, LATENTS, INITIAL = range(5)
"""Uses: noise of a training sample, its time, dropped conditions, sampled latents, initial noise of a sampler"""
EVAL_NOISE, _, EVAL_LATENTS = range(5, 8)
"""Uses of held-out samples, whose indices may be those of training samples"""
SAMPLER_STEPS = 1024
"""``SAMPLER_STEPS + i``: noise of step i of a sampler"""

_BLOCKS, _USES, _INDICES, _EPOCHS = 42, 19, 40, 23  # bits
Box = tuple[slice, ...]


def normals(
    seed: int, use: int, index: Tensor, epoch: Tensor | int, size: Sequence[int] = (), *, box: Box | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return standard normal numbers on the device of ``index``.   [B, *size], or [B, *box]

    index [B] from 0 to 2^40 - 1; epoch [B] or one for all, to 2^23 - 1; ``size`` of a full sample. ``box``: return only these
    slices of the full result, of step 1, for all or the first dims. bfloat16 and float16 are rounded float32 numbers. Raises
    ConfigError for a seed, use, epoch, size or box out of bounds."""
    return _draw(philox.normal, seed, use, index, epoch, size, box, dtype)


def uniforms(
    seed: int, use: int, index: Tensor, epoch: Tensor | int, size: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return uniform numbers in [0, 1), with the arguments of ``normals``.   [B, *size]"""
    return _draw(philox.uniform, seed, use, index, epoch, size, None, dtype)


def _draw(
    draw: Callable[..., Tensor], seed: int, use: int, index: Tensor, epoch: Tensor | int, size: Sequence[int], box: Box | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if index.ndim != 1 or (isinstance(epoch, Tensor) and epoch.shape not in ((), index.shape)):
        shape = list(epoch.shape) if isinstance(epoch, Tensor) else epoch
        raise ConfigError(f"noise: index is {list(index.shape)} and epoch {shape}; expected [B], and [B] or one number")
    if not 0 <= use < 1 << _USES or (isinstance(epoch, int) and not 0 <= epoch < 1 << _EPOCHS):
        raise ConfigError(f"noise: use {use} in epoch {epoch}; expected uses below 2^{_USES} and epochs below 2^{_EPOCHS}")
    shift = _BLOCKS + (1 if dtype == torch.float64 else 2)
    if prod(size) > 1 << shift:
        raise ConfigError(f"noise: a sample of {list(size)} has more than 2^{shift} elements")
    box = box or ()
    slices = [dim.indices(n) for dim, n in zip(box, size)]
    if len(box) > len(size) or any(step != 1 or stop < start for start, stop, step in slices):
        raise ConfigError(f"noise: box {box} of a sample of {list(size)}; expected slices of step 1, one for each dim at most")
    ranges = [(start, stop) for start, stop, _ in slices] + [(0, n) for n in size[len(box) :]]
    starts, count = _runs(tuple(size), ranges, index.device)
    first = (starts + (use << shift)).expand(len(index), -1)
    high: Any = (epoch.long() if isinstance(epoch, Tensor) else epoch) << _INDICES
    upper = (index.long() + high)[:, None].expand(first.shape)
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"noise: seed is {seed}; expected 0 to 2^64 - 1")
    key = (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    numbers: Tensor = draw(key, first, count, upper=upper, dtype=dtype)
    return numbers.view(len(index), *(stop - start for start, stop in ranges))


def _runs(size: tuple[int, ...], ranges: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, int]:
    """Return the starts [R] and the common length of the contiguous runs of a box."""
    count, dim = 1, len(size)
    while dim and count == prod(size[dim:]):
        dim -= 1
        count *= ranges[dim][1] - ranges[dim][0]
    strides = [prod(size[k + 1 :]) for k in range(len(size))]
    start = ranges[dim][0] * strides[dim] if size else 0
    starts = torch.full((1,), start, device=device)  # filled, not copied: can be captured
    for k in reversed(range(dim)):
        starts = (torch.arange(*ranges[k], device=device)[:, None] * strides[k] + starts).flatten()
    return starts, count
