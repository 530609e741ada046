"""What a diffusion model learns and is measured by.   B samples, C channels"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import SamplerConfig
from hpcai.models.diffusion.noise import DROPPED, HELD_NOISE, NOISE, TIMES, numbers, uniforms

LEVELS = 8  # of noise, at which samples that are held out are measured


class Batch(NamedTuple):
    """Samples, what they are conditioned on, and what their random numbers are counted by."""

    sample: Tensor
    """[B, C, ...]"""
    number: Tensor
    """[B] int64 of each in its split"""
    epoch: Tensor
    """[B] int64"""
    field: Tensor | None = None
    parameters: Tensor | None = None
    classes: Tensor | None = None
    tokens: Tensor | None = None
    pooled: Tensor | None = None
    """as ``Condition`` has them"""

    @property
    def condition(self) -> Condition:
        return Condition(self.classes, self.parameters, self.tokens, self.pooled, self.field)


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """The mean squared error of what the network says, weighted by the noise. Noise and times follow from the seed, the number of
    the sample and the epoch: they are the same for any number of processes, and after any resume."""
    uniform = uniforms(model.seed, TIMES, batch.number, batch.epoch, (2,), dtype=torch.float64)
    time = model.objective.drawn(uniform[:, 0], _normal(uniform[:, 1]))
    return {"loss": _error(model, batch, (NOISE, batch.epoch), time, _less(model, batch)).mean()}


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """``loss`` of samples that are held out, each with the noise of its index at one of eight levels, in turns: always the same, so
    that evaluations differ by the network alone; and the loss of each of the levels, ``loss_1`` with least noise."""
    level = batch.number % LEVELS
    uniform = (level.double() + 0.5) / LEVELS
    time = model.objective.drawn(uniform, _normal(uniform))
    error = _error(model, batch, (HELD_NOISE, 0), time, batch.condition).double()
    at = level[:, None] == torch.arange(LEVELS, device=level.device)
    sums = (error[:, None] * at).sum(0), at.sum(0)
    return {"loss": (error.sum(), float(len(error))), "levels": (sums, _by_level)}


def ensemble(model: Any, batch: Batch, sampler: SamplerConfig | None = None, members: int = 8) -> dict[str, Tensor]:
    """Rows for reports: ``truth`` [B, C, ...], ``members`` that the model draws for the condition of each [B, M, C, ...], and of
    this ``field`` and ``parameters``, where there are some."""
    size = tuple(batch.sample.shape[1:])
    drawn = model.sample(batch.condition, members, seed=model.seed, sampler=sampler, size=size, number=batch.number)
    rows = {"truth": batch.sample, "members": drawn.transpose(0, 1).contiguous()}
    given = {"field": batch.field, "parameters": batch.parameters}
    return rows | {name: value for name, value in given.items() if value is not None}


def _error(model: Any, batch: Batch, drawn: tuple[int, Tensor | int], time: Tensor, condition: Condition) -> Tensor:
    """[B] at these times, with the noise of a use and an epoch."""
    (what, epoch), dtype = drawn, torch.promote_types(next(model.parameters()).dtype, torch.float32)
    x0 = model.drawn_to(batch.sample.to(dtype), batch.condition)
    noise = numbers(model.seed, what, batch.number, epoch, x0.shape[1:], dtype=dtype)
    noised = model.objective.noised(x0, noise, time)
    found: Tensor = model.objective.loss(model(noised.input, noised.time, condition), noised)
    return found


def _less(model: Any, batch: Batch) -> Condition:
    """The condition, of which a share of the samples has none."""
    rate, condition = model.cfg.unconditional, batch.condition
    if not rate:
        return condition
    if batch.tokens is not None or batch.pooled is not None:
        raise ConfigError(f"unconditional is {rate:g}, but tokens have none that says nothing; put such samples into the data")
    out = uniforms(model.seed, DROPPED, batch.number, batch.epoch, (1,))[:, 0] < rate
    classes = None if condition.classes is None else condition.classes.masked_fill(out, model.cfg.network.classes)
    known = {"field": condition.field, "parameters": condition.parameters}
    zero = {n: None if x is None else x.masked_fill(out.view(-1, *(1,) * (x.ndim - 1)), 0.0) for n, x in known.items()}
    return condition._replace(classes=classes, **zero)


def _normal(uniform: Tensor) -> Tensor:
    """A number of the normal distribution from one of [0, 1), by its place in it."""
    return torch.special.ndtri(uniform.clamp(2.0**-54, 1 - 2.0**-53))


def _by_level(total: Tensor, count: Tensor) -> dict[str, float]:
    pairs: Sequence[tuple[float, float]] = list(zip(total.tolist(), count.tolist()))
    return {f"loss_{number}": value / n for number, (value, n) in enumerate(pairs, 1) if n}
