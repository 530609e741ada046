"""Loss and detections of RetinaNet.   B batch, H W the image, N objects, A anchors, K classes, D detections"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.kernels.focal_loss import focal_loss
from hpcai.models.retinanet.boxes import BACKGROUND, IGNORED, encode, iou, match
from hpcai.models.retinanet.model import wide


class Batch(NamedTuple):
    """Images with their objects, padded to one size and number."""

    image: Tensor  # [B, H, W, 3] uint8
    boxes: Tensor  # [B, N, 4] float32, x1 y1 x2 y2 in pixels of ``image``
    labels: Tensor  # [B, N] class, int64; -1 for padding
    within: Tensor  # [B, 2] height and width of the image in its padded frame
    original: Tensor  # [B, 2] height and width of the image in its file
    id: Tensor  # [B] number of the image, int64


@torch.no_grad()
def assign(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return class (-1: background), weight, and coded box of each anchor of the full image. The weight is 1/max(1, foreground) of
    the image, over B, and 0 if the anchor is ignored.   [B, A], [B, A], [B, A, 4]"""
    cfg, valid = model.cfg, batch.labels >= 0
    size = model.anchors.image_size(batch.image)
    anchors = torch.cat([level.view(-1, 4) for level in model.anchors(size)]).to(batch.boxes.dtype)
    matches = torch.stack([
        match(iou(boxes, anchors), own, cfg.foreground_iou, cfg.background_iou) for boxes, own in zip(batch.boxes, valid)
    ])  # fmt: skip
    return targets(anchors, batch.boxes, batch.labels, matches)


def targets(anchors: Tensor, boxes: Tensor, labels: Tensor, matches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return class, weight and coded box of each anchor (``assign``) from its object (``match``).

    Shape: anchors [A, 4], boxes [B, N, 4], labels [B, N], matches [B, A]
    """
    foreground = matches >= 0
    index = matches.clamp(min=0)
    classes = torch.where(foreground, labels.gather(1, index), BACKGROUND)
    weight = (matches != IGNORED) / (foreground.sum(1, keepdim=True).clamp(min=1) * len(matches)).to(boxes.dtype)
    codes = encode(boxes.gather(1, index[..., None].expand(-1, -1, 4)), anchors)
    return classes, weight, torch.where(foreground[..., None], codes, 0.0)


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the focal loss of the classes plus the L1 loss of the coded boxes of the foreground, each a sum over anchors over
    max(1, foreground) of its image; means over images."""
    size, assigned = model.anchors.image_size(batch.image), assign(model, batch)
    levels = model(model.normalised(batch.image, batch.within))
    sums, splits = [], [model.anchors.split(values, size) for values in assigned]
    for (logits, codes), (classes, share), (weight, _), (target, _) in zip(levels, *splits):
        focal = focal_loss(logits, classes, model.cfg.alpha, model.cfg.gamma)
        distance = torch.where(classes >= 0, (wide(codes) - target).abs().sum(-1), 0.0)
        sums.append(torch.stack([(values * weight).sum() for values in (focal, distance)]) * share)
    classification, regression = model.spatial_sum(torch.stack(sums).sum(0))
    return {"loss": classification + regression, "classification": classification, "bbox_regression": regression}


@torch.no_grad()
def detections(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the number of each image, and its objects in pixels of its file (``RetinaNet.select``): id [B], detections [B, D, 6],
    x1 y1 x2 y2 score class, padded with score 0 and class -1."""
    size = model.anchors.image_size(batch.image)
    levels = model.anchors.gather(model(model.normalised(batch.image, batch.within)), size)
    return {"id": batch.id, "detections": model.select(levels, size, batch.within, batch.original)}


@torch.no_grad()
def objects(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return images [B, H, W, 3] and their numbers [B] for plots, and the objects of all of them, in pixels of ``batch.image``:
    true [n, 6], number, x1 y1 x2 y2 and class, and detected [m, 7], number, x1 y1 x2 y2, score and class."""
    detected = detections(model, batch._replace(original=batch.within))["detections"]
    true = torch.cat((batch.boxes, batch.labels[..., None]), 2)
    rows = {}
    for name, values in (("true", true.double()), ("detected", detected.double())):
        number = batch.id.double()[:, None, None].expand(-1, values.shape[1], 1)
        rows[name] = torch.cat((number, values), 2)[values[..., -1] >= 0]
    return {"image": model.anchors.full(batch.image), "id": batch.id, **rows}
