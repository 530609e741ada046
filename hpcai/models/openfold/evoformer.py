"""Evoformer: blocks that update an alignment and its pairs by each other (supplement 1.6); stacks for templates and extra rows.

B batch, S sequences, R residues, C channels; n size of the axial mesh axis, 1 without sharding (``parallel`` fills the seams).
Alignments are sharded by sequences or residues, pairs by rows or columns; products of triangles by channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpcai.kernels.chunking import map_chunks
from hpcai.kernels.gates import gate, glu_halves
from hpcai.kernels.outer_product import outer_product
from hpcai.kernels.triangle_multiplication import triangle_multiplication
from hpcai.models.openfold.attention import ColumnAttention, GlobalColumnAttention, RowAttention, TriangleAttention
from hpcai.models.openfold.config import MsaConfig, PairConfig
from hpcai.models.openfold.layers import Dropout, Linear, Transition, channels_first
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.recompute import run_block
from hpcai.nn.seam import Seam

_COUNT_EPS = 1e-3
_CPU = 256 << 20  # bytes of edges in a chunk, without gradients


class Masks(NamedTuple):
    """1 for elements and 0 for padding, in the sharding of each part of a block."""

    rows: Tensor  # [B, S/n, R]
    columns: Tensor  # [B, S, R/n]
    pairs: Tensor  # [B, R/n, R]
    pair_counts: Tensor  # [B, R/n, R] number of sequences with both residues
    size: tuple[int, int]  # S, R


class TriangleMultiplication(nn.Module):
    """Update of an edge by products of the other two edges of its triangles: outgoing (Algorithm 11) or incoming (Algorithm 12).

    z [B, R/n, R, C], mask [B, R/n, R] -> [B, R/n, R, C]
    """

    def __init__(self, channels: int, hidden: int, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.layer_norm_in, self.layer_norm_out = LayerNorm(channels, autocast_output=True), LayerNorm(hidden, autocast_output=True)
        self.linear_ab = Linear(channels, 4 * hidden)  # projections of a and b, then their gates
        self.linear_g = Linear(channels, channels, init="final")
        self.linear_z = Linear(hidden, channels, init="final")
        self.to_channels, self.to_rows = Seam(), Seam()  # a rank multiplies a shard of channels of all edges
        nn.init.ones_(self.linear_g.bias)
        with torch.no_grad():
            self.linear_ab.weight[2 * hidden :] = 0
            self.linear_ab.bias[2 * hidden :] = 1

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.layer_norm_in(z)
        channel_bytes, hidden = z[..., 0].numel() * z.element_size(), self.linear_z.in_features
        if torch.is_grad_enabled():  # the gates are saved then, and computed during communication
            pending = self.to_channels.begin(self._project(z, mask, slice(0, hidden)))
            gates = self.linear_g(z)
            return self._gate_output(self._contract(self.to_channels.finish(pending)), gates)

        def edges(chunk: slice) -> Tensor:
            return self._contract(self.to_channels(self._project(z, mask, chunk)))

        x = map_chunks(edges, hidden, z, 6 * channel_bytes, _CPU, 1, self.to_channels.num_shards)  # [B, C, R/n, R]

        def rows(chunk: slice) -> Tensor:
            return self._gate_output(x[:, :, chunk], self.linear_g(z[:, chunk]))

        return map_chunks(rows, x.shape[2], z, 5 * hidden * channel_bytes // x.shape[2], _CPU, 1)

    def _project(self, z: Tensor, mask: Tensor, channels: slice) -> Tensor:
        """Return some channels of a, then of b.   [B, 2 c, R/n, R]"""
        weight, bias = self.linear_ab.weight, self.linear_ab.bias
        if channels != slice(0, self.linear_z.in_features):
            weight, bias = (parameter.unflatten(0, (4, -1))[:, channels].flatten(0, 1) for parameter in (weight, bias))
        return glu_halves(channels_first(weight, bias, z), mask[:, None])

    def _contract(self, ab: Tensor) -> Tensor:
        """Sum over the third residue.   [B, 2 c/n, R, R] -> [B, c, R/n, R]"""
        return self.to_rows(triangle_multiplication(ab, self.outgoing))

    def _gate_output(self, x: Tensor, g: Tensor) -> Tensor:
        return gate(self.linear_z(self.layer_norm_out(x.permute(0, 2, 3, 1))), g)


class OuterProductMean(nn.Module):
    """Update of pairs from an alignment (Algorithm 10); a pair in no sequence gets bias / 0.001, as published.

    m [B, S, R/n, C], masks -> [B, R/n, R, C]
    """

    def __init__(self, channels: int, pair: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(channels, autocast_output=True)
        self.linear_1, self.linear_2 = Linear(channels, hidden), Linear(channels, hidden)
        self.linear_out = Linear(hidden**2, pair, init="final")
        self.gather_residues = Seam()  # each residue needs all others

    def forward(self, m: Tensor, masks: Masks) -> Tensor:
        m = self.layer_norm(m)
        b = self.linear_2(m)
        mask = masks.columns[..., None].to(b.dtype)  # or the products would be promoted
        pending = self.gather_residues.begin(b * mask, masks.size[1])
        a = self.linear_1(m) * mask
        b = self.gather_residues.finish(pending)
        return outer_product(a, b, self.linear_out.weight, self.linear_out.bias, masks.pair_counts + _COUNT_EPS)


class PairStack(nn.Module):
    """Update of pairs by triangles.   z [B, R/n, R, C], mask [B, R/n, R] (symmetric) -> [B, R/n, R, C]"""

    def __init__(self, channels: int, cfg: PairConfig, attention_first: bool = False) -> None:
        super().__init__()
        self.attention_first = attention_first
        self.tri_mul_out = TriangleMultiplication(channels, cfg.triangle, outgoing=True)
        self.tri_mul_in = TriangleMultiplication(channels, cfg.triangle, outgoing=False)
        self.tri_att_start = TriangleAttention(channels, cfg.head, cfg.heads, starting=True)
        self.tri_att_end = TriangleAttention(channels, cfg.head, cfg.heads, starting=False)
        self.pair_transition = Transition(channels, cfg.transition)
        self.drop_columns, self.drop_rows = Dropout(cfg.dropout, shared_dim=1), Dropout(cfg.dropout, shared_dim=2)
        self.to_columns, self.to_rows = Seam(), Seam()  # between sharding by rows and by columns

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        for part in (self._attend, self._multiply) if self.attention_first else (self._multiply, self._attend):
            z = part(z, mask)
        return z + self.pair_transition(z)

    def _multiply(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.drop_columns(self.tri_mul_out(z, mask), z)
        return self.drop_columns(self.tri_mul_in(z, mask), z)

    def _attend(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.to_columns(self.drop_columns(self.tri_att_start(z, mask), z))
        return self.to_rows(self.drop_rows(self.tri_att_end(z, mask.transpose(1, 2)), z))


class EvoformerBlock(nn.Module):
    """A block of the Evoformer (Algorithm 6).   m [B, S/n, R, C], z [B, R/n, R, C] -> the same"""

    def __init__(self, channels: int, pair: int, msa: MsaConfig, pairs: PairConfig) -> None:
        super().__init__()
        self.msa_att_row = RowAttention(channels, pair, msa.head, msa.heads)
        self.msa_att_col: nn.Module = ColumnAttention(channels, msa.head, msa.heads)
        self.msa_transition = Transition(channels, msa.transition)
        self.outer_product_mean = OuterProductMean(channels, pair, msa.outer)
        self.pair = PairStack(pair, pairs)
        self.drop_rows = Dropout(msa.dropout, shared_dim=1)
        self.to_columns, self.to_rows = Seam(), Seam()  # between sharding by sequences and by residues

    def forward(self, m: Tensor, z: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        m = self.to_columns(self.drop_rows(self.msa_att_row(m, masks.rows, z), m), *masks.size)
        m = m + self.msa_att_col(m, masks.columns)
        m = m + self.msa_transition(m)
        z = z + self.outer_product_mean(m, masks)
        pending = self.to_rows.begin(m, *masks.size)
        z = self.pair(z, masks.pairs)
        return self.to_rows.finish(pending), z


class ExtraMSABlock(EvoformerBlock):
    """An Evoformer block for the extra rows, with one global query per column (Algorithm 18)."""

    def __init__(self, channels: int, pair: int, msa: MsaConfig, pairs: PairConfig) -> None:
        super().__init__(channels, pair, msa, pairs)
        self.msa_att_col = GlobalColumnAttention(channels, msa.head, msa.heads)


class EvoformerStack(nn.Module):
    """Consecutive blocks. With ``checkpoint_blocks`` each saves only its input for the backward pass.

    m [B, S/n, R, C], z [B, R/n, R, C], msa_mask [B, S, R], pair_mask [B, R/n, R] -> [B, S, R/n, C], [B, R/n, R, C]
    """

    def __init__(self, blocks: list[EvoformerBlock], checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.blocks, self.checkpoint_blocks = nn.ModuleList(blocks), checkpoint_blocks
        self.local_sequences, self.local_columns = Seam(), Seam()

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        masks = self.masks(msa_mask, pair_mask)
        for block in self.blocks:
            m, z = run_block(block, "layers" if self.checkpoint_blocks else "none", m, z, masks)
        return m, z

    def masks(self, msa_mask: Tensor, pair_mask: Tensor) -> Masks:
        """Return the masks of the blocks.   msa_mask [B, S, R], pair_mask [B, R/n, R]"""
        size, columns = (msa_mask.shape[1], msa_mask.shape[2]), self.local_columns(msa_mask)
        return Masks(self.local_sequences(msa_mask), columns, pair_mask, columns.transpose(1, 2) @ msa_mask, size)


class TemplateStack(nn.Module):
    """Blocks for the pairs of each template (Algorithm 16).   t [B, R/n, R, C], mask [B, R/n, R] -> [B, R/n, R, C]"""

    def __init__(self, channels: int, blocks: int, cfg: PairConfig, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairStack(channels, cfg, attention_first=True) for _ in range(blocks))
        self.layer_norm = LayerNorm(channels, autocast_output=True)
        self.checkpoint_blocks = checkpoint_blocks

    def forward(self, t: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            t = run_block(block, "layers" if self.checkpoint_blocks else "none", t, mask)
        return self.layer_norm(t)
