"""Calibration of predicted probabilities.   N samples, K classes"""

import math

import torch
from torch import Tensor

BINS = 15


def calibration_sums(confidence: Tensor, correct: Tensor) -> Tensor:
    """Return count, sum of the confidence and correct ones of each of equal bins of the confidence.   [N] each -> [BINS, 3]"""
    bins = (confidence * BINS).long().clamp(0, BINS - 1)
    values = torch.stack((torch.ones_like(confidence), confidence, correct.to(confidence.dtype)), 1).double()
    return values.new_zeros(BINS, 3).index_add(0, bins, values)


def expected_error(sums: Tensor) -> float:
    """Return the expected calibration error of the sums.   [BINS, 3]"""
    return ((sums[:, 1] - sums[:, 2]).abs().sum() / sums[:, 0].sum().clamp(min=1)).item()


def calibration_error(probabilities: Tensor, label: Tensor) -> float:
    """Return the expected calibration error: the mean distance of confidence and accuracy over equal bins of the confidence (Naeini
    et al. 2015; Guo et al. 2017).   Shape: probabilities [N, K], label [N]"""
    confidence, predicted = probabilities.max(1)
    return expected_error(calibration_sums(confidence, predicted == label))


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
