"""Loss and scores of CosmoFlow.   B batch, D H W the cube, C redshifts, P parameters."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.models.cosmoflow.model import log_density


class Batch(NamedTuple):
    """Universes with their parameters."""

    counts: Tensor  # [B, D, H, W, C] particles per cell, int16
    target: Tensor  # [B, P] parameters scaled to [-1, 1]


def _predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    double = next(model.parameters()).dtype == torch.float64
    dtype = torch.float64 if double else torch.float32  # a model in lower precision casts its input itself
    predicted = model(log_density(batch.counts, dtype))
    return predicted.to(dtype), batch.target.to(dtype)


def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the mean squared error of the scaled parameters, and ``mae``, their mean absolute error."""
    predicted, target = _predict(model, batch)
    return {"loss": F.mse_loss(predicted, target), "mae": F.l1_loss(predicted.detach(), target)}


def error(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor | float]]:
    """Return sums and counts of ``mae``, the metric of MLPerf HPC (target 0.124), over all elements, and of ``mse``."""
    guess, target = _predict(model, batch)
    return {"mae": ((guess - target).abs().sum(), guess.numel()), "mse": ((guess - target).square().sum(), guess.numel())}


def pairs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return predicted and true parameters, scaled, per sample.   [B, P] each"""
    predicted, target = _predict(model, batch)
    return {"predicted": predicted.float(), "true": target.to(torch.float32)}
