"""Attention over rows and columns of an alignment, and over pairs that share a residue (supplement 1.6.1 to 1.6.6, 1.7.2).

B batch, S sequences, R residues, C channels, H heads; n size of the axial mesh axis, 1 without sharding.
"""

import torch
from torch import Tensor, nn

from hpcai.kernels.attention import gated_attention
from hpcai.models.openfold.layers import Linear, channels_first, init_weight_
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.seam import Seam


class GatedAttention(nn.Module):
    """Gated attention along rows, or along columns; the four projections are one product.

    x [B, I, N, C], mask [B, I, N], bias [B, H, N, N] -> [B, I, N, C]; with ``columns`` bias is [B, H, I, I]
    """

    def __init__(self, channels: int, head: int, heads: int) -> None:
        super().__init__()
        self.head, self.heads = head, heads
        self.linear_qkvg = Linear(channels, 4 * head * heads, bias=False)
        self.gate_bias = nn.Parameter(torch.ones(head * heads))
        self.linear_o = Linear(head * heads, channels, init="final")
        with torch.no_grad():
            for part in self.linear_qkvg.weight.chunk(4)[:3]:
                init_weight_(part, "glorot")
            self.linear_qkvg.weight[3 * head * heads :] = 0

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None, columns: bool = False) -> Tensor:
        return self.attend(self.project(x), mask, bias, columns)

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys, values and gates.   [B, I, N, C] -> [B, I, N, 4, H, c]"""
        return self.linear_qkvg(x).unflatten(-1, (4, self.heads, self.head))

    def attend(self, qkvg: Tensor, mask: Tensor, bias: Tensor | None, columns: bool = False) -> Tensor:
        if columns:  # only strides are transposed; every product keeps the layout of its input
            return self.linear_o(gated_attention(qkvg.transpose(1, 2), self.gate_bias, mask.transpose(1, 2), bias).transpose(1, 2))
        return self.linear_o(gated_attention(qkvg, self.gate_bias, mask, bias))


class RowAttention(nn.Module):
    """Attention along the rows of an alignment, with a bias from pairs (Algorithm 7).

    m [B, S/n, R, C], mask [B, S/n, R], z [B, R/n, R, C] -> [B, S/n, R, C]
    """

    def __init__(self, channels: int, pair: int, head: int, heads: int) -> None:
        super().__init__()
        self.layer_norm_m, self.layer_norm_z = LayerNorm(channels, autocast_output=True), LayerNorm(pair, autocast_output=True)
        self.linear_z = Linear(pair, heads, bias=False)
        self.attention = GatedAttention(channels, head, heads)
        self.gather_bias = Seam()  # each sequence needs the bias of all pairs

    def forward(self, m: Tensor, mask: Tensor, z: Tensor) -> Tensor:
        bias = channels_first(self.linear_z.weight, None, self.layer_norm_z(z))  # [B, H, R/n, R]
        pending = self.gather_bias.begin(bias)
        qkvg = self.attention.project(self.layer_norm_m(m))
        return self.attention.attend(qkvg, mask, self.gather_bias.finish(pending))


class ColumnAttention(nn.Module):
    """Attention along the columns of an alignment (Algorithm 8).   m [B, S, R/n, C], mask [B, S, R/n] -> [B, S, R/n, C]"""

    def __init__(self, channels: int, head: int, heads: int) -> None:
        super().__init__()
        self.layer_norm_m = LayerNorm(channels, autocast_output=True)
        self.attention = GatedAttention(channels, head, heads)

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        return self.attention(self.layer_norm_m(m), mask, columns=True)


class GlobalColumnAttention(nn.Module):
    """Attention with one query per column, one key and value for all heads (Algorithm 19).   m [B, S, R/n, C], mask [B, S, R/n]"""

    def __init__(self, channels: int, head: int, heads: int) -> None:
        super().__init__()
        self.head, self.heads = head, heads
        self.layer_norm_m = LayerNorm(channels)
        self.linear_q = Linear(channels, head * heads, bias=False, init="glorot")
        self.linear_kv = Linear(channels, 2 * head, bias=False, init="glorot")
        self.linear_g = Linear(channels, head * heads, init="final")
        self.linear_o = Linear(head * heads, channels, init="final")
        nn.init.ones_(self.linear_g.bias)
        with torch.no_grad():
            for part in self.linear_kv.weight.chunk(2):
                init_weight_(part, "glorot")

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        m = self.layer_norm_m(m)
        count = mask.sum(1)[..., None]  # [B, R, 1]
        query = (m * mask[..., None]).sum(1) / (count + 1e-8)  # [B, R, C]
        q = self.linear_q(query).unflatten(-1, (self.heads, self.head)) * self.head**-0.5  # [B, R, H, C]
        k, v = self.linear_kv(m).transpose(1, 2).chunk(2, -1)  # [B, R, S, C]
        logits = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        p = (logits + (mask.transpose(1, 2)[:, :, None] - 1) * 1e9).softmax(-1).to(v.dtype)  # [B, R, H, S]
        o = (p @ v).flatten(-2)[:, None]  # [B, 1, R, H * C]
        return self.linear_o(self.linear_g(m).sigmoid() * o)


class TriangleAttention(nn.Module):
    """Attention of an edge to the edges that start at the same residue (Algorithm 13): z [B, R/n, R, C], mask [B, R/n, R]; or to
    those that end at the same one (Algorithm 14): z [B, R, R/n, C], mask [B, R, R/n]."""

    def __init__(self, channels: int, head: int, heads: int, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.layer_norm = LayerNorm(channels, autocast_output=True)
        self.linear = Linear(channels, heads, bias=False)
        self.attention = GatedAttention(channels, head, heads)
        self.gather_bias = Seam()  # each row needs the bias of all pairs

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.layer_norm(z)
        bias = channels_first(self.linear.weight, None, z)
        pending = self.gather_bias.begin(bias if self.starting else bias.transpose(2, 3))
        qkvg = self.attention.project(z)
        return self.attention.attend(qkvg, mask, self.gather_bias.finish(pending), columns=not self.starting)
