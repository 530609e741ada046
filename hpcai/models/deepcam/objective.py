"""Loss and scores of DeepCAM.   B batch, V variables, H W the map, K classes."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Batch(NamedTuple):
    """Weather maps with the class of each pixel."""

    fields: Tensor  # [B, H, W, V] in physical units, float32
    mask: Tensor  # [B, H, W] class of each pixel, uint8


def _logits(model: Any, batch: Batch) -> Tensor:
    logits = model(model.scaled(batch.fields))
    return logits if logits.dtype == torch.float64 else logits.float()


def _cross_entropy(model: Any, logits: Tensor, mask: Tensor) -> Tensor:
    """Return the cross entropy of each pixel, times the weight of its class.   [B, H, W]"""
    return F.cross_entropy(logits, mask.long(), model.class_weights.to(logits.dtype), reduction="none")


def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the mean over pixels of their cross entropy times f^(-1/8), with f the frequency of the pixel's class (MLPerf HPC). It
    is not divided by the sum of the weights."""
    return {"loss": _spatial_mean(model, _cross_entropy(model, _logits(model, batch), batch.mask)).mean()}


def _spatial_mean(model: Any, values: Tensor) -> Tensor:
    """Return the mean over each full map, sharded or not.   [B, H, W] -> [B]"""
    sums = torch.stack((values.sum((1, 2)), values.new_full((len(values),), values[0].numel())))
    total, count = model.spatial_sum(sums)
    return total / count


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """Return sums and counts of ``iou``, the metric of MLPerf HPC (target 0.82): intersection over union of each class in each map,
    1 if a class is in neither; averaged over classes, then over maps. Also ``iou_<class>``, the loss, and ``recall`` and
    ``precision`` over the pixels of all maps together, 1 if there are none: for each class except the first, and as means."""
    logits = _logits(model, batch)
    confusion = model.spatial_sum(confusion_matrix(logits.argmax(1), batch.mask, logits.shape[1]))
    ious, count = iou(confusion), len(confusion)
    classes = [name.replace(" ", "_") for name in model.cfg.classes]
    per_class = {f"iou_{name}": (column.sum(), count) for name, column in zip(classes, ious.unbind(1))}
    entropy = _spatial_mean(model, _cross_entropy(model, logits, batch.mask)).sum()
    recall_and_precision = confusion.sum(0), partial(_recall_and_precision, classes[1:])
    return {"iou": (ious.mean(1).sum(), count), **per_class, "loss": (entropy, count), "recall and precision": recall_and_precision}


def confusion_matrix(predicted: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix of each map.   [B, H, W] twice -> [B, K true, K predicted] int64"""
    pairs = (mask.short() * classes + predicted.short()).flatten(1)
    return torch.stack([(pairs == k).sum(1) for k in range(classes**2)], 1).unflatten(1, (classes, classes))


def iou(confusion: Tensor) -> Tensor:
    """Return the intersection over union of each class from confusion matrices, 1 if it is in neither map.   [B, K, K] -> [B, K]"""
    intersection = confusion.diagonal(dim1=1, dim2=2)
    union = confusion.sum(1) + confusion.sum(2) - intersection
    return torch.where(union > 0, intersection / union.clamp(min=1), 1.0)


def _recall_and_precision(names: list[str], confusion: Tensor) -> dict[str, float]:
    """Return both for each class except the first, and their means.   confusion [K true, K predicted], K - 1 names"""
    result: dict[str, float] = {}
    for kind, count in (("recall", confusion.sum(1)), ("precision", confusion.sum(0))):
        ratios = torch.where(count > 0, confusion.diagonal().double() / count.clamp(min=1), 1.0)[1:]
        result |= {kind: ratios.mean().item(), **{f"{kind}_{name}": value for name, value in zip(names, ratios.tolist())}}
    return result


def maps(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return maps for plots: fields [B, H, W, V], true and predicted classes [B, H, W] uint8."""
    predictions = _logits(model, batch).argmax(1)
    true, predicted = (model.gather_map(mask[:, None])[:, 0].to(torch.uint8) for mask in (batch.mask, predictions))
    fields = model.gather_map(batch.fields.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return {"fields": fields, "true": true, "predicted": predicted}
