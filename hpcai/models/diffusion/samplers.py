"""Samplers of diffusion models and flows.   B samples, C channels, T levels of a schedule, n steps

    for x in sample(network, objective, SamplerConfig(steps=25), noise, condition):
        show(x)                                                        # the last is the sample
    x = draw_samples(network, objective, SamplerConfig(guidance=7.5), noise, condition, unconditional)

Noise levels are computed on the host before the first step (``plan_steps``): no step reads from the device.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import SamplerConfig
from hpcai.models.diffusion.grid import UNSHARDED, Grid
from hpcai.models.diffusion.prediction import Objective

Network = Callable[[Tensor, Tensor, Condition], Tensor]
StepNoise = Callable[[int], Tensor]
SPACINGS = {
    "ddim": ("leading", "trailing"), "ddpm": ("leading", "trailing"), "dpm++": ("leading", "trailing", "linspace", "karras"),
    "euler": ("leading", "trailing", "linspace", "karras"), "heun": ("leading", "trailing", "linspace", "karras"),
    "edm": ("karras",), "flow": ("trailing", "linspace"),
}  # fmt: skip
"""Spacings of methods with a schedule, and of objectives without one."""


class Step(NamedTuple):
    """One step, from a noise level to the next. The next step may begin at another level (ddim)."""

    time: float
    """input of the network"""
    alpha: float
    sigma: float
    next_alpha: float
    next_sigma: float


def sample(
    network: Network, objective: Objective, cfg: SamplerConfig, noise: Tensor, condition: Condition = UNCONDITIONAL,
    unconditional: Condition | None = None, step_noise: StepNoise | None = None, grid: Grid = UNSHARDED,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the state [B, C, ...] after each of n steps, without gradients; the last one is the sample.

    A sample depends on its own noise and condition only. States have the dtype of ``noise`` (standard normal [B, C, ...]), float32
    at least, whatever the network computes in; with euler and heun on a schedule they are x / alpha. ``condition``: [B, ...], or
    [1, ...] for all samples. ``unconditional``: the condition without information, for guidance other than 1. ``step_noise(i)``:
    Returns the noise [B, C, ...] of step i = 0, 1, ..., for ddpm, eta and churn. Raises ConfigError at the call, before the first
    step, if settings are inconsistent or arguments are missing."""
    steps = plan_steps(objective, cfg)
    if cfg.guidance != 1 and unconditional is None:
        raise ConfigError(f"guidance {cfg.guidance:g} compares with unconditional samples: give unconditional, or set guidance 1")
    stochastic = cfg.method == "ddpm" or cfg.eta > 0 or cfg.churn > 0
    if stochastic and step_noise is None:
        raise ConfigError(f"method {cfg.method} with eta {cfg.eta:g} and churn {cfg.churn:g} adds noise in steps; give step_noise")
    x = noise.to(torch.promote_types(noise.dtype, torch.float32))
    denoiser = _Denoiser(network, objective, cfg, condition, unconditional, len(x), grid)
    if objective.cfg.prediction_type == "regression":
        return _predict(denoiser, x)
    return _METHODS[cfg.method](denoiser, steps, cfg, x, cast(StepNoise, step_noise))  # None if no step adds noise


def draw_samples(
    network: Network, objective: Objective, cfg: SamplerConfig, noise: Tensor, condition: Condition = UNCONDITIONAL,
    unconditional: Condition | None = None, step_noise: StepNoise | None = None,
) -> Tensor:  # fmt: skip
    """Return the last state of ``sample``: the samples [B, C, ...]."""
    return deque(sample(network, objective, cfg, noise, condition, unconditional, step_noise), maxlen=1).pop()


def apply_guidance(cond: Tensor, uncond: Tensor, guidance: float, rescale: float = 0.0, grid: Grid = UNSHARDED) -> Tensor:
    """Classifier-free guidance of predictions [B, C, ...] (Ho and Salimans 2022). ``rescale``: the fraction that is rescaled to the
    standard deviation of ``cond``, for each sample (Lin et al. 2024, eq. 15, 16)."""
    guided = torch.lerp(uncond, cond, guidance)
    if not rescale:
        return guided
    std, guided_std = grid.std(cond), grid.std(guided)  # 0 for an untrained network, whose last layer is zero
    return guided * (rescale * std / guided_std.clamp(min=torch.finfo(guided.dtype).tiny) + (1 - rescale))


def karras_sigmas(low: float, high: float, rho: float, steps: int) -> np.ndarray:
    """Return sigmas from ``high`` down to ``low``, float64 [n] (Karras et al. 2022, eq. 5, without the final 0)."""
    ramp = np.linspace(0, 1, steps)
    return (high ** (1 / rho) + ramp * (low ** (1 / rho) - high ** (1 / rho))) ** rho


def shift_times(time: np.ndarray, shift: float) -> np.ndarray:
    """Shift the times of a flow towards more noise (Esser et al. 2024, eq. 23). 1 stays 1 in any rounding."""
    return shift * time / (shift * time + (1 - time))


def plan_steps(objective: Objective, cfg: SamplerConfig) -> list[Step]:
    """Return the n steps of a sampler, one for a regression. Raises ConfigError, which lists all inconsistent settings."""
    if objective.cfg.prediction_type == "regression":
        return [Step(0.0, 0.0, 0.0, 1.0, 0.0)]
    _check(objective, cfg)
    if objective.cfg.prediction_type == "edm":
        sigmas = karras_sigmas(cfg.low, cfg.high, cfg.rho, cfg.steps)
        return _link_steps(np.log(sigmas) / 4, np.ones(cfg.steps), sigmas, (1.0, 0.0))
    if objective.cfg.prediction_type == "flow":
        if cfg.spacing == "trailing":
            times = shift_times(np.linspace(1, 1 / cfg.steps, cfg.steps), cfg.shift)
        elif cfg.method == "dpm++":
            times = shift_times(np.linspace(1 - 1 / objective.cfg.levels, 0, cfg.steps + 1)[:-1], cfg.shift)
        else:
            first, last = shift_times(np.array([1, 1 / objective.cfg.levels]), cfg.shift)
            times = shift_times(np.linspace(first, last, cfg.steps), cfg.shift)
        return _link_steps(times, 1 - times, times, (1.0, 0.0))
    end = (1.0, 0.0) if cfg.clean else (float(objective.alphas[0]), float(objective.sigmas[0]))
    levels, alphas, sigmas = _select_levels(objective, cfg)
    steps = _link_steps(levels, alphas, sigmas, end)
    if cfg.method == "ddim":  # as published: not the beginning of the next step, unless n divides T
        following = levels - objective.cfg.levels // cfg.steps
        ends = [(objective.alphas[int(t)], objective.sigmas[int(t)]) if t >= 0 else end for t in following]
        steps = [Step(*step[:3], float(alpha), float(sigma)) for step, (alpha, sigma) in zip(steps, ends)]
    return steps


def _check(objective: Objective, cfg: SamplerConfig) -> None:
    says, levels, errors = objective.cfg.prediction_type, objective.cfg.levels, list[str]()
    if not objective.has_schedule and cfg.method not in ("dpm++", "euler", "heun"):
        errors.append(f"method {cfg.method} needs a schedule; prediction_type {says} has none; set method to dpm++, euler or heun")
    else:
        name, spacings = (cfg.method, SPACINGS[cfg.method]) if objective.has_schedule else (says, SPACINGS[says])
        if cfg.spacing not in spacings:
            errors.append(f"spacing {cfg.spacing}: {name} has {', '.join(spacings)}; set spacing to one of them")
    needed = cfg.steps + (cfg.method == "dpm++" and cfg.spacing in ("leading", "linspace"))
    if objective.has_schedule and cfg.spacing != "karras" and needed > levels:
        errors.append(f"steps {cfg.steps}: {cfg.method} visits {needed} levels, and the schedule has {levels}; set fewer steps")
    if says == "flow" and cfg.method == "dpm++" and cfg.spacing == "linspace" and levels == 1:
        errors.append("spacing linspace: dpm++ begins at time 1 - 1/levels, and objective.levels is 1; set spacing to trailing")
    if cfg.eta and cfg.method != "ddim":
        errors.append(f"eta {cfg.eta:g} is of ddim; method is {cfg.method}; set eta to 0")
    if cfg.eta > 1:
        errors.append(f"eta {cfg.eta:g} adds more noise than the next level has; expected 0 to 1")
    if cfg.churn and (says, cfg.method) != ("edm", "heun"):
        errors.append(f"churn {cfg.churn:g} is of edm with heun, not of {says} with {cfg.method}; set churn to 0")
    if cfg.shift != 1 and says != "flow":
        errors.append(f"shift {cfg.shift:g} is of flow; objective.prediction_type is {says}; set shift to 1")
    if cfg.offset and cfg.spacing != "leading":
        errors.append(f"offset {cfg.offset} is of spacing leading; spacing is {cfg.spacing}; set offset to 0")
    if not cfg.clean and cfg.method not in ("ddim", "dpm++"):
        errors.append(f"clean false is of ddim and dpm++; method is {cfg.method}; set clean to true")
    elif not cfg.clean and not objective.has_schedule:
        errors.append(f"clean false ends at the lowest level of a schedule; prediction_type {says} has none; set clean to true")
    low, high = _sigma_range(objective, cfg)
    if cfg.spacing == "karras" and low >= high:
        errors.append(f"low and high: the sigmas to visit begin at {high:g} and end at {low:g}; expected low below high")
    if errors:
        raise ConfigError("\n".join(errors))


def _sigma_range(objective: Objective, cfg: SamplerConfig) -> tuple[float, float]:
    """Return the lowest and highest sigma / alpha of karras, within those of the schedule, on which the network was trained."""
    if not objective.has_schedule:
        return cfg.low, cfg.high
    ratios = _ratios(objective)
    return max(cfg.low, float(ratios[0])), min(cfg.high, float(ratios[-1]))


def _ratios(objective: Objective) -> np.ndarray:
    """Return sigma / alpha of the levels of a schedule, infinite if alpha is 0."""
    with np.errstate(divide="ignore"):
        return objective.sigmas / objective.alphas


def _select_levels(objective: Objective, cfg: SamplerConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the levels at which n steps with a schedule begin, and their alpha and sigma, float64 [n]."""
    count, total, multistep = cfg.steps, objective.cfg.levels, cfg.method == "dpm++"
    if cfg.spacing == "karras":
        ratios = karras_sigmas(*_sigma_range(objective, cfg), cfg.rho, count)
        levels = np.interp(np.log(ratios), np.log(_ratios(objective)), np.arange(total))
        alphas = 1 / np.sqrt(1 + ratios**2)
        return (levels.round() if multistep else levels), alphas, ratios * alphas
    if cfg.spacing == "trailing":
        levels = (total - np.arange(count) * (total / count)).round() - 1
    elif cfg.spacing == "linspace":
        levels = np.linspace(total - 1, 0, count + 1)[:-1].round() if multistep else np.linspace(total - 1, 0, count)
    else:  # dpm++: one level more, without the lowest
        levels = np.arange(count + multistep)[::-1][:count] * (total // (count + multistep)) + cfg.offset
    if levels[0] >= total:
        raise ConfigError(f"offset {cfg.offset}: steps begin at level {levels[0]}, and the schedule ends at {total - 1}; set less")
    if levels[0] == total - 1 and objective.alphas[-1] == 0:
        start = f"zero_snr: {cfg.method} with spacing {cfg.spacing} begins at level {total - 1}, which is noise alone"
        if objective.cfg.prediction_type == "epsilon":
            raise ConfigError(f"{start}: a prediction of epsilon does not determine the sample; set spacing to leading or train v")
        if cfg.method in ("euler", "heun"):
            raise ConfigError(f"{start}: sigma / alpha is infinite; set spacing to karras or leading, or method to ddim or dpm++")
    if cfg.spacing != "linspace" or multistep:
        rows = levels.astype(int)
        return levels, objective.alphas[rows], objective.sigmas[rows]
    ratios = np.interp(levels, np.arange(total), _ratios(objective))
    alphas = 1 / np.sqrt(1 + ratios**2)
    return levels, alphas, ratios * alphas


def _link_steps(times: np.ndarray, alphas: np.ndarray, sigmas: np.ndarray, last: tuple[float, float]) -> list[Step]:
    """Return steps, each of which ends at the beginning of the next."""
    starts = list(zip(alphas.tolist(), sigmas.tolist()))
    return [Step(time, *start, *end) for time, start, end in zip(times.tolist(), starts, [*starts[1:], last])]


class _Denoiser:
    """A network with guidance, and the meaning of its predictions."""

    def __init__(self, network: Network, objective: Objective, cfg: SamplerConfig, condition: Condition,
                 unconditional: Condition | None, count: int, grid: Grid) -> None:  # fmt: skip
        self.network, self.objective, self.cfg, self.unconditional, self.grid = network, objective, cfg, None, grid
        self.condition = _expand(condition, "condition", count)
        if cfg.guidance != 1 and unconditional is not None:
            self.unconditional = _expand(unconditional, "unconditional", count)
            pairs = dict(zip(Condition._fields, zip(self.condition, self.unconditional)))
            for name, (a, b) in pairs.items():
                if (a is None) != (b is None):
                    incomplete = "condition" if a is None else "unconditional"
                    raise ConfigError(f"guidance: {incomplete} has no {name}, the other one has; give it to both or to neither")
            if cfg.batch_guidance:
                self.condition = Condition(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs.values()))

    def predict(self, x: Tensor, time: float, sigma: float) -> Tensor:
        """Return the prediction for noisy samples x [B, C, ...], in their dtype."""
        y = self.objective.scale_input(x, sigma)
        if self.unconditional is None:
            return self._call_network(y, time, self.condition)
        if self.cfg.batch_guidance:
            cond, uncond = self._call_network(torch.cat([y, y]), time, self.condition).chunk(2)
        else:
            cond, uncond = self._call_network(y, time, self.condition), self._call_network(y, time, self.unconditional)
        return apply_guidance(cond, uncond, self.cfg.guidance, self.cfg.rescale, self.grid)

    def to_x0(self, output: Tensor, x: Tensor, alpha: float, sigma: float) -> Tensor:
        x0 = self.objective.to_x0(output, x, alpha, sigma)
        return x0 if self.cfg.clip is None else x0.clamp(-self.cfg.clip, self.cfg.clip)

    def _call_network(self, x: Tensor, time: float, condition: Condition) -> Tensor:
        output = self.network(x, torch.full((len(x),), time, dtype=x.dtype, device=x.device), condition)
        return output[:, : x.shape[1]].to(x.dtype)  # without a predicted variance


def _expand(condition: Condition, argument: str, count: int) -> Condition:
    """Expand a condition of one sample to ``count`` samples."""
    for name, x in zip(Condition._fields, condition):
        if x is not None and len(x) not in (1, count):
            raise ConfigError(f"{argument} has {name} of {len(x)} samples, noise is of {count}; give one for each, or one for all")
    return Condition(*(x if x is None else x.expand(count, *x.shape[1:]) for x in condition))


@torch.no_grad()
def _predict(model: _Denoiser, x: Tensor) -> Iterator[Tensor]:
    """The prediction of a regression, whose input is zero."""
    yield model.to_x0(model.predict(torch.zeros_like(x), 0.0, 0.0), x, 0.0, 0.0)


@torch.no_grad()
def _ddim(model: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, step_noise: StepNoise) -> Iterator[Tensor]:
    """Song et al. 2020, eq. 12 and 16. Clipping applies to x0, not to the noise."""
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        output = model.predict(x, time, sigma)
        added = cfg.eta * next_sigma / sigma * math.sqrt(1 - (alpha / next_alpha) ** 2)
        x0, noise = model.to_x0(output, x, alpha, sigma), model.objective.to_noise(output, x, alpha, sigma)
        x = torch.add(next_alpha * x0, noise, alpha=math.sqrt(max(next_sigma**2 - added**2, 0.0)))
        if added:
            x = torch.add(x, step_noise(i).to(x.dtype), alpha=added)
        yield x


@torch.no_grad()
def _ddpm(model: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, step_noise: StepNoise) -> Iterator[Tensor]:
    """Ho et al. 2020, eq. 6 and 7, with the smaller of the two variances."""
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        x0 = model.to_x0(model.predict(x, time, sigma), x, alpha, sigma)
        beta, ratio = 1 - (alpha / next_alpha) ** 2, (next_sigma / sigma) ** 2
        x = torch.add((next_alpha * beta / sigma**2) * x0, x, alpha=alpha / next_alpha * ratio)
        if next_sigma:
            x = torch.add(x, step_noise(i).to(x.dtype), alpha=math.sqrt(ratio * beta))
        yield x


@torch.no_grad()
def _dpm_solver(model: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, step_noise: StepNoise) -> Iterator[Tensor]:
    """DPM-Solver++ 2M (Lu et al. 2022, algorithm 2). Steps of first order are the first one, the last one if it leaves no noise or
    there are fewer than 15, and the second one if the first begins at alpha 0: its h is infinite."""
    x = x * (steps[0].sigma if model.objective.cfg.prediction_type == "edm" else 1.0)
    last_x0, last_h = x, 0.0
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        x0 = model.to_x0(model.predict(x, time, sigma), x, alpha, sigma)
        h = _log_ratio(next_alpha, next_sigma) - _log_ratio(alpha, sigma)
        first_order = i == 0 or (i == len(steps) - 1 and (len(steps) < 15 or cfg.clean))
        estimate = x0 if first_order else torch.lerp(x0, last_x0, -h / (2 * last_h))
        x = torch.add((next_sigma / sigma) * x, estimate, alpha=-next_alpha * math.expm1(-h))
        last_x0, last_h = x0, h
        yield x


def _log_ratio(alpha: float, sigma: float) -> float:
    """Return ln(alpha / sigma); either may be 0."""
    return math.inf if sigma == 0 else -math.inf if alpha == 0 else math.log(alpha / sigma)


@torch.no_grad()
def _euler_heun(model: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, step_noise: StepNoise) -> Iterator[Tensor]:
    """Integrate dx/ds = (x - x0) / s by Euler's or Heun's method (Karras et al. 2022, algorithms 1 and 2). s is sigma for edm, t
    for flow, whose slope is noise - x0, and sigma / alpha with a schedule, for x divided by alpha, which begins at 1 / alpha with
    leading, as in published pipelines. The last step is Euler's."""
    scheduled = model.objective.has_schedule
    x = x * ((1.0 if cfg.spacing == "leading" else steps[0].sigma) / (steps[0].alpha if scheduled else 1.0))
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        scale, next_scale = (alpha, next_alpha) if scheduled else (1.0, 1.0)
        if cfg.churn and cfg.churn_low <= sigma <= cfg.churn_high:
            sigma_hat = sigma * (1 + min(cfg.churn / len(steps), math.sqrt(2) - 1))
            x = torch.add(x, step_noise(i).to(x.dtype), alpha=cfg.churn_noise * math.sqrt(sigma_hat**2 - sigma**2))
            time, sigma = math.log(sigma_hat) / 4, sigma_hat
        s, next_s = sigma / scale, next_sigma / next_scale
        x0 = model.to_x0(model.predict(x * scale, time, sigma), x * scale, alpha, sigma)
        next_x = torch.lerp(x0, x, next_s / s)
        if cfg.method == "heun" and next_s:
            noisy = next_x * next_scale
            next_x0 = model.to_x0(model.predict(noisy, steps[i + 1].time, next_sigma), noisy, next_alpha, next_sigma)
            slope = torch.add((x - x0) / s, (next_x - next_x0) / next_s)
            next_x = torch.add(x, slope, alpha=(next_s - s) / 2)
        x = next_x
        yield x


_METHODS: dict[str, Callable[[_Denoiser, list[Step], SamplerConfig, Tensor, StepNoise], Iterator[Tensor]]] = {
    "ddim": _ddim, "ddpm": _ddpm, "dpm++": _dpm_solver, "euler": _euler_heun, "heun": _euler_heun,
}  # fmt: skip
