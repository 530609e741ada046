"""Loss and AUC of DLRM-dcnv2.   B batch, N samples, U distinct scores"""

from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.errors import DataError


class Batch(NamedTuple):
    """Samples with their labels."""

    dense: Tensor  # [B, F]
    ids: Any  # padded ids [B, K], or those that the exchange of sharded tables has made of them
    label: Tensor  # [B] 0 or 1


def _logits(model: Any, batch: Batch) -> Tensor:
    logits = model(batch.dense, batch.ids)
    return logits if logits.dtype == torch.float64 else logits.float()


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the mean binary cross entropy."""
    logits = _logits(model, batch)
    return {"loss": F.binary_cross_entropy_with_logits(logits, batch.label.to(logits.dtype))}


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """Return sums and counts of the cross entropy ``loss``, of ``accuracy`` at probability 1/2, and of ``calibration``, the sum of the
    probabilities over the number of positives."""
    logits, count = _logits(model, batch), len(batch.label)
    label = batch.label.to(logits.dtype)
    return {
        "loss": (F.binary_cross_entropy_with_logits(logits, label, reduction="sum"), count),
        "accuracy": (((logits > 0) == (label > 0)).sum(), count),
        "calibration": (logits.sigmoid().sum(), label.sum()),
    }


def predictions(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return logits and labels, for the AUC and for plots.   [B] each"""
    return {"logit": _logits(model, batch), "label": batch.label}


def auc(scores: Tensor, labels: Tensor) -> Fraction:
    """Return the area under the ROC curve, exactly: the fraction of pairs of a positive and a negative in which the positive has the
    higher score; ties count 1/2. Raises DataError for NaN, or if there is no pair.   [N] each"""
    keys, positives, negatives = count_scores(scores, labels)
    return auc_of_counts(count_wins(positives, negatives), int(positives.sum()), int(negatives.sum()))


def count_scores(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return distinct scores in ascending order, and how many positives and negatives have each.   [N] each -> [U] each"""
    if scores.isnan().any():
        raise DataError(f"{int(scores.isnan().sum())} of {len(scores)} scores are NaN, which have no rank; look at the model")
    if not ((labels == 0) | (labels == 1)).all():
        raise DataError("labels are not all 0 or 1")
    keys, inverse = torch.unique(scores.double(), return_inverse=True)
    positives = torch.bincount(inverse[labels > 0], minlength=len(keys))
    return keys, positives, torch.bincount(inverse, minlength=len(keys)) - positives


def count_wins(positives: Tensor, negatives: Tensor) -> int:
    """Return twice the number of pairs in which the positive has the higher score, plus that of ties.   [U] each, ascending"""
    return int((positives * (2 * (negatives.cumsum(0) - negatives) + negatives)).sum())


def auc_of_counts(wins: int, positives: int, negatives: int) -> Fraction:
    if not positives or not negatives:
        raise DataError(f"AUC needs samples of both classes, but there are {positives} positives and {negatives} negatives")
    return Fraction(wins, 2 * positives * negatives)
