"""Loss and scores of the 3D U-Net.   B batch, K classes, D H W the volume."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.models.unet3d.volume import MEAN_HU, STD_HU

_SMOOTH = 1e-6  # in numerator and denominator of the dice: a class in neither gives 1


class Batch(NamedTuple):
    """Volumes with the class of each voxel."""

    image: Tensor  # [B, D, H, W] normalised intensities, float32
    label: Tensor  # [B, D, H, W] class of each voxel, uint8


def _input(model: Any, image: Tensor) -> Tensor:
    weight = model.output.conv.weight
    return image[:, None].to(torch.float64 if weight.dtype == torch.float64 else torch.float32)


def _dice_and_entropy(logits: Tensor, label: Tensor, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return soft dice of each class except the first, and mean cross entropy, of each full volume.   [B, K-1] and [B]"""
    log = F.log_softmax(logits, 1)
    p = log[:, 1:].exp()
    one_hot = label[:, None] == torch.arange(1, logits.shape[1], device=label.device, dtype=label.dtype).view(1, -1, 1, 1, 1)
    entropy = F.nll_loss(log, label.long(), reduction="none").flatten(1)
    overlap, guess, true = (v.flatten(2).sum(2) for v in (p * one_hot, p, one_hot.to(p.dtype)))
    sums = torch.cat((overlap, guess, true, entropy.sum(1, keepdim=True), entropy.new_full((len(entropy), 1), entropy.shape[1])), 1)
    sums = total(sums)
    overlap, guess, true = sums[:, :-2].chunk(3, 1)
    return _dice_ratio(overlap, guess + true), sums[:, -2] / sums[:, -1]


def _combine(soft: Tensor, entropy: Tensor) -> Tensor:
    return ((1 - soft).mean() + entropy.mean()) / 2


def _dice_ratio(intersection: Tensor, sizes: Tensor) -> Tensor:
    return (2 * intersection + _SMOOTH) / (sizes + _SMOOTH)


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the mean of cross entropy over all classes and 1 - soft dice without the first (MLPerf; Milletari et al. 2016)."""
    logits = model(_input(model, batch.image))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    soft, entropy = _dice_and_entropy(wide, batch.label, model.spatial_sum)
    return {"loss": _combine(soft, entropy), "dice": soft.detach().mean(), "entropy": entropy.detach().mean()}


def dice(predicted: Tensor, label: Tensor, classes: int) -> Tensor:
    """Return dice of each class except the first per volume; 1 if it is in neither.   [B, D, H, W] twice -> [B, K-1] float64"""
    columns = []
    for k in range(1, classes):
        a, b = (predicted == k).flatten(1), (label == k).flatten(1)
        columns.append(_dice_ratio((a & b).sum(1).double(), (a.sum(1) + b.sum(1)).double()))
    return torch.stack(columns, 1)


def score(model: Any, volumes: Sequence[Batch]) -> dict[str, tuple[Tensor, float]]:
    """Return sums and counts of ``mean_dice``, the metric of MLPerf (target 0.908): dice of each class but the first in each
    volume, by overlapping windows, averaged over volumes, then over classes; also ``dice_<class>``, and the loss. If a volume is no
    multiple of the stride its border is not scored, as in the reference (``plan_windows``)."""
    dices, losses = [], []
    for image, label in volumes:
        logits, crops = model.sliding_window(model, _input(model, image))
        label = label[(..., *crops)]
        dices.append(dice(logits.argmax(1), label, logits.shape[1]))
        losses.append(_combine(*_dice_and_entropy(logits, label, lambda sums: sums)))
    scores, weight = torch.cat(dices), model.sliding_window.group.share
    names = [f"dice_{name.replace(' ', '_')}" for name in model.cfg.classes[1:]]
    columns = {"mean_dice": scores.mean(1), **dict(zip(names, scores.unbind(1))), "loss": torch.stack(losses)}
    return {name: (column.sum() * weight, len(scores) * weight) for name, column in columns.items()}


def slices(model: Any, volumes: Sequence[Batch]) -> dict[str, Tensor]:
    """Return rows for plots: the axial slice of each volume with most of the last class (of any class, if that one is absent), and
    its true and predicted classes, cropped.   fields [N, S, S, 1] in HU, NaN beyond the volume, true, predicted [N, S, S] uint8"""
    side = max(model.cfg.window[1:]) * 3 // 2
    columns: list[list[Tensor]] = []
    for image, label in volumes:
        logits, crops = model.sliding_window(model, _input(model, image))
        guess, true, hu = logits.argmax(1)[0], label[(0, *crops)].long(), image[(0, *crops)].float() * STD_HU + MEAN_HU
        last = (true == len(model.cfg.classes) - 1).flatten(1).sum(1)
        k = int(torch.where(last.any(), last, (true > 0).flatten(1).sum(1)).argmax())
        voxels = (true[k] > 0).nonzero()
        centre = voxels.double().mean(0) if len(voxels) else torch.tensor(true.shape[1:]).double() / 2
        start = [int(coordinate) - side // 2 for coordinate in centre]
        padding = [n for begin, size in reversed(list(zip(start, true.shape[1:]))) for n in (-begin, begin + side - size)]
        columns.append([F.pad(plane[k], padding, value=fill) for plane, fill in ((hu, math.nan), (true, 0), (guess, 0))])
    fields, true, guess = (torch.stack(planes) for planes in zip(*columns))
    count = len(fields) if model.sliding_window.group.is_first else 0
    return {"fields": fields[:count, ..., None], "true": true[:count].to(torch.uint8), "predicted": guess[:count].to(torch.uint8)}
