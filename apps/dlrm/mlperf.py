"""The MLPerf log of DLRM: its keys and values are in mlperf.toml. It imports no torch."""

from hpcai.mllog import read_benchmarks

BENCHMARK = read_benchmarks(__file__, {})["dlrm_dcnv2"]
