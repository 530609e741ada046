"""Learning-rate schedules: pure functions of the global optimizer step, the same on any number of ranks."""

import math
from collections.abc import Callable

from hpcai.settings import ScheduleConfig


def make_lr_schedule(cfg: ScheduleConfig, lr: float, steps_per_epoch: int, steps: int) -> Callable[[int], float]:
    """Return a function from the 0-based global optimizer step to the learning rate, for a run of ``steps`` steps. The warm-up is
    linear in the epoch, from ``cfg.start`` to ``lr``. The epoch is fractional, or an integer with ``cfg.held``, which keeps the
    rate constant within an epoch. With ``unit: steps`` an epoch is one step. With ``cfg.stable`` the rate is constant until the
    last ``cfg.length`` of the run (Hu et al., "MiniCPM", 2024); decay 1 - sqrt: Hägele et al. 2024."""
    unit = 1 if cfg.unit == "steps" else steps_per_epoch
    last = max(steps - 1, 1) / unit
    begin, peak = 0.0 if cfg.from_zero else cfg.warmup, lr
    span = cfg.length or max(last - begin, 1e-12)
    if cfg.stable:
        span = max(min(span, last - cfg.warmup), 1e-12)
        begin = max(last - span, cfg.warmup)
    if cfg.after_warmup and cfg.warmup:
        peak = cfg.start + (lr - cfg.start) * (cfg.warmup - 1 / unit) / cfg.warmup

    def lr_at(step: int) -> float:
        number = step + cfg.first_step
        epoch = number // unit if cfg.held else number / unit
        if epoch < cfg.warmup:
            return cfg.start + (lr - cfg.start) * epoch / cfg.warmup
        if cfg.decay == "none":
            return peak
        if cfg.decay == "steps":
            since = (number // unit if cfg.late else epoch) - (cfg.warmup if cfg.after_warmup else 0)
            factors = [to for named, to in zip(cfg.decay_at, cfg.decay_to) if since > named or (since == named and not cfg.late)]
            return peak * (factors[-1] if factors else 1.0)
        done = max((epoch - begin) / span, 0.0)
        done = done if cfg.length and cfg.decay == "cosine" and not cfg.stable else min(done, 1.0)
        linear = 1.0 - done
        curves = {"cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "sqrt": 1.0 - math.sqrt(done)}
        left = max(linear, 0.0) ** cfg.power if cfg.decay == "polynomial" else curves.get(cfg.decay, linear)
        top = peak if done <= 1.0 else lr  # torch's cosine annealing rises again, to the learning rate itself
        return top * (cfg.floor + (1.0 - cfg.floor) * left)

    return lr_at
