"""Plan ResNet-50 runs:  hpcai plan resnet --gpus 8 3584 | hpcai plan resnet --check"""

from apps.resnet.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining

_TRAIN, _VALIDATION = 1_281_167, 50_000


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "node.yaml", 400
    samples = {batch: epochs * _TRAIN for batch, epochs in ((3264, 35), (4096, 40), (57_344, 72))}
    source = "reference convergence of MLPerf Training v4.0"
    evaluation = Evaluation(samples=_VALIDATION, every=4 * _TRAIN, cost=1 / 3)  # forward only
