"""Samples from noise, step by step.   B samples, C channels, T levels of a schedule, n steps

    for x in sample(network, objective, SamplerConfig(steps=25), noise, condition):
        show(x)                                                        # the last is the sample
    x = drawn(network, objective, SamplerConfig(guidance=7.5), noise, condition, nothing)

Which levels of noise are visited is known before the first step, as numbers of the host (``plan``): no step reads the device.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

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
"""Of methods along a schedule, and of objectives that have none."""


class Step(NamedTuple):
    """From one level of noise to the next, which is not always where the next step begins (ddim's)."""

    time: float
    """what the network is told there"""
    alpha: float
    sigma: float
    next_alpha: float
    next_sigma: float


def sample(
    network: Network, objective: Objective, cfg: SamplerConfig, noise: Tensor, condition: Condition = UNCONDITIONAL,
    unconditional: Condition | None = None, step_noise: StepNoise | None = None, grid: Grid = UNSHARDED,
) -> Iterator[Tensor]:  # fmt: skip
    """The state after each of n steps [B, C, ...], the last of which is the sample; no gradients are kept.

    ``noise``: of the normal distribution [B, C, ...]; states are in its dtype, float32 at least, whatever the network computes in.
    ``condition``: [B, ...], or [1, ...] for all. ``nothing``: the same, where nothing is asked; guidance other than 1 needs it.
    ``fresh``: the noise that step i = 0, 1, ... adds [B, C, ...]; ddpm, eta and churn need it. A sample depends on its own noise
    and condition alone. States of euler and heun along a schedule are x / alpha, in which these methods work. ``grid``: which
    places this process holds. ConfigError, at the call and before the first step: settings do not go together, or what they
    need is not given.
    """
    steps = plan_steps(objective, cfg)
    if cfg.guidance != 1 and unconditional is None:
        raise ConfigError(f"guidance {cfg.guidance:g} compares with samples of no condition; give nothing, or set guidance to 1")
    adds = cfg.method == "ddpm" or cfg.eta > 0 or cfg.churn > 0
    if adds and step_noise is None:
        raise ConfigError(f"method {cfg.method} with eta {cfg.eta:g} and churn {cfg.churn:g} adds noise on the way; give fresh")
    x = noise.to(torch.promote_types(noise.dtype, torch.float32))
    ask = _Denoiser(network, objective, cfg, condition, unconditional, len(x), grid)
    return _METHODS[cfg.method](ask, steps, cfg, x, step_noise or _no_noise)


def draw_samples(
    network: Network, objective: Objective, cfg: SamplerConfig, noise: Tensor, condition: Condition = UNCONDITIONAL,
    unconditional: Condition | None = None, step_noise: StepNoise | None = None,
) -> Tensor:  # fmt: skip
    """The last state of ``sample``: the samples [B, C, ...]."""
    return deque(sample(network, objective, cfg, noise, condition, unconditional, step_noise), maxlen=1).pop()


def apply_guidance(conditional: Tensor, unconditional: Tensor, guidance: float, rescale: float = 0.0, grid: Grid = UNSHARDED) -> Tensor:
    """What a network said with a condition [B, C, ...], taken ``guidance`` times as far from what it said without (Ho and Salimans
    2022). ``rescale``: the share of that which gets the deviation of ``said``, each sample alone (Lin et al. 2024, eq. 15, 16)."""
    far = torch.lerp(unconditional, conditional, guidance)
    if not rescale:
        return far
    own, wide = grid.std(conditional), grid.std(far)  # 0 of a fresh network, whose last layer is zero
    return far * (rescale * own / wide.clamp(min=torch.finfo(far.dtype).tiny) + (1 - rescale))


def karras_sigmas(low: float, high: float, rho: float, steps: int) -> np.ndarray:
    """Sigmas from ``high`` down to ``low``, float64 [n] (Karras et al. 2022, eq. 5, without the 0 at the end)."""
    there = np.linspace(0, 1, steps)
    return (high ** (1 / rho) + there * (low ** (1 / rho) - high ** (1 / rho))) ** rho


def shift_times(time: np.ndarray, shift: float) -> np.ndarray:
    """Times of flow, more of them where there is much noise (Esser et al. 2024, eq. 23)."""
    return shift * time / (1 + (shift - 1) * time)


def plan_steps(objective: Objective, cfg: SamplerConfig) -> list[Step]:
    """The n steps of a sampler. ConfigError names all settings that do not go together."""
    _check(objective, cfg)
    if objective.cfg.says == "edm":
        sigmas = karras_sigmas(cfg.low, cfg.high, cfg.rho, cfg.steps)
        return _link_steps(np.log(sigmas) / 4, np.ones(cfg.steps), sigmas, (1.0, 0.0))
    if objective.cfg.says == "flow":
        if cfg.spacing == "trailing":
            times = shift_times(np.linspace(1, 1 / cfg.steps, cfg.steps), cfg.shift)
        else:
            first, last = shift_times(np.array([1, 1 / objective.cfg.levels]), cfg.shift)
            times = shift_times(np.linspace(first, last, cfg.steps), cfg.shift)
        return _link_steps(times, 1 - times, times, (1.0, 0.0))
    end = (1.0, 0.0) if cfg.clean else (float(objective.alphas[0]), float(objective.sigmas[0]))
    levels, alphas, sigmas = _select_levels(objective, cfg)
    steps = _link_steps(levels, alphas, sigmas, end)
    if cfg.method == "ddim":  # the published way: not where the next step begins, if T is no multiple of n
        ahead = levels - objective.cfg.levels // cfg.steps
        ends = [(objective.alphas[int(t)], objective.sigmas[int(t)]) if t >= 0 else end for t in ahead]
        steps = [Step(*step[:3], float(alpha), float(sigma)) for step, (alpha, sigma) in zip(steps, ends)]
    return steps


def _check(objective: Objective, cfg: SamplerConfig) -> None:
    says, levels, wrong = objective.cfg.says, objective.cfg.levels, list[str]()
    if not objective.has_schedule and cfg.method not in ("euler", "heun"):
        wrong.append(f"method {cfg.method} goes along a schedule; a network that says {says} has none; set method to euler or heun")
    else:
        where, known = (cfg.method, SPACINGS[cfg.method]) if objective.has_schedule else (says, SPACINGS[says])
        if cfg.spacing not in known:
            wrong.append(f"spacing {cfg.spacing}: {where} has {', '.join(known)}; set spacing to one of them")
    needed = cfg.steps + (cfg.method == "dpm++" and cfg.spacing in ("leading", "linspace"))
    if objective.has_schedule and cfg.spacing != "karras" and needed > levels:
        wrong.append(f"steps {cfg.steps}: {cfg.method} visits {needed} levels, and the schedule has {levels}; set fewer steps")
    if cfg.eta and cfg.method != "ddim":
        wrong.append(f"eta {cfg.eta:g} is of ddim; method is {cfg.method}; set eta to 0")
    if cfg.eta > 1:
        wrong.append(f"eta {cfg.eta:g} adds more noise than there is at the next level; expected 0 to 1")
    if cfg.churn and (says, cfg.method) != ("edm", "heun"):
        wrong.append(f"churn {cfg.churn:g} is of edm with heun, not of {says} with {cfg.method}; set churn to 0")
    if cfg.shift != 1 and says != "flow":
        wrong.append(f"shift {cfg.shift:g} is of flow; the network says {says}; set shift to 1")
    if cfg.offset and cfg.spacing != "leading":
        wrong.append(f"offset {cfg.offset} is of spacing leading; spacing is {cfg.spacing}; set offset to 0")
    if not cfg.clean and cfg.method not in ("ddim", "dpm++"):
        wrong.append(f"clean false is of ddim and dpm++; method is {cfg.method}; set clean to true")
    low, high = _sigma_range(objective, cfg)
    if cfg.spacing == "karras" and low >= high:
        wrong.append(f"low and high: the sigmas to visit begin at {high:g} and end at {low:g}; expected low below high")
    if wrong:
        raise ConfigError("\n".join(wrong))


def _sigma_range(objective: Objective, cfg: SamplerConfig) -> tuple[float, float]:
    """The lowest and highest sigma / alpha of karras: no others than a schedule has, of which a network knows nothing."""
    if not objective.has_schedule:
        return cfg.low, cfg.high
    ratios = _ratios(objective)
    return max(cfg.low, float(ratios[0])), min(cfg.high, float(ratios[-1]))


def _ratios(objective: Objective) -> np.ndarray:
    """sigma / alpha of a schedule's levels; infinite where nothing of a sample is left."""
    with np.errstate(divide="ignore"):
        return objective.sigmas / objective.alphas


def _select_levels(objective: Objective, cfg: SamplerConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The levels where n steps along a schedule begin, and alpha and sigma there, float64 [n]."""
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
    else:  # one more is laid out for dpm++, and the lowest left out
        levels = np.arange(count + multistep)[::-1][:count] * (total // (count + multistep)) + cfg.offset
    if levels[0] >= total:
        raise ConfigError(f"offset {cfg.offset}: steps begin at level {levels[0]}, and the schedule ends at {total - 1}; set less")
    if levels[0] == total - 1 and objective.alphas[-1] == 0:
        place = f"zero_snr: {cfg.method} with spacing {cfg.spacing} begins at level {total - 1}, which is noise alone"
        if objective.cfg.says == "epsilon":
            raise ConfigError(f"{place}: a network that says epsilon tells nothing of a sample; set spacing to leading or train v")
        if cfg.method in ("euler", "heun"):
            raise ConfigError(f"{place}: sigma / alpha is infinite; set spacing to karras or leading, or method to ddim or dpm++")
    if cfg.spacing != "linspace" or multistep:
        whole = levels.astype(int)
        return levels, objective.alphas[whole], objective.sigmas[whole]
    ratios = np.interp(levels, np.arange(total), _ratios(objective))
    alphas = 1 / np.sqrt(1 + ratios**2)
    return levels, alphas, ratios * alphas


def _link_steps(times: np.ndarray, alphas: np.ndarray, sigmas: np.ndarray, last: tuple[float, float]) -> list[Step]:
    """Steps of which each ends where the next one begins."""
    starts = list(zip(alphas.tolist(), sigmas.tolist()))
    return [Step(time, *start, *end) for time, start, end in zip(times.tolist(), starts, [*starts[1:], last])]


class _Denoiser:
    """A network that is guided, and what its words mean."""

    def __init__(self, network: Network, objective: Objective, cfg: SamplerConfig, condition: Condition,
                 nothing: Condition | None, count: int, grid: Grid) -> None:  # fmt: skip
        self.network, self.objective, self.cfg, self.unconditional, self.grid = network, objective, cfg, None, grid
        self.condition = _expand(condition, "condition", count)
        if cfg.guidance != 1 and nothing is not None:
            self.unconditional = _expand(nothing, "nothing", count)
            pairs = dict(zip(Condition._fields, zip(self.condition, self.unconditional)))
            for name, (a, b) in pairs.items():
                if (a is None) != (b is None):
                    lacks = "condition" if a is None else "nothing"
                    raise ConfigError(f"guidance: {lacks} has no {name}, the other one has; give it to both or to neither")
            if cfg.together:
                self.condition = Condition(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs.values()))

    def predict(self, x: Tensor, time: float, sigma: float) -> Tensor:
        """Of the noisy samples x [B, C, ...], in their dtype."""
        given = self.objective.scale_input(x, sigma)
        if self.unconditional is None:
            return self._call_network(given, time, self.condition)
        if self.cfg.together:
            said, without = self._call_network(torch.cat([given, given]), time, self.condition).chunk(2)
        else:
            said, without = self._call_network(given, time, self.condition), self._call_network(given, time, self.unconditional)
        return apply_guidance(said, without, self.cfg.guidance, self.cfg.rescale, self.grid)

    def to_x0(self, said: Tensor, x: Tensor, alpha: float, sigma: float) -> Tensor:
        x0 = self.objective.to_x0(said, x, alpha, sigma)
        return x0 if self.cfg.clip is None else x0.clamp(-self.cfg.clip, self.cfg.clip)

    def _call_network(self, x: Tensor, time: float, condition: Condition) -> Tensor:
        said = self.network(x, torch.full((len(x),), time, dtype=x.dtype, device=x.device), condition)
        return said[:, : x.shape[1]].to(x.dtype)  # without a variance that it may also say


def _expand(condition: Condition, which: str, count: int) -> Condition:
    """What one condition asks of all samples, asked of each."""
    for name, part in zip(Condition._fields, condition):
        if part is not None and len(part) not in (1, count):
            raise ConfigError(f"{which} has {name} of {len(part)} samples, noise is of {count}; give one for each, or one for all")
    return Condition(*(part if part is None else part.expand(count, *part.shape[1:]) for part in condition))


def _no_noise(step: int) -> Tensor:
    raise AssertionError(f"step {step} adds no noise")


@torch.no_grad()
def _ddim(ask: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, fresh: StepNoise) -> Iterator[Tensor]:
    """Song et al. 2020, eq. 12 and 16. Where x0 is clipped, the noise is not."""
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        said = ask.predict(x, time, sigma)
        added = cfg.eta * next_sigma / sigma * math.sqrt(1 - (alpha / next_alpha) ** 2)
        x0, noise = ask.to_x0(said, x, alpha, sigma), ask.objective.to_noise(said, x, alpha, sigma)
        x = torch.add(next_alpha * x0, noise, alpha=math.sqrt(max(next_sigma**2 - added**2, 0.0)))
        if added:
            x = torch.add(x, fresh(i).to(x.dtype), alpha=added)
        yield x


@torch.no_grad()
def _ddpm(ask: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, fresh: StepNoise) -> Iterator[Tensor]:
    """Ho et al. 2020, eq. 6 and 7, with the smaller variance of the two."""
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        x0 = ask.to_x0(ask.predict(x, time, sigma), x, alpha, sigma)
        share, left = 1 - (alpha / next_alpha) ** 2, (next_sigma / sigma) ** 2
        x = torch.add((next_alpha * share / sigma**2) * x0, x, alpha=alpha / next_alpha * left)
        if next_sigma:
            x = torch.add(x, fresh(i).to(x.dtype), alpha=math.sqrt(left * share))
        yield x


@torch.no_grad()
def _dpm_solver(ask: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, fresh: StepNoise) -> Iterator[Tensor]:
    """DPM-Solver++ 2M (Lu et al. 2022, algorithm 2). The first step is of first order, and so is the last where it leaves no noise
    or is one of fewer than 15."""
    before, way_before = x, 0.0
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        x0 = ask.to_x0(ask.predict(x, time, sigma), x, alpha, sigma)
        way = _log_ratio(next_alpha, next_sigma) - _log_ratio(alpha, sigma)
        first_order = i == 0 or (i == len(steps) - 1 and (len(steps) < 15 or cfg.clean))
        ahead = x0 if first_order else torch.lerp(x0, before, -way / (2 * way_before))
        x = torch.add((next_sigma / sigma) * x, ahead, alpha=-next_alpha * math.expm1(-way))
        before, way_before = x0, way
        yield x


def _log_ratio(alpha: float, sigma: float) -> float:
    """ln(alpha / sigma), where one of them may be 0."""
    return math.inf if sigma == 0 else -math.inf if alpha == 0 else math.log(alpha / sigma)


@torch.no_grad()
def _euler_heun(ask: _Denoiser, steps: list[Step], cfg: SamplerConfig, x: Tensor, fresh: StepNoise) -> Iterator[Tensor]:
    """Euler's and Heun's way along dx/ds = (x - x0) / s (Karras et al. 2022, algorithms 1 and 2). s is sigma of edm; t of flow,
    whose slope is noise - x0; sigma / alpha of a schedule, whose x is divided by alpha for it. Heun's last step is Euler's."""
    scheduled = ask.objective.has_schedule
    x = x * (steps[0].sigma / (steps[0].alpha if scheduled else 1.0))
    for i, (time, alpha, sigma, next_alpha, next_sigma) in enumerate(steps):
        scale, next_scale = (alpha, next_alpha) if scheduled else (1.0, 1.0)
        if cfg.churn and cfg.churn_low <= sigma <= cfg.churn_high:
            more = sigma * (1 + min(cfg.churn / len(steps), math.sqrt(2) - 1))
            x = torch.add(x, fresh(i).to(x.dtype), alpha=cfg.churn_noise * math.sqrt(more**2 - sigma**2))
            time, sigma = math.log(more) / 4, more
        here, there = sigma / scale, next_sigma / next_scale
        x0 = ask.to_x0(ask.predict(x * scale, time, sigma), x * scale, alpha, sigma)
        ahead = torch.lerp(x0, x, there / here)
        if cfg.method == "heun" and there:
            inside = ahead * next_scale
            other = ask.to_x0(ask.predict(inside, steps[i + 1].time, next_sigma), inside, next_alpha, next_sigma)
            slope = torch.add((x - x0) / here, (ahead - other) / there)
            ahead = torch.add(x, slope, alpha=(there - here) / 2)
        x = ahead
        yield x


_METHODS: dict[str, Callable[[_Denoiser, list[Step], SamplerConfig, Tensor, StepNoise], Iterator[Tensor]]] = {
    "ddim": _ddim, "ddpm": _ddpm, "dpm++": _dpm_solver, "euler": _euler_heun, "heun": _euler_heun,
}  # fmt: skip
