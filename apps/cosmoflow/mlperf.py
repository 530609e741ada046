"""The MLPerf log of CosmoFlow: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import base_learning_rate, peak_factor, read_benchmarks

RULES = {"opt_base_learning_rate": base_learning_rate, "opt_learning_rate_warmup_factor": peak_factor}
BENCHMARK = read_benchmarks(__file__, RULES)["cosmoflow"]
