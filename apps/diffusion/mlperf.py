"""Entries of the MLPerf logs of Stable Diffusion (Training 5.0) and Flux.1 (6.1), beside the common ones. It imports no torch."""

from hpcai.mllog import DISCLOSED, Benchmark, Entry, Goal, in_steps

_COMMON = (
    Entry("seed", "train.seed"),
    Entry("gradient_accumulation_steps", "step.accumulate"),
    Entry("opt_name", "step.optimizer"),
    Entry("opt_adamw_beta_1", lambda setting: setting("step.betas")[0]),
    Entry("opt_adamw_beta_2", lambda setting: setting("step.betas")[1]),
    Entry("opt_adamw_epsilon", "step.eps"),
    Entry("opt_adamw_weight_decay", "step.weight_decay"),
    Entry("opt_learning_rate_warmup_steps", in_steps("step.schedule.warmup")),
)
BENCHMARKS = {
    "stable_diffusion": Benchmark(
        name="stable_diffusion",
        entries=(*_COMMON, Entry("opt_base_learning_rate", lambda setting: setting("step.lr") / setting("data.batch"))),
        metric="", metric_key="eval_accuracy", log_samples=True,
        goals=(Goal("fid", "FID", 90.0), Goal("clip_cosine", "CLIP", 0.15, higher=True)),
    ),
    "flux1": Benchmark(
        name="flux1",
        entries=(
            *_COMMON,
            Entry("opt_base_learning_rate", "step.lr"),
            Entry("opt_gradient_clip_norm", "step.clip"),
            Entry("evaluation_frequency", lambda setting: int(  # in samples
                setting("run.steps_per_epoch") * setting("run.global_batch") * setting("train.evaluate_every"))),
            Entry("target_accuracy", "train.target", None),
            *DISCLOSED,
        ),
        metric="loss", metric_key="eval_accuracy", log_samples=True,
    ),
}  # fmt: skip
