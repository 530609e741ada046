"""Plan CosmoFlow runs:  hpcai plan cosmoflow --gpus 128 512 | hpcai plan cosmoflow --check"""

from apps.cosmoflow.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining

_TRAIN, _VALIDATION = 524_288, 65_536


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "batch512.yaml", 16
    samples = {batch: epochs * _TRAIN for batch, epochs in ((32, 8), (64, 18), (128, 18), (512, 23), (1024, 40))}
    source = "reference convergence of MLPerf HPC v3.0: 8, 18, 18, 23 and 40 epochs"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN, cost=1 / 3)  # forward only
