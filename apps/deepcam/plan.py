"""Plan DeepCAM runs:  hpcai plan deepcam --gpus 128 2048 | hpcai plan deepcam --check"""

from apps.deepcam.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining

_TRAIN, _VALIDATION = 121_266, 15_158


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "batch2048.yaml", 8
    samples = {batch: epochs * _TRAIN for batch, epochs in ((128, 7), (256, 9), (512, 11), (1024, 13), (2048, 22.5))}
    source = "reference convergence of MLPerf HPC v3.0: 7, 9, 11, 13 and 22.5 epochs"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN, cost=1 / 3)  # forward only
