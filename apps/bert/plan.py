"""Plan BERT runs:  hpcai plan bert --gpus 8 64 3472 | hpcai plan bert --check"""

from apps.bert.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining


class Plan(PlannedTraining):
    workload, yaml, max_samples, split_axis = Benchmark(), "batch384.yaml", 48, "tensor"
    memory_savings = tuple((f"model.recompute={what}",) for what in ("none", "selective", "layers"))
    # Rows of two sequences: half of the published batches and samples.
    samples = {128: 1.28e6, 224: 1.20e6, 768: 1.40e6, 2304: 1.41e6, 4096: 2.09e6, 6528: 2.32e6, 8192: 2.76e6}
    source = "reference convergence of MLPerf Training 3.0 to 5.0, medians, in rows of two sequences"
    evaluation = Evaluation(samples=10_000, every=75_000, cost=0.065)  # forward, in batches; a step of one row is mostly update
