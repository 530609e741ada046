"""Loss of OpenFold, and lDDT (supplement 1.9), in float32 at least.

Every term is a mean over the residues of a protein, then over proteins, so that a batch gives the mean over its proteins.
B batch, S clusters, R residues, L passes of the structure module.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels.chunking import chunk_size
from hpcai.models.openfold import device_cache, residues
from hpcai.models.openfold.config import ObjectiveConfig
from hpcai.models.openfold.geometry import Frames, quat_to_rot
from hpcai.models.openfold.heads import ERROR_BINS, PLDDT_BINS, distance_edges
from hpcai.models.openfold.model import Prediction
from hpcai.models.openfold.violations import violation_loss
from hpcai.nn.recompute import run_block

_CLAMP = _UNIT = 10.0  # angstrom
_FAPE_EPS, _EPS = 1e-4, 1e-8
_RESOLUTION_RANGE = 0.1, 3.0  # angstrom: structures used by the loss of confidence
_CA = residues.ATOM_ORDER["CA"]
_CPU = 32 << 20  # bytes of distances in a chunk


def loss_terms(prediction: Prediction, features: Mapping[str, Tensor], cfg: ObjectiveConfig) -> dict[str, Tensor]:
    """Return all terms with a weight, unweighted.   features of the last pass -> [B] each"""
    dtype = prediction.atoms.positions.dtype
    f = {name: value.to(dtype) if value.is_floating_point() else value for name, value in features.items()}
    logits, atoms = prediction.logits, prediction.atoms
    well_resolved = ((f["resolution"] >= _RESOLUTION_RANGE[0]) & (f["resolution"] <= _RESOLUTION_RANGE[1])).to(dtype)
    table = {
        "fape": lambda: fape(prediction, f),
        "chi": lambda: chi(atoms.angles, atoms.raw_angles, f),
        "distogram": lambda: distogram(logits.distogram, f),
        "masked_msa": lambda: masked_msa(logits.masked_msa, f),
        "plddt": lambda: confidence(logits.plddt, prediction.positions, f) * well_resolved,
        "resolved": lambda: resolved(logits.resolved, f) * well_resolved,
        "violation": lambda: violation_loss(atoms.positions[-1], f["atom14_atom_exists"], f["aatype"], f["residue_index"]),
        "aligned_error": lambda: aligned_error(logits.aligned_error, atoms.backbone[-1], f) * well_resolved,
    }
    return {name: term() for name, term in table.items() if getattr(cfg, name)}


def weighted_total(values: Mapping[str, Tensor], features: Mapping[str, Tensor], cfg: ObjectiveConfig) -> Tensor:
    """Return the weighted sum, times the square root of the number of residues.   [B]"""
    weighted = torch.stack([getattr(cfg, name) * term for name, term in values.items()]).sum(0)
    length = features["seq_length"].to(weighted.dtype).clamp(max=features["aatype"].shape[1])
    return weighted * length.sqrt()


def predict(model: Any, batch: Any) -> tuple[dict[str, Tensor], Prediction]:
    """Return the features of the last pass, and the prediction."""
    features = batch if isinstance(batch, Mapping) else batch._asdict()
    return {name: value[..., -1] for name, value in features.items()}, model(features)


def loss(model: Any, batch: Any, cfg: ObjectiveConfig | None = None) -> dict[str, Tensor]:
    """Return the loss and its terms, means over proteins, for features with passes (``OpenFold.forward``), a mapping or named
    tuple."""
    cfg = cfg or ObjectiveConfig()
    last, prediction = predict(model, batch)
    with torch.autocast(prediction.positions.device.type, enabled=False):
        loss_values = loss_terms(prediction, last, cfg)
        values = {name: term.detach().mean() for name, term in loss_values.items()}
        ca = prediction.positions.detach()[:, :, _CA], last["all_atom_positions"][:, :, _CA], last["all_atom_mask"][:, :, _CA]
        return {"loss": weighted_total(loss_values, last, cfg).mean(), **values, "lddt": lddt(*ca).mean()}


def fape(prediction: Prediction, f: Mapping[str, Tensor]) -> Tensor:
    """Return the frame-aligned point error (Algorithm 28): backbones in all passes, and all atoms in the last, renamed.   [B]"""
    atoms = prediction.atoms
    frames = Frames(quat_to_rot(atoms.backbone[..., :4]), atoms.backbone[..., 4:])
    true, mask = _frames_from_matrix(f["backbone_rigid_tensor"]), f["backbone_rigid_mask"]
    clamp = torch.where(f["use_clamped_fape"] > 0, _CLAMP, math.inf)
    passes = len(frames.translation)  # each is a separate protein, with the same targets
    pass_frames, (rotation, translation, known, clamp_of_pass) = Frames(*(x.flatten(0, 1) for x in frames)), (
        x.expand(passes, *x.shape).flatten(0, 1) for x in (*true, mask, clamp)
    )
    backbone = frame_aligned_point_error(
        pass_frames, Frames(rotation, translation), known, pass_frames.translation, translation, known, clamp_of_pass,
    ).view(passes, -1).mean(0)  # fmt: skip
    swapped = rename_symmetric_atoms(atoms.positions[-1].detach(), f)[..., None]
    original = 1 - swapped
    true_groups = original[..., None, None] * f["rigidgroups_gt_frames"] + swapped[..., None, None] * f["rigidgroups_alt_gt_frames"]
    true_positions = original[..., None] * f["atom14_gt_positions"] + swapped[..., None] * f["atom14_alt_gt_positions"]
    known = original * f["atom14_gt_exists"] + swapped * f["atom14_alt_gt_exists"]
    predicted = Frames(atoms.rotation[-1].flatten(1, 2), atoms.translation[-1].flatten(1, 2))
    side_chains = frame_aligned_point_error(
        predicted, _frames_from_matrix(true_groups.flatten(1, 2)), f["rigidgroups_gt_exists"].flatten(1),
        atoms.positions[-1].flatten(1, 2), true_positions.flatten(1, 2), known.flatten(1), torch.full_like(clamp, _CLAMP),
    )  # fmt: skip
    return (backbone + side_chains) / 2


def _frames_from_matrix(matrix: Tensor) -> Frames:
    """[..., 4, 4]"""
    return Frames(matrix[..., :3, :3], matrix[..., :3, 3])


def frame_aligned_point_error(
    frames: Frames, true_frames: Frames, frames_mask: Tensor, points: Tensor, true_points: Tensor, points_mask: Tensor,
    clamp: Tensor,
) -> Tensor:
    """Return the mean distance between predicted and true points in the coordinates of each frame, over 10 angstrom.

    Distances are computed in chunks of frames, and recomputed in the backward pass.
    frames [B, F], points [B, P, 3], clamp [B] the maximum of a distance, angstrom -> [B]
    """

    def chunk_error(rotation: Tensor, translation: Tensor, rows: slice) -> Tensor:
        difference = _to_frames(Frames(rotation, translation), points) - _to_frames(true_frames.at(slice(None), rows), true_points)
        error = (difference.square().sum(2) + _FAPE_EPS).sqrt().clamp(max=clamp[:, None, None])  # [B, F, P]
        return ((error @ points_mask[:, :, None])[..., 0] * frames_mask[:, rows]).sum(1)

    count = frames_mask.shape[1]
    step = chunk_size(points, points.numel() * points.element_size(), _CPU)
    sums = points.new_zeros(len(points))
    for first in range(0, count, step):
        rows = slice(first, first + step)
        args = frames.rotation[:, rows], frames.translation[:, rows], rows
        sums = sums + (chunk_error(*args) if step >= count else run_block(chunk_error, "layers", *args))
    return sums / _UNIT / (_FAPE_EPS + frames_mask.sum(1)) / (_FAPE_EPS + points_mask.sum(1))


def _to_frames(frames: Frames, points: Tensor) -> Tensor:
    """Return points in the coordinates of every frame.   [B, F] and [B, P, 3] -> [B, F, 3, P]"""
    inverse = frames.rotation.transpose(-1, -2)
    local = inverse.flatten(1, 2) @ points.transpose(1, 2)  # one product for all frames
    return local.unflatten(1, (-1, 3)) - inverse @ frames.translation[..., None]


def rename_symmetric_atoms(positions: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return 1 for residues whose true distances fit the prediction better with renamed symmetric atoms (Algorithm 26).   [B, R]"""
    sums = []
    exists, ambiguous = f["atom14_gt_exists"], f["atom14_atom_is_ambiguous"]
    step = chunk_size(positions, 14 * positions[..., 0].numel() * positions.element_size(), _CPU)
    for name in ("atom14_gt_positions", "atom14_alt_gt_positions"):
        parts = []
        for first in range(0, positions.shape[1], step):
            chunk = slice(first, first + step)
            symmetric, others = (exists * ambiguous)[:, chunk], exists * (1 - ambiguous)
            predicted, true = (  # [B, r * 14, R * 14] angstrom
                torch.cdist(x[:, chunk].flatten(1, 2), x.flatten(1, 2), compute_mode="donot_use_mm_for_euclid_dist")
                for x in (positions, f[name])
            )
            error = (predicted - true).abs() @ others.flatten(1)[..., None]  # [B, r * 14, 1]
            parts.append((error.view(symmetric.shape) * symmetric).sum(2))
        sums.append(torch.cat(parts, 1))
    return (sums[1] < sums[0]).to(positions.dtype)


def chi(angles: Tensor, raw: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of side-chain torsion angles (Algorithm 27), to the nearer of both targets of periodic angles.

    [L, B, R, 7, 2] twice -> [B]
    """
    true, mask = f["chi_angles_sin_cos"], f["chi_mask"]
    sign = 1 - 2 * device_cache.to_device(residues.CHI_PERIODIC, true)[f["aatype"]][..., None]
    squared_error = torch.minimum(*((x - angles[..., 3:, :]).square().sum(-1) for x in (true, true * sign)))  # [L, B, R, 4]
    passes = len(angles)
    length = ((raw.square().sum(-1) + _EPS).sqrt() - 1).abs()  # [L, B, R, 7]
    residue_mask = f["seq_mask"][..., None]
    return (0.5 * (squared_error * mask).sum((0, 2, 3)) / (1e-4 + passes * mask.sum((1, 2)))
            + 0.01 * (length * residue_mask).sum((0, 2, 3)) / (1e-4 + passes * 7 * residue_mask.sum((1, 2))))  # fmt: skip


def distogram(logits: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of pseudo-beta distances, in 64 bins up to 21.7 angstrom.   logits [B, R, R, 64] -> [B]"""
    edges = distance_edges(logits) ** 2
    x, mask = f["pseudo_beta"], f["pseudo_beta_mask"]
    bin_ = torch.bucketize((x[:, :, None] - x[:, None]).square().sum(-1), edges)
    pair_mask = mask[:, :, None] * mask[:, None]
    return (_cross_entropy(logits, bin_) * pair_mask).sum((1, 2)) / (_EPS + pair_mask.sum((1, 2)))


def _cross_entropy(logits: Tensor, true: Tensor) -> Tensor:
    """[..., K] and [...] -> [...]"""
    return F.cross_entropy(logits.movedim(-1, 1), true, reduction="none")


def masked_msa(logits: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of masked letters.   logits [B, S, R, 23] -> [B]"""
    mask = f["bert_mask"]
    return (_cross_entropy(logits, f["true_msa"]) * mask).sum((1, 2)) / (2 * _EPS + mask.sum((1, 2)))


def confidence(logits: Tensor, positions: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of lDDT-Calpha of residues in 50 bins.   logits [B, R, 50], positions [B, R, 37, 3] -> [B]"""
    mask = f["all_atom_mask"][:, :, _CA]
    score = lddt(positions.detach()[:, :, _CA], f["all_atom_positions"][:, :, _CA], mask, per_residue=True)
    bin_ = (score * PLDDT_BINS).floor().long().clamp(0, PLDDT_BINS - 1)
    return (_cross_entropy(logits, bin_) * mask).sum(1) / (_EPS + mask.sum(1))


def resolved(logits: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of experimentally resolved atoms.   logits [B, R, 37] -> [B]"""
    exists = f["atom37_atom_exists"]
    error = F.binary_cross_entropy_with_logits(logits, f["all_atom_mask"], reduction="none")
    return (error * exists).sum((1, 2)) / (_EPS + exists.sum((1, 2)))


def aligned_error(logits: Tensor | None, backbone: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of errors in all frames, 64 bins up to 31 A.   logits [B, R, R, 64], backbone [B, R, 7] -> [B]"""
    if logits is None:
        raise ConfigError("objective.aligned_error is above 0, but the network has no such head; set model.heads.tm=true")
    true, mask = _frames_from_matrix(f["backbone_rigid_tensor"]), f["backbone_rigid_mask"]
    with torch.no_grad():
        predicted = Frames(quat_to_rot(backbone[..., :4]), backbone[..., 4:])
        # A residue in its own frame has exactly the same coordinates in both: the first bin is an error of 0.
        local = [x.at(slice(None), slice(None), None).invert_apply(x.translation[:, None]) for x in (predicted, true)]
        squares = (local[0] - local[1]).square().sum(-1)
        bin_ = torch.bucketize(squares, torch.linspace(0, 31, ERROR_BINS - 1, device=squares.device).to(squares.dtype) ** 2)
    pair_mask = mask[:, :, None] * mask[:, None]
    return (_cross_entropy(logits, bin_) * pair_mask).sum((1, 2)) / (2 * _EPS + pair_mask.sum((1, 2)))


def lddt(predicted: Tensor, true: Tensor, mask: Tensor, per_residue: bool = False, cutoff: float = 15.0) -> Tensor:
    """Return the fraction of true distances up to ``cutoff`` angstrom preserved within 0.5, 1, 2 and 4 (Mariani et al. 2013).

    guess and true [B, R, 3], mask [B, R] -> [B], or [B, R] per residue
    """
    true_distances, distances = (torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (true, predicted))
    not_self = 1 - torch.eye(mask.shape[1], dtype=mask.dtype, device=mask.device)
    pair_mask = (true_distances < cutoff) * mask[:, :, None] * mask[:, None] * not_self
    preserved = sum((true_distances - distances).abs() < limit for limit in (0.5, 1.0, 2.0, 4.0)) / 4
    dims = (2,) if per_residue else (1, 2)
    return (1e-10 + (pair_mask * preserved).sum(dims)) / (1e-10 + pair_mask.sum(dims))
