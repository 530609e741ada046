"""Samplers with an exact network have the states of diffusers' schedulers (tests/data/diffusion/samplers)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import ObjectiveConfig, SamplerConfig
from hpcai.models.diffusion.prediction import Objective
from hpcai.models.diffusion.samplers import plan_steps, sample
from tests.reference_data import load_arrays, load_json

STORED = load_json("diffusion/samplers/cases")
CASES = {case["name"]: case for case in STORED["cases"]}


class Mixture:
    """The exact network of a known distribution: elements are drawn from a Gaussian mixture that ``classes`` selects. Alpha and
    sigma are those of the stored calls of diffusers; the time is compared with them."""

    def __init__(self, objective: Objective, data: dict[str, np.ndarray], calls: int = 1) -> None:
        self.objective, self.data, self.calls, self.call_count = objective, data, calls, 0
        self.mixtures = torch.tensor(pad_mixtures(), dtype=torch.float64)  # [2, 3, J]

    def __call__(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        cfg, dtype, x = self.objective.cfg, x.dtype, x.double()
        assert time.shape == (len(x),) and time.dtype == dtype and condition.classes is not None
        call, network_time = self.call_count // self.calls, float(time[0])
        self.call_count += 1
        if "timesteps" in self.data:
            scale = cfg.levels if cfg.prediction_type == "flow" else 1
            assert network_time * scale == pytest.approx(self.data["timesteps"][call], rel=1e-6, abs=1e-6)
        if cfg.prediction_type == "edm":
            alpha, sigma = 1.0, math.exp(4 * network_time) if dtype == torch.float64 else float(self.data["call_sigma"][call])
            x = x * math.hypot(sigma, cfg.sigma_data)
        else:
            alpha, sigma = float(self.data["call_alpha"][call]), float(self.data["call_sigma"][call])
            if cfg.prediction_type != "flow":  # Heun's calls are stored for x / alpha
                alpha, sigma = alpha / math.hypot(alpha, sigma), sigma / math.hypot(alpha, sigma)
        weight, mean, deviation = self.mixtures[condition.classes].unbind(1)  # [B, J]
        x = x[..., None]
        weight, mean, deviation = (part.view(len(part), *(1,) * (x.ndim - 2), -1) for part in (weight, mean, deviation))
        variance, residual = alpha**2 * deviation**2 + sigma**2, x - alpha * mean
        responsibility = (weight.log() - variance.log() / 2 - residual**2 / (2 * variance)).softmax(-1)
        x0 = (responsibility * (mean + alpha * deviation**2 * residual / variance)).sum(-1)
        noise = (responsibility * sigma * residual / variance).sum(-1)
        if cfg.prediction_type == "edm":  # the definition of EDM's network output
            total = sigma**2 + cfg.sigma_data**2
            prediction = (x0 - cfg.sigma_data**2 / total * x[..., 0]) * math.sqrt(total) / (sigma * cfg.sigma_data)
        else:
            prediction = {"epsilon": noise, "v": alpha * noise - sigma * x0, "flow": noise - x0}[cfg.prediction_type]
        return prediction.to(dtype)


def pad_mixtures() -> list[list[list[float]]]:
    """Return weights, means and deviations of both mixtures; the shorter one is padded with a component of negligible weight."""
    cond, uncond = (list(STORED["mixtures"][name].values()) for name in ("cond", "uncond"))
    return [cond, [[*values, padding] for values, padding in zip(uncond, (1e-300, 0.0, 1.0))]]


def objective_and_sampler(case: dict[str, Any], **overrides: Any) -> tuple[Objective, SamplerConfig]:
    settings, steps = case["settings"], case["steps"]
    kind = case["scheduler"].removesuffix("Scheduler").removesuffix("Discrete")
    if kind.startswith("EDM"):
        churn = {"churn": settings["S_churn"], "churn_low": settings["S_min"], "churn_high": settings["S_max"],
                 "churn_noise": settings["S_noise"]} if kind == "EDMHeun" else {}  # fmt: skip
        objective = ObjectiveConfig(prediction_type="edm", sigma_data=settings.get("sigma_data", 0.5))
        return Objective(objective), SamplerConfig(
            method={"EDMHeun": "heun", "EDMEuler": "euler"}.get(kind, "dpm++"), steps=steps, spacing="karras",
            low=settings["sigma_min"], high=settings["sigma_max"], rho=settings["rho"], **churn, **overrides,
        )  # fmt: skip
    if case["prediction"] == "flow":
        shift = settings.get("shift", settings.get("flow_shift"))
        shift = math.exp(case["set_timesteps"]["mu"]) if settings.get("use_dynamic_shifting") else shift
        return Objective(ObjectiveConfig(prediction_type="flow", levels=settings["num_train_timesteps"])), SamplerConfig(
            method={"FlowMatchHeun": "heun", "FlowMatchEuler": "euler"}.get(kind, "dpm++"), steps=steps, shift=shift,
            spacing="trailing" if "set_timesteps" in case else "linspace", **overrides,
        )  # fmt: skip
    objective = ObjectiveConfig(
        prediction_type={"epsilon": "epsilon", "v_prediction": "v"}[case["prediction"]], schedule=settings["beta_schedule"],
        levels=settings["num_train_timesteps"], first=settings["beta_start"], last=settings["beta_end"],
        zero_snr=settings.get("rescale_betas_zero_snr", False),
    )  # fmt: skip
    return Objective(objective), SamplerConfig(
        method={"DDIM": "ddim", "DDPM": "ddpm", "DPMSolverMultistep": "dpm++", "Heun": "heun"}[kind], steps=steps,
        spacing="karras" if settings.get("use_karras_sigmas") else settings["timestep_spacing"],
        offset=settings.get("steps_offset", 0), eta=case.get("eta", 0.0),
        clean=settings.get("set_alpha_to_one", True) and settings.get("final_sigmas_type", "zero") == "zero",
        guidance=case.get("guidance_scale", 1.0), rescale=case.get("guidance_rescale", 0.0),
        clip=settings["clip_sample_range"] if settings.get("clip_sample") else None, **overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trajectories() -> dict[str, np.ndarray]:
    return load_arrays("diffusion/samplers/trajectories")


def initial_scale(objective: Objective, cfg: SamplerConfig) -> float:
    """Return the scale of the first state: the stored noise was multiplied by it and then rounded to float32."""
    first = plan_steps(objective, cfg)[0]
    scaled = cfg.method in ("euler", "heun") or objective.cfg.prediction_type == "edm"
    return first.sigma / (first.alpha if objective.has_schedule else 1) if scaled else 1.0


def compute_states(name: str, stored: dict[str, np.ndarray], dtype: torch.dtype, **overrides: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the states of hpcai and of diffusers after each step [n, B, C, H, W]."""
    objective, cfg = objective_and_sampler(CASES[name], **overrides)
    data = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
    np.testing.assert_allclose(initial_scale(objective, cfg) * stored["noise"], data["traj"][0], rtol=1e-6)
    noise = torch.from_numpy(data["traj"][0] / initial_scale(objective, cfg)).to(dtype)
    network = Mixture(objective, data, calls=1 if cfg.batch_guidance or cfg.guidance == 1 else 2)
    cond, uncond = (Condition(classes=torch.full((len(noise),), i)) for i in range(2))
    fresh = (lambda i: torch.from_numpy(data["noise"][i]).to(dtype)) if "noise" in data else None
    states = list(sample(network, objective, cfg, noise, cond, uncond, fresh))
    assert all(x.dtype == dtype for x in states)
    if "timesteps" in data:
        assert network.call_count == len(data["timesteps"]) * network.calls
    return torch.stack(states).numpy(), data["traj"][1:]


@pytest.mark.parametrize("name", CASES)
def test_each_state_equals_that_of_diffusers(name: str, trajectories: dict[str, np.ndarray]) -> None:
    actual, expected = compute_states(name, trajectories, torch.float64)
    scale = max(1, abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11 * scale)
    if f"{name}.call_sigma" in trajectories:
        actual, expected = compute_states(name, trajectories, torch.float32)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["ddim_guided_eps", "ddim_guided_rescaled_v"])
def test_guidance_with_two_sequential_batches(name: str, trajectories: dict[str, np.ndarray]) -> None:
    actual, expected = compute_states(name, trajectories, torch.float64, batch_guidance=False)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11 * max(1, abs(expected).max()))
