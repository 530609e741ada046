"""Plan RetinaNet runs:  hpcai plan retinanet --gpus 8 2528 | hpcai plan retinanet --check"""

from apps.retinanet.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining

_TRAIN, _VALIDATION = 1_170_301, 24_781


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "node.yaml", 32
    epochs = {256: 4, 512: 5, 768: 5, 1024: 6, 1280: 7, 2048: 8, 2560: 9, 4096: 15}
    samples = {batch: count * _TRAIN for batch, count in epochs.items()}
    source = "MLPerf Training v4.0: reference convergence"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN, cost=1 / 3)  # forward only
