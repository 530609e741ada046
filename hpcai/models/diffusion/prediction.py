"""What a network is trained to say of a noisy sample, and what follows from what it says.   B samples, C channels, T levels

A noisy sample is x = alpha x0 + sigma noise. On a schedule (epsilon, v, x0) alpha^2 + sigma^2 = 1 at each of its levels 0 to T - 1;
edm has alpha 1 and any sigma above 0; flow has alpha 1 - t and sigma t, with t from 0 to 1. Nothing is drawn here: whoever trains
counts random numbers (``hpcai.kernels.philox``) and gives them.

    objective = Objective(ObjectiveConfig(says="v"))
    noised = objective.add_noise(x0, noise, objective.sample_times(uniform, normal))
    loss = objective.loss(network(noised.input, noised.time, condition), noised).mean()
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.models.diffusion.config import ObjectiveConfig
from hpcai.models.diffusion.grid import UNSHARDED, Grid

Number = float | Tensor  # of all samples, or of each [B]


class NoisySample(NamedTuple):
    """Noisy samples and what a network should say of them. All of it is in the samples' dtype, float32 at least."""

    input: Tensor
    """what the network is given [B, C, ...]: x, of edm x / sqrt(sigma^2 + sigma_data^2)"""
    time: Tensor
    """and told [B]: the level 0 to T - 1; of edm ln(sigma) / 4; of flow t"""
    alpha: Tensor
    sigma: Tensor
    """[B]"""
    target: Tensor
    """what it should say [B, C, ...]"""
    weight: Tensor
    """of its mean squared error [B]"""


def snr(cfg: ObjectiveConfig) -> np.ndarray:
    """alpha^2 of each level of a schedule, float64 [T]: Ho et al. 2020 (linear), Nichol and Dhariwal 2021, eq. 17 (cosine). With
    ``zero_snr`` alpha is moved and stretched so that the last is 0 (Lin et al. 2024, algorithm 1)."""
    if cfg.schedule == "cosine":
        curve = np.cos((np.linspace(0, 1, cfg.levels + 1) + 0.008) / 1.008 * np.pi / 2) ** 2
        added = np.minimum(1 - curve[1:] / curve[:-1], 0.999)
    else:
        power = 2 if cfg.schedule == "scaled_linear" else 1
        added = np.linspace(cfg.first ** (1 / power), cfg.last ** (1 / power), cfg.levels) ** power
    left = np.cumprod(1 - added)
    if cfg.zero_snr:
        alpha = np.sqrt(left)
        left = ((alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])) ** 2
    return left


def loss_weights(cfg: ObjectiveConfig) -> np.ndarray:
    """What the squared error of each level of a schedule counts, float64 [T]: 1, or min(SNR, gamma) in units of x0's error (Hang et
    al. 2023), which is divided by SNR for epsilon and by SNR + 1 for v."""
    left = snr(cfg)
    if cfg.min_snr is None:
        return np.ones_like(left)
    ratio = left / (1 - left)
    most = np.minimum(ratio, cfg.min_snr)
    if cfg.says == "epsilon":
        return np.divide(most, ratio, out=np.ones_like(ratio), where=ratio > 0)
    return most / (ratio + 1) if cfg.says == "v" else most


class Objective:
    """One of epsilon, v, x0, edm and flow. ``alphas`` and ``sigmas`` are those of a schedule's levels, float64 [T]; others have
    none."""

    def __init__(self, cfg: ObjectiveConfig) -> None:
        self.cfg = cfg
        self.has_schedule = cfg.says in ("epsilon", "v", "x0")
        self.alphas = self.sigmas = np.empty(0)
        if self.has_schedule:
            left = snr(cfg)
            self.alphas, self.sigmas = np.sqrt(left), np.sqrt(1 - left)
            self._table = torch.from_numpy(np.stack([self.alphas, self.sigmas, loss_weights(cfg)]))
        self._tables: dict[torch.device, Tensor] = {}

    def sample_times(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """The times to train [B], from numbers of [0, 1) and of the normal distribution [B]. On a schedule: whole levels, all
        equally often; edm: sigma, exp(mean + deviation normal) (Karras et al. 2022, table 1); flow: t, uniform or
        sigmoid(mean + deviation normal) (Esser et al. 2024, eq. 19)."""
        if self.has_schedule:  # 1, which narrow numbers may round to, is no level
            return (uniform * self.cfg.levels).floor().clamp(max=self.cfg.levels - 1)
        if self.cfg.says == "flow" and self.cfg.times == "uniform":
            return uniform
        some = self.cfg.mean + self.cfg.deviation * normal
        return some.exp() if self.cfg.says == "edm" else some.sigmoid()

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma at times of ``drawn`` [B], in float64. Levels are whole: one between two of them counts as the lower."""
        if self.has_schedule:
            alpha, sigma, _ = self._lookup(time)
            return alpha, sigma
        time = time.double()
        return (torch.ones_like(time) if self.cfg.says == "edm" else 1 - time), time

    def add_noise(self, x0: Tensor, noise: Tensor, time: Tensor) -> NoisySample:
        """Samples and noise [B, C, ...] at times of ``drawn`` [B].

        The weight of edm is 1, on what the network itself should say; on x0 that is (sigma^2 + sigma_data^2) / (sigma sigma_data)^2
        (Karras et al. 2022, eq. 8). So is flow's.
        """
        dtype = torch.promote_types(x0.dtype, torch.float32)
        alpha, sigma = (number.to(dtype) for number in self.alpha_sigma(time))
        x0, noise = x0.to(dtype), noise.to(dtype)
        x = _per_sample(alpha, x0) * x0 + _per_sample(sigma, x0) * noise
        weight = self._lookup(time)[2].to(dtype) if self.has_schedule else torch.ones_like(sigma)
        told = (time.double().log() / 4 if self.cfg.says == "edm" else time).to(dtype)
        return NoisySample(self.scale_input(x, sigma), told, alpha, sigma, self.target(x0, noise, alpha, sigma), weight)

    def loss(self, output: Tensor, noisy: NoisySample, grid: Grid = UNSHARDED) -> Tensor:
        """The mean squared error of each sample times its weight [B], in float32 at least. Channels that a network says beyond the
        target's, such as a variance, do not count."""
        return grid.mean((output[:, : noisy.target.shape[1]] - noisy.target).square()) * noisy.weight

    def scale_input(self, x: Tensor, sigma: Number) -> Tensor:
        """What the network is given of a noisy sample x [B, C, ...]."""
        return x / _per_sample((sigma**2 + self.cfg.sigma_data**2) ** 0.5, x) if self.cfg.says == "edm" else x

    def target(self, x0: Tensor, noise: Tensor, alpha: Number, sigma: Number) -> Tensor:
        """What the network should say of samples with noise [B, C, ...]."""
        alpha, sigma, width = _per_sample(alpha, x0), _per_sample(sigma, x0), self.cfg.sigma_data
        match self.cfg.says:
            case "epsilon":
                return noise
            case "v":
                return alpha * noise - sigma * x0
            case "x0":
                return x0
            case "edm":  # eq. 8, without the difference of two numbers that are alike where there is little noise
                return (sigma * x0 - width**2 * noise) / (width * (sigma**2 + width**2) ** 0.5)
            case "flow":
                return noise - x0

    def to_x0(self, output: Tensor, x: Tensor, alpha: Number, sigma: Number) -> Tensor:
        """x0 as the network sees it, which said ``said`` of the noisy sample x (not of its input, where they part) [B, C, ...].
        epsilon says nothing of it where alpha is 0."""
        alpha, sigma, width, output = _per_sample(alpha, x), _per_sample(sigma, x), self.cfg.sigma_data, output.to(x.dtype)
        match self.cfg.says:
            case "epsilon":
                return (x - sigma * output) / alpha
            case "v":
                return alpha * x - sigma * output
            case "x0":
                return output
            case "edm":
                total = sigma**2 + width**2
                return (width**2 / total) * x + (sigma * width / total**0.5) * output
            case "flow":
                return x - sigma * output

    def to_noise(self, output: Tensor, x: Tensor, alpha: Number, sigma: Number) -> Tensor:
        """The noise, as ``sample_of``. x0 says nothing of it where sigma is 0."""
        alpha, sigma, width, output = _per_sample(alpha, x), _per_sample(sigma, x), self.cfg.sigma_data, output.to(x.dtype)
        match self.cfg.says:
            case "epsilon":
                return output
            case "v":
                return sigma * x + alpha * output
            case "x0":
                return (x - alpha * output) / sigma
            case "edm":
                total = sigma**2 + width**2
                return (sigma / total) * x - (width / total**0.5) * output
            case "flow":
                return x + alpha * output

    def _lookup(self, time: Tensor) -> Tensor:
        """alpha, sigma and weight of levels [3, B]. The table is copied to a device once: no such copy can be captured (a step is
        warmed up before that)."""
        table = self._tables.get(time.device)
        if table is None:
            with torch.inference_mode(False):  # training may want it too
                table = self._table.to(time.device)
            if type(table) is Tensor:  # one on paper (hpcai.plan) has no numbers
                self._tables[time.device] = table
        return table[:, time.long()]


def _per_sample(number: Number, x: Tensor) -> Number:
    """A number of each sample [B] as one of all its places [B, 1, ...]."""
    return number.to(x.dtype).view(-1, *(1,) * (x.ndim - 1)) if isinstance(number, Tensor) else number
