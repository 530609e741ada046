"""The MLPerf log of ResNet-50: keys that are computed; mlperf.toml has all. It imports no torch."""

from hpcai.mllog import Lookup, if_decay, read_benchmarks

_DECAYS = ("polynomial",)


def _decay_steps(setting: Lookup) -> int:
    per_epoch = setting("run.steps_per_epoch")
    length = setting("step.schedule.length") or setting("run.steps") / per_epoch - setting("step.schedule.warmup")
    return round(length * per_epoch)


RULES = {
    "lars_opt_end_learning_rate": if_decay(_DECAYS, lambda setting: round(setting("step.schedule.floor") * setting("step.lr"), 9)),
    "lars_opt_learning_rate_decay_poly_power": if_decay(_DECAYS, lambda setting: setting("step.schedule.power")),
    "lars_opt_learning_rate_decay_steps": if_decay(_DECAYS, _decay_steps),
    "model_bn_span": lambda setting: setting("batchnorm_group") * setting("run.global_batch") // setting("run.world"),
}
BENCHMARK = read_benchmarks(__file__, RULES)["resnet"]
