"""The MLPerf log of OpenFold: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import read_benchmarks

_EMA = "step.ema_decay", "step.ema_decay_half_life", "step.ema_decay_power"
RULES = {
    "val_every_iters": lambda setting: setting("run.steps_per_epoch") * setting("train.evaluate_every"),
    "templates_enabled": lambda setting: setting("features.templates") > 0,
    "opt_name": lambda setting: setting("step.optimizer").title(),
    "opt_gradient_clipping": lambda setting: setting("step.clip") is not None,
    "swa_enabled": lambda setting: any(setting(path) for path in _EMA),
    "initial_training_dataloader_type":
        lambda setting: f"InitialTrainingDataloader{'PQ' if setting('data.order') == 'ready' else 'PT'}",
}
BENCHMARK = read_benchmarks(__file__, RULES)["openfold"]
