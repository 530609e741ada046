"""Inference in overlapping windows.   B batch, C channels, K classes, D H W the volume."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Corner = tuple[int, int, int]

FILL = -2.2  # air around a volume: the least normalised intensity, as the reference rounds it


@dataclass(frozen=True)
class Placed:
    """Along one dim of a volume: what is left of it, what is put around that, and where windows begin in the sum of both."""

    kept: slice
    before: int
    after: int
    starts: range


def place(size: int, window: int, overlap: float, crop: bool) -> Placed:
    """Windows over ``size`` voxels, (1 - overlap)*window apart (MLPerf's KiTS19 reference).

    What is left over of a whole number of strides is cut off on both sides where it is less than half a stride and ``crop`` says
    so; otherwise the volume is padded to the next stride, and to one window at least.
    """
    stride = int(window * (1 - overlap))
    rest = (size - window) % stride if crop else 0
    rest = rest if rest < stride // 2 else 0
    kept = slice(rest // 2, size - (rest - rest // 2))
    left = kept.stop - kept.start
    whole = window + -(-max(left - window, 0) // stride) * stride
    pad = whole - left
    return Placed(kept, pad // 2, pad - pad // 2, range(0, whole - window + 1, stride))


def gaussian(window: Sequence[int]) -> Tensor:
    """Weights of the voxels of a window, largest in its middle: the cube root of the product of three Gaussians whose standard
    deviation is an eighth of each side, scaled to 1 at most.   [D, H, W] float64"""
    whole = torch.ones((), dtype=torch.float64)
    for size in window:
        off = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
        whole = whole[..., None] * torch.exp(-0.5 * (off / (0.125 * size)).square() / 3)
    return whole / whole.max()


def sliding_window(
    network: Callable[[Tensor], Tensor], image: Tensor, window: Sequence[int], overlap: float = 0.5, *, crop: bool = True,
    fill: float = FILL, team: "Alone | None" = None,
) -> tuple[Tensor, tuple[slice, slice, slice]]:  # fmt: skip
    """Mean of the logits of all windows over a voxel, weighted by ``gaussian``, and the part of the volume that they are of.

    [1, C, D, H, W] -> [1, K, D', H', W']. ``team`` says which of the windows this process sees, and adds up what all have seen.
    """
    team = team or Alone()
    if image.ndim != 5 or image.shape[0] != 1:
        raise ValueError(f"image has shape {list(image.shape)}; expected [1, C, D, H, W]")
    places = [place(n, w, overlap, crop) for n, w in zip(image.shape[2:], window)]
    kept = (places[0].kept, places[1].kept, places[2].kept)
    around = [n for p in reversed(places) for n in (p.before, p.after)]
    middle: Any = (..., *kept)
    padded = torch.nn.functional.pad(image[middle], around, value=fill)
    corners = [(d, h, w) for d in places[0].starts for h in places[1].starts for w in places[2].starts]
    mine = team.mine(corners)
    dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
    weights = gaussian(window).to(image.device, dtype)
    sums: Tensor | None = None
    for corner in mine or corners[:1]:  # where windows are fewer than processes, some see the first again, at no weight
        box: Any = (..., *(slice(c, c + w) for c, w in zip(corner, window)))
        logits = network(padded[box].contiguous()).to(dtype)
        if sums is None:
            sums = logits.new_zeros(1, logits.shape[1], *padded.shape[2:])
        sums[box] += logits * (weights if mine else 0 * weights)
    assert sums is not None
    sums = team.total(sums)
    seen = torch.ones((), dtype=dtype, device=image.device)
    for p, w, n in zip(places, window, padded.shape[2:]):  # the weights are a product over the dims, and so is their sum
        seen = seen[..., None] * _covered(p.starts, w, n).to(image.device, dtype)
    inner: Any = (..., *(slice(p.before, n - p.after) for p, n in zip(places, padded.shape[2:])))
    return sums[inner] / seen[inner], kept


def _covered(starts: range, window: int, size: int) -> Tensor:
    """Sum of the weights of all windows along one dim.   [size] float64"""
    one, line = gaussian((window,)), torch.zeros(size, dtype=torch.float64)
    for start in starts:
        line[start : start + window] += one
    return line


class Alone(nn.Module):
    """The seam for sharing the windows of a volume out: here one process sees all of them."""

    share = 1.0
    """share of a volume's score that this process counts"""
    is_first = True
    """whether this process is the first of those that see a volume together"""

    def mine(self, windows: Sequence[Corner]) -> Sequence[Corner]:
        return windows

    def total(self, sums: Tensor) -> Tensor:
        return sums

    def whole_windows(self) -> AbstractContextManager[Any]:
        """Inside, the network takes windows that are not cut."""
        return nullcontext()


class Windows(nn.Module):
    """``sliding_window`` of a model, whose ``team`` may be several processes."""

    def __init__(self, window: Sequence[int], overlap: float) -> None:
        super().__init__()
        self.window, self.overlap = tuple(window), overlap
        self.team = Alone()

    def forward(self, network: Callable[[Tensor], Tensor], image: Tensor, crop: bool = True) -> tuple[Tensor, tuple[slice, ...]]:
        with self.team.whole_windows():
            return sliding_window(network, image, self.window, self.overlap, crop=crop, team=self.team)
