"""Entries of the MLPerf log of DeepCAM, beside the common ones. It imports no torch."""

from hpcai.mllog import Benchmark, Entry, decay_factor, decay_name, if_decay, if_lamb, in_steps, peak_factor

BENCHMARK = Benchmark(
    name="deepcam",
    entries=(
        Entry("seed", "train.seed"),
        Entry("gradient_accumulation_frequency", "step.accumulate"),
        Entry("batchnorm_group_size", "batchnorm_group"),
        Entry("opt_name", lambda setting: {"adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}.get(setting("step.optimizer"))),
        Entry("opt_lr", "step.lr"),
        Entry("opt_betas", "step.betas"),
        Entry("opt_eps", "step.eps"),
        Entry("opt_weight_decay", "step.weight_decay"),
        Entry("opt_bias_correction", if_lamb(True)),
        Entry("opt_grad_averaging", if_lamb(True)),
        Entry("opt_max_grad_norm", lambda setting: setting("step.clip") if setting("step.optimizer") == "lamb" else None),
        Entry("scheduler_type", decay_name),
        Entry("scheduler_lr_warmup_steps", in_steps("step.schedule.warmup")),
        Entry("scheduler_lr_warmup_factor", peak_factor),
        Entry("scheduler_milestones", if_decay(("steps",), in_steps("step.schedule.decay_at"))),
        Entry("scheduler_decay_rate", decay_factor),
        Entry("scheduler_t_max", if_decay(("cosine",), in_steps("step.schedule.length"))),
        Entry("scheduler_eta_min", if_decay(("cosine",), lambda setting: setting("step.schedule.floor") * setting("step.lr"))),
        Entry("target_quality", "train.target", None),
    ),
    metric="iou",
    metric_key="eval_accuracy",
)
