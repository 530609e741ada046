"""Plan DLRM runs:  hpcai plan dlrm --gpus 8 64 128 | hpcai plan dlrm --check"""

from apps.dlrm.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining

_TRAIN, _VALIDATION = 4_195_197_692, 89_137_319


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "node.yaml", 6912
    epochs = {32_768: 0.7, 55_296: 0.75, 65_536: 0.775, 102_400: 0.9, 135_168: 0.95}
    samples = {batch: count * _TRAIN for batch, count in epochs.items()}
    source = "MLPerf Training v4.0: reference convergence"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN / 20, cost=1 / 3)  # forward only
