"""The MLPerf log of OpenCatalyst: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import decay_factor, if_decay, in_unit, read_benchmarks

RULES = {
    "opt_name": lambda setting: {"adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}.get(setting("step.optimizer")),
    "opt_learning_rate_warmup_factor": lambda setting: setting("step.schedule.start") / setting("step.lr"),
    "opt_learning_rate_decay_boundary_steps": if_decay(("steps",), in_unit("steps", "step.schedule.decay_at")),
    "opt_learning_rate_decay_factor": decay_factor,
}
BENCHMARK = read_benchmarks(__file__, RULES)["oc20"]
