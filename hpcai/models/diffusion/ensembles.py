"""Scores of generated ensembles on held-out samples.   B samples, M members, C channels"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcai.models.diffusion import scores
from hpcai.models.diffusion.objective import Batch, draw_ensemble, score

_EDGES = -6.0, 6.0, 240  # first and last edge of a histogram of standardized values, and the number of edges


def ensemble_scores(model: Any, batch: Batch, members: int = 8, offset: float = 0.5) -> dict[str, Any]:
    """Return ``score``, and scores of ``members`` generated for the condition of each sample, in standardized units: ``crps``,
    ``rmse`` of the ensemble mean, ``spread_over_skill``, which is 1 for a calibrated ensemble, ``coverage_90``, ``spectrum_error``,
    the mean absolute log ratio of power spectra, and ``ks``, the distance of one-point distributions
    (``hpcai.models.diffusion.scores``); of a model with a regression mean ``dressed_crps``, the CRPS of the mean with normal
    errors of the residual's deviation. Scores of forecasts end in ``_<k>``, the lead time in intervals, with ``persistence_<k>``,
    the error of the initial state."""
    rows = draw_ensemble(model, batch, members=members)
    ensemble, truth = rows["members"].transpose(0, 1), rows["truth"]
    result = score(model, batch, offset)
    if batch.future is None:
        result |= _scores(model, ensemble, truth)
        if "mean" in rows:
            dressed = scores.gaussian_crps(rows["mean"].double(), model.residual_scale(truth.double()), truth)
            result["dressed"] = scores.mean_sums("dressed_crps", dressed, model.weights)
        return result
    for lead in range(truth.shape[1]):
        after = _scores(model, ensemble[:, :, lead], truth[:, lead])
        after["persistence"] = scores.mean_sums("persistence", (truth[:, lead] - rows["start"]).double().abs(), model.weights)
        for name, (sums, finish) in after.items():
            result[f"{name}_{lead + 1}"] = sums, partial(_finish_lead, finish, lead + 1)
    return result


def _scores(model: Any, ensemble: Tensor, truth: Tensor) -> dict[str, Any]:
    """Return the sums of scores.   ensemble [M, B, C, ...], truth [B, C, ...]"""
    sizes, box = truth.shape[2:], model.cfg.fields.box if model.cfg.fields else ()
    bins = scores.shells(sizes, box or 1.0, truth.device)
    edges = torch.linspace(*_EDGES, dtype=torch.float64, device=truth.device)
    generated, true = ensemble.reshape(-1, *sizes), truth.reshape(-1, *sizes)
    return {
        "ensemble": scores.ensemble_sums(ensemble, truth, model.weights),
        "spectra": scores.spectrum_sums(generated, true, bins),
        "values": scores.one_point_sums(generated, true, edges),
    }


def _finish_lead(finish: Callable[..., dict[str, float]], lead: int, *sums: Tensor) -> dict[str, float]:
    return {f"{name}_{lead}": value for name, value in finish(*sums).items()}
