"""The loss that trains DeepCAM, and its scores.   B batch, V variables, H W the map, K classes."""

from collections.abc import Callable
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
    return {"loss": _mean(model, _cross_entropy(model, _logits(model, batch), batch.mask)).mean()}


def _mean(model: Any, values: Tensor) -> Tensor:
    """The mean over each whole map, however it is cut.   [B, H, W] -> [B]"""
    own = torch.stack((values.sum((1, 2)), values.new_full((len(values),), values[0].numel())))
    total, count = model.total(own)
    return total / count


def score(model: Any, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    """``iou``, the metric of MLPerf HPC (target 0.82): intersection over union of each class in each map, 1 where a class is in
    neither; the mean over classes, then over maps. Each class has its own, too (``iou_<class>``), and the loss is among them."""
    logits = _logits(model, batch)
    found = iou(logits.argmax(1), batch.mask, logits.shape[1], model.total)
    count = len(found)
    names = [f"iou_{name.replace(' ', '_')}" for name in model.cfg.classes]
    every = {name: (column.sum(), count) for name, column in zip(names, found.unbind(1))}
    entropy = _mean(model, _cross_entropy(model, logits, batch.mask)).sum()
    return {"iou": (found.mean(1).sum(), count), **every, "loss": (entropy, count)}


def iou(guess: Tensor, mask: Tensor, classes: int, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
    """Intersection over union of each class in each map; 1 where it is in neither. ``total`` adds the cells of the parts of maps
    that are cut.   [B, H, W] twice -> [B, K]"""
    pairs = [((guess == k).flatten(1), (mask == k).flatten(1)) for k in range(classes)]
    both, either = total(torch.stack([torch.stack([(a & b).sum(1), (a | b).sum(1)]) for a, b in pairs], -1))
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def maps(model: Any, batch: Batch) -> dict[str, Tensor]:
    """For pictures: the maps, what is in them and what the model sees.   fields [B, H, W, V], true and predicted [B, H, W] uint8"""
    guess = _logits(model, batch).argmax(1)
    true, predicted = (model.whole(mask[:, None])[:, 0].to(torch.uint8) for mask in (batch.mask, guess))
    fields = model.whole(batch.fields.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return {"fields": fields, "true": true, "predicted": predicted}
