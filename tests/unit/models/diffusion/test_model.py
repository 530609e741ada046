"""Training, evaluation and sampling use counter-based random numbers: a sample does not depend on its batch."""

from typing import Any

import pytest
import torch

from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion import Batch, Condition, Diffusion, DiffusionConfig, draw_ensemble, ensemble_scores, loss, score, scores
from hpcai.models.diffusion.objective import LEVELS

UNET: dict[str, Any] = {
    "inputs": 1, "outputs": 1, "field": 1, "tokens": None, "channels": (8, 16), "blocks": 1, "attention": ("none", "none"),
    "middle": "self", "heads": (1, 2), "groups": 4, "patch": 2, "zero": False,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "epsilon": {"objective": {"prediction_type": "epsilon"}, "sampler": {"method": "ddim", "steps": 3}},
    "v": {"objective": {"prediction_type": "v", "min_snr": 5.0}, "sampler": {"method": "dpm++", "steps": 3}},
    "x0": {"objective": {"prediction_type": "x0", "schedule": "cosine"}, "sampler": {"method": "ddpm", "steps": 3}},
    "edm": {
        "objective": {"prediction_type": "edm", "mean": -1.2, "deviation": 1.2},
        "sampler": {"method": "heun", "steps": 3, "spacing": "karras", "churn": 2.0},
    },
    "flow": {"objective": {"prediction_type": "flow", "times": "logit_normal"}, "sampler": {"method": "euler", "steps": 3}},
}  # fmt: skip


def model(way: str = "flow", **words: Any) -> Diffusion:
    torch.manual_seed(0)
    return Diffusion(DiffusionConfig.model_validate({"unet": UNET, **WAYS[way], **words}), seed=3).double()


def batch(count: int = 6, epoch: int = 2) -> Batch:
    draw = torch.Generator().manual_seed(1)
    high, low = (torch.randn(count, 1, n, n, generator=draw, dtype=torch.float64) for n in (8, 2))
    return Batch(high, torch.arange(10, 10 + count), torch.full((count,), epoch), low)


def some(whole: Batch, which: Any) -> Batch:
    return Batch(*(None if x is None else x[which] for x in whole))


@pytest.mark.parametrize("way", WAYS)
def test_losses_scores_and_members_are_those_of_each_sample_alone(way: str) -> None:
    made, whole = model(way), batch()
    parts = [some(whole, which) for which in torch.tensor([4, 0, 2, 5, 1, 3]).split(2)]
    mean = sum(loss(made, part)["loss"] for part in parts) / len(parts)
    torch.testing.assert_close(mean, loss(made, whole)["loss"], rtol=1e-12, atol=0)
    assert loss(made, batch(epoch=3))["loss"] != loss(made, whole)["loss"], "another epoch, other noise"
    found, each = score(made, whole), [score(made, part) for part in parts]
    torch.testing.assert_close(sum(one["loss"][0] for one in each), found["loss"][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(score(made, batch(epoch=7))["loss"][0], found["loss"][0], rtol=0, atol=0)
    assert set(finished(found)) == {f"loss_{1 + number % LEVELS}" for number in whole.indices.tolist()}
    rows = draw_ensemble(made, whole, members=3)["members"]
    assert rows.shape == (6, 3, 1, 8, 8) and rows.isfinite().all()
    alone = draw_ensemble(made, some(whole, slice(5, 6)), members=2)["members"]
    torch.testing.assert_close(alone[0], rows[5, :2], rtol=1e-10, atol=1e-10)
    assert not torch.equal(rows[:, 0], rows[:, 1]) and made.training


def finished(*found: dict[str, Any]) -> dict[str, float]:
    """Add up the sums of batches, and return the scores, as an evaluation does."""
    told: dict[str, float] = {}
    for name in found[0].keys() - {"loss"}:
        totals = [one[name] for one in found]
        told |= totals[0][1](*(torch.stack(sums).sum(0) for sums in zip(*(total[0] for total in totals))))
    return told


def test_ensemble_scores_do_not_depend_on_batches() -> None:
    made, whole = model("flow"), batch()
    told = finished(ensemble_scores(made, whole, members=4))
    parts = [ensemble_scores(made, some(whole, which), members=4) for which in torch.tensor([5, 2, 0, 1, 4, 3]).split(2)]
    assert finished(*parts) == pytest.approx(told, rel=1e-8, abs=1e-10)
    low = finished(ensemble_scores(made, whole, members=2, offset=0.0))
    assert low["loss_3"] == finished(score(made, whole, 0.0))["loss_3"] != told["loss_3"]
    rows = draw_ensemble(made, whole, members=4)
    members, truth = rows["members"].transpose(0, 1), rows["truth"]
    assert abs(scores.crps(members, truth, fair=True).mean().item() - told["crps"]) < 1e-10
    spread = members.var(0).mean().sqrt() / (members.mean(0) - truth).square().mean().sqrt() * (5 / 4) ** 0.5
    assert abs(spread.item() - told["spread_over_skill"]) < 1e-10
    made.sample = lambda condition, members, **words: whole.sample.expand(members, *whole.sample.shape)  # type: ignore[method-assign]
    same = finished(ensemble_scores(made, whole, members=3))
    assert max(same[name] for name in ("crps", "rmse", "spectrum_error", "ks")) < 1e-15, "members that are the truth"


def test_samples_do_not_depend_on_batch_size() -> None:
    made, whole = model("edm"), batch()
    every = made.sample(whole.condition, 4, size=(1, 8, 8))
    few = made.sample(whole.condition, 4, size=(1, 8, 8), batch_size=5)
    torch.testing.assert_close(few, every, rtol=1e-10, atol=1e-10)
    assert not torch.equal(made.sample(whole.condition, 4, size=(1, 8, 8), seed=1), every)


def test_a_residual_is_the_difference_from_the_coarse_field() -> None:
    made, plain, whole = model(residual=0.5), model(), batch()
    inside = made.subtract_coarse(whole.sample, whole.condition)
    torch.testing.assert_close(made.add_coarse(inside, whole.condition), whole.sample, rtol=1e-12, atol=1e-12)
    again = loss(plain, whole._replace(sample=inside))["loss"]
    torch.testing.assert_close(loss(made, whole)["loss"], again, rtol=1e-12, atol=0)
    found, given = (one.sample(whole.condition, 2, size=(1, 8, 8)) for one in (made, plain))
    torch.testing.assert_close(found[0], made.add_coarse(given[0], whole.condition), rtol=1e-10, atol=1e-10)
    with pytest.raises(DataError, match="the difference from a coarse field; give condition.field"):
        made.add_coarse(whole.sample, Condition())


FIELDS = {"names": ["density"], "units": ["mean"], "mean": [-0.3], "deviation": [1.2], "floor": 0.05, "factor": 4}


def test_physical_units_and_sizes() -> None:
    words = {"size": [1, 8, 8], "fields": FIELDS}
    made = Diffusion(DiffusionConfig.model_validate({"unet": UNET, **WAYS["flow"], **words}, strict=False))
    density = torch.rand(3, 1, 8, 8) + 0.1
    torch.testing.assert_close(made.to_physical(made.standardize(density)).float(), density, rtol=1e-5, atol=1e-6)
    assert made.sample(Condition(field=torch.zeros(2, 1, 2, 2)), 3).shape == (3, 2, 1, 8, 8)
    assert made.sample(Condition(field=torch.zeros(1, 1, 4, 3)), 1).shape == (1, 1, 1, 16, 12), "a larger region"
    with pytest.raises(ConfigError, match="The settings have none; give size="):
        model().sample(Condition(field=torch.zeros(1, 1, 2, 2)))
    with pytest.raises(ConfigError, match="cannot convert samples to physical units"):
        model().to_physical(density)
    with pytest.raises(DataError, match=r"conditions and indices are of \[2, 3\] samples"):
        made.sample(Condition(field=torch.zeros(2, 1, 2, 2)), indices=torch.arange(3))


def test_parameters_by_name_and_errors(caplog: pytest.LogCaptureFixture) -> None:
    known = {"parameters": ["Omega_m", "sigma_8"], "low": [0.1, 0.6], "high": [0.5, 1.0], "parameter_units": ["", ""]}
    words = {"size": [1, 8, 8], "fields": {**FIELDS, **known}}
    made = Diffusion(DiffusionConfig.model_validate({"unet": {**UNET, "parameters": 2}, **WAYS["flow"], **words}, strict=False))
    asked = made.standardize_parameters({"sigma_8": [0.6, 0.9], "Omega_m": 0.3})
    torch.testing.assert_close(asked, torch.tensor([[0.0, -1.0], [0.0, 0.5]]))
    field = torch.zeros(2, 1, 2, 2)
    made.sample(Condition(field=field, parameters=asked), 1)
    assert not caplog.messages
    made.sample(Condition(field=field, parameters=made.standardize_parameters({"sigma_8": [0.8, 0.5], "Omega_m": 0.3})), 1)
    assert caplog.messages == ["sigma_8 is 0.5, outside of 0.6 to 1, the range that the model was trained on"]
    with pytest.raises(DataError, match="parameters Omega_m; the model was trained on Omega_m, sigma_8"):
        made.standardize_parameters({"Omega_m": 0.3})
    with pytest.raises(DataError, match=r"condition.field has \[2, 3\] pixels and the sample \[8, 8\]; expected 4 times as many"):
        made.sample(Condition(field=torch.zeros(2, 1, 2, 3), parameters=asked), size=(1, 8, 8))
