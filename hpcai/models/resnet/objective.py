"""Loss, accuracy and calibration of ResNet.   B batch, H W the image, K classes, N images"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.nn.calibration import calibration_sums, expected_error

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
        "calibration": (calibration_sums(confidence, correct), lambda sums: {"ece": expected_error(sums)}),
    }


def predictions(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return images, true classes and logits, for plots and calibration: image [B, h, w, 3] uint8, reduced to 112 pixels at most,
    true [B], logits [B, K]."""
    factor = -(-max(batch.image.shape[1:3]) // MAX_PIXELS)
    image = F.avg_pool2d(batch.image.permute(0, 3, 1, 2).float(), factor, ceil_mode=True).round().to(torch.uint8)
    return {"image": image.permute(0, 2, 3, 1), "true": batch.label, "logits": _logits(model, batch)}
