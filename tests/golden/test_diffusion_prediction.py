"""Prediction types agree with formulas evaluated in float64 (tests/data/diffusion/objectives)."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.models.diffusion.config import ObjectiveConfig
from hpcai.models.diffusion.prediction import NoisySample, Objective, alphas_cumprod, loss_weights
from hpcai.models.diffusion.samplers import apply_guidance, karras_sigmas, shift_times
from tests.reference_data import check_subsample, load_arrays, load_json, load_tensors

FOLDER = "diffusion/objectives"
PredictionType = Literal["epsilon", "v", "x0"]
PREDICTION_TYPES: list[PredictionType] = ["epsilon", "v", "x0"]


def objective_config(name: str, **overrides: Any) -> ObjectiveConfig:
    settings = load_json(f"{FOLDER}/settings")["schedules"][name]
    kind = {"squaredcos_cap_v2": "cosine"}.get(settings["beta_schedule"], settings["beta_schedule"])
    return ObjectiveConfig(
        schedule=kind, first=settings["beta_start"], last=settings["beta_end"], levels=settings["num_train_timesteps"],
        zero_snr=settings["rescale_betas_zero_snr"], **overrides,
    )  # fmt: skip


def check_close(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray, tolerance: float = 1e-11) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1, abs(expected).max()))


@pytest.mark.parametrize("name", ["sd2", "linear", "cosine", "sd2_zero_snr", "linear_zero_snr"])
def test_schedules(name: str) -> None:
    check_close(alphas_cumprod(objective_config(name)), load_arrays(f"{FOLDER}/schedules")[f"{name}_kept"], 1e-12)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("gamma", [1, 5])
@pytest.mark.parametrize("name", ["sd2", "sd2_zero_snr"])
def test_min_snr_weights_of_all_levels(name: str, gamma: int, prediction_type: PredictionType) -> None:
    weights = loss_weights(objective_config(name, prediction_type=prediction_type, min_snr=float(gamma)))
    check_subsample(weights, load_arrays(f"{FOLDER}/schedules"), f"{name}_min_snr_{gamma}_{prediction_type}", 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_input_target_weight_and_loss_of_a_schedule(prediction_type: PredictionType, dtype: torch.dtype) -> None:
    stored, tolerance = load_tensors(f"{FOLDER}/vp"), 1e-11 if dtype == torch.float64 else 1e-6
    for gamma in (None, load_json(f"{FOLDER}/settings")["vp"]["min_snr_gamma"]):
        objective = Objective(objective_config("sd2", prediction_type=prediction_type, min_snr=gamma))
        noisy = objective.add_noise(stored["x0"].to(dtype), stored["noise"].to(dtype), stored["timesteps"].float())
        expected = NoisySample(
            stored["x_t"], stored["timesteps"], stored["alpha"], stored["sigma"],
            {"epsilon": stored["noise"], "v": stored["v"], "x0": stored["x0"]}[prediction_type],
            stored[f"min_snr_weight_{prediction_type}"] if gamma else torch.ones(len(stored["x0"])),
        )  # fmt: skip
        for actual, value in zip(noisy, expected):
            assert actual.dtype == dtype
            check_close(actual, value, tolerance)
        check_close(objective.loss(stored["pred"].to(dtype), noisy), stored[f"mse_{prediction_type}"] * expected.weight, tolerance)


@pytest.mark.parametrize("per_sample", [True, False], ids=["per_sample_tensors", "host_scalars"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_conversion_of_predictions(prediction_type: PredictionType, per_sample: bool) -> None:
    stored, objective = load_tensors(f"{FOLDER}/vp"), Objective(objective_config("sd2", prediction_type=prediction_type))
    alpha, sigma = objective.alpha_sigma(stored["timesteps"])
    indices = [slice(None)] if per_sample else [slice(i, i + 1) for i in range(len(alpha))]
    for index in indices:
        prediction, x = stored["pred"][index], stored["x_t"][index]
        a, s = (alpha[index], sigma[index]) if per_sample else (alpha[index].item(), sigma[index].item())
        x0, noise = objective.to_x0(prediction, x, a, s), objective.to_noise(prediction, x, a, s)
        check_close(x0, prediction if prediction_type == "x0" else stored[f"x0_from_{prediction_type}"][index])
        check_close(noise, prediction if prediction_type == "epsilon" else stored[f"epsilon_from_{prediction_type}"][index])
        velocity = Objective(objective_config("sd2", prediction_type="v")).target(x0, noise, a, s)
        check_close(velocity, prediction if prediction_type == "v" else stored[f"v_from_{prediction_type}"][index])


def test_edm() -> None:
    stored, cfg = load_tensors(f"{FOLDER}/edm"), load_json(f"{FOLDER}/settings")["edm"]
    settings = {"sigma_data": cfg["sigma_data"], "mean": cfg["P_mean"], "deviation": cfg["P_std"]}
    objective = Objective(ObjectiveConfig(prediction_type="edm", **settings))
    noisy = objective.add_noise(stored["x0"], stored["noise"], stored["sigma"])
    check_close(noisy.input, stored["network_input"])
    check_close(noisy.time, stored["c_noise"])
    check_close(noisy.target, stored["network_target"])
    prediction, x = stored["network_output"], stored["x"]
    loss = objective.loss(prediction, noisy)
    check_close(loss, stored["loss_per_sample"])
    check_close(loss.mean(), stored["loss"][0])
    denoised = objective.to_x0(prediction, x, noisy.alpha, noisy.sigma)
    check_close(denoised, stored["denoised"])
    check_close(stored["weight"] * (denoised - stored["x0"]).square().mean((1, 2, 3)), loss)
    noise = objective.to_noise(prediction, x, noisy.alpha, noisy.sigma)
    check_close(noise, (x - denoised) / stored["sigma"].view(-1, 1, 1, 1), 1e-10)
    check_close(objective.sample_times(stored["normal"], stored["normal"]), stored["sigma_sampled"])


def test_flow() -> None:
    stored, objective = load_tensors(f"{FOLDER}/flow"), Objective(ObjectiveConfig(prediction_type="flow"))
    noisy = objective.add_noise(stored["x0"], stored["noise"], stored["t"])
    check_close(noisy.input, stored["x_t"])
    check_close(noisy.time, stored["t"])
    check_close(noisy.target, stored["target"])
    check_close(objective.loss(stored["pred"], noisy), stored["mse"])
    check_close(objective.to_x0(stored["pred"], stored["x_t"], noisy.alpha, noisy.sigma), stored["x0_from_pred"])
    check_close(objective.to_noise(stored["pred"], stored["x_t"], noisy.alpha, noisy.sigma), stored["noise_from_pred"])


def test_logit_normal_times() -> None:
    stored = load_tensors(f"{FOLDER}/flow")
    for i, (mean, deviation) in enumerate(load_json(f"{FOLDER}/settings")["flow"]["logit_normal"]):
        objective = Objective(ObjectiveConfig(prediction_type="flow", times="logit_normal", mean=mean, deviation=deviation))
        check_close(objective.sample_times(stored["normal"], stored["normal"]), stored[f"logit_normal_sample_{i}"])


def test_shifted_times() -> None:
    stored = load_arrays(f"{FOLDER}/flow")
    times = stored["weight_sigma"].astype(np.float64)
    for shift in load_json(f"{FOLDER}/settings")["flow"]["sd3_shifts"]:
        check_close(shift_times(times, shift), stored[f"sd3_shift_{shift:g}"])
    for mu, expected in zip(stored["flux_mu"], stored["flux_shifted"]):
        check_close(shift_times(times, float(np.exp(mu))), expected)


def test_sigmas_of_karras() -> None:
    for case in load_json(f"{FOLDER}/settings")["karras"]:
        sigmas = karras_sigmas(case["sigma_min"], case["sigma_max"], case["rho"], case["steps"])
        check_close(sigmas, load_arrays(f"{FOLDER}/karras")[case["key"]])


def test_guidance() -> None:
    stored, cfg = load_tensors(f"{FOLDER}/guidance"), load_json(f"{FOLDER}/settings")["guidance"]
    check_close(apply_guidance(stored["cond"], stored["uncond"], cfg["scale"]), stored["guided"])
    check_close(apply_guidance(stored["cond"], stored["uncond"], cfg["scale"], cfg["rescale"]), stored["guided_rescaled"])
