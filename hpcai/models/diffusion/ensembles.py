"""Ensembles that a model draws for samples that are held out, and what they are worth.   B samples, M members, C channels"""

from typing import Any

import torch

from hpcai.models.diffusion import scores
from hpcai.models.diffusion.objective import Batch, draw_ensemble, score

_EDGES = -6.0, 6.0, 240  # first and last edge of a histogram of standard values, and its bins


def ensemble_scores(model: Any, batch: Batch, members: int = 8, offset: float = 0.5) -> dict[str, Any]:
    """``score``, and scores of ``members`` that are drawn for the condition of each sample, in the units that the network sees:
    ``crps``, ``rmse`` of their mean, ``spread_over_skill``, which is 1 for an ensemble that knows its error, ``coverage_90``,
    ``spectrum_error``, by how much power differs from the truth's, as a logarithm and on average over scales, and ``ks``, by how
    much the distributions of single values do (``hpcai.models.diffusion.scores``)."""
    rows = draw_ensemble(model, batch, members=members)
    drawn, truth = rows["members"].transpose(0, 1), rows["truth"]
    sizes, box = truth.shape[2:], model.cfg.fields.box if model.cfg.fields else ()
    at = scores.shells(sizes, box or 1.0, truth.device)
    edges = torch.linspace(*_EDGES, dtype=torch.float64, device=truth.device)
    every, true = drawn.reshape(-1, *sizes), truth.reshape(-1, *sizes)
    return {
        **score(model, batch, offset),
        "ensemble": scores.ensemble_sums(drawn, truth),
        "spectra": scores.spectrum_sums(every, true, at),
        "values": scores.one_point_sums(every, true, edges),
    }
