"""Violations of stereochemistry: bonds and angles between residues that are out of range, atoms that clash (supplement 1.9.11).

Positions are those of 14 atoms a residue, angstrom.   B batch, R residues.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.kernels.chunking import chunk_size
from hpcai.models.openfold import residues, device_cache

TOLERANCE = 12.0  # deviations
OVERLAP = 1.5  # angstrom
_N, _CA, _C = 0, 1, 2  # places among the 14
_SULPHUR = residues.ATOM14_NAMES[residues.NAMES.index("CYS")].index("SG")
_PROLINE = residues.LETTERS.index("P")
_CPU = 16 << 20  # bytes of distances at a time


class Bonds(NamedTuple):
    """Violations between each residue and the next."""

    lengths: Tensor  # [B] mean violation of C-N, angstrom
    before: Tensor  # [B] of the cosine at C
    after: Tensor  # [B] of the cosine at N
    violated: Tensor  # [B, R] 1 for a residue with any of them


def violation(positions: Tensor, exists: Tensor, aatype: Tensor, index: Tensor) -> Tensor:
    """The sum of all, clashes per atom.   positions [B, R, 14, 3], exists [B, R, 14], aatype and index [B, R] -> [B]"""
    atoms = exists.sum((1, 2)) + 1e-8
    found = bonds(positions, exists, aatype, index)
    clash = (clashes(positions, exists, aatype, index) + within(positions, exists, aatype)) / atoms
    return found.lengths + found.before + found.after + clash


def bonds(positions: Tensor, exists: Tensor, aatype: Tensor, index: Tensor, eps: float = 1e-6) -> Bonds:
    """Violations of the bonds and angles between residues (equations 44 and 45)."""
    n, ca, c = (positions[:, :, place] for place in (_N, _CA, _C))
    there = [exists[:, :, place] for place in (_N, _CA, _C)]
    next_to = (index[:, 1:] - index[:, :-1] == 1).to(positions.dtype)
    proline = aatype[:, 1:] == _PROLINE
    columns = (map(positions.new_full, ((), ()), column) for column in zip(*residues.C_N_LENGTH))
    wanted, deviation = (torch.where(proline, after, others) for others, after in columns)
    c_n, c_ca, n_ca = n[:, 1:] - c[:, :-1], (ca - c)[:, :-1], (ca - n)[:, 1:]
    length, other, another = ((eps + x.square().sum(-1)).sqrt() for x in (c_n, c_ca, n_ca))
    at_c = (c_ca / other[..., None] * c_n / length[..., None]).sum(-1)
    at_n = (-c_n / length[..., None] * n_ca / another[..., None]).sum(-1)
    # The deviation of the angle at C is that of the bond, as in the published code.
    rows: tuple[tuple[Any, Any, Any, Tensor], ...] = (
        (length, wanted, deviation, there[2][:, :-1] * there[0][:, 1:]),
        (at_c, residues.COS_CA_C_N[0], residues.C_N_LENGTH[0][1], there[1][:, :-1] * there[2][:, :-1] * there[0][:, 1:]),
        (at_n, residues.COS_C_N_CA[0], residues.COS_C_N_CA[1], there[2][:, :-1] * there[0][:, 1:] * there[1][:, 1:]),
    )
    means, broken = [], torch.zeros_like(next_to)
    for value, middle, spread, known in rows:
        over = (eps + (value - middle) ** 2).sqrt() - TOLERANCE * spread
        known = known * next_to
        means.append((known * over.relu()).sum(-1) / (known.sum(-1) + eps))
        broken = torch.maximum(broken, known * (over > 0))
    either = torch.maximum(*(torch.nn.functional.pad(broken, side) for side in ((0, 1), (1, 0))))
    return Bonds(means[0], means[1], means[2], either)


def within(positions: Tensor, exists: Tensor, aatype: Tensor) -> Tensor:
    """How far atoms of one residue go beyond stereochemistry (equation 46), angstrom, each pair from both sides.   [B]"""
    table = residues.bounds(TOLERANCE, OVERLAP)
    lower, upper = (device_cache.on(bound, positions)[aatype] for bound in table[:2])
    apart = (1e-10 + (positions[..., :, None, :] - positions[..., None, :, :]).square().sum(-1)).sqrt()
    both = exists[..., :, None] * exists[..., None, :] * (1 - torch.eye(14, dtype=exists.dtype, device=exists.device))
    return 2 * (both * ((lower - apart).relu() + (apart - upper).relu())).sum((1, 2, 3))


def clashes(positions: Tensor, exists: Tensor, aatype: Tensor, index: Tensor) -> Tensor:
    """Overlap of atoms of different residues (equation 46) beyond what is tolerated, angstrom, each pair from both sides.   [B]

    Pairs are R^2 of 196 and few of them clash: they are gone through a few residues at a time, each with its derivative.
    """
    radius = device_cache.on(residues.ATOM14_RADIUS, positions)[aatype] * exists
    return _Clashes.apply(positions, radius, exists, index)


class _Clashes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, positions: Tensor, radius: Tensor, exists: Tensor, index: Tensor) -> Tensor:
        batch, count = index.shape
        total, slope = positions.new_zeros(batch), torch.zeros_like(positions)
        step = chunk_size(positions, 14 * 14 * 4 * count, _CPU)
        place = torch.arange(14, device=positions.device)
        sulphur = (place[:, None, None] == _SULPHUR) & (place == _SULPHUR)  # [14, 1, 14]
        bond = (place[:, None, None] == _C) & (place == _N)
        for b in range(batch):
            x, size, there, number = positions[b].flatten(0, 1), radius[b].flatten(), exists[b].flatten(), index[b]
            for first in range(0, count, step):
                some = slice(first, first + step)
                rows = slice(14 * first, 14 * (first + step))
                later = (number[some, None] < number)[:, None, :, None]
                linked = (number[some, None] + 1 == number)[:, None, :, None] & bond
                pair = (later & ~linked & ~sulphur).flatten(2).flatten(0, 1) * there[rows, None] * there  # [r * 14, R * 14]
                apart = torch.cdist(x[rows], x, compute_mode="donot_use_mm_for_euclid_dist").clamp(min=1e-5)
                over = (pair * (size[rows, None] + size - OVERLAP - apart)).relu()
                total[b] += 2 * over.sum()
                push = (over > 0) / apart * -2  # times x_i - x_j: it acts on i this way, on j the other
                slope[b].view(-1, 3)[rows] += push.sum(1)[:, None] * x[rows] - push @ x
                slope[b].view(-1, 3).add_(push.sum(0)[:, None] * x - push.T @ x[rows])
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[:, None, None, None] * ctx.saved_tensors[0], None, None, None
