"""The MLPerf logs of language models: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import decay_name, read_benchmarks

RULES = {
    "opt_end_learning_rate": lambda setting: setting("step.lr") * setting("step.schedule.floor"),
    "opt_learning_rate_decay_schedule":
        lambda setting: {"cosine_annealing": "cosine with linear warmup"}.get(decay_name(setting)),
}
BENCHMARKS = read_benchmarks(__file__, RULES)
