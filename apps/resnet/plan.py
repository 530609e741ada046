"""Plan ResNet-50 runs:  hpcai plan resnet --gpus 8 3584 | hpcai plan resnet --check"""

from apps.resnet.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining

_TRAIN, _VALIDATION = 1_281_167, 50_000


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "node.yaml", 400
    epochs = {1632: 35, 3200: 35, 3264: 35, 4096: 40, 8192: 42, 13_056: 46, 32_768: 56, 49_152: 68, 57_344: 78, 65_536: 85}
    samples = {batch: count * _TRAIN for batch, count in epochs.items()}
    source = "MLPerf Training v4.0: reference convergence, and NVIDIA's runs at 3,200 and 57,344"
    evaluation = Evaluation(samples=_VALIDATION, every=4 * _TRAIN, cost=1 / 3)  # forward only
