"""Prediction types of diffusion models, in each dtype, for maps and volumes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.config import load
from hpcai.errors import ConfigError
from hpcai.models.diffusion.config import ObjectiveConfig
from hpcai.models.diffusion.prediction import Objective
from tests.unit.models.watched import Without

SAYS = ["epsilon", "v", "x0", "edm", "flow"]


def objective(says: Any, **more: Any) -> Objective:
    return Objective(ObjectiveConfig(prediction_type=says, **more))


def some(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def times(of: Objective, count: int) -> Tensor:
    return of.sample_times(torch.linspace(0.05, 0.9, count, dtype=torch.float64), some(count, seed=1))


def test_a_predicted_variance_is_ignored() -> None:
    of = objective("epsilon")
    noised = of.add_noise(some(2, 4, 3, 3), some(2, 4, 3, 3, seed=2), torch.tensor([3.0, 500.0]))
    said = some(2, 8, 3, 3, seed=3)
    torch.testing.assert_close(of.loss(said, noised), of.loss(said[:, :4], noised), rtol=0, atol=0)


def test_levels_are_integers_and_uniform() -> None:
    of, uniform = objective("v", levels=50), (torch.arange(1000) + 0.5) / 1000
    assert torch.bincount(of.sample_times(uniform, uniform).long()).tolist() == [20] * 50
    assert of.sample_times(torch.tensor([0.0, 1.0], dtype=torch.bfloat16), uniform[:2]).tolist() == [0, 49], "rounded to 1"


def test_the_target_of_edm_loses_no_digits_at_small_sigma() -> None:
    """The difference x0 - c_skip x, divided by c_out, is off by 1e-4 here."""
    of, x0, noise = objective("edm"), some(1, 3, 8, 8), some(1, 3, 8, 8, seed=2)
    narrow, wide = (of.add_noise(x0.to(dtype), noise.to(dtype), torch.tensor([1e-3])) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(narrow.target.double(), wide.target, rtol=0, atol=1e-6)


@pytest.mark.parametrize("says", SAYS)
def test_nothing_in_a_step_reads_the_device(says: str) -> None:
    of, x0, noise = objective(says), some(4, 3, 5, 6), some(4, 3, 5, 6, seed=2)
    said = some(4, 3, 5, 6, seed=3).requires_grad_()
    with Without():
        of.loss(said, of.add_noise(x0, noise, times(of, 4))).mean().backward()
    assert said.grad is not None


@pytest.mark.parametrize("words, told", [
    (["prediction_type=edm", "min_snr=5"], "min_snr is for epsilon, v and x0; prediction_type is edm"),
    (["prediction_type=v", "times=logit_normal"], "times logit_normal is for flow; prediction_type is v"),
])  # fmt: skip
def test_inconsistent_settings_are_errors(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(ObjectiveConfig, overrides=words)
