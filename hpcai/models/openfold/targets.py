"""Targets of training from a structure: its atoms, frames and torsion angles, under AlphaFold's names.

Jumper et al., Nature 2021, supplement 1.8. Inputs and outputs are float32; frames and angles are computed in float64.
N residues; leading dims, such as that of templates, are kept. Missing atoms give 0 or masked elements, never NaN.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.models.openfold import residues
from hpcai.models.openfold.residues import ATOM_ORDER, GAP, UNKNOWN

Array = NDArray[Any]

EPSILON = 1e-8  # added to squared lengths, angstrom squared, as in the public code: coincident points give columns of zeros

# The four atoms of each torsion angle: pre-omega, phi, psi, chi1 to chi4; those of the previous residue have indices from 37 on.
_BACKBONE = ("CA' C' N CA", "C' N CA C", "N CA C O")
_TORSIONS = np.array([[ATOM_ORDER[name.rstrip("'")] + 37 * name.endswith("'") for name in row.split()] for row in _BACKBONE])
_TORSIONS = np.concatenate([np.broadcast_to(_TORSIONS, (21, 3, 4)), residues.CHI_ATOMS], 1)  # [21, 7, 4]
_TORSION_EXISTS = np.concatenate([np.ones((21, 3), np.float32), residues.CHI_EXISTS], 1)  # [21, 7]
_TORSION_PERIODIC = np.pad(residues.CHI_PERIODIC, ((0, 0), (3, 0)))  # [21, 7]
_SIGNS = np.array([1, 1, -1, 1, 1, 1, 1.0])  # psi is measured to O, 180 degrees from N of the next residue, and rotated back


def _check(aatype: Any, positions: Any, mask: Any, where: str, most: int) -> tuple[Array, Array, Array]:
    """Return the arrays, with positions 0 for missing atoms."""
    aatype, positions, mask = np.asarray(aatype), np.asarray(positions, np.float32), np.asarray(mask, np.float32)
    shape = aatype.shape
    if not shape or mask.shape != (*shape, 37) or positions.shape != (*shape, 37, 3):
        fault = f"{where}: residue types {shape}, positions {positions.shape} and mask {mask.shape} do not fit together"
        raise DataError(f"{fault}; expected [..., N], [..., N, 37, 3] and [..., N, 37]")
    _check_types(aatype, where, most)
    if not ((mask == 0) | (mask == 1)).all():
        raise DataError(f"{where}: the mask of atoms has values other than 0 and 1; expected 1 for atoms with a position")
    positions = np.where(mask[..., None] > 0, positions, np.float32(0))
    if not np.isfinite(positions).all():
        *_, residue, atom, _ = np.argwhere(~np.isfinite(positions))[0]
        expected = "angstrom, or 0 in the mask"
        raise DataError(f"{where}: {residues.ATOM_TYPES[atom]} of residue {residue} has no finite position; expected {expected}")
    return aatype, positions, mask


def _check_types(aatype: Array, where: str, most: int) -> None:
    if aatype.dtype.kind not in "iu":
        raise DataError(f"{where}: residue types are {aatype.dtype}; expected integers, 0 to {most}")
    if aatype.size and (aatype.min() < 0 or aatype.max() > most):
        raise DataError(f"{where}: residue types from {aatype.min()} to {aatype.max()}; expected 0 to {most} ({UNKNOWN} is X)")


def frames_from_points(a: Array, b: Array, c: Array) -> Array:
    """Return frames with origin b, x from a to b, and y on the side of c (Algorithm 21).   3 x [..., 3] -> [..., 4, 4]

    The rotation deviates from orthogonality by EPSILON, and is 0 if points coincide.
    """
    x = _normalize(b - a)
    y = c - b
    y = _normalize(y - x * (x * y).sum(-1, keepdims=True))
    frames = np.zeros((*x.shape[:-1], 4, 4), x.dtype)
    for column, vector in enumerate((x, y, np.cross(x, y), b)):
        frames[..., :3, column] = vector
    frames[..., 3, 3] = 1
    return frames


def _normalize(vector: Array) -> Array:
    return vector / np.sqrt((vector * vector).sum(-1, keepdims=True) + EPSILON)


def _gather_atoms(positions: Array, mask: Array, index: Array) -> tuple[Array, Array]:
    """Return float64 positions of atoms by index among 37, or 74, and whether all of them are known.

    [..., N, 37, 3], [..., N, 37], [..., N, G, K] -> [..., N, G, K, 3], [..., N, G]
    """
    flat = index.reshape(*index.shape[:-2], -1)
    points = np.take_along_axis(positions, flat[..., None], -2).reshape(*index.shape, 3)
    return points.astype(np.float64), np.take_along_axis(mask, flat, -1).reshape(index.shape).min(-1)


def torsion_angles(aatype: Any, positions: Any, mask: Any, where: str = "structure") -> tuple[Array, Array, Array]:
    """Return sine and cosine of pre-omega, phi, psi and chi1 to chi4; the same with symmetric atoms renamed; and their mask.

    Pre-omega and phi need the previous residue. Unknown angles are 0. A gap, as in templates, counts as X.
    [..., N], [..., N, 37, 3], [..., N, 37] -> [..., N, 7, 2], [..., N, 7, 2], [..., N, 7]
    """
    aatype, positions, mask = _check(aatype, positions, mask, where, GAP)
    aatype = np.minimum(aatype, UNKNOWN)
    pairs, pair_mask = np.zeros((*aatype.shape, 74, 3), np.float32), np.zeros((*aatype.shape, 74), np.float32)
    pairs[..., :37, :], pair_mask[..., :37] = positions, mask
    pairs[..., 1:, 37:, :], pair_mask[..., 1:, 37:] = positions[..., :-1, :, :], mask[..., :-1, :]
    points, mask_found = _gather_atoms(pairs, pair_mask, _TORSIONS[aatype])
    mask_found *= _TORSION_EXISTS[aatype]
    frames = frames_from_points(points[..., 1, :], points[..., 2, :], points[..., 0, :])
    displacement = points[..., 3, :] - points[..., 2, :]
    cos, sin = ((frames[..., :3, axis] * displacement).sum(-1) for axis in (1, 2))
    sin_cos = np.stack([sin, cos], -1)
    sin_cos *= (_SIGNS * mask_found / np.sqrt(sin * sin + cos * cos + EPSILON))[..., None]
    alternative = sin_cos * (1 - 2 * _TORSION_PERIODIC[aatype])[..., None]
    return sin_cos.astype(np.float32), alternative.astype(np.float32), mask_found


def pseudo_beta(aatype: Any, positions: Any, mask: Any, where: str = "structure") -> tuple[Array, Array]:
    """Return CB, or CA of glycine, and its mask.   [..., N], [..., N, 37, 3], [..., N, 37] -> [..., N, 3], [..., N]"""
    aatype, positions, mask = _check(aatype, positions, mask, where, GAP)
    glycine = aatype == residues.RESTYPES.index("G")
    alpha, beta = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
    beta_positions = np.where(glycine[..., None], positions[..., alpha, :], positions[..., beta, :])
    return beta_positions, np.where(glycine, mask[..., alpha], mask[..., beta])


def make_atom14_masks(aatype: Any, where: str = "structure") -> dict[str, Array]:
    """Return the masks of atoms in atom14 and atom37 form, and the indices from one to the other; absent atoms have index 0."""
    aatype = np.asarray(aatype)
    _check_types(aatype, where, UNKNOWN)
    return {
        "atom14_atom_exists": residues.ATOM14_EXISTS[aatype],
        "residx_atom14_to_atom37": residues.ATOM14_TO_37[aatype],
        "residx_atom37_to_atom14": residues.ATOM37_TO_14[aatype],
        "atom37_atom_exists": residues.ATOM37_EXISTS[aatype],
    }


def compute_targets(aatype: Any, positions: Any, mask: Any, where: str = "structure") -> dict[str, Array]:
    """Return the targets of all losses.   [..., N] types up to 20, [..., N, 37, 3] angstrom, [..., N, 37]

    Names with ``alt`` are the structure with symmetric atoms renamed. Atoms that the residue type lacks, and OXT, are dropped.
    Raises DataError, with ``where``, for invalid arrays.
    """
    aatype, positions, mask = _check(aatype, positions, mask, where, UNKNOWN)
    index, swap = residues.ATOM14_TO_37[aatype], residues.ATOM14_SWAP[aatype]
    exists = residues.ATOM14_EXISTS[aatype] * np.take_along_axis(mask, index, -1)
    atom14_positions = np.take_along_axis(positions, index[..., None], -2) * exists[..., None]
    sin_cos, alternative, torsion_mask = torsion_angles(aatype, positions, mask, where)
    beta, beta_mask = pseudo_beta(aatype, positions, mask, where)
    return make_atom14_masks(aatype, where) | _group_frames(aatype, positions, mask) | {
        "atom14_gt_exists": exists,
        "atom14_gt_positions": atom14_positions,
        "atom14_alt_gt_exists": np.take_along_axis(exists, swap, -1),
        "atom14_alt_gt_positions": np.take_along_axis(atom14_positions, swap[..., None], -2),
        "atom14_atom_is_ambiguous": residues.ATOM14_AMBIGUOUS[aatype],
        "torsion_angles_sin_cos": sin_cos,
        "alt_torsion_angles_sin_cos": alternative,
        "torsion_angles_mask": torsion_mask,
        "chi_angles_sin_cos": sin_cos[..., 3:, :],
        "chi_mask": torsion_mask[..., 3:],
        "pseudo_beta": beta,
        "pseudo_beta_mask": beta_mask,
    }


def _group_frames(aatype: Array, positions: Array, mask: Array) -> dict[str, Array]:
    """Return the frames of the eight rigid groups.   [..., N, 8, 4, 4]"""
    points, exists = _gather_atoms(positions, mask, residues.GROUP_BASE[aatype])
    frames = frames_from_points(*np.moveaxis(points, -2, 0))
    frames[..., 0, :3, 0::2] *= -1  # x of the backbone is from CA to C: a rotation about y by 180 degrees
    ambiguous, group_exists = residues.GROUP_AMBIGUOUS[aatype], residues.GROUP_EXISTS[aatype]
    true_frames, exists = frames.astype(np.float32), exists * group_exists
    alternative = true_frames.copy()
    alternative[..., :3, 1:3] *= 1 - 2 * ambiguous[..., None, None]  # a rotation about x by 180 degrees
    return {
        "rigidgroups_gt_frames": true_frames,
        "rigidgroups_gt_exists": exists,
        "rigidgroups_group_exists": group_exists,
        "rigidgroups_group_is_ambiguous": ambiguous,
        "rigidgroups_alt_gt_frames": alternative,
        "backbone_rigid_tensor": true_frames[..., 0, :, :],
        "backbone_rigid_mask": exists[..., 0],
    }
