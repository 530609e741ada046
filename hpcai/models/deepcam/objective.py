"""The loss that trains DeepCAM, and its scores.   B batch, V variables, H W the map, K classes."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Batch(NamedTuple):
    """Maps of the weather and what each of their cells is."""

    fields: Tensor  # [B, H, W, V] in physical units, float32
    mask: Tensor  # [B, H, W] class of each cell, uint8


def _logits(model: Any, batch: Batch) -> Tensor:
    logits = model(model.scaled(batch.fields))
    return logits if logits.dtype == torch.float64 else logits.float()


def _cross_entropy(model: Any, logits: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy of each cell, times the weight of its class.   [B, H, W]"""
    return F.cross_entropy(logits, mask.long(), model.class_weights.to(logits.dtype), reduction="none")


def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The plain mean over cells of their cross entropy times f^(-1/8), f being the frequency of a cell's class (MLPerf HPC). It is
    not divided by the sum of the weights."""
    return {"loss": _spatial_mean(model, _cross_entropy(model, _logits(model, batch), batch.mask)).mean()}


def _spatial_mean(model: Any, values: Tensor) -> Tensor:
    """The mean over each whole map, however it is cut.   [B, H, W] -> [B]"""
    sums = torch.stack((values.sum((1, 2)), values.new_full((len(values),), values[0].numel())))
    total, count = model.spatial_sum(sums)
    return total / count


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """``iou``, the metric of MLPerf HPC (target 0.82): intersection over union of each class in each map, 1 where a class is in
    neither; the mean over classes, then over maps. Each class has its own, too (``iou_<class>``), and the loss is among them.

    ``recall`` and ``precision``: of the true cells of a class those that are found, of the cells that are called so those that are
    right, over the cells of all maps together; 1 where there are none. Each class but the first has its own, and their mean."""
    logits = _logits(model, batch)
    confusion = model.spatial_sum(confusion_matrix(logits.argmax(1), batch.mask, logits.shape[1]))
    ious, count = iou(confusion), len(confusion)
    classes = [name.replace(" ", "_") for name in model.cfg.classes]
    per_class = {f"iou_{name}": (column.sum(), count) for name, column in zip(classes, ious.unbind(1))}
    entropy = _spatial_mean(model, _cross_entropy(model, logits, batch.mask)).sum()
    recall_and_precision = confusion.sum(0), partial(_recall_and_precision, classes[1:])
    return {"iou": (ious.mean(1).sum(), count), **per_class, "loss": (entropy, count), "recall and precision": recall_and_precision}


def confusion_matrix(predicted: Tensor, mask: Tensor, classes: int) -> Tensor:
    """How many cells of each class are called what in each map.   [B, H, W] twice -> [B, K true, K guessed] int64"""
    pairs = (mask.short() * classes + predicted.short()).flatten(1)
    return torch.stack([(pairs == k).sum(1) for k in range(classes**2)], 1).unflatten(1, (classes, classes))


def iou(confusion: Tensor) -> Tensor:
    """Intersection over union of each class, 1 where it is in neither map; of what ``confusion`` gives.   [B, K, K] -> [B, K]"""
    intersection = confusion.diagonal(dim1=1, dim2=2)
    union = confusion.sum(1) + confusion.sum(2) - intersection
    return torch.where(union > 0, intersection / union.clamp(min=1), 1.0)


def _recall_and_precision(names: list[str], confusion: Tensor) -> dict[str, float]:
    """cells [K true, K guessed], without a name for the first class"""
    result: dict[str, float] = {}
    for kind, count in (("recall", confusion.sum(1)), ("precision", confusion.sum(0))):
        ratios = torch.where(count > 0, confusion.diagonal().double() / count.clamp(min=1), 1.0)[1:]
        result |= {kind: ratios.mean().item(), **{f"{kind}_{name}": value for name, value in zip(names, ratios.tolist())}}
    return result


def maps(model: Any, batch: Batch) -> dict[str, Tensor]:
    """For pictures: the maps, what is in them and what the model sees.   fields [B, H, W, V], true and predicted [B, H, W] uint8"""
    predictions = _logits(model, batch).argmax(1)
    true, predicted = (model.gather_map(mask[:, None])[:, 0].to(torch.uint8) for mask in (batch.mask, predictions))
    fields = model.gather_map(batch.fields.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return {"fields": fields, "true": true, "predicted": predicted}
