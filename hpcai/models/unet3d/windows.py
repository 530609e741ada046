"""Sliding-window inference.   B batch, C channels, K classes, D H W the volume."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Corner = tuple[int, int, int]

PADDING_VALUE = -2.2  # air: the minimum normalised intensity, as rounded by the reference


@dataclass(frozen=True)
class WindowPlan:
    """The windows along one dim of a volume: the range after cropping, the padding around it, and the starts of windows in both."""

    crop: slice
    before: int
    after: int
    starts: range


def plan_windows(size: int, window: int, overlap: float, crop: bool) -> WindowPlan:
    """Plan windows over ``size`` voxels with stride (1 - overlap)*window (MLPerf's KiTS19 reference).

    A remainder of less than half a stride is cropped on both sides if ``crop`` is set; otherwise the volume is padded to the next
    stride, and to one window at least.
    """
    stride = int(window * (1 - overlap))
    remainder = (size - window) % stride if crop else 0
    remainder = remainder if remainder < stride // 2 else 0
    cropped = slice(remainder // 2, size - (remainder - remainder // 2))
    size_left = cropped.stop - cropped.start
    padded = window + -(-max(size_left - window, 0) // stride) * stride
    padding = padded - size_left
    return WindowPlan(cropped, padding // 2, padding - padding // 2, range(0, padded - window + 1, stride))


def gaussian_weights(window: Sequence[int]) -> Tensor:
    """Return the weights of a window: the cube root of a product of three Gaussians with a standard deviation of 1/8 of each side,
    scaled to a maximum of 1.   [D, H, W] float64"""
    weights = torch.ones((), dtype=torch.float64)
    for size in window:
        offset = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
        weights = weights[..., None] * torch.exp(-0.5 * (offset / (0.125 * size)).square() / 3)
    return weights / weights.max()


class WindowGroup(nn.Module):
    """The seam for dividing the windows of a volume among processes; here one process computes all of them."""

    share = 1.0
    """fraction of a volume's score that this process contributes"""
    is_first = True
    """whether this process is the first of its group"""

    def assign(self, windows: Sequence[Corner]) -> Sequence[Corner]:
        return windows

    def all_reduce(self, sums: Tensor) -> Tensor:
        return sums

    def unsharded(self) -> AbstractContextManager[Any]:
        """Context manager: the network runs on unsharded windows."""
        return nullcontext()


class SlidingWindow(nn.Module):
    """The mean of the logits of all windows, weighted by ``gaussian_weights``, and the range of the volume that it covers.
    ``group`` assigns windows to this process, and all-reduces the sums.   [1, C, D, H, W] -> [1, K, D', H', W']"""

    def __init__(self, window: Sequence[int], overlap: float) -> None:
        super().__init__()
        self.window, self.overlap = tuple(window), overlap
        self.group = WindowGroup()

    def forward(self, network: Callable[[Tensor], Tensor], image: Tensor, crop: bool = True) -> tuple[Tensor, tuple[slice, ...]]:
        if image.ndim != 5 or image.shape[0] != 1:
            raise ValueError(f"image has shape {list(image.shape)}; expected [1, C, D, H, W]")
        plans = [plan_windows(n, w, self.overlap, crop) for n, w in zip(image.shape[2:], self.window)]
        cropped: Any = (..., *(p.crop for p in plans))
        padding = [n for p in reversed(plans) for n in (p.before, p.after)]
        padded = torch.nn.functional.pad(image[cropped], padding, value=PADDING_VALUE)
        corners = [(d, h, w) for d in plans[0].starts for h in plans[1].starts for w in plans[2].starts]
        assigned = self.group.assign(corners)
        dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
        weights = gaussian_weights(self.window).to(image.device, dtype)
        sums: Any = None
        with self.group.unsharded():
            for corner in assigned or corners[:1]:  # with fewer windows than ranks, some compute the first, with weight 0
                box: Any = (..., *(slice(c, c + w) for c, w in zip(corner, self.window)))
                logits = network(padded[box].contiguous()).to(dtype)
                if sums is None:
                    sums = logits.new_zeros(1, logits.shape[1], *padded.shape[2:])
                sums[box] += logits * (weights if assigned else 0 * weights)
        sums = self.group.all_reduce(sums)
        weight_sum = torch.ones((), dtype=dtype, device=image.device)
        for p, w, n in zip(plans, self.window, padded.shape[2:]):  # the weights factorise over the dims, and so does their sum
            dim_weights, dim_sum = gaussian_weights((w,)), torch.zeros(n, dtype=torch.float64)
            for start in p.starts:
                dim_sum[start : start + w] += dim_weights
            weight_sum = weight_sum[..., None] * dim_sum.to(image.device, dtype)
        inner: Any = (..., *(slice(p.before, n - p.after) for p, n in zip(plans, padded.shape[2:])))
        return sums[inner] / weight_sum[inner], cropped[1:]
