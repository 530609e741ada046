"""Entries of the MLPerf logs of language models, beside the common ones. It imports no torch."""

from hpcai.mllog import DISCLOSED, Benchmark, Entry, decay_name, in_steps

_COMMON = (
    Entry("seed", "train.seed"),
    Entry("gradient_accumulation_steps", "step.accumulate"),
    Entry("opt_name", "step.optimizer"),
    Entry("opt_base_learning_rate", "step.lr"),                              # the base rate of MLPerf Training is the peak
    Entry("opt_learning_rate_warmup_steps", in_steps("step.schedule.warmup")),
    Entry("opt_adamw_weight_decay", "step.weight_decay"),
    Entry("opt_gradient_clip_norm", "step.clip"),
    Entry("max_sequence_length", "model.positions"),
    Entry("target_accuracy", "train.target", None),
    *DISCLOSED,
)
BENCHMARKS = {
    "llama2_70b_lora": Benchmark(
        name="llama2_70b_lora",
        entries=(
            *_COMMON,
            Entry("opt_learning_rate_training_steps", "run.steps"),
            Entry("lora_rank", "lora.rank"),
            Entry("lora_alpha", "lora.alpha"),
        ),
        metric="loss", metric_key="eval_accuracy", log_samples=True,
    ),
    "llama31_8b": Benchmark(
        name="llama31_8b",
        entries=(
            *_COMMON,
            Entry("max_steps", "run.steps"),
            Entry("opt_end_learning_rate", lambda setting: setting("step.lr") * setting("step.schedule.floor")),
            Entry("opt_learning_rate_decay_steps", in_steps("step.schedule.length")),
            Entry("opt_learning_rate_decay_schedule", lambda setting: {"cosine_annealing": "cosine with linear warmup"}.get(
                decay_name(setting))),
            Entry("opt_adamw_beta_1", lambda setting: setting("step.betas")[0]),
            Entry("opt_adamw_beta_2", lambda setting: setting("step.betas")[1]),
            Entry("opt_adamw_epsilon", "step.eps"),
        ),
        metric="loss", metric_key="eval_accuracy", log_samples=True,
    ),
}  # fmt: skip
