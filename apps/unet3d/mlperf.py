"""The MLPerf log of the 3D U-Net: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import decay_factor, if_decay, in_unit, read_benchmarks

_DROPS = ("none", "steps")  # MLPerf Training has no key for a continuous decay: its checker then misses a line
RULES = {
    "opt_momentum": lambda setting: setting("step.momentum") if setting("step.optimizer") == "sgd" else None,
    "opt_learning_rate_decay_boundary_epochs": if_decay(_DROPS, in_unit("epochs", "step.schedule.decay_at")),
    "opt_learning_rate_decay_factor": if_decay(_DROPS, lambda setting: decay_factor(setting) or 1.0),
}
BENCHMARK = read_benchmarks(__file__, RULES)["unet3d"]
