"""The MLPerf log of R-GAT: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import read_benchmarks

# A sample of the loader is a sub-graph.
RULES = {
    "train_samples": lambda setting: setting("run.train_samples") * setting("data.papers"),
    "eval_samples": lambda setting: setting("run.validation_samples") * setting("data.papers"),
}
BENCHMARK = read_benchmarks(__file__, RULES)["gnn"]
