"""What a diffusion model learns and is measured by.   B samples, C channels"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import SamplerConfig
from hpcai.models.diffusion.noise import DROPPED, EVAL_LATENTS, EVAL_NOISE, LATENTS, NOISE, TIMES, normals, uniforms

LEVELS = 8  # of noise, at which samples that are held out are measured


class Batch(NamedTuple):
    """Samples, what they are conditioned on, and what their random numbers are counted by."""

    sample: Tensor
    """[B, C, ...]; of latents what the encoder says of them [B, 2C, ...] (``Latents``)"""
    indices: Tensor
    """[B] int64 of each in its split"""
    epoch: Tensor
    """[B] int64"""
    field: Tensor | None = None
    parameters: Tensor | None = None
    classes: Tensor | None = None
    tokens: Tensor | None = None
    pooled: Tensor | None = None
    """as ``Condition`` has them"""
    level: Tensor | None = None
    """[B] of eight, of the noise at which a sample is measured that is held out; None: its number says it"""

    @property
    def condition(self) -> Condition:
        return Condition(self.classes, self.parameters, self.tokens, self.pooled, self.field)


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """The mean squared error of what the network says, weighted by the noise. Noise and times follow from the seed, the number of
    the sample and the epoch: they are the same for any number of processes, and after any resume."""
    uniform = uniforms(model.seed, TIMES, batch.indices, batch.epoch, (2,), dtype=torch.float64)
    time = model.objective.sample_times(uniform[:, 0], _to_normal(uniform[:, 1]))
    return {"loss": _sample_errors(model, batch, (NOISE, LATENTS, batch.epoch), time, _drop_conditions(model, batch)).mean()}


def score(model: Any, batch: Batch, offset: float = 0.5) -> dict[str, Any]:
    """``loss`` of samples that are held out, each with the noise of its index at one of eight levels, in turns: always the same, so
    that evaluations differ by the network alone; and the loss of each of the levels, ``loss_1`` with least noise.

    ``place``: where each eighth of the times is measured: in its middle, or at its beginning, 0, as MLPerf Training's Flux.1 is.
    """
    level = batch.indices % LEVELS if batch.level is None else batch.level
    uniform = (level.double() + offset) / LEVELS
    time = model.objective.sample_times(uniform, _to_normal(uniform))
    error = _sample_errors(model, batch, (EVAL_NOISE, EVAL_LATENTS, 0), time, batch.condition).double()
    at = level[:, None] == torch.arange(LEVELS, device=level.device)
    sums = (error[:, None] * at).sum(0), at.sum(0)
    return {"loss": (error.sum(), float(len(error))), "levels": (sums, _level_means)}


def draw_ensemble(model: Any, batch: Batch, sampler: SamplerConfig | None = None, members: int = 8) -> dict[str, Tensor]:
    """Rows for reports: ``truth`` [B, C, ...], ``members`` that the model draws for the condition of each [B, M, C, ...], and of
    this ``field`` and ``parameters``, where there are some."""
    truth = model.grid.gather(model.prepare_sample(batch.sample))
    size = tuple(truth.shape[1:])
    drawn = model.sample(batch.condition, members, seed=model.seed, sampler=sampler, size=size, indices=batch.indices)
    rows = {"truth": truth, "members": drawn.transpose(0, 1).contiguous()}
    given = {"field": batch.field, "parameters": batch.parameters}
    return rows | {name: value for name, value in given.items() if value is not None}


def _sample_errors(model: Any, batch: Batch, drawn: tuple[int, int, Tensor | int], time: Tensor, condition: Condition) -> Tensor:
    """[B] at these times, with the numbers of a use for noise, another for latents, and an epoch."""
    (what, latents, epoch), dtype = drawn, torch.promote_types(next(model.parameters()).dtype, torch.float32)

    def fresh(use: int, held: torch.Size) -> Tensor:
        size = model.grid.full_size(held[1:])
        box = (slice(None), *model.grid.box(size))
        return normals(model.seed, use, batch.indices, epoch, (held[0], *size), box=box, dtype=dtype)

    x0 = model.subtract_coarse(model.prepare_sample(batch.sample.to(dtype), partial(fresh, latents)), batch.condition)
    noise = fresh(what, x0.shape[1:])
    noised = model.objective.add_noise(x0, noise, time)
    found: Tensor = model.objective.loss(model(noised.input, noised.time, condition), noised, model.grid)
    return found


def _drop_conditions(model: Any, batch: Batch) -> Condition:
    """The condition, of which a share of the samples has none."""
    rate, condition = model.cfg.unconditional, batch.condition
    if not rate:
        return condition
    out = uniforms(model.seed, DROPPED, batch.indices, batch.epoch, (1,))[:, 0] < rate
    nothing = model.unconditional(condition)
    pairs = {name: (x, getattr(nothing, name)) for name, x in condition._asdict().items() if x is not None}
    return Condition(**{name: torch.where(out.view(-1, *(1,) * (x.ndim - 1)), none, x) for name, (x, none) in pairs.items()})


def _to_normal(uniform: Tensor) -> Tensor:
    """A number of the normal distribution from one of [0, 1), by its place in it."""
    return torch.special.ndtri(uniform.clamp(2.0**-54, 1 - 2.0**-53))


def _level_means(total: Tensor, count: Tensor) -> dict[str, float]:
    pairs: Sequence[tuple[float, float]] = list(zip(total.tolist(), count.tolist()))
    return {f"loss_{number}": value / n for number, (value, n) in enumerate(pairs, 1) if n}
