"""Factors and noise for crops, the same wherever a crop is cut and whichever processor does it.   D H W the crop, d h w a part"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcai.kernels import philox


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
    """Standard normal numbers, counted by seed and place.   [B] -> [B, d, h, w] float32"""
    (d, h), (begin, end) = (torch.arange(*ends, device=seed.device) for ends in box[:2]), box[2]
    rows = ((d[:, None] * window[1] + h) * window[2] + begin).flatten().expand(len(seed), -1)
    found = philox.normal(0, rows, end - begin, upper=seed[:, None].expand(rows.shape))
    return found.view(len(seed), len(d), len(h), end - begin)
