"""Scores of predicted structures: lDDT, distances, superposed atoms; and rows for plots.   B batch, R residues"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcai.models.openfold import objective
from hpcai.models.openfold.config import ObjectiveConfig
from hpcai.models.openfold.heads import distance_edges, plddt
from hpcai.models.openfold.residues import ATOM_ORDER

_CA = ATOM_ORDER["CA"]
_GDT_TS, _GDT_HA = (1.0, 2.0, 4.0, 8.0), (0.5, 1.0, 2.0, 4.0)  # angstrom
_REPORTED = ObjectiveConfig(chi=0, plddt=0)  # the loss terms that are reported for held-out chains, unweighted


def score(model: Any, batch: Any) -> dict[str, Tensor]:
    """Return means over chains: ``lddt``, the metric of MLPerf HPC (target 0.8), lDDT-Calpha, 0 to 1; ``drmsd`` in angstrom;
    ``gdt_ts`` and ``gdt_ha`` of CA atoms, 0 to 1; ``confidence``, pLDDT, 0 to 100; and three terms of the loss."""
    features, prediction = objective.predict(model, batch)
    with torch.autocast(prediction.positions.device.type, enabled=False):
        guess, true, mask = _ca_atoms(prediction, features)
        fitted = superpose(guess, true, mask)
        confidence = (plddt(prediction.logits.plddt) * mask).sum(1) / mask.sum(1)
        scores = {
            "lddt": objective.lddt(guess, true, mask), "drmsd": drmsd(guess, true, mask),
            "gdt_ts": gdt(fitted, true, mask, _GDT_TS), "gdt_ha": gdt(fitted, true, mask, _GDT_HA), "confidence": confidence,
            **objective.loss_terms(prediction, features, _REPORTED),
        }  # fmt: skip
        return {name: value.mean() for name, value in scores.items()}


def predict_structures(model: Any, batch: Any) -> dict[str, Tensor]:
    """Return rows for plots, residues of all chains concatenated: types, true and predicted atoms [37, 3] angstrom, confidence and
    lDDT 0 to 100, NaN without a CA; ``index`` and ``residues`` [B] of each chain; and the expected distances [R * R] of the
    distogram, angstrom."""
    features, prediction = objective.predict(model, batch)
    with torch.autocast(prediction.positions.device.type, enabled=False):
        predicted, true, mask = _ca_atoms(prediction, features)
        per_residue = 100 * objective.lddt(predicted, true, mask, per_residue=True).where(mask > 0, torch.nan)
        real = features["seq_mask"] > 0
        pair_mask = real[:, :, None] & real[:, None]
        return {
            "index": features["index"], "residues": real.sum(1), "aatype": features["aatype"][real].to(torch.int8),
            "predicted": prediction.positions[real].float(), "true": features["all_atom_positions"][real].float(),
            "mask": features["all_atom_mask"][real].to(torch.uint8), "plddt": plddt(prediction.logits.plddt)[real].float(),
            "lddt": per_residue[real].float(), "distance": expected_distance(prediction.logits.distogram)[pair_mask].half(),
        }  # fmt: skip


def _ca_atoms(prediction: Any, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return predicted and true CA [B, R, 3], and their mask [B, R]."""
    predicted, true, mask = prediction.positions, features["all_atom_positions"], features["all_atom_mask"]
    return predicted[:, :, _CA], true[:, :, _CA].to(predicted.dtype), mask[:, :, _CA].to(predicted.dtype)


def superpose(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Rotate and translate ``guess`` to the least squared distances to ``true`` (Kabsch 1976).

    guess and true [B, R, 3], mask [B, R] -> [B, R, 3]
    """
    dtype, weight = torch.float64, mask.double()[..., None]
    count = weight.sum(1, keepdim=True).clamp(min=1)
    centroids = [(x.to(dtype) * weight).sum(1, keepdim=True) / count for x in (predicted, true)]
    centred = predicted.to(dtype) - centroids[0]
    u, _, v = torch.linalg.svd((centred * weight).transpose(1, 2) @ (true.to(dtype) - centroids[1]))
    mirrored = torch.linalg.det(u @ v).sign()
    u = torch.cat([u[..., :2], u[..., 2:] * mirrored[:, None, None]], 2)  # no reflection
    return (centred @ (u @ v) + centroids[1]).to(predicted.dtype)


def gdt(superposed: Tensor, true: Tensor, mask: Tensor, limits: Sequence[float] = _GDT_TS) -> Tensor:
    """Return the global distance test (Zemla 2003): the fraction of atoms within each limit in angstrom, averaged. The limits are
    those of GDT-TS; half of them give GDT-HA. With one superposition of all atoms, it is a lower bound of a search over many.

    superposed and true [B, R, 3], mask [B, R] -> [B]
    """
    distances = torch.linalg.vector_norm(superposed - true, dim=-1)
    within = torch.stack([(distances <= limit).to(mask.dtype) for limit in limits]).mean(0)
    return (within * mask).sum(1) / mask.sum(1).clamp(min=1)


def drmsd(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Return the root mean square difference of the distances of all pairs of atoms, angstrom.   [B, R, 3] twice, [B, R] -> [B]"""
    true_distances, distances = (torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (true, predicted))
    pair_mask = mask[:, :, None] * mask[:, None]
    count = mask.sum(1)
    return ((true_distances - distances).square() * pair_mask).sum((1, 2)).div((count * (count - 1)).clamp(min=1)).sqrt()


def expected_distance(logits: Tensor) -> Tensor:
    """Return the mean distance of a distogram, angstrom; beyond 21.7 it counts as 21.8.   [..., 64] -> [...]"""
    edges = distance_edges(logits)
    width = edges[1] - edges[0]
    return logits.softmax(-1) @ (torch.cat([edges, edges[-1:] + width]) - width / 2)
