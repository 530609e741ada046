"""Samples drawn step by step: what is refused, what a sample depends on, and where samples end whose distribution is known."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.errors import ConfigError
from hpcai.models.diffusion.condition import NOTHING, Condition
from hpcai.models.diffusion.config import ObjectiveConfig, SamplerConfig
from hpcai.models.diffusion.prediction import Objective
from hpcai.models.diffusion.samplers import SPACINGS, drawn, plan, sample

SHAPE = (3, 2, 4, 5)
WIDTH = 0.7  # the deviation of samples
SCHEDULED = [(says, method, spacing) for says in ("epsilon", "v", "x0") for method in ("ddim", "ddpm", "dpm++", "euler", "heun")
             for spacing in SPACINGS[method]]  # fmt: skip
ALL = SCHEDULED + [(says, method, at) for says in ("edm", "flow") for method in ("euler", "heun") for at in SPACINGS[says]]
Way = tuple[Any, Any, Any]


class Watched(TorchDispatchMode):
    """Reads of the device are refused."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"), f"a step reads the device: {name}"
        return function(*args, **(kwargs or {}))


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fresh(i: int) -> Tensor:
    return some(*SHAPE, seed=100 + i)


def objective(says: Any = "v", **more: Any) -> Objective:
    return Objective(ObjectiveConfig(says=says, **more))


def cfg(way: Way, **more: Any) -> SamplerConfig:
    return SamplerConfig(method=way[1], spacing=way[2], **more)


class Normal:
    """Knows that each number of a sample is drawn from a normal distribution of deviation WIDTH, about its parameter."""

    def __init__(self, of: Objective) -> None:
        self.of = of

    def __call__(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        assert not torch.is_grad_enabled()
        of, now = self.of, time[0].item()
        mean = 0 if condition.parameters is None else condition.parameters[:, 0].view(-1, *(1,) * (x.ndim - 1))
        if of.scheduled:
            ratio = np.interp(now, np.arange(of.cfg.levels), of.sigmas / np.maximum(of.alphas, 1e-12))
            alpha = float(1 / np.hypot(1, ratio))
            sigma = float(ratio * alpha)
        elif of.cfg.says == "edm":
            alpha, sigma = 1.0, float(np.exp(4 * now))
            x = x * (sigma**2 + of.cfg.sigma_data**2) ** 0.5
        else:
            alpha, sigma = 1 - now, now
        off, total = x - alpha * mean, (alpha * WIDTH) ** 2 + sigma**2
        return of.target(mean + alpha * WIDTH**2 / total * off, sigma / total * off, alpha, sigma)


def mixing(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
    """Of each sample alone, no line, and dependent on time and condition."""
    out = torch.tanh(x.roll(1, -1) + 0.3 * x) + 0.01 * torch.tanh(time).view(-1, *(1,) * (x.ndim - 1))
    return out if condition.parameters is None else out * (1 + condition.parameters[:, 0].view(-1, *(1,) * (x.ndim - 1)))


@pytest.mark.parametrize("way", [way for way in ALL if way[1] != "ddpm"], ids="-".join)
def test_noise_becomes_the_sample_that_it_belongs_to(way: Way) -> None:
    """Along the flow of probability a normal distribution stays one, and a number keeps its place in it."""
    of, noise = objective(way[0]), some(*SHAPE)
    settings = cfg(way, steps=120)
    first = plan(of, settings)[0]
    start = noise * first.sigma if way[1] in ("euler", "heun") else noise
    wanted = start * WIDTH / np.hypot(first.alpha * WIDTH, first.sigma)
    found = drawn(Normal(of), of, settings, noise)
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("spacing", SPACINGS["ddpm"])
def test_ddpm_draws_as_widely_as_samples_lie(spacing: Any) -> None:
    of, generator = objective("v"), torch.Generator().manual_seed(0)

    def some_more(i: int) -> Tensor:
        return torch.randn(64, 1, 16, 16, generator=generator)

    settings = SamplerConfig(method="ddpm", spacing=spacing, steps=250)
    found = drawn(Normal(of), of, settings, some_more(0), fresh=some_more)
    assert found.std().item() == pytest.approx(WIDTH, rel=0.03) and abs(found.mean().item()) < 0.02


@pytest.mark.parametrize("method, spacing", [(method, spacing) for says, method, spacing in SCHEDULED
                                              if says == "v" and spacing != "karras"])  # fmt: skip
def test_whatever_a_network_says_of_the_same_samples_is_the_same_way(method: str, spacing: str) -> None:
    """Where a network is told a level, not powers of sigma between them."""
    noise, found = some(*SHAPE), []
    for says in ("epsilon", "v", "x0"):
        of = objective(says)
        eta = 0.5 if method == "ddim" else 0.0
        found.append(torch.stack(list(sample(Normal(of), of, cfg((says, method, spacing), steps=9, eta=eta), noise, fresh=fresh))))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_a_sample_depends_on_its_own_noise_alone_and_no_step_reads_the_device(way: Way) -> None:
    of, noise = objective(way[0]), some(*SHAPE)
    condition, nothing = Condition(parameters=some(3, 1, seed=7)), Condition(parameters=torch.zeros(1, 1, dtype=torch.float64))
    more = {"eta": 1.0} if way[1] == "ddim" else {"churn": 8.0} if way[:2] == ("edm", "heun") else {}
    settings = cfg(way, steps=6, guidance=3.0, rescale=0.5, **more)
    with Watched():
        whole = drawn(mixing, of, settings, noise, condition, nothing, fresh)
    assert whole.isfinite().all()
    for i in range(3):
        own = condition._replace(parameters=some(3, 1, seed=7)[i : i + 1])
        alone = drawn(mixing, of, settings, noise[i : i + 1], own, nothing, lambda step, i=i: fresh(step)[i : i + 1])  # type: ignore[misc]
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", [("v", "dpm++", "leading"), ("edm", "heun", "karras"), ("flow", "euler", "trailing")], ids="-".join)
def test_guidance_in_one_batch_of_twice_the_size_is_one_after_the_other(way: Way) -> None:
    of, noise, sizes = objective(way[0]), some(*SHAPE), list[int]()
    condition, nothing = Condition(parameters=some(3, 1, seed=7)), Condition(parameters=some(3, 1, seed=8))

    def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        assert condition.parameters is not None and len(x) == len(time) == len(condition.parameters)
        sizes.append(len(x))
        return mixing(x, time, condition)

    def states(together: bool) -> Tensor:
        settings = cfg(way, steps=5, guidance=4.0, rescale=0.3, together=together)
        return torch.stack(list(sample(network, of, settings, noise, condition, nothing)))

    one = states(True)
    calls = len(sizes)
    assert sizes == [6] * calls
    torch.testing.assert_close(states(False), one, rtol=1e-12, atol=1e-12)
    assert sizes[calls:] == [3] * (2 * calls)


def test_guidance_moves_a_sample_beyond_its_condition() -> None:
    """Of two normal distributions of one width, guidance g gives that about the one mean g times less the other g - 1 times."""
    of, noise = objective("v"), some(*SHAPE)
    means = [Condition(parameters=torch.full((3, 1), mean, dtype=torch.float64)) for mean in (0.5, 0.1, 0.1 + 3 * 0.4)]
    guided = drawn(Normal(of), of, SamplerConfig(guidance=3.0), noise, means[0], means[1])
    torch.testing.assert_close(guided, drawn(Normal(of), of, SamplerConfig(), noise, means[2]), rtol=0, atol=1e-10)


def test_a_fresh_network_that_says_0_gives_numbers_however_it_is_guided() -> None:
    nothing = Condition(parameters=torch.zeros(3, 1))
    settings = SamplerConfig(guidance=3.0, rescale=0.7, steps=5)
    assert drawn(lambda x, time, condition: 0 * x, objective("v"), settings, some(*SHAPE), nothing, nothing).isfinite().all()


@pytest.mark.parametrize("method, at", [("ddim", "trailing"), ("dpm++", "trailing"), ("dpm++", "linspace"), ("heun", "karras")])
def test_a_schedule_that_begins_with_noise_alone_gives_samples(method: Any, at: Any) -> None:
    of, noise = objective("v", zero_snr=True), some(*SHAPE)
    found = drawn(Normal(of), of, SamplerConfig(method=method, spacing=at, steps=100), noise)
    torch.testing.assert_close(found, WIDTH * noise, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_what_is_clipped_stays_within(way: Way) -> None:
    of = objective(way[0])
    found = drawn(Normal(of), of, cfg(way, steps=8, clip=0.25), 2 * some(*SHAPE), fresh=fresh)
    assert found.abs().max().item() == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_states_stay_wide_in_volumes_while_a_network_is_narrow_and_says_a_variance_too(way: Way) -> None:
    of, times = objective(way[0]), list[Tensor]()

    def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        assert x.shape == (2, 1, 3, 4, 5) and x.dtype == torch.float32
        times.append(time)
        return torch.cat([x / 2, torch.full_like(x, float("nan"))], 1).bfloat16()

    noise = some(2, 1, 3, 4, 5).bfloat16()
    for x in sample(network, of, cfg(way, steps=4), noise, fresh=lambda i: noise):
        assert x.shape == noise.shape and x.dtype == torch.float32 and x.isfinite().all()
    assert all(time.shape == (2,) and time.dtype == torch.float32 for time in times)


@pytest.mark.parametrize("way, more", [(("v", "ddpm", "leading"), {}), (("v", "ddim", "trailing"), {"eta": 1.0})])
def test_the_last_step_asks_for_no_noise(way: Way, more: dict[str, float]) -> None:
    asked = list[int]()
    drawn(mixing, objective(), cfg(way, steps=4, **more), some(*SHAPE), fresh=lambda i: (asked.append(i), fresh(i))[1])
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("steps, first_order", [(14, True), (15, False)])
def test_the_last_of_fewer_than_15_steps_is_of_first_order(steps: int, first_order: bool) -> None:
    of, said = objective("x0"), list[Tensor]()
    settings = SamplerConfig(steps=steps, clean=False)
    *_, before, last = sample(lambda *words: (said.append(Normal(of)(*words)), said[-1])[1], of, settings, some(*SHAPE))
    end = plan(of, settings)[-1]
    part = end.next_sigma / end.sigma
    alone = part * before + (end.next_alpha - part * end.alpha) * said[-1]
    assert torch.allclose(last, alone, rtol=0, atol=1e-12) == first_order


def test_steps_come_one_by_one_and_the_last_is_what_is_drawn() -> None:
    of, calls = objective("flow"), list[float]()

    def network(x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        calls.append(time[0].item())
        assert condition == NOTHING
        return x / 2

    settings = SamplerConfig(method="euler", steps=4)
    states = sample(network, of, settings, some(*SHAPE))
    assert isinstance(states, Iterator) and calls == []
    first = next(states)
    assert calls == [1.0]
    kept = first.clone()
    assert torch.is_grad_enabled(), "also between two steps"
    *_, last = states
    assert torch.equal(first, kept), "states are not written over"
    assert calls == [1.0, 0.75, 0.5, 0.25]
    assert torch.equal(last, drawn(network, of, settings, some(*SHAPE)))


@pytest.mark.parametrize("says, more, told", [
    ("flow", {"method": "ddim"}, "method ddim goes along a schedule.*flow has none; set method to euler or heun"),
    ("edm", {}, r"method dpm\+\+ goes along a schedule"),
    ("edm", {"method": "heun"}, "spacing trailing: edm has karras; set spacing"),
    ("flow", {"method": "heun", "spacing": "karras"}, "spacing karras: flow has trailing, linspace"),
    ("v", {"method": "ddim", "spacing": "karras"}, "spacing karras: ddim has leading, trailing"),
    ("v", {"method": "ddpm", "spacing": "linspace"}, "spacing linspace: ddpm has leading, trailing"),
    ("v", {"steps": 1001}, r"steps 1001: dpm\+\+ visits 1001 levels, and the schedule has 1000; set fewer"),
    ("v", {"steps": 1000, "spacing": "linspace"}, r"steps 1000: dpm\+\+ visits 1001 levels"),
    ("v", {"eta": 0.5}, r"eta 0.5 is of ddim; method is dpm\+\+; set eta to 0"),
    ("v", {"method": "ddim", "eta": 1.5}, "eta 1.5 adds more noise.*expected 0 to 1"),
    ("v", {"method": "heun", "churn": 4.0}, "churn 4 is of edm with heun, not of v with heun; set churn to 0"),
    ("v", {"shift": 3.0}, "shift 3 is of flow; the network says v; set shift to 1"),
    ("v", {"offset": 1}, "offset 1 is of spacing leading; spacing is trailing; set offset to 0"),
    ("v", {"method": "ddim", "spacing": "leading", "steps": 10, "offset": 100}, "steps begin at level 1000.*ends at 999"),
    ("v", {"method": "heun", "clean": False}, r"clean false is of ddim and dpm\+\+; method is heun; set clean to true"),
    ("edm", {"method": "heun", "spacing": "karras", "low": 3.0, "high": 2.0}, "begin at 2 and end at 3; expected low below high"),
    ("v", {"spacing": "karras", "high": 0.01}, "expected low below high"),
    ("v", {"guidance": 2.0}, "guidance 2 compares.*give nothing, or set guidance to 1"),
    ("v", {"method": "ddpm"}, "adds noise on the way; give fresh"),
    ("v", {"method": "ddim", "eta": 0.5}, "adds noise on the way; give fresh"),
    ("edm", {"method": "heun", "spacing": "karras", "churn": 4.0}, "adds noise on the way; give fresh"),
    ("v", {"method": "dpm++", "eta": 0.5, "shift": 2.0}, "(?s)eta 0.5.*\n.*shift 2"),
])  # fmt: skip
def test_settings_that_do_not_go_together_are_refused_before_the_first_step(says: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sample(never, objective(says), SamplerConfig(**more), some(*SHAPE))


@pytest.mark.parametrize("says, more, told", [
    ("epsilon", {"method": "ddim"}, "begins at level 999, which is noise alone: a network that says epsilon tells nothing"),
    ("epsilon", {"spacing": "linspace"}, "set spacing to leading or train v"),
    ("v", {"method": "heun", "spacing": "linspace"}, "sigma / alpha is infinite; set spacing to karras or leading"),
])  # fmt: skip
def test_a_level_of_noise_alone_is_refused_where_nothing_can_be_made_of_it(says: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(objective(says, zero_snr=True), SamplerConfig(**more))
    assert plan(objective(says, zero_snr=True), SamplerConfig(**more | {"spacing": "leading"}))[0].alpha > 0


def test_a_condition_and_none_must_have_the_same_parts() -> None:
    parts = Condition(), Condition(classes=torch.zeros(3))
    for pair, told in ((parts, "condition has no classes, the other one has"), (parts[::-1], "nothing has no classes")):
        with pytest.raises(ConfigError, match=told):
            sample(never, objective(), SamplerConfig(guidance=2.0), some(*SHAPE), *pair)
    with pytest.raises(ConfigError, match="condition has parameters of 2 samples, noise is of 3; give one for each"):
        sample(never, objective(), SamplerConfig(), some(*SHAPE), Condition(parameters=some(2, 1)))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_ensemble_may_share_one_condition(guidance: float) -> None:
    nothing, settings = Condition(parameters=torch.zeros(1, 1, dtype=torch.float64)), SamplerConfig(steps=5, guidance=guidance)
    one, each = (Condition(parameters=torch.full((n, 1), 0.4, dtype=torch.float64)) for n in (1, 3))
    found, known = (drawn(mixing, objective(), settings, some(*SHAPE), condition, nothing) for condition in (one, each))
    assert torch.equal(found, known)


never: Callable[..., Tensor] = lambda x, time, condition: pytest.fail("a network was called")  # noqa: E731
