"""R-GAT: graph attention on a heterogeneous graph (Velickovic et al., ICLR 2018; the network of MLPerf's GNN benchmark).

Names of parameters are those of PyTorch Geometric's ``HeteroConv`` of ``GATConv``.
N nodes of a type, M of them in the hops that later layers need, E edges of a relation, F features, H heads, D channels of a head
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels.graph_attention import graph_attention
from hpcai.models.rgat.batch import Batch
from hpcai.models.rgat.config import SEPARATOR, RGATConfig
from hpcai.nn.weights import PretrainedMixin

_EDGE_COST = 16  # of an edge in graph attention, relative to a multiply-add per channel of a matrix product


class GATConv(nn.Module):
    """Graph attention over one relation. One projection serves sources and destinations, as in MLPerf."""

    def __init__(self, inputs: int, hidden: int, heads: int, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.lin = nn.Linear(inputs, hidden, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, hidden // heads))
        self.att_dst = nn.Parameter(torch.empty(1, heads, hidden // heads))
        self.bias = nn.Parameter(torch.zeros(hidden))
        nn.init.xavier_uniform_(self.lin.weight)
        for att in (self.att_src, self.att_dst):  # PyTorch Geometric's glorot
            limit = (6 / (heads + hidden // heads)) ** 0.5
            nn.init.uniform_(att, -limit, limit)

    def weight(self) -> Tensor:
        """Return the projection by head.   [H, D, F]"""
        return self.lin.weight.unflatten(0, self.att_src.shape[1:])

    def score_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights that map a node to its attention score as a source and as a destination, W^T a of each head: no
        destination is projected.   [F, H] each"""
        weight = self.weight()
        return (self.att_src[0, :, :, None] * weight).sum(1).t(), (self.att_dst[0, :, :, None] * weight).sum(1).t()

    def forward(self, x: Tensor, source_score: Tensor, destination_score: Tensor, edges: Tensor) -> Tensor:
        """Return weighted sums of projected sources, without the bias.

        The projection is linear: it comes before or after the sum, whichever costs less.
        Shape: x [N, F], source_score [N, H], destination_score [M, H], edges [2, E] -> [H, M, D]
        """
        weight, (count, heads) = self.weight(), destination_score.shape
        width = weight.shape[1]
        if count * width + _EDGE_COST * edges.shape[1] < len(x) * width:
            sums = graph_attention(source_score, destination_score, x, edges, self.slope)
            return torch.bmm(sums, weight.transpose(1, 2))
        projected = self.lin(x).unflatten(1, (heads, width))
        return graph_attention(source_score, destination_score, projected, edges, self.slope)


class HeteroConv(nn.Module):
    """Graph attention over several relations, summed for each type of nodes. ``needed``: Relations that are computed."""

    def __init__(self, cfg: RGATConfig, inputs: int, needed: Sequence[str]) -> None:
        super().__init__()
        self.needed, self.heads = needed, cfg.heads
        self.convs = nn.ModuleDict({f"<{r}>": GATConv(inputs, cfg.hidden, cfg.heads, cfg.slope) for r in cfg.relation_names})

    def forward(self, x: Mapping[str, Tensor], edges: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Tensor]:
        """``counts``: The nodes M of each type whose results are computed, which are the first ones."""
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for relation in self.needed:
            conv: Any = self.convs[f"<{relation}>"]
            for kind, weight in zip(relation.split(SEPARATOR)[::2], conv.score_weights()):
                parts[kind].append(weight)
        scores = {kind: self._scores(x[kind], weights) for kind, weights in parts.items()}
        sums: dict[str, list[Tensor]] = defaultdict(list)
        biases: dict[str, list[Tensor]] = defaultdict(list)
        for relation in self.needed:
            source, _, destination = relation.split(SEPARATOR)
            conv, source_score = self.convs[f"<{relation}>"], next(scores[source])
            destination_score = next(scores[destination])[: counts[destination]]
            biases[destination].append(conv.bias)
            sums[destination].append(conv(x[source], source_score, destination_score, edges[relation]))
        return {kind: sum(s[1:], s[0]).transpose(0, 1).flatten(1) + sum(biases[kind]) for kind, s in sums.items()}

    def _scores(self, x: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the scores of all nodes for each of the weights, in float32 or wider.   [N, H] each"""
        scores = x @ torch.cat([*weights], 1).to(x.dtype)
        return iter(scores.to(torch.promote_types(scores.dtype, torch.float32)).split(self.heads, 1))


class RGAT(PretrainedMixin):
    """Maps a ``Batch`` to logits of its seeds [S, K]. A layer computes the nodes of the hops that later layers need, from the edges
    that end there, which changes no logit of a seed."""

    package = __package__

    def __init__(self, cfg: RGATConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or RGATConfig()
        widths = cfg.inputs, *(cfg.hidden for _ in range(cfg.layers - 1))
        self.convs = nn.ModuleList([HeteroConv(cfg, width, needed) for width, needed in zip(widths, cfg.needed())])
        self.lin, self.dropout = nn.Linear(cfg.hidden, cfg.outputs), nn.Dropout(cfg.dropout)

    def forward(self, batch: Batch) -> Tensor:
        sizes, edges, x = self._inputs(batch)
        for layer, conv in enumerate(self.convs):
            hops = len(self.convs) - layer
            ends = {name: sum(part.shape[1] for part in batch.edges[name][:hops]) for name in edges}
            x = conv(x, {name: edge[:, : ends[name]] for name, edge in edges.items()}, {k: sum(n[:hops]) for k, n in sizes.items()})
            if hops > 1:
                x = {kind: self.dropout(F.leaky_relu(h)) for kind, h in x.items()}
        return self.lin(x[self.cfg.target][: len(batch.labels)])

    def _inputs(self, batch: Batch) -> tuple[dict[str, list[int]], dict[str, Tensor], dict[str, Tensor]]:
        """Return the nodes of each hop, edges and features of all hops. Raises DataError if the batch has other hops, relations or
        widths than the network."""
        cfg, kinds = self.cfg, {kind for name in self.cfg.relation_names for kind in name.split(SEPARATOR)[::2]}
        if missing := sorted({*cfg.relation_names} - {*batch.edges}) + sorted(kinds - {*batch.features}):
            raise DataError(f"the batch lacks {', '.join(missing)} of the network's node types and relations (model.relations)")
        hops = {len(parts) for parts in batch.edges.values()} | {len(parts) - 1 for parts in batch.features.values()}
        widths = {part.shape[1] for kind in kinds for part in batch.features[kind]}
        if hops != {cfg.layers} or widths != {cfg.inputs}:
            actual = f"{sorted(hops)} hops and {sorted(widths)} features"
            raise DataError(f"the batch has {actual}; the network expects {cfg.layers} hops and {cfg.inputs} features")
        device, weight = self.lin.weight.device.type, self.lin.weight
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        sizes = {kind: [len(part) for part in batch.features[kind]] for kind in sorted(kinds)}
        x = {kind: torch.cat([part.to(dtype) for part in batch.features[kind]]) for kind in sizes}
        return sizes, {name: torch.cat(batch.edges[name], 1) for name in cfg.relation_names}, x
