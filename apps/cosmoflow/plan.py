"""Plan CosmoFlow runs:  hpcai plan cosmoflow --gpus 128 512 | hpcai plan cosmoflow --check"""

from apps.cosmoflow.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining, Published

_TRAIN, _VALIDATION = 524_288, 65_536


class Plan(PlannedTraining):
    workload, yaml, max_samples = Benchmark(), "batch512.yaml", 16
    samples = {batch: epochs * _TRAIN for batch, epochs in ((32, 8), (64, 18), (128, 18), (512, 23), (1024, 40))}
    source = "reference convergence of MLPerf HPC v3.0: 8, 18, 18, 23 and 40 epochs"
    evaluation = Evaluation(samples=_VALIDATION, every=_TRAIN, cost=1 / 3)  # forward only
    published = (
        Published("step", 32 / 7150, "h100", 32, 32),
        Published("step", 512 / 105_700, "h100", 512, 512),
        Published("step", 512 / 46_450, "a100", 512, 512, publisher="HPE and LBNL"),
        Published("run", 9.9, "h100", 32, 32),
        Published("run", 2.10, "h100", 512, 512),
        Published("run", 4.73, "a100", 512, 512, publisher="HPE and LBNL"),
    )
