"""Averages of the weights: with constant geometric weights (Polyak and Juditsky 1992), with a half-life in samples (Karras et al.,
"Elucidating the design space of diffusion-based generative models", 2022), or with weights that grow as a power of the step
(Karras et al., "Analyzing and improving the training dynamics of diffusion models", 2024)."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from hpcai.dist.collect import sum_in_place
from hpcai.errors import ConfigError
from hpcai.parallel.replicate import GradientSums
from hpcai.parallel.rows import Share, placed
from hpcai.parallel.shard import FullySharded
from hpcai.settings import StepConfig
from hpcai.train.optim import Optimizer


class Average:
    """a += take*(w - a) after every step, from the first weights on; without an average in the settings the weights themselves.

    The optimizer averages the parameters in the pass that updates them; the floating-point buffers are averaged here. What is taken
    follows from the number of the step, and with a half-life from ``seen``, the samples before it, of all copies; a resumed run
    sets both. ``batch``: samples of a step, of all copies, where the loop knows them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sums: GradientSums | FullySharded, cfg: StepConfig) -> None:
        self.cfg, self.optimizer, self.sums = cfg, optimizer, sums
        self.seen, self.batch = 0, 0
        kept = model.state_dict(keep_vars=True).items()
        self._live = {n: b for n, b in kept if not isinstance(b, nn.Parameter) and b.is_floating_point()}
        self._mean = {name: placed(buffer.detach().clone(), buffer) for name, buffer in self._live.items() if cfg.averages}

    def begin(self, step: int, batch: Callable[[], int]) -> None:
        """Set what 0-based ``step`` takes, before it is made; ``batch()`` counts its samples, unless they are known."""
        if self.cfg.average_half_life is not None:
            size = self.batch or batch()
            self.optimizer.set_take(half_life_take(self.cfg.average_half_life, self.cfg.average_ramp, size, self.seen))
            self.seen += size
        elif self.cfg.average_power is not None:
            self.optimizer.set_take(power_take(self.cfg.average_power, step + 1))

    @torch.no_grad()
    def update(self) -> None:
        if self._mean:
            change = torch._foreach_sub(list(self._live.values()), self.buffers)
            torch._foreach_add_(self.buffers, torch._foreach_mul(change, self.optimizer.take))

    def state(self) -> dict[str, Tensor | Share]:
        return {**self.optimizer.averages(), **self._mean}

    @property
    def buffers(self) -> list[Tensor]:
        """The averages of the buffers, in place."""
        return list(self._mean.values())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the average, with level statistics (``level``); afterwards its weights are what they were. All
        processes that train call it together. Memory stays where it is, so that captured graphs go on.
        """
        self.level()
        rows = [(s.row.weights, s.weights, s.average) for s in self.optimizer.states] if self.cfg.averages else []
        pairs = [(live, live.clone() if live is full else full, mean) for live, full, mean in rows]
        buffers = [(live, live.clone(), self._mean.get(name)) for name, live in self._live.items()]
        self._put([(live, mean) for live, _, mean in pairs + buffers if mean is not None], shared=bool(pairs))
        try:
            yield
        finally:
            self._put([(live, before) for live, before, _ in pairs + buffers], shared=bool(pairs))

    @torch.no_grad()
    def level(self) -> None:
        """Set running statistics, and their averages, to their means over all copies, in one message. Training does not read them;
        an evaluation or a checkpoint does, and then sees the samples of all copies and not of one."""
        axis, kept = self.sums.mesh["replicate"], [*self._live.values(), *self._mean.values()]
        if axis.size == 1 or not kept:
            return
        flat = sum_in_place(torch.cat([tensor.reshape(-1).to(self.optimizer.lr.dtype) for tensor in kept]), axis).div_(axis.size)
        for tensor, value in zip(kept, flat.split([tensor.numel() for tensor in kept])):
            tensor.copy_(value.view(tensor.shape))

    @torch.no_grad()
    def _put(self, pairs: list[tuple[Tensor, Tensor]], shared: bool) -> None:
        self.sums.settle()
        for live, value in pairs:
            live.copy_(value)
        if shared:
            self.sums.spread()
            self.sums.settle()


def half_life_take(half_life: float, ramp: float | None, batch: int, seen: int) -> float:
    """What the average takes of the weights after a step of ``batch`` samples that ``seen`` ones came before: all after the first
    step where there is a ``ramp`` (Karras et al. 2022, as published code has it)."""
    life = half_life if ramp is None else min(half_life, ramp * seen)
    return -math.expm1(-math.log(2) * batch / max(life, 1e-8))


def power_take(deviation: float, step: int) -> float:
    """What the average takes of the weights after 1-based ``step`` (Karras et al. 2024, appendix C); all after the first."""
    return 1.0 if step == 1 else -math.expm1((exponent(deviation) + 1) * math.log1p(-1 / step))


@cache
def exponent(deviation: float) -> float:
    """The power by which weights count whose steps have this standard deviation over the last one (sigma_rel; Karras et al. 2024,
    appendix C): the root gamma of (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = deviation^2. Raises ConfigError if there is none."""
    if not 0 < deviation <= 12**-0.5:
        raise ConfigError(f"an average of deviation {deviation:g} is no power; give more than 0, and 0.288 at most")
    low, high = 0.0, 1 / deviation**2
    while low < (middle := (low + high) / 2) < high:  # the left side falls where gamma >= 0
        wide = (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > deviation**2
        low, high = (middle, high) if wide else (low, middle)
    return low
