"""The loss that trains OpenFold, and lDDT (supplement 1.9), in float32 at least.

Every term is a mean over the residues of a protein, then over proteins, so that a batch is the mean of its proteins by themselves.
B batch, S clusters, R residues, L passes of the structure module.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcai.errors import ConfigError
from hpcai.kernels.chunking import chunk_size
from hpcai.models.openfold import residues, device_cache
from hpcai.models.openfold.config import ObjectiveConfig
from hpcai.models.openfold.geometry import Frames, rotation_of
from hpcai.models.openfold.heads import ERROR_BINS, PLDDT_BINS, distance_edges
from hpcai.models.openfold.model import Prediction
from hpcai.models.openfold.violations import violation

_CLAMP = _UNIT = 10.0  # angstrom
_FAPE_EPS, _EPS = 1e-4, 1e-8
_RESOLVED = 0.1, 3.0  # angstrom: structures that confidence is learnt from
_CA = residues.PLACE["CA"]
_CPU = 32 << 20  # bytes of distances at a time


def terms(prediction: Prediction, features: Mapping[str, Tensor], cfg: ObjectiveConfig) -> dict[str, Tensor]:
    """The terms that have a weight, each without it.   features of the last pass -> [B] each"""
    kind = prediction.atoms.positions.dtype
    f = {name: value.to(kind) if value.is_floating_point() else value for name, value in features.items()}
    logits, atoms = prediction.logits, prediction.atoms
    known = ((f["resolution"] >= _RESOLVED[0]) & (f["resolution"] <= _RESOLVED[1])).to(kind)
    table = {
        "fape": lambda: fape(prediction, f),
        "chi": lambda: chi(atoms.angles, atoms.raw_angles, f),
        "distogram": lambda: distogram(logits.distogram, f),
        "masked_msa": lambda: masked_msa(logits.masked_msa, f),
        "plddt": lambda: confidence(logits.plddt, prediction.positions, f) * known,
        "resolved": lambda: resolved(logits.resolved, f) * known,
        "violation": lambda: violation(atoms.positions[-1], f["atom14_atom_exists"], f["aatype"], f["residue_index"]),
        "aligned_error": lambda: aligned_error(logits.aligned_error, atoms.backbone[-1], f) * known,
    }
    return {name: term() for name, term in table.items() if getattr(cfg, name)}


def total(found: Mapping[str, Tensor], features: Mapping[str, Tensor], cfg: ObjectiveConfig) -> Tensor:
    """The weighted sum, times the square root of how many residues were there to learn from.   [B]"""
    weighted = torch.stack([getattr(cfg, name) * term for name, term in found.items()]).sum(0)
    length = features["seq_length"].to(weighted.dtype).clamp(max=features["aatype"].shape[1])
    return weighted * length.sqrt()


def predicted(model: Any, batch: Any) -> tuple[dict[str, Tensor], Prediction]:
    """The features of the last pass, and what the model says after it."""
    features = batch if isinstance(batch, Mapping) else batch._asdict()
    return {name: value[..., -1] for name, value in features.items()}, model(features)


def loss(model: Any, batch: Any, cfg: ObjectiveConfig | None = None) -> dict[str, Tensor]:
    """The loss and its terms, as means over proteins, for features with passes (see ``OpenFold.forward``) in a mapping or named
    tuple."""
    cfg = cfg or ObjectiveConfig()
    last, prediction = predicted(model, batch)
    with torch.autocast(prediction.positions.device.type, enabled=False):
        found = terms(prediction, last, cfg)
        values = {name: term.detach().mean() for name, term in found.items()}
        with torch.no_grad():
            score = lddt(prediction.positions[:, :, _CA], last["all_atom_positions"][:, :, _CA], last["all_atom_mask"][:, :, _CA])
        return {"loss": total(found, last, cfg).mean(), **values, "lddt": score.mean()}


def fape(prediction: Prediction, f: Mapping[str, Tensor]) -> Tensor:
    """Frame-aligned point error (Algorithm 28) of backbones in every pass, and of all atoms in the last under the naming of twins
    that fits better.   [B]"""
    atoms = prediction.atoms
    frames = Frames(rotation_of(atoms.backbone[..., :4]), atoms.backbone[..., 4:])
    true, mask = _frames(f["backbone_rigid_tensor"]), f["backbone_rigid_mask"]
    clamp = torch.where(f["use_clamped_fape"] > 0, _CLAMP, math.inf)
    passes = len(frames.translation)  # each is a protein of its own, with the same truth
    ones, (turns, points, there, most) = Frames(*(x.flatten(0, 1) for x in frames)), (
        x.expand(passes, *x.shape).flatten(0, 1) for x in (*true, mask, clamp)
    )
    backbone = point_error(ones, Frames(turns, points), there, ones.translation, points, there, most).view(passes, -1).mean(0)
    better = renamed(atoms.positions[-1].detach(), f)[..., None]
    kept = 1 - better
    group = kept[..., None, None] * f["rigidgroups_gt_frames"] + better[..., None, None] * f["rigidgroups_alt_gt_frames"]
    where = kept[..., None] * f["atom14_gt_positions"] + better[..., None] * f["atom14_alt_gt_positions"]
    there = kept * f["atom14_gt_exists"] + better * f["atom14_alt_gt_exists"]
    guess = Frames(atoms.rotation[-1].flatten(1, 2), atoms.translation[-1].flatten(1, 2))
    side = point_error(
        guess, _frames(group.flatten(1, 2)), f["rigidgroups_gt_exists"].flatten(1),
        atoms.positions[-1].flatten(1, 2), where.flatten(1, 2), there.flatten(1), torch.full_like(clamp, _CLAMP),
    )  # fmt: skip
    return (backbone + side) / 2


def _frames(matrix: Tensor) -> Frames:
    """[..., 4, 4]"""
    return Frames(matrix[..., :3, :3], matrix[..., :3, 3])


def point_error(
    frames: Frames, true_frames: Frames, frames_mask: Tensor, points: Tensor, true_points: Tensor, points_mask: Tensor,
    clamp: Tensor,
) -> Tensor:
    """Mean distance of points to where they should be, as each frame sees them, over 10 angstrom.

    Several million distances are gone through a few frames at a time, and again in the backward pass.
    frames [B, F], points [B, P, 3], clamp [B] the most that a distance counts, angstrom -> [B]
    """  # fmt: skip

    def some(rotation: Tensor, translation: Tensor, rows: slice) -> Tensor:
        seen = _seen(Frames(rotation, translation), points) - _seen(true_frames.at(slice(None), rows), true_points)
        error = (seen.square().sum(2) + _FAPE_EPS).sqrt().clamp(max=clamp[:, None, None])  # [B, F, P]
        return ((error @ points_mask[:, :, None])[..., 0] * frames_mask[:, rows]).sum(1)

    count = frames_mask.shape[1]
    step = chunk_size(points, points.numel() * points.element_size(), _CPU)
    sums = points.new_zeros(len(points))
    for first in range(0, count, step):
        rows = slice(first, first + step)
        given = frames.rotation[:, rows], frames.translation[:, rows], rows
        sums = sums + (some(*given) if step >= count else checkpoint(some, *given, use_reentrant=False))
    return sums / _UNIT / (_FAPE_EPS + frames_mask.sum(1)) / (_FAPE_EPS + points_mask.sum(1))


def _seen(frames: Frames, points: Tensor) -> Tensor:
    """Points in the coordinates of every frame.   [B, F] and [B, P, 3] -> [B, F, 3, P]"""
    turned = frames.rotation.transpose(-1, -2)
    seen = turned.flatten(1, 2) @ points.transpose(1, 2)  # one product, of all frames at once
    return seen.unflatten(1, (-1, 3)) - turned @ frames.translation[..., None]


def renamed(positions: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """1 for residues whose true distances fit the prediction better when twin atoms swap names (Algorithm 26).   [B, R]"""
    sums = []
    exists, ambiguous = f["atom14_gt_exists"], f["atom14_atom_is_ambiguous"]
    step = chunk_size(positions, 14 * positions[..., 0].numel() * positions.element_size(), _CPU)
    for name in ("atom14_gt_positions", "atom14_alt_gt_positions"):
        parts = []
        for first in range(0, positions.shape[1], step):
            some = slice(first, first + step)
            near, far = (exists * ambiguous)[:, some], exists * (1 - ambiguous)
            guess, true = (_apart(x[:, some], x) for x in (positions, f[name]))
            off = (guess - true).abs() @ far.flatten(1)[..., None]  # [B, r * 14, 1]
            parts.append((off.view(near.shape) * near).sum(2))
        sums.append(torch.cat(parts, 1))
    return (sums[1] < sums[0]).to(positions.dtype)


def _apart(some: Tensor, every: Tensor) -> Tensor:
    """[B, r, 14, 3] and [B, R, 14, 3] -> [B, r * 14, R * 14] angstrom"""
    return torch.cdist(some.flatten(1, 2), every.flatten(1, 2), compute_mode="donot_use_mm_for_euclid_dist")


def chi(angles: Tensor, raw: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Side chains' angles (Algorithm 27), against the nearer of two truths where half a turn changes nothing.

    [L, B, R, 7, 2] twice -> [B]
    """
    true, mask = f["chi_angles_sin_cos"], f["chi_mask"]
    turn = 1 - 2 * device_cache.on(residues.CHI_PERIODIC, true)[f["aatype"]][..., None]
    off = torch.minimum(*((x - angles[..., 3:, :]).square().sum(-1) for x in (true, true * turn)))  # [L, B, R, 4]
    passes = len(angles)
    length = ((raw.square().sum(-1) + _EPS).sqrt() - 1).abs()  # [L, B, R, 7]
    seen = f["seq_mask"][..., None]
    return (0.5 * (off * mask).sum((0, 2, 3)) / (1e-4 + passes * mask.sum((1, 2)))
            + 0.01 * (length * seen).sum((0, 2, 3)) / (1e-4 + passes * 7 * seen.sum((1, 2))))  # fmt: skip


def distogram(logits: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of the distances of pseudo-beta atoms, in 64 bins up to 21.7 angstrom.   logits [B, R, R, 64] -> [B]"""
    edges = distance_edges(logits) ** 2
    x, mask = f["pseudo_beta"], f["pseudo_beta_mask"]
    bin_ = torch.bucketize((x[:, :, None] - x[:, None]).square().sum(-1), edges)
    both = mask[:, :, None] * mask[:, None]
    return (_entropy(logits, bin_) * both).sum((1, 2)) / (_EPS + both.sum((1, 2)))


def _entropy(logits: Tensor, true: Tensor) -> Tensor:
    """[..., K] and [...] -> [...]"""
    return F.cross_entropy(logits.movedim(-1, 1), true, reduction="none")


def masked_msa(logits: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of the letters that were hidden.   logits [B, S, R, 23] -> [B]"""
    mask = f["bert_mask"]
    return (_entropy(logits, f["true_msa"]) * mask).sum((1, 2)) / (2 * _EPS + mask.sum((1, 2)))


def confidence(logits: Tensor, positions: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of the 50 bins of a residue's lDDT-Calpha.   logits [B, R, 50], positions [B, R, 37, 3] -> [B]"""
    mask = f["all_atom_mask"][:, :, _CA]
    score = lddt(positions.detach()[:, :, _CA], f["all_atom_positions"][:, :, _CA], mask, each=True)
    bin_ = (score * PLDDT_BINS).floor().long().clamp(0, PLDDT_BINS - 1)
    return (_entropy(logits, bin_) * mask).sum(1) / (_EPS + mask.sum(1))


def resolved(logits: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of which atoms the experiment saw.   logits [B, R, 37] -> [B]"""
    exists = f["atom37_atom_exists"]
    error = F.binary_cross_entropy_with_logits(logits, f["all_atom_mask"], reduction="none")
    return (error * exists).sum((1, 2)) / (_EPS + exists.sum((1, 2)))


def aligned_error(logits: Tensor | None, backbone: Tensor, f: Mapping[str, Tensor]) -> Tensor:
    """How far each residue is off as each frame sees it, 64 bins up to 31 A.   logits [B, R, R, 64], backbone [B, R, 7] -> [B]"""
    if logits is None:
        raise ConfigError("objective.aligned_error has a weight, but the network has no such head; set model.heads.tm=true")
    true, mask = _frames(f["backbone_rigid_tensor"]), f["backbone_rigid_mask"]
    with torch.no_grad():
        guess = Frames(rotation_of(backbone[..., :4]), backbone[..., 4:])
        # A residue is where it sees itself to be, to the last bit: the first bin is that of no error at all.
        seen = [x.at(slice(None), slice(None), None).to_local(x.translation[:, None]) for x in (guess, true)]
        off = (seen[0] - seen[1]).square().sum(-1)
        bin_ = torch.bucketize(off, torch.linspace(0, 31, ERROR_BINS - 1, device=off.device).to(off.dtype) ** 2)
    both = mask[:, :, None] * mask[:, None]
    return (_entropy(logits, bin_) * both).sum((1, 2)) / (2 * _EPS + both.sum((1, 2)))


def lddt(guess: Tensor, true: Tensor, mask: Tensor, each: bool = False, cutoff: float = 15.0) -> Tensor:
    """Share of true distances below ``cutoff`` angstrom that are kept within 0.5, 1, 2 and 4, 0 to 1 (Mariani et al. 2013).

    guess and true [B, R, 3], mask [B, R] -> [B], or [B, R] of each residue
    """
    near, far = (torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") for x in (true, guess))
    others = 1 - torch.eye(mask.shape[1], dtype=mask.dtype, device=mask.device)
    count = (near < cutoff) * mask[:, :, None] * mask[:, None] * others
    kept = sum((near - far).abs() < limit for limit in (0.5, 1.0, 2.0, 4.0)) / 4
    dims = (2,) if each else (1, 2)
    return (1e-10 + (count * kept).sum(dims)) / (1e-10 + count.sum(dims))
