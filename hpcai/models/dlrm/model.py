"""DLRM-dcnv2: recommendation by embedding tables and low-rank cross layers (Naumov et al., arXiv:1906.00091, with the cross network
of Wang et al., "DCN V2", WWW 2021).

The network is that of MLPerf (torchrec's DLRM_DCN).   B batch, F numbers, T tables, D channels, K ids of a sample, C = (T + 1) D
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.models.dlrm.config import DLRMConfig
from hpcai.nn.embedding_bag import EmbeddingBags
from hpcai.nn.weights import PretrainedMixin


class LowRankCross(nn.Module):
    """x0 * (W (V x) + b) + x.   [B, C] -> [B, C]"""

    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.V, self.W = nn.Parameter(torch.empty(rank, channels)), nn.Parameter(torch.empty(channels, rank))
        self.bias = nn.Parameter(torch.zeros(channels))
        nn.init.xavier_normal_(self.V)
        nn.init.xavier_normal_(self.W)

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        # Not addcmul, whose backward pass reads and writes twice as much.
        return x0 * nn.functional.linear(nn.functional.linear(x, self.V), self.W, self.bias) + x


def _mlp(sizes: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes))


class DLRM(PretrainedMixin):
    """Maps numbers [B, F] and padded ids [B, K] (``hpcai.nn.embedding_bag``) to logits [B]."""

    package = __package__

    def __init__(self, cfg: DLRMConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or DLRMConfig()
        self.bottom = _mlp((cfg.dense_features, *cfg.bottom))
        self.embedding = EmbeddingBags(cfg.rows, cfg.dim, cfg.hotness, rowwise=cfg.adagrad_rowwise, eps=cfg.adagrad_eps)
        channels = (len(cfg.rows) + 1) * cfg.dim
        self.cross = nn.ModuleList(LowRankCross(channels, cfg.cross_rank) for _ in range(cfg.cross_layers))
        self.top = _mlp((channels, *cfg.top))

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        pending = self.embedding.begin(ids)
        x = dense
        for layer in self.bottom:
            x = layer(x).relu()
        embeddings = self.embedding.finish(pending)[: len(x)]
        x = x0 = torch.cat((x[:, None], embeddings), 1).flatten(1)
        for cross in self.cross:
            x = cross(x, x0)
        for layer in self.top[:-1]:
            x = layer(x).relu()
        return self.top[-1](x)[:, 0]

    def output_files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        return {"model.safetensors": lambda path: export(path, names=lambda name: None if name.endswith(".sum") else name)}

    def save(self, path: str | Path, weights: Mapping[str, Tensor] | None = None, form: str = "hpcai") -> None:
        """Save weights and settings as the base class, without the state of Adagrad, which has the size of the tables."""
        weights = weights or self.state_dict()
        super().save(path, {name: value for name, value in weights.items() if not name.endswith(".sum")}, form)
