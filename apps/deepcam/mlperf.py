"""The MLPerf log of DeepCAM: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import decay_factor, decay_name, if_decay, if_lamb, in_unit, peak_factor, read_benchmarks

RULES = {
    "opt_name": lambda setting: {"adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}.get(setting("step.optimizer")),
    "opt_bias_correction": if_lamb(True),
    "opt_grad_averaging": if_lamb(True),
    "opt_max_grad_norm": lambda setting: setting("step.clip") if setting("step.optimizer") == "lamb" else None,
    "scheduler_type": decay_name,
    "scheduler_lr_warmup_factor": peak_factor,
    "scheduler_milestones": if_decay(("steps",), in_unit("steps", "step.schedule.decay_at")),
    "scheduler_decay_rate": decay_factor,
    "scheduler_t_max": if_decay(("cosine",), in_unit("steps", "step.schedule.length")),
    "scheduler_eta_min": if_decay(("cosine",), lambda setting: setting("step.schedule.floor") * setting("step.lr")),
}
BENCHMARK = read_benchmarks(__file__, RULES)["deepcam"]
