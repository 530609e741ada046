"""The learning rate: a pure function of the global optimizer step, the same on any number of processes."""

import math
from collections.abc import Callable

from hpcai.settings import ScheduleConfig


def make_lr_schedule(cfg: ScheduleConfig, lr: float, steps_per_epoch: int, steps: int) -> Callable[[int], float]:
    """Learning rate by 0-based global optimizer step, for a run of ``steps`` steps.

    The warm-up is linear in the epoch, from ``cfg.start`` to ``lr``. The epoch is a fraction, or a whole number where the rate is
    held for an epoch (``cfg.held``). With ``unit: steps`` an epoch is one step long.
    """
    unit = 1 if cfg.unit == "steps" else steps_per_epoch
    last = max(steps - 1, 1) / unit
    peak = lr
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
        done = max((epoch - cfg.warmup) / (cfg.length or max(last - cfg.warmup, 1e-12)), 0.0)
        done = done if cfg.length and cfg.decay == "cosine" else min(done, 1.0)
        left = 1.0 - done if cfg.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        top = peak if done <= 1.0 else lr  # torch's cosine rises to the learning rate itself
        return top * (cfg.floor + (1.0 - cfg.floor) * left)

    return lr_at
