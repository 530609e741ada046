"""Loss and accuracy of R-GAT.   S seeds, K classes"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hpcai.models.rgat.batch import Batch


def _logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits and classes of all seeds, the latter -1 where they are unknown."""
    logits = model(batch)
    return logits if logits.dtype.itemsize > 2 else logits.float(), batch.labels.long()


def counted(batch: Batch) -> Tensor:
    """Return the number of seeds whose class is known."""
    return (batch.labels >= 0).sum().float()


def loss(model: Any, batch: Batch, counts: Tensor | None = None) -> dict[str, Any]:
    """Return the mean cross entropy of the seeds whose class is known, and their accuracy as (sum, count). ``counts``: Seeds to
    divide by; None: those of the batch."""
    sums, own = score(model, batch), counted(batch)
    return {"loss": sums["loss"][0] / (own if counts is None else counts).clamp(min=1e-9), "accuracy": sums["accuracy"]}


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """Return sums and counts over the seeds whose class is known: ``accuracy``, the metric of MLPerf (target 0.72), and the cross
    entropy ``loss``."""
    (logits, labels), count = _logits(model, batch), counted(batch)
    return {
        "accuracy": ((logits.detach().argmax(1) == labels).sum(), count),
        "loss": (F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), count),
    }


def predictions(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return numbers, classes (-1: unknown) and logits of the seeds that are no padding, for plots: paper [S], true [S], logits
    [S, K]."""
    logits, labels = _logits(model, batch)
    real = batch.papers >= 0
    return {"paper": batch.papers[real], "true": labels[real], "logits": logits[real]}
