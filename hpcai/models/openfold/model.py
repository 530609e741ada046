"""OpenFold: the structure of a protein from its sequence and its relatives' (Jumper et al. 2021, Algorithm 2 of the supplement).

B batch, S clusters, E extra rows, T templates, R residues, C channels, P passes (one more than recycles); n axial size, 1 outside a
cluster.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcai.models.openfold.config import OpenFoldConfig
from hpcai.models.openfold.embedders import ExtraEmbedder, InputEmbedder, RecyclingEmbedder, TemplateEmbedder
from hpcai.models.openfold.evoformer import EvoformerBlock, ExtraBlock, Stack
from hpcai.models.openfold.heads import Heads, Logits
from hpcai.models.openfold.layers import Linear
from hpcai.models.openfold.residues import LETTERS, PLACE
from hpcai.models.openfold.structure import Atoms, StructureModule
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin

_CA, _CB, _GLYCINE = PLACE["CA"], PLACE["CB"], LETTERS.index("G")
_PSI = 2  # its index among the seven torsion angles


class Prediction(NamedTuple):
    msa: Tensor  # [B, S, R/n, C]
    pair: Tensor  # [B, R/n, R, C]
    single: Tensor  # [B, R, C]
    atoms: Atoms
    positions: Tensor  # [B, R, 37, 3] angstrom
    logits: Logits


class Previous(NamedTuple):
    """A pass takes this over from the one before."""

    first: Tensor  # [B, R, C] of the alignment
    pair: Tensor  # [B, R/n, R, C]
    positions: Tensor  # [B, R, 37, 3] angstrom


class OpenFold(PretrainedMixin):
    """Features -> Prediction."""

    package = __package__

    def __init__(self, cfg: OpenFoldConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or OpenFoldConfig()
        extra = cfg.extra
        self.input_embedder = InputEmbedder(cfg.msa, cfg.pair)
        self.recycling_embedder = RecyclingEmbedder(cfg.msa, cfg.pair)
        self.template_embedder = TemplateEmbedder(cfg.msa, cfg.pair, cfg.template, cfg.checkpoint) if cfg.template else None
        self.extra_msa_embedder = ExtraEmbedder(extra.channels)
        self.extra_msa_stack = Stack(
            [ExtraBlock(extra.channels, cfg.pair, extra.msa, extra.pairs) for _ in range(extra.blocks)], cfg.checkpoint
        )
        self.evoformer = Stack([EvoformerBlock(cfg.msa, cfg.pair, cfg.rows, cfg.pairs) for _ in range(cfg.blocks)], cfg.checkpoint)
        self.to_single = Linear(cfg.msa, cfg.single)
        self.structure_module = StructureModule(cfg.single, cfg.pair, cfg.structure)
        self.heads = Heads(cfg.msa, cfg.pair, cfg.single, cfg.heads)
        self.own_rows, self.own_sequences, self.join_rows = Seam(), Seam(), Seam()
        self.one_answer: nn.Module = Seam()  # processes that hold a protein together give one answer, which counts once

    def forward(self, features: Mapping[str, Tensor]) -> Prediction:
        """``features`` as ``hpcai.models.openfold.featurize`` makes them, with a batch dim in front and a dim of passes at the end.

        Only the last pass has gradients; the others give it where to begin.
        """
        m, z, s, atoms, positions = self.passes(features)
        m = m[:, : features["msa_feat"].shape[1]]
        return self.one_answer(Prediction(m, z, s, atoms, positions, self.heads(m, z, s, atoms.states[-1])))

    def passes(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Atoms, Tensor]:
        """What the last pass ends with: alignment [B, S, R/n, C], pairs [B, R/n, R, C], residues [B, R, C], atoms, and their
        positions in 37 places [B, R, 37, 3]."""
        previous, graded = None, torch.is_grad_enabled()
        passes = features["aatype"].shape[-1]
        for number in range(passes):
            last = number == passes - 1
            now = {name: value[..., number] for name, value in features.items()}
            with torch.set_grad_enabled(graded and last):
                if torch.is_autocast_enabled(now["aatype"].device.type):
                    torch.clear_autocast_cache()  # older torch gives out again what it cast without gradients
                first, *found = self._once(now, previous)
            previous = Previous(first, found[1], found[4])
        m, z, s, atoms, positions = found
        return m, z, s, atoms, positions

    def fold(self, sequence: str, alignments: Any = None, **words: Any) -> Any:
        """The structure of a sequence, with confidence; see ``hpcai.models.openfold.folding.fold``."""
        from hpcai.models.openfold.folding import fold

        return fold(self, sequence, alignments, **words)

    def _once(self, features: Mapping[str, Tensor], previous: Previous | None) -> tuple[Any, ...]:
        """One pass: the first sequence of the alignment [B, R, C], and what ``passes`` returns."""
        kind = self.to_single.weight.dtype
        residues, aatype = features["seq_mask"].to(kind), features["aatype"]
        pair_mask = self.own_rows(residues)[:, :, None] * residues[:, None]
        m, z = self.input_embedder(features["target_feat"].to(kind), features["residue_index"], features["msa_feat"].to(kind))
        first, again = self.recycling_embedder(*self._recycled(previous, aatype, m, z))
        m = torch.cat([m[:, :1] + first[:, None], m[:, 1:]], 1)
        z = z + again
        msa_mask = features["msa_mask"].to(kind)
        if self.template_embedder is not None:
            z = z + self.template_embedder(features, z, pair_mask)
            m = torch.cat([m, self.template_embedder.template_single_embedder(features)], 1)
            msa_mask = torch.cat([msa_mask, features["template_torsion_angles_mask"][..., _PSI].to(kind)], 1)
        extra = self.extra_msa_embedder(features)
        z = self.extra_msa_stack(extra, z, features["extra_msa_mask"].to(kind), pair_mask)[1]
        m, z = self.evoformer(self.own_sequences(m), z, msa_mask, pair_mask)
        first = self.join_rows(m[:, 0], aatype.shape[1])
        s = self.to_single(first)
        atoms = self.structure_module(s, z, aatype, residues)
        return first, m, z, s, atoms, self._positions(atoms.positions[-1], features)

    def _recycled(self, previous: Previous | None, aatype: Tensor, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first pass meets zeros, which the norms turn into their biases."""
        if previous is None:
            wide = torch.promote_types(m.dtype, torch.float32)
            return torch.zeros_like(m[:, 0]), torch.zeros_like(z), torch.zeros(*aatype.shape, 3, dtype=wide, device=m.device)
        x = previous.positions
        beta = torch.where((aatype == _GLYCINE)[..., None], x[:, :, _CA], x[:, :, _CB])
        return previous.first.to(m.dtype), previous.pair.to(z.dtype), beta

    def _positions(self, positions: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Positions of atoms in 37 places, from those in 14.   [B, R, 14, 3] -> [B, R, 37, 3]"""
        index = features["residx_atom37_to_atom14"][..., None].expand(-1, -1, -1, 3)
        return positions.gather(2, index) * features["atom37_atom_exists"][..., None].to(positions.dtype)
