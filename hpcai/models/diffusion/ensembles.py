"""Scores of generated ensembles on held-out samples.   B samples, M members, C channels"""

from typing import Any

import torch

from hpcai.models.diffusion import scores
from hpcai.models.diffusion.objective import Batch, draw_ensemble, score

_EDGES = -6.0, 6.0, 240  # first and last edge of a histogram of standardized values, and the number of edges


def ensemble_scores(model: Any, batch: Batch, members: int = 8, offset: float = 0.5) -> dict[str, Any]:
    """Return ``score``, and scores of ``members`` generated for the condition of each sample, in standardized units: ``crps``,
    ``rmse`` of the ensemble mean, ``spread_over_skill``, which is 1 for a calibrated ensemble, ``coverage_90``, ``spectrum_error``,
    the mean absolute log ratio of power spectra, and ``ks``, the distance of one-point distributions
    (``hpcai.models.diffusion.scores``)."""
    rows = draw_ensemble(model, batch, members=members)
    ensemble, truth = rows["members"].transpose(0, 1), rows["truth"]
    sizes, box = truth.shape[2:], model.cfg.fields.box if model.cfg.fields else ()
    bins = scores.shells(sizes, box or 1.0, truth.device)
    edges = torch.linspace(*_EDGES, dtype=torch.float64, device=truth.device)
    generated, true = ensemble.reshape(-1, *sizes), truth.reshape(-1, *sizes)
    return {
        **score(model, batch, offset),
        "ensemble": scores.ensemble_sums(ensemble, truth),
        "spectra": scores.spectrum_sums(generated, true, bins),
        "values": scores.one_point_sums(generated, true, edges),
    }
