"""OpenFold: protein structure from a sequence and an alignment of its homologs (Jumper et al. 2021, Algorithm 2 of the supplement).

B batch, S clusters, E extra rows, T templates, R residues, C channels, P passes (recycles plus one); n ranks of the axial axis.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcai.models.openfold.config import OpenFoldConfig
from hpcai.models.openfold.embedders import ExtraMSAEmbedder, InputEmbedder, RecyclingEmbedder, TemplateEmbedder
from hpcai.models.openfold.evoformer import EvoformerBlock, EvoformerStack, ExtraMSABlock
from hpcai.models.openfold.heads import Heads, Logits
from hpcai.models.openfold.layers import Linear
from hpcai.models.openfold.residues import ATOM_ORDER, RESTYPES
from hpcai.models.openfold.structure import StructureModule, StructureOutput
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin

_CA, _CB, _GLYCINE = ATOM_ORDER["CA"], ATOM_ORDER["CB"], RESTYPES.index("G")
_PSI = 2  # index among the seven torsion angles


class Prediction(NamedTuple):
    msa: Tensor  # [B, S, R/n, C]
    pair: Tensor  # [B, R/n, R, C]
    single: Tensor  # [B, R, C]
    atoms: StructureOutput
    positions: Tensor  # [B, R, 37, 3] angstrom
    logits: Logits


class Recycled(NamedTuple):
    """The outputs of a pass that the next one reads."""

    msa_first_row: Tensor  # [B, R, C]
    pair: Tensor  # [B, R/n, R, C]
    positions: Tensor  # [B, R, 37, 3] angstrom


class OpenFold(PretrainedMixin):
    """Maps features to a Prediction."""

    package = __package__

    def __init__(self, cfg: OpenFoldConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or OpenFoldConfig()
        extra = cfg.extra
        self.input_embedder = InputEmbedder(cfg.msa, cfg.pair)
        self.recycling_embedder = RecyclingEmbedder(cfg.msa, cfg.pair)
        self.template_embedder = TemplateEmbedder(cfg.msa, cfg.pair, cfg.template, cfg.checkpoint) if cfg.template else None
        self.extra_msa_embedder = ExtraMSAEmbedder(extra.channels)
        self.extra_msa_stack = EvoformerStack(
            [ExtraMSABlock(extra.channels, cfg.pair, extra.msa, extra.pairs) for _ in range(extra.blocks)], cfg.checkpoint
        )
        self.evoformer = EvoformerStack(
            [EvoformerBlock(cfg.msa, cfg.pair, cfg.rows, cfg.pairs) for _ in range(cfg.blocks)], cfg.checkpoint
        )
        self.to_single = Linear(cfg.msa, cfg.single)
        self.structure_module = StructureModule(cfg.single, cfg.pair, cfg.structure)
        self.heads = Heads(cfg.msa, cfg.pair, cfg.single, cfg.heads)
        self.local_rows, self.local_sequences, self.gather_rows = Seam(), Seam(), Seam()
        self.replicated_output: nn.Module = Seam()  # the output of ranks that share a protein, counted once

    def forward(self, features: Mapping[str, Tensor]) -> Prediction:
        """``features`` are those of ``hpcai.models.openfold.featurize``, with a batch dim in front and a dim of passes at the end.

        Only the last pass has gradients.
        """
        m, z, s, atoms, positions = self.run_passes(features)
        m = m[:, : features["msa_feat"].shape[1]]
        return self.replicated_output(Prediction(m, z, s, atoms, positions, self.heads(m, z, s, atoms.states[-1])))

    def run_passes(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, StructureOutput, Tensor]:
        """Return the outputs of the last pass: alignment [B, S, R/n, C], pairs [B, R/n, R, C], residues [B, R, C], structures, and
        the positions of 37 atoms [B, R, 37, 3]."""
        recycled, with_grad = None, torch.is_grad_enabled()
        passes = features["aatype"].shape[-1]
        for pass_index in range(passes):
            last = pass_index == passes - 1
            inputs = {name: value[..., pass_index] for name, value in features.items()}
            with torch.set_grad_enabled(with_grad and last):
                if torch.is_autocast_enabled(inputs["aatype"].device.type):
                    torch.clear_autocast_cache()  # older torch reuses casts without gradients
                first, *outputs = self._iteration(inputs, recycled)
            recycled = Recycled(*(x.detach() for x in (first, outputs[1], outputs[4])))  # from forward derivatives too
        m, z, s, atoms, positions = outputs
        return m, z, s, atoms, positions

    def fold(self, sequence: str, alignments: Any = None, **kwargs: Any) -> Any:
        """Predict the structure of a sequence, a ``Fold``; arguments and errors are those of ``folding.prepare_features``."""
        from hpcai.models.openfold import folding

        return folding.predict(self, sequence, folding.prepare_features(self, sequence, alignments, **kwargs))

    def _iteration(self, features: Mapping[str, Tensor], previous: Recycled | None) -> tuple[Any, ...]:
        """Run one pass: return the first row of the alignment [B, R, C], and the results of ``run_passes``."""
        dtype = self.to_single.weight.dtype
        seq_mask, aatype = features["seq_mask"].to(dtype), features["aatype"]
        pair_mask = self.local_rows(seq_mask)[:, :, None] * seq_mask[:, None]
        m, z = self.input_embedder(features["target_feat"].to(dtype), features["residue_index"], features["msa_feat"].to(dtype))
        msa_first_row, z_update = self.recycling_embedder(*self._recycled_inputs(previous, aatype, m, z))
        m = torch.cat([m[:, :1] + msa_first_row[:, None], m[:, 1:]], 1)
        z = z + z_update
        msa_mask = features["msa_mask"].to(dtype)
        if self.template_embedder is not None:
            z = z + self.template_embedder(features, z, pair_mask)
            m = torch.cat([m, self.template_embedder.template_single_embedder(features)], 1)
            msa_mask = torch.cat([msa_mask, features["template_torsion_angles_mask"][..., _PSI].to(dtype)], 1)
        extra = self.extra_msa_embedder(features)
        z = self.extra_msa_stack(extra, z, features["extra_msa_mask"].to(dtype), pair_mask)[1]
        m, z = self.evoformer(self.local_sequences(m), z, msa_mask, pair_mask)
        msa_first_row = self.gather_rows(m[:, 0], aatype.shape[1])
        s = self.to_single(msa_first_row)
        atoms = self.structure_module(s, z, aatype, seq_mask)
        index = features["residx_atom37_to_atom14"][..., None].expand(-1, -1, -1, 3)
        exists = features["atom37_atom_exists"][..., None]
        return msa_first_row, m, z, s, atoms, atoms.positions[-1].gather(2, index) * exists.to(atoms.positions.dtype)

    def _recycled_inputs(self, previous: Recycled | None, aatype: Tensor, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the recycling embedder: in the first pass zeros, which its layer norms map to their biases."""
        if previous is None:
            wide = torch.promote_types(m.dtype, torch.float32)
            return torch.zeros_like(m[:, 0]), torch.zeros_like(z), torch.zeros(*aatype.shape, 3, dtype=wide, device=m.device)
        positions = previous.positions
        pseudo_beta = torch.where((aatype == _GLYCINE)[..., None], positions[:, :, _CA], positions[:, :, _CB])
        return previous.msa_first_row.to(m.dtype), previous.pair.to(z.dtype), pseudo_beta
