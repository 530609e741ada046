"""Entries of the MLPerf log of CosmoFlow, beside the common ones. It imports no torch."""

from hpcai.mllog import Benchmark, Entry, base_learning_rate, peak_factor

BENCHMARK = Benchmark(
    name="cosmoflow",
    entries=(
        Entry("seed", "train.seed"),
        Entry("opt_name", "step.optimizer"),
        Entry("opt_base_learning_rate", base_learning_rate),
        Entry("opt_learning_rate_warmup_epochs", "step.schedule.warmup"),
        Entry("opt_learning_rate_warmup_factor", peak_factor),
        Entry("opt_learning_rate_decay_boundary_epochs", "step.schedule.decay_at"),
        Entry("opt_learning_rate_decay_factor", "step.schedule.decay_to"),
        Entry("opt_weight_decay", "step.weight_decay"),
        Entry("dropout", "model.dropout"),
        Entry("target_quality", "train.target", None),
    ),
    metric="mae",
    metric_key="eval_error",
)
