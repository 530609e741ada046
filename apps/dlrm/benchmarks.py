"""Benchmark of DLRM:  hpcai bench dlrm | hpcai ablate dlrm [model.dim=32 data.batch=1024 ...]

Events are random, with ids of uniform distribution. The plain form has torch's EmbeddingBag, whose gradients are dense, and torch's
optimizer for all weights.
"""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from apps.dlrm.data import score
from apps.dlrm.settings import Config
from hpcai.cli.benchmarks import Enabled, Implementation, Switch, Workload
from hpcai.dist import Mesh
from hpcai.models.dlrm import DLRM, Batch, loss, parallelize
from hpcai.nn.embedding_bag import EmbeddingBags


class RandomConfig(Config):
    """A DLRM run. Batches of random events have any size."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        return self


class Benchmark(Workload):
    settings, batch, fields, unit = RandomConfig, Batch, Batch._fields, "events"
    loss, metric = staticmethod(loss), staticmethod(score)

    def switches(self, cfg: Config, mesh: Mesh) -> list[Switch]:
        return [Switch("touched rows", "Adagrad updates the rows that a batch touched, not all rows of each table")]

    def build(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(DLRM(cfg.model), mesh)
        if "touched rows" not in enabled:
            for group in model.embedding.groups:
                group.all_reduce = lambda gradients: gradients
        return model

    def implementations(self, cfg: Config, batch: Any, mesh: Mesh) -> dict[str, Callable[[], Implementation]]:
        return {"plain": lambda: Implementation(with_torch_bags(DLRM(cfg.model)), loss)}

    def random_sample(self, cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
        model = cfg.model
        ids = random.integers(0, np.repeat(model.rows, model.hotness), dtype=np.int64).astype(np.int32)
        return random.standard_normal(model.dense_features, np.float32), ids, np.float32(random.random() < 0.5)


class TorchBags(nn.Module):
    """Tables of ``bags`` as torch's layers, with dense gradients."""

    def __init__(self, bags: EmbeddingBags) -> None:
        super().__init__()
        self.hotness = list(bags.hotness)
        self.layers = nn.ModuleList(nn.EmbeddingBag.from_pretrained(table.weight, False, mode="sum") for table in bags.tables)

    def begin(self, ids: Tensor) -> Tensor:
        bags: Any = zip(self.layers, ids.split(self.hotness, 1))
        return torch.stack([_pool(bag, layer.weight) for layer, bag in bags], 1)

    def finish(self, pooled: Tensor) -> Tensor:
        return pooled


def with_torch_bags(model: Any) -> Any:
    """Replace the tables of a DLRM by torch's layers, in place."""
    model.embedding = TorchBags(model.embedding)
    return model


def _pool(ids: Tensor, weight: Tensor) -> Tensor:
    if ids.shape[1] == 1 or not (ids < 0).any():
        return F.embedding_bag(ids, weight, mode="sum")
    return F.embedding_bag(ids.clamp(min=0), weight, mode="sum", per_sample_weights=(ids >= 0).to(weight.dtype))
