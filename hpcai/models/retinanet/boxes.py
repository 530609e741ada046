"""Boxes and anchors, in plain torch: nothing waits for the device.

A box is x1 y1 x2 y2 in pixels.   B batch, N objects, A anchors, M candidates, L levels
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels.triton_support import on_cpu

_MAX_LOG = 4.135166556742356  # log(1000/16): the largest exponent of a decoded side
BACKGROUND, IGNORED = -1, -2


def cell_anchors(size: int, ratios: Sequence[float]) -> Tensor:
    """Return the anchors around the corner of a cell, for each ratio of height to width three sizes, rounded.   [A, 4] int64"""
    sizes = torch.tensor([size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))], dtype=torch.float32)
    roots = torch.tensor(ratios, dtype=torch.float32).sqrt()[:, None]
    width, height = ((1 / roots) * sizes).flatten(), (roots * sizes).flatten()
    return (torch.stack((-width, -height, width, height), 1) / 2).round().long()


def grid_anchors(cells: Tensor, grid: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return the anchors of a level with ``grid`` cells (h, w) in an image of ``size`` (H, W), float32: ``cells`` shifted by
    size // grid, the stride (MLPerf, torchvision).   [A, 4] -> [h, w, A, 4]"""
    y, x = (torch.arange(n, device=cells.device) * (side // n) for n, side in zip(grid, size))
    y, x = torch.meshgrid(y, x, indexing="ij")
    return (torch.stack((x, y, x, y), 2)[:, :, None] + cells).float()


def _centers(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return centers and sides.   [..., 4] -> [..., 2] twice"""
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * sides, sides


def encode(boxes: Tensor, anchors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the offset of the centers in sides of the anchor, and the log of the ratio of the sides (Girshick et al. 2014), times
    ``weights`` [4].   [..., 4]"""
    (center, sides), (anchor_center, anchor_sides) = _centers(boxes), _centers(anchors)
    codes = torch.cat(((center - anchor_center) / anchor_sides, torch.log(sides / anchor_sides)), -1)
    return codes if weights is None else codes * weights


def decode(codes: Tensor, anchors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the boxes of ``codes``, the inverse of ``encode``; sides are at most 62.5 times those of the anchor.   [..., 4]"""
    codes = codes if weights is None else codes / weights
    center, sides = _centers(anchors.to(codes.dtype))
    center, half = codes[..., :2] * sides + center, 0.5 * codes[..., 2:].clamp(max=_MAX_LOG).exp() * sides
    return torch.cat((center - half, center + half), -1)


def clip_boxes(boxes: Tensor, size: Tensor) -> Tensor:
    """Return boxes within an image of ``size`` (height, width).   [..., 4], [..., 2] -> [..., 4]"""
    limit = torch.cat((size.flip(-1), size.flip(-1)), -1)
    return torch.minimum(boxes.clamp(min=0), limit.to(boxes.dtype))


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each pair.   [..., N, 4], [..., M, 4] -> [..., N, M]"""
    a, b = a[..., :, None, :], b[..., None, :, :]
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    intersection = sides[..., 0] * sides[..., 1]
    return intersection / (_area(a) + _area(b) - intersection)


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def match(overlap: Tensor, valid: Tensor | None, foreground: float = 0.5, background: float = 0.4,
          low_quality: bool = True) -> Tensor:  # fmt: skip
    """Return the object of each anchor, BACKGROUND (-1) or IGNORED (-2).

    An anchor belongs to the object with which it overlaps most, the first of equals: from ``foreground`` on, and with
    ``low_quality`` if no anchor overlaps more with some object (Ren et al. 2015; MLPerf, torchvision). Below ``background`` it is
    background, otherwise ignored.

    Shape: overlap [N, A], valid [N] bool, False for padding -> [A] int64
    """
    if not len(overlap):
        return overlap.new_full(overlap.shape[1:], BACKGROUND, dtype=torch.int64)
    if valid is not None:
        overlap = overlap.masked_fill(~valid[:, None], -1.0)
    best, index = overlap.max(0)
    matches = torch.where(best < foreground, IGNORED, index).masked_fill(best < background, BACKGROUND)
    if low_quality:
        is_best = overlap == overlap.amax(1, keepdim=True)
        is_best = is_best if valid is None else is_best & valid[:, None]
        matches = torch.where(is_best.any(0), index, matches)
    return matches


def nms(boxes: Tensor, scores: Tensor, labels: Tensor | None, threshold: float, limit: int) -> Tensor:
    """Return the indices of the best ``limit`` boxes of each image, by score, then -1: a box that overlaps more than ``threshold``
    with a better one of its label is removed (greedy non-maximum suppression). Boxes with score -inf are left out.

    There are ``limit`` steps for the whole batch, without a host read on a GPU: only boxes that are returned cost a step.

    Shape: boxes [B, M, 4], scores and labels [B, M] -> [B, limit] int64
    """
    remaining, kept = scores, []
    for _ in range(limit if boxes.shape[1] else 0):
        best = remaining.argmax(1, keepdim=True)  # the first of equals
        is_kept = remaining.gather(1, best) > -torch.inf
        if on_cpu(scores) and not is_kept.any():
            break
        removed = iou(boxes.gather(1, best[..., None].expand(-1, -1, 4)), boxes)[:, 0] > threshold
        if labels is not None:
            removed &= labels == labels.gather(1, best)
        remaining = remaining.masked_fill(removed, -torch.inf).scatter(1, best, -torch.inf)
        kept.append(torch.where(is_kept, best, -1))
    result = torch.cat(kept, 1) if kept else torch.empty_like(scores[:, :0], dtype=torch.int64)
    return F.pad(result, (0, limit - result.shape[1]), value=-1)
