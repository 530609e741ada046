"""What the MLPerf log of a language model says beside the common lines. No torch here."""

from hpcai.mllog import Benchmark

BENCHMARKS: dict[str, Benchmark] = {}
