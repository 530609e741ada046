"""Auxiliary heads: confidence, distances, masked letters, experimentally resolved atoms, aligned errors (supplement 1.9).

B batch, S sequences, R residues, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpcai.models.openfold.config import HeadsConfig
from hpcai.models.openfold.layers import Linear
from hpcai.models.openfold.residues import ATOM_TYPES, MASKED
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.seam import Seam

PLDDT_BINS, DISTANCE_BINS, ERROR_BINS = 50, 64, 64


class Logits(NamedTuple):
    """Always float32 at least, for the losses."""

    plddt: Tensor  # [B, R, 50]
    distogram: Tensor  # [B, R, R, 64]
    masked_msa: Tensor  # [B, S, R, 23]
    resolved: Tensor  # [B, R, 37]
    aligned_error: Tensor | None  # [B, R, R, 64]


class PLDDTHead(nn.Module):
    """Logits of lDDT of each residue (Algorithm 29).   [B, R, C] -> [B, R, 50]"""

    def __init__(self, single: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(single)
        self.linear_1, self.linear_2 = Linear(single, hidden, init="relu"), Linear(hidden, hidden, init="relu")
        self.linear_3 = Linear(hidden, PLDDT_BINS, init="final")

    def forward(self, s: Tensor) -> Tensor:
        return self.linear_3(self.linear_2(self.linear_1(self.layer_norm(s)).relu()).relu())


class Heads(nn.Module):
    wide = True

    def __init__(self, msa: int, pair: int, single: int, cfg: HeadsConfig) -> None:
        super().__init__()
        self.plddt = PLDDTHead(single, cfg.plddt)
        self.distogram = Linear(pair, DISTANCE_BINS, init="final")
        self.masked_msa = Linear(msa, MASKED + 1, init="final")
        self.experimentally_resolved = Linear(single, len(ATOM_TYPES), init="final")
        self.tm = Linear(pair, ERROR_BINS, init="final") if cfg.tm else None
        self.gather_rows, self.gather_columns = Seam(), Seam()

    def forward(self, m: Tensor, z: Tensor, s: Tensor, structure_states: Tensor) -> Logits:
        """``structure_states`` are those of the structure module.   [B, S, R/n, C], [B, R/n, R, C], [B, R, C], [B, R, C]"""
        with torch.autocast(m.device.type, enabled=False):
            wide = torch.promote_types(self.distogram.weight.dtype, torch.float32)
            m, z, s, structure_states = (x.to(wide) for x in (m, z, s, structure_states))
            size = s.shape[1]
            half = self.gather_rows.begin(self.distogram(z), size)
            msa = self.gather_columns.begin(self.masked_msa(m), size)
            error = self.gather_rows.begin(self.tm(z), size) if self.tm is not None else None
            plddt, resolved = self.plddt(structure_states), self.experimentally_resolved(s)
            half, msa = self.gather_rows.finish(half), self.gather_columns.finish(msa)
            error = self.gather_rows.finish(error) if self.tm is not None else None
            return Logits(plddt, half + half.transpose(1, 2), msa, resolved, error)


def distance_edges(like: Tensor) -> Tensor:
    """Return the edges between distance bins, angstrom, in the dtype and on the device of ``like``.   [63]"""
    return torch.linspace(2.3125, 21.6875, DISTANCE_BINS - 1, device=like.device).to(like.dtype)


def plddt(logits: Tensor) -> Tensor:
    """Return the expected lDDT-Calpha of each residue, 0 to 100.   [..., 50] -> [...]"""
    bins = logits.shape[-1]
    centres = (torch.arange(bins, dtype=logits.dtype, device=logits.device) + 0.5) * (100 / bins)
    return logits.softmax(-1) @ centres
