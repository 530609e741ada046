"""Prediction types of diffusion models, in each dtype, for maps and volumes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.config import load
from hpcai.errors import ConfigError
from hpcai.models.diffusion.config import ObjectiveConfig
from hpcai.models.diffusion.prediction import Objective
from tests.unit.models.operation_checks import ForbidOps

PREDICTION_TYPES = ["epsilon", "v", "x0", "edm", "flow"]


def new_objective(prediction_type: Any, **settings: Any) -> Objective:
    return Objective(ObjectiveConfig(prediction_type=prediction_type, **settings))


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def times(objective: Objective, count: int) -> Tensor:
    return objective.sample_times(torch.linspace(0.05, 0.9, count, dtype=torch.float64), randn(count, seed=1))


def test_a_predicted_variance_is_ignored() -> None:
    objective = new_objective("epsilon")
    noised = objective.add_noise(randn(2, 4, 3, 3), randn(2, 4, 3, 3, seed=2), torch.tensor([3.0, 500.0]))
    prediction = randn(2, 8, 3, 3, seed=3)
    torch.testing.assert_close(objective.loss(prediction, noised), objective.loss(prediction[:, :4], noised), rtol=0, atol=0)


def test_levels_are_integers_and_uniform() -> None:
    objective, uniform = new_objective("v", levels=50), (torch.arange(1000) + 0.5) / 1000
    assert torch.bincount(objective.sample_times(uniform, uniform).long()).tolist() == [20] * 50
    assert objective.sample_times(torch.tensor([0.0, 1.0], dtype=torch.bfloat16), uniform[:2]).tolist() == [0, 49], "rounded to 1"


def test_the_target_of_edm_loses_no_digits_at_small_sigma() -> None:
    """The difference x0 - c_skip x, divided by c_out, has an error of 1e-4 here."""
    objective, x0, noise = new_objective("edm"), randn(1, 3, 8, 8), randn(1, 3, 8, 8, seed=2)
    sigma, dtypes = torch.tensor([1e-3]), (torch.float32, torch.float64)
    fp32, fp64 = (objective.add_noise(x0.to(dtype), noise.to(dtype), sigma) for dtype in dtypes)
    torch.testing.assert_close(fp32.target.double(), fp64.target, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_nothing_in_a_step_reads_the_device(prediction_type: str) -> None:
    objective, x0, noise = new_objective(prediction_type), randn(4, 3, 5, 6), randn(4, 3, 5, 6, seed=2)
    prediction = randn(4, 3, 5, 6, seed=3).requires_grad_()
    with ForbidOps():
        objective.loss(prediction, objective.add_noise(x0, noise, times(objective, 4))).mean().backward()
    assert prediction.grad is not None


@pytest.mark.parametrize("overrides, message", [
    (["prediction_type=edm", "min_snr=5"], "min_snr is for epsilon, v and x0; prediction_type is edm"),
    (["prediction_type=v", "times=logit_normal"], "times logit_normal is for flow; prediction_type is v"),
])  # fmt: skip
def test_inconsistent_settings_are_errors(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ObjectiveConfig, overrides=overrides)
