"""Plan DeepCAM runs:  hpcai plan deepcam --gpus 128 2048 | hpcai plan deepcam --check"""

from apps.deepcam.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining, Published

_TRAIN, _VALIDATION = 121_266, 15_158


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "batch2048.yaml", 8
    samples = {batch: epochs * _TRAIN for batch, epochs in ((128, 7), (256, 9), (512, 11), (1024, 13), (2048, 22.5))}
    source = "reference convergence of MLPerf HPC v3.0: 7, 9, 11, 13 and 22.5 epochs"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN, cost=1 / 3)  # forward only
    published = (
        Published("step", 128 / 1310, "h100", 16, 128),
        Published("step", 2048 / 61_400, "h100", 2048, 2048),
        Published("step", 2048 / 43_600, "a100", 2048, 2048, publisher="HPE and LBNL"),
        Published("step", 256 / 2860, "a100-40", 128, 256, publisher="Dell"),
        Published("run", 0.83, "h100", 2048, 2048),
        Published("run", 1.81, "a100", 2048, 2048, publisher="HPE and LBNL"),
        Published("run", 13.0, "a100-40", 128, 256, publisher="Dell"),
    )
