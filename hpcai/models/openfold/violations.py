"""Violations of stereochemistry: bonds and angles between residues, and clashes of atoms (supplement 1.9.11).

Positions are in atom14 form, angstrom.   B batch, R residues.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.dynamo import is_transformed
from hpcai.kernels.chunking import chunk_size
from hpcai.models.openfold import device_cache, residues

TOLERANCE = 12.0  # standard deviations
OVERLAP = 1.5  # angstrom
_N, _CA, _C = 0, 1, 2  # atom14 indices
_SULPHUR = residues.ATOM14_NAMES[residues.RESNAMES.index("CYS")].index("SG")
_PROLINE = residues.RESTYPES.index("P")
_CPU = 16 << 20  # bytes of distances in a chunk


class Bonds(NamedTuple):
    """Violations between each residue and the next."""

    lengths: Tensor  # [B] mean violation of C-N, angstrom
    before: Tensor  # [B] of the cosine at C
    after: Tensor  # [B] of the cosine at N


def violation_loss(positions: Tensor, exists: Tensor, aatype: Tensor, index: Tensor) -> Tensor:
    """Return the sum of violations, clashes per atom.   positions [B, R, 14, 3], exists [B, R, 14], aatype and index [B, R] -> [B]
    """
    atoms = exists.sum((1, 2)) + 1e-8
    bonds = bond_violations(positions, exists, aatype, index)
    clash = (clash_overlap(positions, exists, aatype, index) + within_residue_violations(positions, exists, aatype)) / atoms
    return bonds.lengths + bonds.before + bonds.after + clash


def bond_violations(positions: Tensor, exists: Tensor, aatype: Tensor, index: Tensor, eps: float = 1e-6) -> Bonds:
    """Return violations of the bonds and angles between residues (equations 44 and 45)."""
    n, ca, c = (positions[:, :, atom] for atom in (_N, _CA, _C))
    masks = [exists[:, :, atom] for atom in (_N, _CA, _C)]
    consecutive = (index[:, 1:] - index[:, :-1] == 1).to(positions.dtype)
    proline = aatype[:, 1:] == _PROLINE
    columns = (map(positions.new_full, ((), ()), column) for column in zip(*residues.C_N_LENGTH))
    target_length, deviation = (torch.where(proline, after, others) for others, after in columns)
    c_n, c_ca, n_ca = n[:, 1:] - c[:, :-1], (ca - c)[:, :-1], (ca - n)[:, 1:]
    length, c_ca_length, n_ca_length = ((eps + x.square().sum(-1)).sqrt() for x in (c_n, c_ca, n_ca))
    at_c = (c_ca / c_ca_length[..., None] * c_n / length[..., None]).sum(-1)
    at_n = (-c_n / length[..., None] * n_ca / n_ca_length[..., None]).sum(-1)
    # The angle at C has the standard deviation of the bond, as in the published code.
    checks: tuple[tuple[Any, Any, Any, Tensor], ...] = (
        (length, target_length, deviation, masks[2][:, :-1] * masks[0][:, 1:]),
        (at_c, residues.COS_CA_C_N[0], residues.C_N_LENGTH[0][1], masks[1][:, :-1] * masks[2][:, :-1] * masks[0][:, 1:]),
        (at_n, residues.COS_C_N_CA[0], residues.COS_C_N_CA[1], masks[2][:, :-1] * masks[0][:, 1:] * masks[1][:, 1:]),
    )
    means = []
    for value, target, deviation_of_value, mask in checks:
        excess = (eps + (value - target) ** 2).sqrt() - TOLERANCE * deviation_of_value
        mask = mask * consecutive
        means.append((mask * excess.relu()).sum(-1) / (mask.sum(-1) + eps))
    return Bonds(*means)


def within_residue_violations(positions: Tensor, exists: Tensor, aatype: Tensor) -> Tensor:
    """Return how far distances within residues exceed their bounds (equation 46), angstrom, each pair counted twice.   [B]"""
    bounds = residues.distance_bounds(TOLERANCE, OVERLAP)
    lower, upper = (device_cache.to_device(bound, positions)[aatype] for bound in bounds[:2])
    distances = (1e-10 + (positions[..., :, None, :] - positions[..., None, :, :]).square().sum(-1)).sqrt()
    pair_mask = exists[..., :, None] * exists[..., None, :] * (1 - torch.eye(14, dtype=exists.dtype, device=exists.device))
    return 2 * (pair_mask * ((lower - distances).relu() + (distances - upper).relu())).sum((1, 2, 3))


def clash_overlap(positions: Tensor, exists: Tensor, aatype: Tensor, index: Tensor) -> Tensor:
    """Return the overlap of atoms of different residues (equation 46) beyond the tolerance, angstrom, each pair twice.   [B]

    There are 196 R^2 pairs and few of them clash: they are processed in chunks of residues, together with their derivatives.
    """
    radius = device_cache.to_device(residues.ATOM14_RADIUS, positions)[aatype] * exists
    if is_transformed():
        return torch.stack([_plain_overlap(*arguments) for arguments in zip(positions, radius, exists, index)])
    return _ClashOverlap.apply(positions, radius, exists, index)


def _plain_overlap(positions: Tensor, radius: Tensor, exists: Tensor, index: Tensor) -> Tensor:
    x, size, mask = positions.flatten(0, 1), radius.flatten(), exists.flatten()
    distances = (x[:, None] - x).square().sum(-1).clamp(min=1e-10).sqrt()
    pair = _counted_pairs(index, slice(None)) * mask[:, None] * mask
    return 2 * (pair * (size[:, None] + size - OVERLAP - distances).relu()).sum()


def _counted_pairs(index: Tensor, chunk: slice) -> Tensor:
    """Whether atoms of ``chunk`` and of later residues can clash, neither bonded nor sulphur.   index [R] -> [r * 14, R * 14]"""
    atom = torch.arange(14, device=index.device)
    sulphur = (atom[:, None, None] == _SULPHUR) & (atom == _SULPHUR)  # [14, 1, 14]
    bond = (atom[:, None, None] == _C) & (atom == _N)
    later = (index[chunk, None] < index)[:, None, :, None]
    bonded = (index[chunk, None] + 1 == index)[:, None, :, None] & bond
    return (later & ~bonded & ~sulphur).flatten(2).flatten(0, 1)


class _ClashOverlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, positions: Tensor, radius: Tensor, exists: Tensor, index: Tensor) -> Tensor:
        batch, count = index.shape
        total, gradient = positions.new_zeros(batch), torch.zeros_like(positions)
        step = chunk_size(positions, 14 * 14 * 4 * count, _CPU)
        for b in range(batch):
            x, size, mask = positions[b].flatten(0, 1), radius[b].flatten(), exists[b].flatten()
            for first in range(0, count, step):
                chunk = slice(first, first + step)
                rows = slice(14 * first, 14 * (first + step))
                pair = _counted_pairs(index[b], chunk) * mask[rows, None] * mask  # [r * 14, R * 14]
                distances = torch.cdist(x[rows], x, compute_mode="donot_use_mm_for_euclid_dist").clamp(min=1e-5)
                overlap = (pair * (size[rows, None] + size - OVERLAP - distances)).relu()
                total[b] += 2 * overlap.sum()
                factor = (overlap > 0) / distances * -2  # times x_i - x_j: the gradient of i, and minus that of j
                gradient[b].view(-1, 3)[rows] += factor.sum(1)[:, None] * x[rows] - factor @ x
                gradient[b].view(-1, 3).add_(factor.sum(0)[:, None] * x - factor.T @ x[rows])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output[:, None, None, None] * ctx.saved_tensors[0], None, None, None
