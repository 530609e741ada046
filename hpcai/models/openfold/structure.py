"""Structure module (supplement 1.8): invariant point attention updates one frame per residue, torsion angles place its atoms.

Internal coordinates are in units of 10 angstrom, outputs in angstrom. Everything is computed in float32 at least.
B batch, R residues, H heads, C channels, P points, L passes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcai.models.openfold import residues
from hpcai.models.openfold.config import StructureConfig
from hpcai.models.openfold.geometry import Frames, quat_to_rot, torsion_angles_to_frames, update_quaternion
from hpcai.models.openfold.layers import Linear
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.seam import Seam

_ANGSTROM = 10.0  # angstrom
_EPS = 1e-8


class StructureOutput(NamedTuple):
    """The results of all L passes; the last one is the prediction."""

    backbone: Tensor  # [L, B, R, 7] quaternion (w, x, y, z) and translation, angstrom
    rotation: Tensor  # [L, B, R, 8, 3, 3] of the rigid groups
    translation: Tensor  # [L, B, R, 8, 3] angstrom
    raw_angles: Tensor  # [L, B, R, 7, 2] sine and cosine before normalisation
    angles: Tensor  # [L, B, R, 7, 2]
    positions: Tensor  # [L, B, R, 14, 3] angstrom
    states: Tensor  # [L, B, R, C]


class InvariantPointAttention(nn.Module):
    """Attention by features, pairs and distances between points in the frames of residues (Algorithm 22).

    s [B, R, C], bias [B, H, R/n, R], z [B, R/n, R, Cz], frames [B, R] -> [B, R, C]
    """

    def __init__(self, single: int, pair: int, cfg: StructureConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width, points = cfg.heads * cfg.head, cfg.query_points + cfg.value_points
        # Biases and LeCun's initialisation are those of the published code, not of the supplement.
        self.linear_q, self.linear_kv = Linear(single, width), Linear(single, 2 * width)
        self.linear_q_points = Linear(single, 3 * cfg.heads * cfg.query_points)
        self.linear_kv_points = Linear(single, 3 * cfg.heads * points)
        self.linear_b = Linear(pair, cfg.heads)
        self.head_weights = nn.Parameter(torch.full((cfg.heads,), 0.541324854612918))  # softplus gives 1
        self.linear_out = Linear(cfg.heads * (pair + cfg.head + 4 * cfg.value_points), single, init="final")
        self.local_rows, self.gather_rows = Seam(), Seam()

    def forward(self, s: Tensor, bias: Tensor, z: Tensor, frames: Frames) -> Tensor:
        cfg, heads = self.cfg, self.cfg.heads
        local_s, local_frames = self.local_rows(s), Frames(*(self.local_rows(x) for x in frames))  # [B, R/n]
        q = self.linear_q(local_s).unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, R/n, C]
        k, v = self.linear_kv(s).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(2, -1)
        q_points = self._global_points(self.linear_q_points(local_s), local_frames)  # [B, H, R/n, P, 3]
        k_points, v_points = self._global_points(self.linear_kv_points(s), frames).split([cfg.query_points, cfg.value_points], 3)
        # -w/2 |q - k|^2 of points is one more product of features: terms of q alone cancel in the softmax.
        weight = (nn.functional.softplus(self.head_weights) * (1 / (3 * cfg.query_points * 9 / 2)) ** 0.5)[:, None, None]
        key_norms = k_points.square().sum((-1, -2))[..., None] * -0.5
        weights = weight.expand(len(local_s), -1, local_s.shape[1], 1)
        left = torch.cat([q * (1 / (3 * cfg.head)) ** 0.5, q_points.flatten(-2) * weight, weights], -1)
        right = torch.cat([k, k_points.flatten(-2), key_norms], -1)
        logits = torch.baddbmm(bias.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1).transpose(1, 2))  # [B * H, R/n, R]
        p = logits.softmax(-1).unflatten(0, (-1, heads))
        o = (p @ v).transpose(1, 2).flatten(-2)
        attended = (p @ v_points.flatten(-2)).unflatten(-1, (-1, 3)).transpose(1, 2).flatten(2, 3)  # [B, R/n, H * P, 3] in space
        points_local = (attended - local_frames.translation[..., None, :]) @ local_frames.rotation
        point_norms = (points_local.square().sum(-1) + _EPS).sqrt()
        pair_values = (p.transpose(1, 2) @ z).flatten(-2)  # [B, R/n, H * Cz]
        return self.gather_rows(self.linear_out(torch.cat([o, *points_local.unbind(-1), point_norms, pair_values], -1)), s.shape[1])

    def _global_points(self, x: Tensor, frames: Frames) -> Tensor:
        """Return points in global coordinates: [B, R, 3 * H * P], all x before all y before all z -> [B, H, R, P, 3]"""
        points = x.unflatten(-1, (3, -1))  # [B, R, 3, H * P]
        origin, *factors = (part.flatten(0, 1) for part in (frames.translation[..., None], frames.rotation, points))
        return torch.baddbmm(origin, *factors).view(*x.shape[:2], 3, self.cfg.heads, -1).permute(0, 3, 1, 4, 2)

    def pair_bias(self, z: Tensor, mask: Tensor) -> Tensor:
        """Return the bias of pairs in the logits, the same in every pass.   [B, R/n, R, Cz] and [B, R] -> [B, H, R/n, R]"""
        pair_mask = (self.local_rows(mask)[:, :, None] * mask[:, None])[..., None]
        return (self.linear_b(z) * (1 / 3) ** 0.5 + (pair_mask - 1) * 1e5).permute(0, 3, 1, 2).contiguous()


class AngleResnet(nn.Module):
    """Torsion angles (Algorithm 20, lines 11 to 14).   s [L, B, R, C], initial [B, R, C] -> [L, B, R, 7, 2] unnormalised, and
    normalised"""

    def __init__(self, single: int, cfg: StructureConfig) -> None:
        super().__init__()
        width = cfg.angle
        self.linear_in, self.linear_initial = Linear(single, width), Linear(single, width)
        pairs = (
            nn.ModuleDict({"linear_1": Linear(width, width, init="relu"), "linear_2": Linear(width, width, init="final")})
            for _ in range(cfg.angle_blocks)
        )
        self.layers = nn.ModuleList(pairs)
        self.linear_out = Linear(width, 14)

    def forward(self, s: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        a = self.linear_in(s.relu()) + self.linear_initial(initial.relu())
        for layer in self.layers:
            a = a + layer["linear_2"](layer["linear_1"](a.relu()).relu())  # type: ignore[index]
        raw = self.linear_out(a.relu()).unflatten(-1, (7, 2))
        return raw, raw / raw.square().sum(-1, keepdim=True).clamp(min=_EPS).sqrt()


class StructureTransition(nn.Module):
    """A residual network per residue (Algorithm 20, lines 8 and 9).   [B, R, C] -> [B, R, C]"""

    def __init__(self, single: int, cfg: StructureConfig) -> None:
        super().__init__()
        inits: dict[str, Any] = {"linear_1": "relu", "linear_2": "relu", "linear_3": "final"}
        layers = ({name: Linear(single, single, init=init) for name, init in inits.items()} for _ in range(cfg.transition_layers))
        self.layers = nn.ModuleList(map(nn.ModuleDict, layers))
        self.dropout = nn.Dropout(cfg.dropout)
        self.layer_norm = LayerNorm(single)

    def forward(self, s: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer["linear_2"](layer["linear_1"](s).relu()).relu()  # type: ignore[index]
            s = s + layer["linear_3"](hidden)  # type: ignore[index]
        return self.layer_norm(self.dropout(s))


class StructureModule(nn.Module):
    """Atoms from residues and pairs (Algorithm 20).

    single [B, R, C], pair [B, R/n, R, Cz], aatype [B, R], mask [B, R] -> StructureOutput
    """

    wide = True  # a coordinate of 50 angstrom in bfloat16 is off by 0.2
    group_frame: Tensor
    atom_group: Tensor
    atom_position: Tensor
    atom_exists: Tensor

    def __init__(self, single: int, pair: int, cfg: StructureConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.layer_norm_s, self.layer_norm_z = LayerNorm(single), LayerNorm(pair)
        self.linear_in = Linear(single, single)
        self.ipa = InvariantPointAttention(single, pair, cfg)
        self.ipa_dropout = nn.Dropout(cfg.dropout)
        self.layer_norm_ipa = LayerNorm(single)
        self.transition = StructureTransition(single, cfg)
        self.bb_update = Linear(single, 6, init="final")
        self.angle_resnet = AngleResnet(single, cfg)
        tables = {
            "group_frame": residues.GROUP_FRAME, "atom_group": residues.ATOM14_GROUP,
            "atom_position": residues.ATOM14_POSITION, "atom_exists": residues.ATOM14_EXISTS,
        }  # fmt: skip
        for name, table in tables.items():
            self.register_buffer(name, torch.tensor(table), persistent=False)

    def forward(self, single: Tensor, pair: Tensor, aatype: Tensor, mask: Tensor) -> StructureOutput:
        with torch.autocast(single.device.type, enabled=False):
            wide = torch.promote_types(single.dtype, torch.float32)
            s, z = self.layer_norm_s(single.to(wide)), self.layer_norm_z(pair.to(wide))
            bias, initial = self.ipa.pair_bias(z, mask.to(wide)), s
            s = self.linear_in(s)
            quaternion = torch.zeros(*s.shape[:-1], 4, dtype=wide, device=s.device)
            quaternion[..., 0] = 1
            translation = torch.zeros_like(quaternion[..., 1:])
            passes = []
            for _ in range(self.cfg.passes):
                frames = Frames(quat_to_rot(quaternion), translation)
                s = self.layer_norm_ipa(self.ipa_dropout(s + self.ipa(s, bias, z, frames)))
                s = self.transition(s)
                rotation_update, translation_update = self.bb_update(s).split(3, -1)
                quaternion, translation = update_quaternion(quaternion, rotation_update), frames.apply(translation_update)
                passes.append((quaternion, translation, s))
                quaternion = quaternion.detach()  # gradients of rotations stop between passes, which stabilises training
            quaternion, translation, states = (torch.stack(each) for each in zip(*passes))
            raw, angles = self.angle_resnet(states, initial)
            backbone = Frames(quat_to_rot(quaternion), translation * _ANGSTROM)
            groups = torsion_angles_to_frames(backbone, angles, self.group_frame[aatype].to(wide))
            backbone_7 = torch.cat([quaternion, backbone.translation], -1)
            # The positions of atoms by their rigid groups, 0 for atoms that a residue lacks.   [L, B, R, 14, 3]
            group = self.atom_group[aatype].expand(len(groups.rotation), -1, -1, -1)  # [L, B, R, 14]
            rotation = groups.rotation.gather(3, group[..., None, None].expand(-1, -1, -1, -1, 3, 3))
            translation = groups.translation.gather(3, group[..., None].expand(-1, -1, -1, -1, 3))
            positions = Frames(rotation, translation).apply(self.atom_position[aatype].to(rotation.dtype))
            positions = positions * self.atom_exists[aatype][..., None].to(positions.dtype)
            return StructureOutput(backbone_7, *groups, raw, angles, positions, states)
