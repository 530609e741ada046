"""Input embedders: sequence, alignment, previous pass, templates and extra rows (supplement 1.5 and 1.7).

B batch, S sequences, E extra rows, T templates, R residues, C channels; n size of the axial mesh axis, 1 without sharding.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpcai.models.openfold.config import TemplateConfig
from hpcai.models.openfold.evoformer import TemplateStack
from hpcai.models.openfold.layers import Linear, one_hot
from hpcai.models.openfold.residues import MASKED
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.seam import Seam

_NUM_LETTERS = MASKED + 1  # alignments have 20, unknown, gap, masked
_NUM_TYPES = _NUM_LETTERS - 1
_BACKBONE = slice(3)  # N, CA and C of atom37; a list would be copied to the device in every pass
_MAX_OFFSET = 32  # residues, the maximum of offsets along the chain
_MAX_SQUARED_DISTANCE = 1e8  # square angstrom: the last bin is open


class InputEmbedder(nn.Module):
    """Algorithms 3 and 4.   target [B, R, 22], index [B, R], msa [B, S, R, 49] -> m [B, S, R, C], z [B, R/n, R, C]"""

    def __init__(self, msa: int, pair: int) -> None:
        super().__init__()
        self.linear_tf_z_i, self.linear_tf_z_j = Linear(22, pair), Linear(22, pair)
        self.linear_tf_m, self.linear_msa_m = Linear(22, msa), Linear(49, msa)
        self.linear_relpos = Linear(2 * _MAX_OFFSET + 1, pair)
        self.local_rows = Seam()

    def forward(self, target: Tensor, index: Tensor, msa: Tensor) -> tuple[Tensor, Tensor]:
        offsets = (self.local_rows(index)[:, :, None] - index[:, None]).clamp(-_MAX_OFFSET, _MAX_OFFSET) + _MAX_OFFSET
        z = self.linear_tf_z_i(self.local_rows(target))[:, :, None] + self.linear_tf_z_j(target)[:, None]
        z = z + self.linear_relpos(one_hot(offsets, 2 * _MAX_OFFSET + 1, target.dtype))
        return self.linear_msa_m(msa) + self.linear_tf_m(target)[:, None], z


class RecyclingEmbedder(nn.Module):
    """Embeds the previous pass (Algorithm 32): first row m [B, R, C], pairs z [B, R/n, R, C], atoms x [B, R, 3], angstrom."""

    edges: Tensor

    def __init__(self, msa: int, pair: int) -> None:
        super().__init__()
        self.linear = Linear(15, pair)
        self.layer_norm_m, self.layer_norm_z = LayerNorm(msa), LayerNorm(pair)
        self.register_buffer("edges", squared_bin_edges(3.25, 20.75, 15), persistent=False)
        self.local_rows = Seam()

    def forward(self, m: Tensor, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer_norm_m(m), self.layer_norm_z(z) + self.linear(distogram(self.local_rows(x), x, self.edges).to(z.dtype))


class ExtraMSAEmbedder(nn.Module):
    """Embeds extra rows, each a letter and two features of deletions.   [B, E, R] each -> [B, E/n, R, C]"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = Linear(_NUM_LETTERS + 2, channels)
        self.local_sequences = Seam()

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        names = "extra_msa", "extra_has_deletion", "extra_deletion_value"
        rows, *deletions = (self.local_sequences(features[name]) for name in names)
        letters = one_hot(rows, _NUM_LETTERS, self.linear.weight.dtype)
        deletion_columns = [values[..., None].to(letters.dtype) for values in deletions]
        return self.linear(torch.cat([letters, *deletion_columns], -1))


class TemplateAngleEmbedder(nn.Module):
    """Embeds torsion angles of a template as a row of the alignment.   [B, T, R, 57] -> [B, T, R, C]"""

    def __init__(self, msa: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(57, msa, init="relu"), Linear(msa, msa)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        dtype = self.linear_1.weight.dtype
        x = [one_hot(features["template_aatype"], _NUM_TYPES, dtype)]
        x += [features[f"template_{name}torsion_angles_sin_cos"].flatten(-2).to(dtype) for name in ("", "alt_")]
        x += [features["template_torsion_angles_mask"].to(dtype)]
        return self.linear_2(self.linear_1(torch.cat(x, -1)).relu())


class TemplatePointwiseAttention(nn.Module):
    """Attention of a pair to the same pair in templates (Algorithm 17).   t [B, T, R/n, R, Ct], z [B, R/n, R, C] -> same as z"""

    def __init__(self, template: int, pair: int, head: int, heads: int) -> None:
        super().__init__()
        self.head, self.heads = head, heads
        self.linear_q = Linear(pair, head * heads, bias=False, init="glorot")
        self.linear_kv = Linear(template, 2 * head * heads, bias=False, init="glorot")
        self.linear_o = Linear(head * heads, pair, init="final")

    def forward(self, t: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        q = self.linear_q(z).unflatten(-1, (self.heads, self.head))[:, None] * self.head**-0.5  # [B, 1, R, R, H, C]
        k, v = self.linear_kv(t).unflatten(-1, (2, self.heads, self.head)).unbind(-3)  # [B, T, R, R, H, C]
        logits = (q * k).sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))  # [B, T, R, R, H]
        p = (logits + (mask[:, :, None, None, None] - 1) * 1e5).softmax(1)
        return self.linear_o((p[..., None].to(v.dtype) * v).sum(1).flatten(-2))


class TemplateEmbedder(nn.Module):
    """Update of pairs from templates.   z [B, R/n, R, C], pair_mask [B, R/n, R] -> [B, R/n, R, C]"""

    edges: Tensor

    def __init__(self, msa: int, pair: int, cfg: TemplateConfig, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.template_single_embedder = TemplateAngleEmbedder(msa)
        self.template_pair_embedder = Linear(88, cfg.channels, init="relu")
        self.template_pair_stack = TemplateStack(cfg.channels, cfg.blocks, cfg.pairs, checkpoint_blocks)
        self.template_pointwise_att = TemplatePointwiseAttention(cfg.channels, pair, cfg.head, cfg.heads)
        self.register_buffer("edges", squared_bin_edges(3.25, 50.75, 39), persistent=False)
        self.local_rows = Seam()

    def forward(self, features: Mapping[str, Tensor], z: Tensor, pair_mask: Tensor) -> Tensor:
        t = self.template_pair_embedder(self._pairs(features))  # [B, T, R/n, R, C]
        count = t.shape[1]
        mask_per_template = pair_mask[:, None].expand(-1, count, -1, -1).flatten(0, 1)
        t = self.template_pair_stack(t.flatten(0, 1), mask_per_template).unflatten(0, (-1, count))
        mask = features["template_mask"].to(z.dtype)  # [B, T]
        return self.template_pointwise_att(t, z, mask) * (mask.sum(1) > 0)[:, None, None, None]

    def _pairs(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return [B, T, R/n, R, 88]: distances, their mask, types by column and by row, three unused zeros, backbone mask."""
        dtype = self.template_pair_embedder.weight.dtype
        atoms = features["template_all_atom_mask"][..., _BACKBONE].prod(-1).to(dtype)
        beta = features["template_pseudo_beta_mask"].to(dtype)
        types = one_hot(features["template_aatype"], _NUM_TYPES, dtype)
        known, backbone = (self.local_rows(x)[..., :, None] * x[..., None, :] for x in (beta, atoms))  # [B, T, R/n, R]
        near = distogram(self.local_rows(features["template_pseudo_beta"]), features["template_pseudo_beta"], self.edges).to(dtype)
        shape = *known.shape, _NUM_TYPES
        unused = known.new_zeros(*known.shape, 3)
        by_type = types[..., None, :, :].expand(shape), self.local_rows(types)[..., :, None, :].expand(shape)
        return torch.cat([near, known[..., None], *by_type, unused, backbone[..., None]], -1) * backbone[..., None]


def squared_bin_edges(first: float, last: float, count: int) -> Tensor:
    """Return lower edges of distance bins, squared, and the upper one of the last.   angstrom -> [count + 1] square angstrom"""
    return nn.functional.pad(torch.linspace(first, last, count) ** 2, (0, 1), value=_MAX_SQUARED_DISTANCE)


def distogram(x: Tensor, y: Tensor, edges: Tensor) -> Tensor:
    """Return True for the bin of the distance of each pair, if any.

    x [..., I, 3], y [..., J, 3], edges [K + 1] -> [..., I, J, K]
    """
    squared = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1, keepdim=True)
    return (squared > edges[:-1].to(squared.dtype)) & (squared < edges[1:].to(squared.dtype))
