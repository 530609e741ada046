"""Prediction types and samplers: each dtype, errors, the inputs of a sample, and samples of a known distribution."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.config import load
from hpcai.errors import ConfigError
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import ObjectiveConfig, SamplerConfig
from hpcai.models.diffusion.prediction import Objective
from hpcai.models.diffusion.samplers import SPACINGS, draw_samples, plan_steps, sample
from tests.reference_data import load_json
from tests.unit.models.operation_checks import ForbidOps

SHAPE = (3, 2, 4, 5)
SCHEDULED = [(kind, method, spacing) for kind in ("epsilon", "v", "x0") for method in ("ddim", "ddpm", "dpm++", "euler", "heun")
             for spacing in SPACINGS[method]]  # fmt: skip
ALL = SCHEDULED + [(kind, method, at) for kind in ("edm", "flow") for method in ("dpm++", "euler", "heun") for at in SPACINGS[kind]]
Case = tuple[Any, Any, Any]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_noise(i: int) -> Tensor:
    return randn(*SHAPE, seed=100 + i)


def new_objective(prediction_type: Any = "v", **settings: Any) -> Objective:
    return Objective(ObjectiveConfig(prediction_type=prediction_type, **settings))


def sampler(case: Case, **settings: Any) -> SamplerConfig:
    return SamplerConfig(method=case[1], spacing=case[2], **settings)


def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
    """A network that is nonlinear, independent for each sample, and dependent on time and condition."""
    out = torch.tanh(x.roll(1, -1) + 0.3 * x) + 0.01 * torch.tanh(time).view(-1, *(1,) * (x.ndim - 1))
    return out if condition.parameters is None else out * (1 + condition.parameters[:, 0].view(-1, *(1,) * (x.ndim - 1)))


@pytest.mark.parametrize("case", ALL, ids="-".join)
def test_a_sample_depends_on_its_own_noise_alone_and_no_step_reads_the_device(case: Case) -> None:
    objective, noise = new_objective(case[0]), randn(*SHAPE)
    condition, empty = Condition(parameters=randn(3, 1, seed=7)), Condition(parameters=torch.zeros(1, 1, dtype=torch.float64))
    noisy = {"eta": 1.0} if case[1] == "ddim" else {"churn": 8.0} if case[:2] == ("edm", "heun") else {}
    cfg = sampler(case, steps=6, guidance=3.0, rescale=0.5, **noisy)
    with ForbidOps():
        samples = draw_samples(network, objective, cfg, noise, condition, empty, step_noise)
    assert samples.isfinite().all()
    for i in range(3):
        own = condition._replace(parameters=randn(3, 1, seed=7)[i : i + 1])
        alone = draw_samples(network, objective, cfg, noise[i : i + 1], own, empty, lambda step, i=i: step_noise(step)[i : i + 1])  # type: ignore[misc]
        torch.testing.assert_close(alone, samples[i : i + 1], rtol=1e-11, atol=1e-11)


def test_the_last_step_needs_no_noise() -> None:
    steps = list[int]()
    case = "v", "ddim", "trailing"
    settings = sampler(case, steps=4, eta=1.0)
    draw_samples(network, new_objective(), settings, randn(*SHAPE), step_noise=lambda i: (steps.append(i), step_noise(i))[1])
    assert steps == [0, 1, 2]


def test_steps_are_lazy_and_the_last_is_the_sample() -> None:
    objective, calls = new_objective("flow"), list[float]()

    def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        calls.append(time[0].item())
        return x / 2

    settings = SamplerConfig(method="euler", steps=4)
    states = sample(network, objective, settings, randn(*SHAPE))
    assert isinstance(states, Iterator) and calls == []
    first = next(states)
    assert calls == [1.0] and torch.is_grad_enabled(), "also between two steps"
    saved = first.clone()
    *_, last = states
    assert torch.equal(first, saved), "states are not written over"
    assert calls == [1.0, 0.75, 0.5, 0.25] and torch.equal(last, draw_samples(network, objective, settings, randn(*SHAPE)))


@pytest.mark.parametrize("kind, settings, message", load_json("refused/samplers")["settings"])
def test_inconsistent_settings_are_errors_before_the_first_step(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(never, new_objective(kind), SamplerConfig(**settings), randn(*SHAPE))


@pytest.mark.parametrize("kind, settings, message", load_json("refused/samplers")["pure_noise"])
def test_a_level_of_pure_noise_is_an_error_for_some_methods(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_steps(new_objective(kind, zero_snr=True), SamplerConfig(**settings))
    assert plan_steps(new_objective(kind, zero_snr=True), SamplerConfig(**settings | {"spacing": "leading"}))[0].alpha > 0


def test_conditional_and_unconditional_must_have_the_same_fields() -> None:
    parts = Condition(), Condition(classes=torch.zeros(3))
    for pair, message in ((parts, "condition has no classes, the other one has"), (parts[::-1], "unconditional has no classes")):
        with pytest.raises(ConfigError, match=message):
            sample(never, new_objective(), SamplerConfig(guidance=2.0), randn(*SHAPE), *pair)
    with pytest.raises(ConfigError, match="condition has parameters of 2 samples, noise is of 3; give one for each"):
        sample(never, new_objective(), SamplerConfig(), randn(*SHAPE), Condition(parameters=randn(2, 1)))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_ensemble_may_share_one_condition(guidance: float) -> None:
    empty, settings = Condition(parameters=torch.zeros(1, 1, dtype=torch.float64)), SamplerConfig(steps=5, guidance=guidance)
    shared, repeated = (Condition(parameters=torch.full((n, 1), 0.4, dtype=torch.float64)) for n in (1, 3))
    actual, expected = (
        draw_samples(network, new_objective(), settings, randn(*SHAPE), condition, empty) for condition in (shared, repeated)
    )
    assert torch.equal(actual, expected)


never: Callable[..., Tensor] = lambda x, time, condition: pytest.fail("a network was called")  # noqa: E731


# ---- prediction types


PREDICTION_TYPES = ["epsilon", "v", "x0", "edm", "flow"]


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
    with pytest.raises(ConfigError, match="dpm.. begins at time 1 - 1/levels, and objective.levels is 1; set spacing to trailing"):
        plan_steps(new_objective("flow", levels=1), SamplerConfig(spacing="linspace"))


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
