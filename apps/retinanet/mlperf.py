"""The MLPerf log of RetinaNet: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import read_benchmarks

RULES = {"opt_learning_rate_warmup_factor": lambda setting: round(setting("step.schedule.start") / setting("step.lr"), 9)}
BENCHMARK = read_benchmarks(__file__, RULES)["ssd"]
