"""Entries of the MLPerf log of the 3D U-Net, beside the common ones. It imports no torch."""

from hpcai.mllog import Benchmark, Entry, decay_factor, if_decay, in_unit

_DROPS = ("none", "steps")  # MLPerf Training has no key for a continuous decay: its checker then misses a line

BENCHMARK = Benchmark(
    name="unet3d",
    entries=(
        Entry("seed", "train.seed"),
        Entry("gradient_accumulation_steps", "step.accumulate"),
        Entry("opt_name", "step.optimizer"),
        Entry("opt_base_learning_rate", "step.lr"),                          # the base rate of MLPerf Training is the peak
        Entry("opt_momentum", lambda setting: setting("step.momentum") if setting("step.optimizer") == "sgd" else None),
        Entry("opt_weight_decay", "step.weight_decay"),
        Entry("opt_learning_rate_warmup_epochs", in_unit("epochs", "step.schedule.warmup")),
        Entry("opt_learning_rate_decay_boundary_epochs", if_decay(_DROPS, in_unit("epochs", "step.schedule.decay_at"))),
        Entry("opt_learning_rate_decay_factor", if_decay(_DROPS, lambda setting: decay_factor(setting) or 1.0)),
        Entry("oversampling", "data.augment.foreground"),
        Entry("training_input_shape", "model.window"),
        Entry("validation_input_shape", "model.window"),
        Entry("validation_overlap", "model.overlap"),
        Entry("target_quality", "train.target", None),
    ),
    metric="mean_dice",
    metric_key="eval_accuracy",
)
