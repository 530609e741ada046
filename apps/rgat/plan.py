"""Plan R-GAT runs:  hpcai plan rgat --gpus 8 64 512 | hpcai plan rgat --check"""

from typing import Any

from apps.rgat.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining
from hpcai.dist import Mesh

_TRAIN, _VALIDATION = 94_605_581, 788_379
_PAPERS = 16  # of a sub-graph: neighbours of more would overlap in the random graph, as they do not in that of 269 million papers


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "node.yaml", 256
    epochs = {4096: 0.8, 16_384: 0.85, 32_768: 0.95, 65_536: 1.15, 262_144: 2.45}
    samples = {batch: count * _TRAIN for batch, count in epochs.items()}
    source = "MLPerf Training v4.0: reference convergence"
    # forward, in batches; a step of one paper is mostly update
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN / 20, cost=0.006)

    def random_batch(self, cfg: Any, mesh: Mesh, count: int) -> Any:
        data = cfg.data.model_copy(update={"papers": min(_PAPERS, count)})
        return super().random_batch(cfg.model_copy(update={"data": data}), mesh, count)
