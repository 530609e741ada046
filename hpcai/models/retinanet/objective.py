"""Loss and detections of RetinaNet.   B batch, H W the image, N objects, A anchors, K classes, D detections"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class _FocalLoss(torch.autograd.Function):
    """The focal loss and its gradient in one pass over the logits, of which only the gradient is saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, alpha: float, gamma: float) -> Tensor:
        x, label, is_object = wide(logits), labels.clamp(min=0)[..., None], labels[..., None] >= 0
        off, on = (1 - alpha, alpha) if alpha >= 0 else (1.0, 1.0)
        loss, grad = _focal_terms(x, off, gamma)  # all classes are absent
        own = x.gather(-1, label)
        present, slope = _focal_terms(-own, on, gamma)
        present, slope = (torch.where(is_object, a, b.gather(-1, label)) for a, b in ((present, loss), (-slope, grad)))
        total = loss.scatter_(-1, label, present).sum(-1)
        ctx.save_for_backward(grad.scatter_(-1, label, slope).to(logits.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_output[..., None].to(grad.dtype), None, None, None


def _focal_terms(x: Tensor, weight: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Return weight p^gamma softplus(x), p = sigmoid(x), and its derivative, weight p^gamma (p + gamma (1 - p) softplus(x))."""
    p, entropy = x.sigmoid(), F.logsigmoid(-x).neg_()
    scale = p.pow(gamma).mul_(weight)
    slope = (1 - p).mul_(entropy).mul_(gamma).add_(p).mul_(scale)
    return entropy.mul_(scale), slope


def focal_loss(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Return the sigmoid focal loss of each anchor, summed over classes (Lin et al. 2017, equation 5): cross entropy times
    (1 - pt)^gamma times alpha, or 1 - alpha for an absent class; a negative alpha omits these.

    Shape: logits [..., K], labels [...] class, negative: none -> [...], in float32 or float64
    """
    return _FocalLoss.apply(logits, labels, alpha, gamma)


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
