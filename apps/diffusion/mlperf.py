"""The MLPerf logs of Stable Diffusion and Flux.1: keys that are computed; mlperf.toml has all. It imports no torch."""

import math

from hpcai.mllog import read_benchmarks

_PER_EVALUATION = "run.steps_per_epoch", "run.global_batch", "train.evaluate_every"
RULES = {
    "opt_base_learning_rate": lambda setting: setting("step.lr") / setting("data.batch"),
    "evaluation_frequency": lambda setting: int(math.prod(setting(path) for path in _PER_EVALUATION)),
}
BENCHMARKS = read_benchmarks(__file__, RULES)
