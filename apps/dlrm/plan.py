"""Plan DLRM runs:  hpcai plan dlrm --gpus 8 64 128 | hpcai plan dlrm --check"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.dlrm.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining
from hpcai.dist import Mesh
from hpcai.models.dlrm import DLRM, Batch, parallelize
from hpcai.nn.embedding_bag import TableGroup
from hpcai.parallel.embedding_plan import ShardingPlan, plan_shards

_TRAIN, _VALIDATION = 4_195_197_692, 89_137_319
_MEMORY = 60e9  # bytes of tables on a GPU, as in NVIDIA's plans


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "node.yaml", 6912
    epochs = {32_768: 0.7, 55_296: 0.75, 65_536: 0.775, 102_400: 0.9, 135_168: 0.95}
    samples = {batch: count * _TRAIN for batch, count in epochs.items()}
    source = "MLPerf Training v4.0: reference convergence"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN / 20, cost=2.5e-5)  # forward; a step of one event is update

    def build(self, cfg: Any, mesh: Mesh) -> nn.Module:
        model, ranks = DLRM(cfg.model), mesh["replicate"].size
        parallelize(model, mesh, self._shards(cfg, ranks) if ranks > 1 else None)
        for group in model.embedding.groups:
            group.__class__ = _PlannedGroup
        return model

    def random_batch(self, cfg: Any, mesh: Mesh, count: int) -> Any:
        """Return a batch whose ids have been sent, as before a captured step."""
        model, ranks = cfg.model, mesh["replicate"].size
        dense, label = torch.zeros(count, model.dense_features), torch.zeros(count)
        if ranks == 1:
            return Batch(dense, (torch.zeros(count, sum(model.hotness), dtype=torch.int32),), label)
        plan = self._shards(cfg, ranks)
        local = torch.zeros(count, sum(model.hotness[t] for t in plan.replicated), dtype=torch.int32)
        return Batch(dense, (local, torch.zeros(count, ranks, plan.ids(mesh["replicate"].rank), dtype=torch.int32)), label)

    def _shards(self, cfg: Any, ranks: int) -> ShardingPlan:
        model = cfg.model
        kwargs = {"ranks": ranks, "memory": _MEMORY, "batch": cfg.data.batch, "rowwise": model.adagrad_rowwise}
        return plan_shards(model.rows, model.hotness, model.dim, **kwargs)


class _PlannedGroup(TableGroup):
    """Lookups and updates as on a GPU, by operations of static shapes."""

    def pool(self, ids: Any) -> Tensor:
        index = ids if isinstance(ids, Tensor) else ids[0]
        weights = [table.weight for table in self.tables]
        parts = [F.embedding_bag(part, weight, mode="sum", per_sample_weights=torch.ones_like(part, dtype=weight.dtype))
                 for part, weight in zip(index.split(list(self.layout.hotness), 1), weights)]  # fmt: skip
        pooled = torch.cat([index.new_empty(len(index), 0, dtype=self.like.weight.dtype), *parts], 1)
        if torch.is_grad_enabled():
            pooled.requires_grad_()
            pooled.register_hook(lambda grad: self.saved.append((index, grad)))
        return pooled

    def update_(self, lr: Tensor, scale: Any, skip: Tensor, eps: float) -> None:
        saved, self.saved = self.saved, []
        for table, part in zip(self.tables, saved[0][0].split(list(self.layout.hotness), 1) if saved else ()):
            rows = part.flatten()[: len(table.weight)]  # at most all: later ids are duplicates
            for tensor in (table.weight, table.sum):
                tensor.index_add_(0, rows, tensor.new_zeros(1, tensor.shape[1]).expand(len(rows), -1))
