"""Prediction types of diffusion models: targets, losses and conversions.   B samples, C channels, T levels

A noisy sample is x = alpha x0 + sigma noise. On a schedule (epsilon, v, x0) alpha^2 + sigma^2 = 1 at each of its levels 0 to T - 1;
edm has alpha 1 and any sigma above 0; flow has alpha 1 - t and sigma t, with t from 0 to 1; regression has neither: its input is 0.
Random numbers are arguments: training computes them by a counter-based generator (``hpcai.kernels.philox``).

    objective = Objective(ObjectiveConfig(prediction_type="v"))
    noisy = objective.add_noise(x0, noise, objective.sample_times(uniform, normal))
    loss = objective.loss(network(noisy.input, noisy.time, condition), noisy).mean()
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.models.diffusion.config import ObjectiveConfig
from hpcai.models.diffusion.grid import UNSHARDED, Grid

Number = float | Tensor  # one for all samples, or [B]


class NoisySample(NamedTuple):
    """Noisy samples and the targets of a network, in the dtype of the samples, float32 at least."""

    input: Tensor
    """[B, C, ...] input of the network: x, for edm x / sqrt(sigma^2 + sigma_data^2)"""
    time: Tensor
    """[B] time input of the network: the level 0 to T - 1; for edm ln(sigma) / 4; for flow t"""
    alpha: Tensor
    sigma: Tensor
    """[B]"""
    target: Tensor
    """[B, C, ...]"""
    weight: Tensor
    """[B] weight of the mean squared error"""


def alphas_cumprod(cfg: ObjectiveConfig) -> np.ndarray:
    """Return alpha^2 = SNR / (1 + SNR) of each level of a schedule, float64 [T]: Ho et al. 2020 (linear), Nichol and Dhariwal 2021,
    eq. 17 (cosine). ``zero_snr`` shifts and scales alpha so that the last is 0 (Lin et al. 2024, algorithm 1)."""
    if cfg.schedule == "cosine":
        curve = np.cos((np.linspace(0, 1, cfg.levels + 1) + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - curve[1:] / curve[:-1], 0.999)
    else:
        power = 2 if cfg.schedule == "scaled_linear" else 1
        betas = np.linspace(cfg.first ** (1 / power), cfg.last ** (1 / power), cfg.levels) ** power
    alpha2 = np.cumprod(1 - betas)
    if cfg.zero_snr:
        alpha = np.sqrt(alpha2)
        alpha2 = ((alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])) ** 2
    return alpha2


def loss_weights(cfg: ObjectiveConfig) -> np.ndarray:
    """Return the weight of the squared error at each level of a schedule, float64 [T]: 1, or min(SNR, gamma) for the error of x0
    (Hang et al. 2023), divided by SNR for epsilon and by SNR + 1 for v."""
    alpha2 = alphas_cumprod(cfg)
    if cfg.min_snr is None:
        return np.ones_like(alpha2)
    ratio = alpha2 / (1 - alpha2)
    clipped = np.minimum(ratio, cfg.min_snr)
    if cfg.prediction_type == "epsilon":
        return np.divide(clipped, ratio, out=np.ones_like(ratio), where=ratio > 0)
    return clipped / (ratio + 1) if cfg.prediction_type == "v" else clipped


class Objective:
    """Prediction of one of the types. ``alphas``, ``sigmas``: of the levels of a schedule, float64 [T], else empty."""

    def __init__(self, cfg: ObjectiveConfig) -> None:
        self.cfg = cfg
        self.has_schedule = cfg.prediction_type in ("epsilon", "v", "x0")
        self.alphas = self.sigmas = np.empty(0)
        if self.has_schedule:
            alpha2 = alphas_cumprod(cfg)
            self.alphas, self.sigmas = np.sqrt(alpha2), np.sqrt(1 - alpha2)
            self._table = torch.from_numpy(np.stack([self.alphas, self.sigmas, loss_weights(cfg)]))
        self._tables: dict[torch.device, Tensor] = {}

    def sample_times(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return training times [B], from uniform numbers in [0, 1) and standard normal ones [B]. With a schedule: integer levels,
        uniform; edm: sigma, exp(mean + deviation normal) (Karras et al. 2022, table 1); flow: t, uniform or
        sigmoid(mean + deviation normal) (Esser et al. 2024, eq. 19)."""
        if self.cfg.prediction_type == "regression":
            return torch.zeros_like(uniform)
        if self.has_schedule:  # clamped: in low precision a uniform number may be rounded to 1
            return (uniform * self.cfg.levels).floor().clamp(max=self.cfg.levels - 1)
        if self.cfg.prediction_type == "flow" and self.cfg.times == "uniform":
            return uniform
        scaled = self.cfg.mean + self.cfg.deviation * normal
        return scaled.exp() if self.cfg.prediction_type == "edm" else scaled.sigmoid()

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma at times of ``sample_times`` [B], in float64. Levels are truncated to integers."""
        if self.has_schedule:
            alpha, sigma, _ = self._lookup(time)
            return alpha, sigma
        time = time.double()
        if self.cfg.prediction_type == "regression":
            return torch.zeros_like(time), torch.zeros_like(time)
        return (torch.ones_like(time) if self.cfg.prediction_type == "edm" else 1 - time), time

    def add_noise(self, x0: Tensor, noise: Tensor, time: Tensor) -> NoisySample:
        """Add noise to samples [B, C, ...] at times of ``sample_times`` [B].

        The weights of edm and flow are 1, for the error of the network; for the error of x0, that of edm is
        (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 (Karras et al. 2022, eq. 8).
        """
        dtype = torch.promote_types(x0.dtype, torch.float32)
        alpha, sigma = (number.to(dtype) for number in self.alpha_sigma(time))
        x0, noise = x0.to(dtype), noise.to(dtype)
        x = _per_sample(alpha, x0) * x0 + _per_sample(sigma, x0) * noise
        weight = self._lookup(time)[2].to(dtype) if self.has_schedule else torch.ones_like(sigma)
        t = (time.double().log() / 4 if self.cfg.prediction_type == "edm" else time).to(dtype)
        return NoisySample(self.scale_input(x, sigma), t, alpha, sigma, self.target(x0, noise, alpha, sigma), weight)

    def loss(self, output: Tensor, noisy: NoisySample, grid: Grid = UNSHARDED, weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean squared error of each sample [B], in float32 at least. Further channels of the output, such as a
        variance, are ignored. ``weights``: of cells, broadcast to [B, C, ...]"""
        square = (output[:, : noisy.target.shape[1]] - noisy.target).square()
        return grid.mean(square if weights is None else square * weights) * noisy.weight

    def scale_input(self, x: Tensor, sigma: Number) -> Tensor:
        """Return the input of the network for a noisy sample x [B, C, ...]."""
        return x / _per_sample((sigma**2 + self.cfg.sigma_data**2) ** 0.5, x) if self.cfg.prediction_type == "edm" else x

    def target(self, x0: Tensor, noise: Tensor, alpha: Number, sigma: Number) -> Tensor:
        """Return the target of the network for samples and noise [B, C, ...]."""
        alpha, sigma, data = _per_sample(alpha, x0), _per_sample(sigma, x0), self.cfg.sigma_data
        match self.cfg.prediction_type:
            case "epsilon":
                return noise
            case "v":
                return alpha * noise - sigma * x0
            case "x0" | "regression":
                return x0
            case "edm":  # eq. 8, rearranged to avoid cancellation at small sigma
                return (sigma * x0 - data**2 * noise) / (data * (sigma**2 + data**2) ** 0.5)
            case "flow":
                return noise - x0

    def to_x0(self, output: Tensor, x: Tensor, alpha: Number, sigma: Number) -> Tensor:
        """Return the x0 that ``output`` predicts for the noisy sample x, before ``scale_input`` [B, C, ...]. For epsilon it is
        undefined if alpha is 0."""
        alpha, sigma, data, output = _per_sample(alpha, x), _per_sample(sigma, x), self.cfg.sigma_data, output.to(x.dtype)
        match self.cfg.prediction_type:
            case "epsilon":
                return (x - sigma * output) / alpha
            case "v":
                return alpha * x - sigma * output
            case "x0" | "regression":
                return output
            case "edm":
                total = sigma**2 + data**2
                return (data**2 / total) * x + (sigma * data / total**0.5) * output
            case "flow":
                return x - sigma * output

    def to_noise(self, output: Tensor, x: Tensor, alpha: Number, sigma: Number) -> Tensor:
        """Return the predicted noise, like ``to_x0``. For x0 it is undefined if sigma is 0."""
        alpha, sigma, data, output = _per_sample(alpha, x), _per_sample(sigma, x), self.cfg.sigma_data, output.to(x.dtype)
        match self.cfg.prediction_type:
            case "epsilon":
                return output
            case "v":
                return sigma * x + alpha * output
            case "x0" | "regression":
                return (x - alpha * output) / sigma
            case "edm":
                total = sigma**2 + data**2
                return (sigma / total) * x - (data / total**0.5) * output
            case "flow":
                return x + alpha * output

    def _lookup(self, time: Tensor) -> Tensor:
        """Return alpha, sigma and weight of levels [3, B]. The table is copied to a device once, in the warm-up of a step: the copy
        cannot be captured."""
        table = self._tables.get(time.device)
        if table is None:
            with torch.inference_mode(False):  # training may use it later
                table = self._table.to(time.device)
            if type(table) is Tensor:  # not a tensor without memory (hpcai.plan)
                self._tables[time.device] = table
        return table[:, time.long()]


def _per_sample(number: Number, x: Tensor) -> Number:
    """Return numbers of samples [B] as [B, 1, ...], for broadcasting."""
    return number.to(x.dtype).view(-1, *(1,) * (x.ndim - 1)) if isinstance(number, Tensor) else number
