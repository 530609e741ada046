"""The learning rate: a pure function of the global optimizer step, the same on any number of processes."""

import math
from collections.abc import Callable

from hpcai.settings import ScheduleConfig


def rate(cfg: ScheduleConfig, lr: float, steps_per_epoch: int, steps: int) -> Callable[[int], float]:
    """Learning rate by 0-based global optimizer step, for a run of ``steps`` steps.

    Warm-up is linear in the epoch from ``cfg.start`` to ``lr``. With ``per: epoch`` the epoch is a whole number, as in the
    MLPerf HPC codes, whose first epoch runs at ``cfg.start``; with ``per: step`` it is a fraction.
    """
    last = max(steps - 1, 1) / steps_per_epoch

    def at(step: int) -> float:
        epoch = step // steps_per_epoch if cfg.per == "epoch" else step / steps_per_epoch
        if epoch < cfg.warmup:
            return cfg.start + (lr - cfg.start) * epoch / cfg.warmup
        if cfg.decay == "steps":
            whole = step // steps_per_epoch if cfg.boundary == "after" else epoch
            begun = [
                to for at_, to in zip(cfg.decay_at, cfg.decay_to) if (whole > at_ if cfg.boundary == "after" else whole >= at_)
            ]
            return lr * (begun[-1] if begun else 1.0)
        if cfg.decay == "none":
            return lr
        done = min(max((epoch - cfg.warmup) / max(last - cfg.warmup, 1e-12), 0.0), 1.0)
        left = 1.0 - done if cfg.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return lr * (cfg.floor + (1.0 - cfg.floor) * left)

    return at
