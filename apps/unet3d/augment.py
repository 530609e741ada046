"""Factors and noise for crops, the same wherever a crop is cut and whichever processor does it.   D H W the crop, d h w a part"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def vary(image: Tensor, change: Tensor, seed: Tensor, window: Sequence[int], box: Sequence[tuple[int, int]]) -> Tensor:
    """``image`` times a factor, plus Gaussian noise, each of its own.

    image [B, d, h, w] is the part ``box`` (first and end along each dim) of crops of ``window``; change [B, 2]: factor, deviation
    of the noise; seed [B]. The noise of a voxel is a function of the seed and of its place in the whole crop.
    """
    wide = change.to(image.dtype).view(-1, 2, 1, 1, 1)
    varied = image * wide[:, 0]
    if not image.is_cuda and not bool(change[:, 1].any()):
        return varied  # on a CPU the noise costs more than to look whether there is any
    return varied + normal(seed, window, box).to(image.dtype) * wide[:, 1]


def normal(seed: Tensor, window: Sequence[int], box: Sequence[tuple[int, int]]) -> Tensor:
    """Standard normal numbers (Box and Muller 1958) from hashes of seed and place.   [B] -> [B, d, h, w] float32"""
    d, h, w = (torch.arange(*ends, device=seed.device) for ends in box)
    place = (d[:, None, None] * window[1] + h[:, None]) * window[2] + w
    low, high = (part.view(-1, 1, 1, 1) for part in (seed & _WORD, seed >> 32 & _WORD))
    first = _hashed(_hashed(place + low) ^ high)
    second = _hashed(first ^ 0x9E3779B9)
    radius = (-2 * ((first + 1).double() / 2**32).log()).sqrt()
    return (radius * torch.cos(second.double() * (2 * math.pi / 2**32))).float()


def _hashed(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that leaves no pattern (Wellons' lowbias32)."""
    x = x & _WORD
    x = ((x ^ x >> 16) * 0x7FEB352D) & _WORD
    x = ((x ^ x >> 15) * 0x846CA68B) & _WORD
    return x ^ x >> 16
