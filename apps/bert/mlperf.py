"""The MLPerf log of BERT: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import Lookup, in_unit, read_benchmarks

_warmup = in_unit("steps", "step.schedule.warmup")


def _start_step(setting: Lookup) -> int:
    """Return MLPerf's first step of the warm-up, at which the rate would be 0: before step 0 if a run starts at another rate."""
    start, lr, steps = setting("step.schedule.start"), setting("step.lr"), _warmup(setting)
    return -round(start * steps / (lr - start)) if start else 0


RULES = {
    "start_warmup_step": _start_step,
    "num_warmup_steps": lambda setting: _warmup(setting) - _start_step(setting),
    "opt_learning_rate_warmup_steps": lambda setting: _warmup(setting) - _start_step(setting),
}
BENCHMARK = read_benchmarks(__file__, RULES)["bert"]
