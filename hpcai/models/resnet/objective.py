"""Loss, accuracy and calibration of ResNet.   B batch, H W the image, K classes, N images"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BINS = 15
MAX_PIXELS = 112  # of an image for plots


class Batch(NamedTuple):
    """Images with their classes."""

    image: Tensor  # [B, H, W, 3] uint8
    label: Tensor  # [B] class, int32


def _logits(model: Any, batch: Batch) -> Tensor:
    result = model(model.normalised(batch.image))
    return result if result.dtype == torch.float64 else result.float()


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the mean cross entropy to (1 - s) one-hot + s/K, with s ``cfg.label_smoothing``."""
    return {"loss": F.cross_entropy(_logits(model, batch), batch.label.long(), label_smoothing=model.cfg.label_smoothing)}


def score(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return sums and counts of ``accuracy`` (top-1, the metric of MLPerf; target 0.759), ``top5``, the cross entropy ``loss``
    without smoothing, the Brier score ``brier`` (0 to 2), and the expected calibration error ``ece``."""
    logits, label = _logits(model, batch), batch.label.long()
    probabilities, count = logits.softmax(1), len(label)
    confidence, predicted = probabilities.max(1)
    correct = predicted == label
    better = (logits > logits.gather(1, label[:, None])).sum(1)
    brier = (probabilities - F.one_hot(label, logits.shape[1])).square().sum()
    return {
        "accuracy": (correct.sum(), count),
        "top5": ((better < 5).sum(), count),
        "loss": (F.cross_entropy(logits, label, reduction="sum"), count),
        "brier": (brier, count),
        "calibration": (_calibration_sums(confidence, correct), lambda sums: {"ece": _expected_error(sums)}),
    }


def _calibration_sums(confidence: Tensor, correct: Tensor) -> Tensor:
    """Return count, sum of the confidence and correct ones of each of equal bins of the confidence.   [N] each -> [BINS, 3]"""
    bins = (confidence * BINS).long().clamp(0, BINS - 1)
    values = torch.stack((torch.ones_like(confidence), confidence, correct.to(confidence.dtype)), 1).double()
    return values.new_zeros(BINS, 3).index_add(0, bins, values)


def _expected_error(sums: Tensor) -> float:
    return ((sums[:, 1] - sums[:, 2]).abs().sum() / sums[:, 0].sum().clamp(min=1)).item()


def calibration_error(probabilities: Tensor, label: Tensor) -> float:
    """Return the expected calibration error: the mean distance of confidence and accuracy over equal bins of the confidence (Naeini
    et al. 2015; Guo et al. 2017).   Shape: probabilities [N, K], label [N]"""
    confidence, predicted = probabilities.max(1)
    return _expected_error(_calibration_sums(confidence, predicted == label))


def fit_temperature(logits: Tensor, label: Tensor) -> float:
    """Return the temperature T at which softmax(logits/T) has the least cross entropy (Guo et al. 2017). Fit it on held-out images,
    which are not those of the final judgement.   Shape: logits [N, K], label [N]"""
    logits, label = logits.double(), label.long()[:, None]
    low, high = -5.0, 5.0  # of log T; the cross entropy is convex in 1/T
    for _ in range(50):
        middle = (low + high) / 2
        probabilities = (logits / math.exp(middle)).softmax(1)
        slope = ((probabilities * logits).sum(1) - logits.gather(1, label)[:, 0]).mean()  # in 1/T
        low, high = (middle, high) if slope > 0 else (low, middle)
    return math.exp((low + high) / 2)


def predictions(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return images, true classes and logits, for plots and calibration: image [B, h, w, 3] uint8, reduced to 112 pixels at most,
    true [B], logits [B, K]."""
    factor = -(-max(batch.image.shape[1:3]) // MAX_PIXELS)
    image = F.avg_pool2d(batch.image.permute(0, 3, 1, 2).float(), factor, ceil_mode=True).round().to(torch.uint8)
    return {"image": image.permute(0, 2, 3, 1), "true": batch.label, "logits": _logits(model, batch)}
