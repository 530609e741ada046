"""Prediction types against formulas in float64 (tests/data/diffusion/objectives)."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.models.diffusion.config import ObjectiveConfig
from hpcai.models.diffusion.prediction import NoisySample, Objective, alphas_cumprod, loss_weights
from hpcai.models.diffusion.samplers import apply_guidance, karras_sigmas, shift_times
from tests.reference_data import check_subsample, load_arrays, load_json

FOLDER = "diffusion/objectives"
Says = Literal["epsilon", "v", "x0"]
SAYS: list[Says] = ["epsilon", "v", "x0"]


def numbers(name: str) -> dict[str, Tensor]:
    """Read as float64, also arrays that are stored in float32 without loss."""
    return {key: torch.from_numpy(value).double() for key, value in load_arrays(f"{FOLDER}/{name}").items()}


def schedule(name: str, **more: Any) -> ObjectiveConfig:
    known = load_json(f"{FOLDER}/settings")["schedules"][name]
    kind = {"squaredcos_cap_v2": "cosine"}.get(known["beta_schedule"], known["beta_schedule"])
    return ObjectiveConfig(
        schedule=kind, first=known["beta_start"], last=known["beta_end"], levels=known["num_train_timesteps"],
        zero_snr=known["rescale_betas_zero_snr"], **more,
    )  # fmt: skip


def close(found: Tensor | np.ndarray, known: Tensor | np.ndarray, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(known), rtol=0, atol=tolerance * max(1, abs(np.asarray(known)).max()))


@pytest.mark.parametrize("name", ["sd2", "linear", "cosine", "sd2_zero_snr", "linear_zero_snr"])
def test_schedules(name: str) -> None:
    close(alphas_cumprod(schedule(name)), load_arrays(f"{FOLDER}/schedules")[f"{name}_kept"], 1e-12)


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("gamma", [1, 5])
@pytest.mark.parametrize("name", ["sd2", "sd2_zero_snr"])
def test_min_snr_weights_of_all_levels(name: str, gamma: int, says: Says) -> None:
    found = loss_weights(schedule(name, prediction_type=says, min_snr=float(gamma)))
    check_subsample(found, load_arrays(f"{FOLDER}/schedules"), f"{name}_min_snr_{gamma}_{says}", 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("says", SAYS)
def test_on_a_schedule_input_target_weight_and_loss(says: Says, dtype: torch.dtype) -> None:
    known, tolerance = numbers("vp"), 1e-11 if dtype == torch.float64 else 1e-6
    for gamma in (None, load_json(f"{FOLDER}/settings")["vp"]["min_snr_gamma"]):
        objective = Objective(schedule("sd2", prediction_type=says, min_snr=gamma))
        noised = objective.add_noise(known["x0"].to(dtype), known["noise"].to(dtype), known["timesteps"].float())
        wanted = NoisySample(
            known["x_t"], known["timesteps"], known["alpha"], known["sigma"],
            {"epsilon": known["noise"], "v": known["v"], "x0": known["x0"]}[says],
            known[f"min_snr_weight_{says}"] if gamma else torch.ones(len(known["x0"])),
        )  # fmt: skip
        for found, other in zip(noised, wanted):
            assert found.dtype == dtype
            close(found, other, tolerance)
        close(objective.loss(known["pred"].to(dtype), noised), known[f"mse_{says}"] * wanted.weight, tolerance)


@pytest.mark.parametrize("each", [True, False], ids=["of_each_sample", "host_numbers"])
@pytest.mark.parametrize("says", SAYS)
def test_predictions_as_sample_as_noise_and_as_v(says: Says, each: bool) -> None:
    known, objective = numbers("vp"), Objective(schedule("sd2", prediction_type=says))
    alpha, sigma = objective.alpha_sigma(known["timesteps"])
    some = [slice(None)] if each else [slice(i, i + 1) for i in range(len(alpha))]
    for at in some:
        said, x = known["pred"][at], known["x_t"][at]
        a, s = (alpha[at], sigma[at]) if each else (alpha[at].item(), sigma[at].item())
        x0, noise = objective.to_x0(said, x, a, s), objective.to_noise(said, x, a, s)
        close(x0, said if says == "x0" else known[f"x0_from_{says}"][at])
        close(noise, said if says == "epsilon" else known[f"epsilon_from_{says}"][at])
        velocity = Objective(schedule("sd2", prediction_type="v")).target(x0, noise, a, s)
        close(velocity, said if says == "v" else known[f"v_from_{says}"][at])


def test_edm() -> None:
    known, cfg = numbers("edm"), load_json(f"{FOLDER}/settings")["edm"]
    sizes = {"sigma_data": cfg["sigma_data"], "mean": cfg["P_mean"], "deviation": cfg["P_std"]}
    objective = Objective(ObjectiveConfig(prediction_type="edm", **sizes))
    noised = objective.add_noise(known["x0"], known["noise"], known["sigma"])
    close(noised.input, known["network_input"])
    close(noised.time, known["c_noise"])
    close(noised.target, known["network_target"])
    said, x = known["network_output"], known["x"]
    loss = objective.loss(said, noised)
    close(loss, known["loss_per_sample"])
    close(loss.mean(), known["loss"][0])
    denoised = objective.to_x0(said, x, noised.alpha, noised.sigma)
    close(denoised, known["denoised"])
    close(known["weight"] * (denoised - known["x0"]).square().mean((1, 2, 3)), loss)
    close(objective.to_noise(said, x, noised.alpha, noised.sigma), (x - denoised) / known["sigma"].view(-1, 1, 1, 1), 1e-10)
    close(objective.sample_times(known["normal"], known["normal"]), known["sigma_sampled"])


def test_flow() -> None:
    known, objective = numbers("flow"), Objective(ObjectiveConfig(prediction_type="flow"))
    noised = objective.add_noise(known["x0"], known["noise"], known["t"])
    close(noised.input, known["x_t"])
    close(noised.time, known["t"])
    close(noised.target, known["target"])
    close(objective.loss(known["pred"], noised), known["mse"])
    close(objective.to_x0(known["pred"], known["x_t"], noised.alpha, noised.sigma), known["x0_from_pred"])
    close(objective.to_noise(known["pred"], known["x_t"], noised.alpha, noised.sigma), known["noise_from_pred"])


def test_logit_normal_times() -> None:
    known = numbers("flow")
    for i, (mean, deviation) in enumerate(load_json(f"{FOLDER}/settings")["flow"]["logit_normal"]):
        objective = Objective(ObjectiveConfig(prediction_type="flow", times="logit_normal", mean=mean, deviation=deviation))
        close(objective.sample_times(known["normal"], known["normal"]), known[f"logit_normal_sample_{i}"])


def test_shifted_times() -> None:
    known = load_arrays(f"{FOLDER}/flow")
    times = known["weight_sigma"].astype(np.float64)
    for shift in load_json(f"{FOLDER}/settings")["flow"]["sd3_shifts"]:
        close(shift_times(times, shift), known[f"sd3_shift_{shift:g}"])
    for mu, other in zip(known["flux_mu"], known["flux_shifted"]):
        close(shift_times(times, float(np.exp(mu))), other)


def test_sigmas_of_karras() -> None:
    for case in load_json(f"{FOLDER}/settings")["karras"]:
        found = karras_sigmas(case["sigma_min"], case["sigma_max"], case["rho"], case["steps"])
        close(found, load_arrays(f"{FOLDER}/karras")[case["key"]])


def test_guidance() -> None:
    known, cfg = numbers("guidance"), load_json(f"{FOLDER}/settings")["guidance"]
    close(apply_guidance(known["cond"], known["uncond"], cfg["scale"]), known["guided"])
    close(apply_guidance(known["cond"], known["uncond"], cfg["scale"], cfg["rescale"]), known["guided_rescaled"])
