"""Frames in space: a rotation and a translation, made from quaternions, moved, and hung on the torsion angles of a residue."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Frames(NamedTuple):
    """Maps x -> rotation x + translation, from a frame's own coordinates to those that it stands in."""

    rotation: Tensor  # [..., 3, 3]
    translation: Tensor  # [..., 3]

    def at(self, *index: Any) -> "Frames":
        """The frames at an index of their leading dims: ``frames.at(..., 0)``."""
        return Frames(self.rotation[(*index, slice(None), slice(None))], self.translation[(*index, slice(None))])

    def apply(self, points: Tensor) -> Tensor:
        """[..., 3] -> [..., 3]"""
        return turned(self.rotation, points) + self.translation

    def to_local(self, points: Tensor) -> Tensor:
        """The inverse of ``apply``."""
        return turned(self.rotation.transpose(-1, -2), points - self.translation)

    def then(self, inner: "Frames") -> "Frames":
        """``inner``, whose coordinates are those of these frames, seen from outside."""
        return Frames(self.rotation @ inner.rotation, self.apply(inner.translation))


def turned(rotation: Tensor, points: Tensor) -> Tensor:
    """[..., 3, 3] and [..., 3] -> [..., 3]"""
    return (rotation * points[..., None, :]).sum(-1)


def rotation_of(quaternion: Tensor) -> Tensor:
    """[..., 4] (w, x, y, z), of any length: the rotation grows with its square -> [..., 3, 3]"""
    w, x, y, z = quaternion.unbind(-1)
    ww, xx, yy, zz = w * w, x * x, y * y, z * z
    rows = [
        torch.stack([ww + xx - yy - zz, 2 * (x * y - w * z), 2 * (x * z + w * y)], -1),
        torch.stack([2 * (x * y + w * z), ww - xx + yy - zz, 2 * (y * z - w * x)], -1),
        torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), ww - xx - yy + zz], -1),
    ]
    return torch.stack(rows, -2)


def turned_further(quaternion: Tensor, by: Tensor) -> Tensor:
    """The quaternion times (1, by), of length 1 (Algorithm 23, lines 1 to 3).   [..., 4] and [..., 3] -> [..., 4]"""
    w, v = quaternion[..., :1], quaternion[..., 1:]
    found = torch.cat([w - (v * by).sum(-1, keepdim=True), v + w * by + torch.linalg.cross(v, by)], -1)
    return found / found.square().sum(-1, keepdim=True).sqrt()


def about_x(sin_cos: Tensor) -> Tensor:
    """Rotations about the x axis.   [..., 2] -> [..., 3, 3]"""
    sin, cos = sin_cos.unbind(-1)
    one, zero = torch.ones_like(sin), torch.zeros_like(sin)
    return torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], -1).unflatten(-1, (3, 3))


def groups_of(backbone: Frames, sin_cos: Tensor, default: Tensor) -> Frames:
    """The eight rigid groups of each residue in space (Algorithm 24): backbone, pre-omega, phi, psi, chi1 to chi4.

    backbone [..., R], sin_cos [..., R, 7, 2] of the torsion angles, default [..., R, 8, 4, 4]: where a group begins in its parent
    when its angle is 0 -> [..., R, 8]
    """
    still = torch.stack([torch.zeros_like(sin_cos[..., :1, 0]), torch.ones_like(sin_cos[..., :1, 0])], -1)
    local = Frames(default[..., :3, :3] @ about_x(torch.cat([still, sin_cos], -2)), default[..., :3, 3])
    chain = [local.at(..., 4)]
    for chi in (5, 6, 7):  # each side-chain group hangs on the one before
        chain.append(chain[-1].then(local.at(..., chi)))
    rotation = torch.cat([local.rotation[..., :4, :, :], torch.stack([frame.rotation for frame in chain], -3)], -3)
    translation = torch.cat([local.translation[..., :4, :], torch.stack([frame.translation for frame in chain], -2)], -2)
    return backbone.at(..., None).then(Frames(rotation, translation))
