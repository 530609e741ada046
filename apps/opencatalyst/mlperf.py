"""Entries of the MLPerf log of OpenCatalyst, beside the common ones. It imports no torch."""

from hpcai.mllog import Benchmark, Entry, decay_factor, if_decay, in_steps

BENCHMARK = Benchmark(
    name="oc20",
    entries=(
        Entry("seed", "train.seed"),
        Entry("gradient_accumulation_frequency", "step.accumulate"),
        Entry("opt_name", lambda setting: {"adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}.get(setting("step.optimizer"))),
        Entry("opt_base_learning_rate", "step.lr"),                          # the base rate of this benchmark is the peak
        Entry("opt_learning_rate_warmup_steps", in_steps("step.schedule.warmup")),
        Entry("opt_learning_rate_warmup_factor", lambda setting: setting("step.schedule.start") / setting("step.lr")),
        Entry("opt_learning_rate_decay_boundary_steps", if_decay(("steps",), in_steps("step.schedule.decay_at"))),
        Entry("opt_learning_rate_decay_factor", decay_factor),
        Entry("target_quality", "train.target", None),
    ),
    metric="force_mae",
    metric_key="eval_error",
)
