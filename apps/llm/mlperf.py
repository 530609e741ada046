"""What the MLPerf logs of language models say beside the common lines. No torch here."""

from hpcai.mllog import Benchmark, Entry, Setting, in_steps, scheduler

_AXES = {"tensor_parallelism": "tensor", "pipeline_parallelism": "pipeline", "context_parallelism": "context"}


def _linear(setting: Setting) -> str:
    """The narrowest numbers of products."""
    return {"bf16": "bfloat16", "bf16-params": "bfloat16"}.get(setting("step.precision"), setting("step.precision"))


def _sums(setting: Setting) -> str:
    """Those of messages: activations between cut layers, which are as products are, and otherwise gradients."""
    cut = any(setting(f"mesh.{axis}") > 1 for axis in _AXES.values())
    return _linear(setting) if cut or setting("step.precision") == "bf16-params" else "fp32"


def _micro_batch(setting: Setting) -> int:
    ways = [setting(f"mesh.{axis}") for axis in _AXES.values()]
    copies = setting("run.world") // (ways[0] * ways[1] * ways[2])
    return int(setting("data.batch") // (copies * setting("step.accumulate")))


_COMMON = (
    Entry("seed", "train.seed"),
    Entry("gradient_accumulation_steps", "step.accumulate"),
    Entry("opt_name", "step.optimizer"),
    Entry("opt_base_learning_rate", "step.lr"),                              # Training's base is the peak
    Entry("opt_learning_rate_warmup_steps", in_steps("step.schedule.warmup")),
    Entry("opt_adamw_weight_decay", "step.weight_decay"),
    Entry("opt_gradient_clip_norm", "step.clip"),
    Entry("max_sequence_length", "model.positions"),
    Entry("target_accuracy", "train.target", None),
    Entry("lowest_numerical_precision_in_linear", _linear),
    Entry("lowest_numerical_precision_in_attn", _linear),
    Entry("lowest_numerical_precision_in_comm", _sums),
    *(Entry(key, f"mesh.{axis}") for key, axis in _AXES.items()),
    Entry("expert_parallelism", lambda setting: 1),
    Entry("micro_batch_size", _micro_batch),
    Entry("config_filename", lambda setting: "settings.yaml"),               # beside the log
)
BENCHMARKS = {
    "llama2_70b_lora": Benchmark(
        name="llama2_70b_lora",
        entries=(
            *_COMMON,
            Entry("opt_learning_rate_training_steps", "train.steps"),
            Entry("lora_rank", "lora.rank"),
            Entry("lora_alpha", "lora.alpha"),
        ),
        metric="loss", metric_key="eval_accuracy", samples=True,
    ),
    "llama31_8b": Benchmark(
        name="llama31_8b",
        entries=(
            *_COMMON,
            Entry("max_steps", "train.steps"),
            Entry("opt_end_learning_rate", lambda setting: setting("step.lr") * setting("step.schedule.floor")),
            Entry("opt_learning_rate_decay_steps", in_steps("step.schedule.length")),
            Entry("opt_learning_rate_decay_schedule", lambda setting: {"cosine_annealing": "cosine with linear warmup"}.get(
                scheduler(setting))),
            Entry("opt_adamw_beta_1", lambda setting: setting("step.betas")[0]),
            Entry("opt_adamw_beta_2", lambda setting: setting("step.betas")[1]),
            Entry("opt_adamw_epsilon", "step.eps"),
        ),
        metric="loss", metric_key="eval_accuracy", samples=True,
    ),
}  # fmt: skip
