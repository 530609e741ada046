"""Training loss and evaluation metrics of a diffusion model.   B samples, C channels"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import SamplerConfig
from hpcai.models.diffusion.noise import DROPPED, EVAL_LATENTS, EVAL_NOISE, LATENTS, NOISE, TIMES, normals, uniforms

LEVELS = 8  # noise levels at which held-out samples are scored


class Batch(NamedTuple):
    """Samples, their conditions, and the counters of their random numbers."""

    sample: Tensor
    """[B, C, ...]; for latents the moments of the encoder [B, 2C, ...] (``Latents``)"""
    indices: Tensor
    """[B] int64 index of each sample in its split"""
    epoch: Tensor
    """[B] int64"""
    field: Tensor | None = None
    parameters: Tensor | None = None
    classes: Tensor | None = None
    tokens: Tensor | None = None
    pooled: Tensor | None = None
    sizes: Tensor | None = None
    """see ``Condition``"""
    level: Tensor | None = None
    """[B] noise level 0 to 7 of held-out samples; None: the index modulo 8"""
    fine: Tensor | None = None
    """[B, C', ...] local cells of the condition on the grid of the sample"""
    shift: Tensor | None = None
    """[B, D] int64 cells by which the sample is shifted along its dims; None: it is not"""
    future: Tensor | None = None
    """[B, L, C, ...] true states of a forecast, of which the first is the sample"""

    @property
    def condition(self) -> Condition:
        return Condition(self.classes, self.parameters, self.tokens, self.pooled, self.field, fine=self.fine, sizes=self.sizes)


def loss(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the mean squared error of predictions, weighted by noise level. Noise and times are functions of the seed, the index
    of the sample and the epoch: the same for any number of ranks, and after a resume."""
    uniform = uniforms(model.seed, TIMES, batch.indices, batch.epoch, (2,), dtype=torch.float64)
    time = model.objective.sample_times(uniform[:, 0], _to_normal(uniform[:, 1]))
    rate, condition = model.cfg.unconditional, batch.condition
    if rate:  # drop the condition of a random fraction of the samples, for classifier-free guidance
        dropped = uniforms(model.seed, DROPPED, batch.indices, batch.epoch, (1,))[:, 0] < rate
        empty = model.unconditional(condition)
        pairs = {name: (x, getattr(empty, name)) for name, x in condition._asdict().items() if x is not None}
        chosen = {name: torch.where(dropped.view(-1, *(1,) * (x.ndim - 1)), none, x) for name, (x, none) in pairs.items()}
        condition = Condition(**chosen)
    return {"loss": _sample_errors(model, batch, (NOISE, LATENTS, batch.epoch), time, condition).mean()}


def score(model: Any, batch: Batch, offset: float = 0.5) -> dict[str, Any]:
    """Return ``loss`` of held-out samples, and of each of eight noise levels, ``loss_1`` with the least noise. Noise and level of a
    sample depend on its index only, so that evaluations differ by the network only.

    ``offset``: position of a level within its eighth of the times, by default the middle; 0, the beginning, as in MLPerf's Flux.1
    """
    level = batch.indices % LEVELS if batch.level is None else batch.level
    uniform = (level.double() + offset) / LEVELS
    time = model.objective.sample_times(uniform, _to_normal(uniform))
    error = _sample_errors(model, batch, (EVAL_NOISE, EVAL_LATENTS, 0), time, batch.condition).double()
    if model.cfg.objective.prediction_type == "regression":  # has no noise
        return {"loss": (error.sum(), float(len(error)))}
    one_hot = level[:, None] == torch.arange(LEVELS, device=level.device)
    levels = ((error[:, None] * one_hot).sum(0), one_hot.sum(0)), lambda total, count: {
        f"loss_{k}": value / n for k, (value, n) in enumerate(zip(total.tolist(), count.tolist()), 1) if n
    }
    return {"loss": (error.sum(), float(len(error))), "levels": levels}


def draw_ensemble(model: Any, batch: Batch, sampler: SamplerConfig | None = None, members: int = 8) -> dict[str, Tensor]:
    """Return rows for reports: ``truth`` [B, C, ...], generated ``members`` [B, M, C, ...], their ``index`` [B], the regression
    ``mean`` [B, C, ...] and the conditions ``field``, or ``coarse`` with other channels, ``fine`` and ``parameters``, if any. For
    forecasts: the states at L lead times, [B, L, C, ...] and [B, M, L, C, ...], and ``start`` [B, C, ...], the state before."""
    grid = model.grid
    truth, fine = grid.gather(model.prepare_sample(batch.sample)), None if batch.fine is None else grid.gather(batch.fine)
    condition, kwargs = batch.condition._replace(fine=fine), {"seed": model.seed, "sampler": sampler, "indices": batch.indices}
    if batch.future is None:
        samples = model.sample(condition, members, size=tuple(truth.shape[1:]), **kwargs)
    else:
        truth = grid.gather(batch.future.flatten(0, 1)).unflatten(0, batch.future.shape[:2])
        samples = model.roll_out(condition, truth.shape[1], members, **kwargs).transpose(1, 2)
    rows = {"index": batch.indices, "truth": truth, "members": samples.transpose(0, 1).contiguous()}
    if model.mean is not None and batch.future is None:
        rows["mean"] = grid.gather(model.baseline(batch.condition, batch.sample))
    coarse = "coarse" if model.cfg.fields and model.cfg.fields.coarse else "field"
    conditions = {coarse: batch.field, "parameters": batch.parameters, "fine" if batch.future is None else "start": fine}
    return rows | {name: value for name, value in conditions.items() if value is not None}


def _sample_errors(model: Any, batch: Batch, counter: tuple[int, int, Tensor | int], time: Tensor, condition: Condition) -> Tensor:
    """Return the loss of each sample [B]. ``counter``: the uses of random numbers for noise and for latents, and the epoch."""
    (use, latents, epoch), dtype = counter, torch.promote_types(next(model.parameters()).dtype, torch.float32)

    def draw(use: int, local: torch.Size) -> Tensor:
        size = model.grid.full_size(local[1:])
        box = (slice(None), *model.grid.box(size))
        return normals(model.seed, use, batch.indices, epoch, (local[0], *size), box=box, dtype=dtype)

    sample = model.prepare_sample(batch.sample.to(dtype), partial(draw, latents))
    x0 = model.subtract_baseline(sample, batch.condition, batch.shift)
    noise = draw(use, x0.shape[1:])
    noisy, weights = model.objective.add_noise(x0, noise, time), model.loss_weights(x0, batch.shift)
    complete = model.with_static(condition, len(x0), batch.shift)
    output = model(model.fill_masked(noisy.input, batch.shift), noisy.time, complete)
    return model.objective.loss(output, noisy, model.grid, weights)


def _to_normal(uniform: Tensor) -> Tensor:
    """Return standard normal numbers from uniform ones, by inverse transform."""
    return torch.special.ndtri(uniform.clamp(2.0**-54, 1 - 2.0**-53))
