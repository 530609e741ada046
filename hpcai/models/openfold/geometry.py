"""Frames, rotations and translations: from quaternions, their composition, and rigid groups of a residue by torsion angles."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.models.openfold import device_cache


def _product_tables() -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients of products: of q q^T in the rotation matrix, and of q v^T in the quaternion product with (0, v)."""
    rotation, product = np.zeros((4, 4, 3, 3)), np.zeros((4, 3, 4))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        rotation[[0, i + 1], [0, i + 1], i, i] = 1
        rotation[[j + 1, k + 1], [j + 1, k + 1], i, i] = -1
        rotation[i + 1, j + 1, [i, j], [j, i]] = 2
        rotation[0, k + 1, [i, j], [j, i]] = -2, 2
        product[i + 1, i, 0], product[0, i, i + 1] = -1, 1
        product[j + 1, k, i + 1], product[k + 1, j, i + 1] = 1, -1
    return rotation.reshape(16, 9), product.reshape(12, 4)


_ROTATION, _PRODUCT = _product_tables()


class Frames(NamedTuple):
    """Maps x -> rotation x + translation, from local coordinates to those of the parent."""

    rotation: Tensor  # [..., 3, 3]
    translation: Tensor  # [..., 3]

    def at(self, *index: Any) -> "Frames":
        """Index the leading dims: ``frames.at(..., 0)``."""
        return Frames(self.rotation[(*index, slice(None), slice(None))], self.translation[(*index, slice(None))])

    def apply(self, points: Tensor) -> Tensor:
        """[..., 3] -> [..., 3]"""
        return rotate(self.rotation, points) + self.translation

    def invert_apply(self, points: Tensor) -> Tensor:
        return rotate(self.rotation.transpose(-1, -2), points - self.translation)

    def compose(self, inner: "Frames") -> "Frames":
        """Return ``inner``, given in these frames, in the coordinates of the parent."""
        return Frames(self.rotation @ inner.rotation, self.apply(inner.translation))


def rotate(rotation: Tensor, points: Tensor) -> Tensor:
    """[..., 3, 3] and [..., 3] -> [..., 3]"""
    return (rotation * points[..., None, :]).sum(-1)


def quat_to_rot(quaternion: Tensor) -> Tensor:
    """[..., 4] (w, x, y, z) of any length; the result scales with its square -> [..., 3, 3]"""
    return _bilinear(quaternion, quaternion, _ROTATION).unflatten(-1, (3, 3))


def update_quaternion(quaternion: Tensor, vector: Tensor) -> Tensor:
    """Multiply by (1, vector) and normalise (Algorithm 23, lines 1 to 3).   [..., 4] and [..., 3] -> [..., 4]"""
    updated = quaternion + _bilinear(quaternion, vector, _PRODUCT)
    return updated / torch.linalg.vector_norm(updated, dim=-1, keepdim=True)


def _bilinear(left: Tensor, right: Tensor, table: np.ndarray) -> Tensor:
    """Contract all pairwise products with a table of coefficients: few operations on a full batch.

    left [..., N], right [..., M], table [N * M, K] -> [..., K]
    """
    return (left[..., :, None] * right[..., None, :]).flatten(-2) @ device_cache.to_device(table, left)


def rotation_about_x(sin_cos: Tensor) -> Tensor:
    """Return rotations about the x axis from sine and cosine.   [..., 2] -> [..., 3, 3]"""
    sin, cos = sin_cos.unbind(-1)
    ones, zeros = torch.ones_like(sin), torch.zeros_like(sin)
    return torch.stack([ones, zeros, zeros, zeros, cos, -sin, zeros, sin, cos], -1).unflatten(-1, (3, 3))


def torsion_angles_to_frames(backbone: Frames, sin_cos: Tensor, default_frames: Tensor) -> Frames:
    """Return the eight rigid groups of each residue (Algorithm 24): backbone, pre-omega, phi, psi, chi1 to chi4.

    backbone [..., R], sin_cos [..., R, 7, 2] of the torsion angles, default_frames [..., R, 8, 4, 4], which may lack leading dims:
    the frame of a group in its parent at angle 0 -> [..., R, 8]
    """
    identity = torch.stack([torch.zeros_like(sin_cos[..., :1, 0]), torch.ones_like(sin_cos[..., :1, 0])], -1)
    rotations = default_frames[..., :3, :3] @ rotation_about_x(torch.cat([identity, sin_cos], -2))
    local = Frames(rotations, default_frames[..., :3, 3].expand(rotations.shape[:-1]))
    chain = [local.at(..., 4)]
    for chi in (5, 6, 7):  # the parent of a side-chain group is the previous one
        chain.append(chain[-1].compose(local.at(..., chi)))
    rotation = torch.cat([local.rotation[..., :4, :, :], torch.stack([frame.rotation for frame in chain], -3)], -3)
    translation = torch.cat([local.translation[..., :4, :], torch.stack([frame.translation for frame in chain], -2)], -2)
    return backbone.at(..., None).compose(Frames(rotation, translation))
