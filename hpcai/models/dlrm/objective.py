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
    ids: Any  # padded ids [B, K], or those that ``parallel.exchange`` has made of them
    label: Tensor  # [B] 0 or 1


def predictions(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return logits and labels, for the AUC and for plots.   [B] each"""
    is_double = next(model.parameters()).dtype == torch.float64  # a model in lower precision casts its input itself
    logits = model(batch.dense.double() if is_double else batch.dense, batch.ids)
    return {"logit": logits if logits.dtype == torch.float64 else logits.float(), "label": batch.label}


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the mean binary cross entropy."""
    logits = predictions(model, batch)["logit"]
    return {"loss": F.binary_cross_entropy_with_logits(logits, batch.label.to(logits.dtype))}


def auc(scores: Tensor, labels: Tensor) -> Fraction:
    """Return the area under the ROC curve, exactly: the fraction of pairs of a positive and a negative in which the positive has
    the higher score; ties count 1/2. Raises DataError for NaN, for other labels than 0 and 1, or if there is no pair.   [N]
    each"""
    _, positives, negatives = count_scores(scores, labels)
    return auc_of_wins(count_wins(positives, negatives), int(positives.sum()), int(negatives.sum()))


def count_scores(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return distinct scores in ascending order, and how many positives and negatives have each.   [N] each -> [U] each"""
    if scores.isnan().any() or not ((labels == 0) | (labels == 1)).all():
        raise DataError(f"{int(scores.isnan().sum())} of {len(scores)} scores are NaN, labels are {labels.unique().tolist()[:9]}; "
                        "expected scores with an order, and labels 0 and 1")  # fmt: skip
    keys, inverse = torch.unique(scores.double(), return_inverse=True)
    positives = torch.bincount(inverse[labels > 0], minlength=len(keys))
    return keys, positives, torch.bincount(inverse, minlength=len(keys)) - positives


def count_wins(positives: Tensor, negatives: Tensor) -> int:
    """Return twice the number of pairs in which the positive has the higher score, plus that of ties.   [U] each, ascending"""
    return int((positives * (2 * (negatives.cumsum(0) - negatives) + negatives)).sum())


def auc_of_wins(wins: int, positives: int, negatives: int) -> Fraction:
    if not positives or not negatives:
        raise DataError(f"AUC needs samples of both classes, but there are {positives} positives and {negatives} negatives")
    return Fraction(wins, 2 * positives * negatives)
