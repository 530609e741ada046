"""What the MLPerf log of CosmoFlow says beside the common lines. No torch here."""

from hpcai.mllog import Benchmark, Entry, first_rate, rise

BENCHMARK = Benchmark(
    name="cosmoflow",
    entries=(
        Entry("seed", "train.seed"),
        Entry("opt_name", "step.optimizer"),
        Entry("opt_base_learning_rate", first_rate),
        Entry("opt_learning_rate_warmup_epochs", "step.schedule.warmup"),
        Entry("opt_learning_rate_warmup_factor", rise),
        Entry("opt_learning_rate_decay_boundary_epochs", "step.schedule.decay_at"),
        Entry("opt_learning_rate_decay_factor", "step.schedule.decay_to"),
        Entry("opt_weight_decay", "step.weight_decay"),
        Entry("dropout", "model.dropout"),
        Entry("target_quality", "train.target", None),
    ),
    metric="mae",
    metric_key="eval_error",
)
