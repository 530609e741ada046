"""States of samplers with an exact network against those of diffusers (tests/data/diffusion/samplers)."""

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

KNOWN = load_json("diffusion/samplers/cases")
CASES = {case["name"]: case for case in KNOWN["cases"]}


class Mixture:
    """The exact network of a known distribution: each element is a mixture of normal ones, selected by ``classes``. It is called at
    alpha and sigma of the calls of diffusers, and checks the time."""

    def __init__(self, objective: Objective, data: dict[str, np.ndarray], calls: int = 1) -> None:
        self.objective, self.data, self.calls, self.asked = objective, data, calls, 0
        self.mixtures = torch.tensor(padded(), dtype=torch.float64)  # [2, 3, J]

    def __call__(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        cfg, dtype, x = self.objective.cfg, x.dtype, x.double()
        assert time.shape == (len(x),) and time.dtype == dtype and condition.classes is not None
        call, told_time = self.asked // self.calls, float(time[0])
        self.asked += 1
        if "timesteps" in self.data:
            scale = cfg.levels if cfg.prediction_type == "flow" else 1
            assert told_time * scale == pytest.approx(self.data["timesteps"][call], rel=1e-6, abs=1e-6)
        if cfg.prediction_type == "edm":
            alpha, sigma = 1.0, math.exp(4 * told_time) if dtype == torch.float64 else float(self.data["call_sigma"][call])
            x = x * math.hypot(sigma, cfg.sigma_data)
        else:
            alpha, sigma = float(self.data["call_alpha"][call]), float(self.data["call_sigma"][call])
            if cfg.prediction_type != "flow":  # Heun's calls are stored for x / alpha
                alpha, sigma = alpha / math.hypot(alpha, sigma), sigma / math.hypot(alpha, sigma)
        weight, mean, deviation = self.mixtures[condition.classes].unbind(1)  # [B, J]
        x = x[..., None]
        weight, mean, deviation = (part.view(len(part), *(1,) * (x.ndim - 2), -1) for part in (weight, mean, deviation))
        variance, off = alpha**2 * deviation**2 + sigma**2, x - alpha * mean
        share = (weight.log() - variance.log() / 2 - off**2 / (2 * variance)).softmax(-1)
        x0 = (share * (mean + alpha * deviation**2 * off / variance)).sum(-1)
        noise = (share * sigma * off / variance).sum(-1)
        if cfg.prediction_type == "edm":  # by its definition
            total = sigma**2 + cfg.sigma_data**2
            said = (x0 - cfg.sigma_data**2 / total * x[..., 0]) * math.sqrt(total) / (sigma * cfg.sigma_data)
        else:
            said = {"epsilon": noise, "v": alpha * noise - sigma * x0, "flow": noise - x0}[cfg.prediction_type]
        return said.to(dtype)


def padded() -> list[list[list[float]]]:
    """Weights, means and deviations of both mixtures, the shorter one padded with a component of negligible weight."""
    cond, uncond = (list(KNOWN["mixtures"][name].values()) for name in ("cond", "uncond"))
    return [cond, [[*part, more] for part, more in zip(uncond, (1e-300, 0.0, 1.0))]]


def settings(case: dict[str, Any], **more: Any) -> tuple[Objective, SamplerConfig]:
    given, steps = case["settings"], case["steps"]
    kind = case["scheduler"].removesuffix("Scheduler").removesuffix("Discrete")
    if kind.startswith("EDM"):
        churn = {"churn": given["S_churn"], "churn_low": given["S_min"], "churn_high": given["S_max"],
                 "churn_noise": given["S_noise"]} if kind == "EDMHeun" else {}  # fmt: skip
        objective = ObjectiveConfig(prediction_type="edm", sigma_data=given.get("sigma_data", 0.5))
        return Objective(objective), SamplerConfig(
            method="heun" if kind == "EDMHeun" else "euler", steps=steps, spacing="karras", low=given["sigma_min"],
            high=given["sigma_max"], rho=given["rho"], **churn, **more,
        )  # fmt: skip
    if kind.startswith("FlowMatch"):
        shift = math.exp(case["set_timesteps"]["mu"]) if given.get("use_dynamic_shifting") else given["shift"]
        return Objective(ObjectiveConfig(prediction_type="flow", levels=given["num_train_timesteps"])), SamplerConfig(
            method="heun" if kind == "FlowMatchHeun" else "euler", steps=steps, shift=shift,
            spacing="trailing" if "set_timesteps" in case else "linspace", **more,
        )  # fmt: skip
    objective = ObjectiveConfig(
        prediction_type={"epsilon": "epsilon", "v_prediction": "v"}[case["prediction"]], schedule=given["beta_schedule"],
        levels=given["num_train_timesteps"], first=given["beta_start"], last=given["beta_end"],
        zero_snr=given.get("rescale_betas_zero_snr", False),
    )  # fmt: skip
    return Objective(objective), SamplerConfig(
        method={"DDIM": "ddim", "DDPM": "ddpm", "DPMSolverMultistep": "dpm++", "Heun": "heun"}[kind], steps=steps,
        spacing="karras" if given.get("use_karras_sigmas") else given["timestep_spacing"], offset=given.get("steps_offset", 0),
        clean=given.get("set_alpha_to_one", True) and given.get("final_sigmas_type", "zero") == "zero", eta=case.get("eta", 0.0),
        guidance=case.get("guidance_scale", 1.0), rescale=case.get("guidance_rescale", 0.0),
        clip=given["clip_sample_range"] if given.get("clip_sample") else None, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trajectories() -> dict[str, np.ndarray]:
    return load_arrays("diffusion/samplers/trajectories")


def begin(objective: Objective, cfg: SamplerConfig) -> float:
    """The scale of the first state: the stored one was rounded to float32 after the multiplication of the noise by this."""
    first = plan_steps(objective, cfg)[0]
    return first.sigma / (first.alpha if objective.has_schedule else 1) if cfg.method in ("euler", "heun") else 1.0


def states(name: str, stored: dict[str, np.ndarray], dtype: torch.dtype, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ours and theirs after each step [n, B, C, H, W]."""
    objective, cfg = settings(CASES[name], **more)
    data = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
    np.testing.assert_allclose(begin(objective, cfg) * stored["noise"], data["traj"][0], rtol=1e-6)
    noise = torch.from_numpy(data["traj"][0] / begin(objective, cfg)).to(dtype)
    network = Mixture(objective, data, calls=1 if cfg.batch_guidance or cfg.guidance == 1 else 2)
    cond, uncond = (Condition(classes=torch.full((len(noise),), i)) for i in range(2))
    fresh = (lambda i: torch.from_numpy(data["noise"][i]).to(dtype)) if "noise" in data else None
    found = list(sample(network, objective, cfg, noise, cond, uncond, fresh))
    assert all(x.dtype == dtype for x in found)
    if "timesteps" in data:
        assert network.asked == len(data["timesteps"]) * network.calls
    return torch.stack(found).numpy(), data["traj"][1:]


@pytest.mark.parametrize("name", CASES)
def test_every_state_is_that_of_diffusers(name: str, trajectories: dict[str, np.ndarray]) -> None:
    found, known = states(name, trajectories, torch.float64)
    scale = max(1, abs(known).max())
    np.testing.assert_allclose(found, known, rtol=0, atol=1e-11 * scale)
    if f"{name}.call_sigma" in trajectories:
        found, known = states(name, trajectories, torch.float32)
        np.testing.assert_allclose(found, known, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["ddim_guided_eps", "ddim_guided_rescaled_v"])
def test_guidance_with_one_batch_after_the_other(name: str, trajectories: dict[str, np.ndarray]) -> None:
    found, known = states(name, trajectories, torch.float64, batch_guidance=False)
    np.testing.assert_allclose(found, known, rtol=0, atol=1e-11 * max(1, abs(known).max()))
