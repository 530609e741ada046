"""Plan 3D U-Net runs:  hpcai plan unet3d --gpus 8 768 | hpcai plan unet3d --check"""

from typing import Any

from apps.unet3d.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining
from hpcai.dist import Mesh
from hpcai.models.unet3d import Batch
from hpcai.parallel.spatial import SpatialPartition

_VOLUMES = 168


class Plan(PlannedTraining):
    workload, yaml, split_axis, max_samples = Benchmark(), "node.yaml", "depth", 7
    samples = {28: 348.5e3, 56: 359.5e3, 64: 394.4e3, 84: 420e3}
    source = "reference convergence of MLPerf Training v4.0, in crops"
    # 1.8 s for 42 volumes on 8 H100, whose training step takes 1 / 71 s a crop.
    evaluation = Evaluation(samples=42, every=20 * _VOLUMES, cost=1.8 * 8 / 42 * 71, start=1000 * _VOLUMES)

    def random_batch(self, cfg: Any, mesh: Mesh, count: int) -> Any:
        batch, part = super().random_batch(cfg, mesh, count), SpatialPartition.from_mesh(mesh).local_slices(cfg.model.window)
        return Batch(*(tensor[(slice(None), *part)] for tensor in batch))
