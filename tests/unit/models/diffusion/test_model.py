"""Training, evaluation and sampling use counter-based random numbers: a sample does not depend on its batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion import (
    Batch,
    Condition,
    Diffusion,
    DiffusionConfig,
    SamplerConfig,
    draw_ensemble,
    ensemble_scores,
    loss,
    score,
    scores,
)
from hpcai.models.diffusion.objective import LEVELS
from tests.reference_data import load_json

UNET: dict[str, Any] = {
    "inputs": 1, "outputs": 1, "field": 1, "tokens": None, "channels": (8, 16), "blocks": 1, "attention": ("none", "none"),
    "middle": "self", "heads": (1, 2), "groups": 4, "patch": 2, "zero": False,
}  # fmt: skip
CASES = load_json("diffusion/small_models")


def new_model(case: str = "flow", **overrides: Any) -> Diffusion:
    torch.manual_seed(0)
    return Diffusion(DiffusionConfig.model_validate({"unet": UNET, **CASES[case], **overrides}, strict=False), seed=3).double()


def random_batch(count: int = 6, epoch: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(1)
    high, low = (torch.randn(count, 1, n, n, generator=generator, dtype=torch.float64) for n in (8, 2))
    return Batch(high, torch.arange(10, 10 + count), torch.full((count,), epoch), low)


def select(batch: Batch, index: Any) -> Batch:
    return Batch(*(None if x is None else x[index] for x in batch))


@pytest.mark.parametrize("case", CASES)
def test_losses_scores_and_members_of_a_sample_do_not_depend_on_its_batch(case: str) -> None:
    model, batch = new_model(case), random_batch()
    parts = [select(batch, index) for index in torch.tensor([4, 0, 2, 5, 1, 3]).split(2)]
    mean = sum(loss(model, part)["loss"] for part in parts) / len(parts)
    torch.testing.assert_close(mean, loss(model, batch)["loss"], rtol=1e-12, atol=0)
    assert loss(model, random_batch(epoch=3))["loss"] != loss(model, batch)["loss"], "another epoch, other noise"
    expected, by_part = score(model, batch), [score(model, part) for part in parts]
    torch.testing.assert_close(sum(metrics["loss"][0] for metrics in by_part), expected["loss"][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(score(model, random_batch(epoch=7))["loss"][0], expected["loss"][0], rtol=0, atol=0)
    assert set(finish_scores(expected)) == {f"loss_{1 + number % LEVELS}" for number in batch.indices.tolist()}
    ensembles = draw_ensemble(model, batch, members=3)["members"]
    assert ensembles.shape == (6, 3, 1, 8, 8) and ensembles.isfinite().all()
    alone = draw_ensemble(model, select(batch, slice(5, 6)), members=2)["members"]
    torch.testing.assert_close(alone[0], ensembles[5, :2], rtol=1e-10, atol=1e-10)
    assert not torch.equal(ensembles[:, 0], ensembles[:, 1]) and model.training


def finish_scores(*batches: dict[str, Any]) -> dict[str, float]:
    """Add up the sums of batches, and return the scores, as an evaluation does."""
    results: dict[str, float] = {}
    for name in batches[0].keys() - {"loss"}:
        totals = [metrics[name] for metrics in batches]
        results |= totals[0][1](*(torch.stack(sums).sum(0) for sums in zip(*(total[0] for total in totals))))
    return results


def test_ensemble_scores_do_not_depend_on_batches() -> None:
    model, batch = new_model("flow"), random_batch()
    expected = finish_scores(ensemble_scores(model, batch, members=4))
    parts = [ensemble_scores(model, select(batch, index), members=4) for index in torch.tensor([5, 2, 0, 1, 4, 3]).split(2)]
    assert finish_scores(*parts) == pytest.approx(expected, rel=1e-8, abs=1e-10)
    low = finish_scores(ensemble_scores(model, batch, members=2, offset=0.0))
    assert low["loss_3"] == finish_scores(score(model, batch, 0.0))["loss_3"] != expected["loss_3"]
    ensemble = draw_ensemble(model, batch, members=4)
    members, truth = ensemble["members"].transpose(0, 1), ensemble["truth"]
    assert abs(scores.crps(members, truth, fair=True).mean().item() - expected["crps"]) < 1e-10
    spread = members.var(0).mean().sqrt() / (members.mean(0) - truth).square().mean().sqrt() * (5 / 4) ** 0.5
    assert abs(spread.item() - expected["spread_over_skill"]) < 1e-10
    model.sample = lambda condition, members, **kwargs: batch.sample.expand(members, *batch.sample.shape)  # type: ignore[method-assign]
    perfect = finish_scores(ensemble_scores(model, batch, members=3))
    assert max(perfect[name] for name in ("crps", "rmse", "spectrum_error", "ks")) < 1e-15, "members equal to the truth"


def test_samples_do_not_depend_on_batch_size() -> None:
    model, batch = new_model("edm"), random_batch()
    expected = model.sample(batch.condition, 4, size=(1, 8, 8))
    actual = model.sample(batch.condition, 4, size=(1, 8, 8), batch_size=5)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert not torch.equal(model.sample(batch.condition, 4, size=(1, 8, 8), seed=1), expected)


def test_a_residual_is_the_difference_from_the_coarse_field() -> None:
    model, plain, batch = new_model(residual=0.5), new_model(), random_batch()
    residual = model.subtract_baseline(batch.sample, batch.condition)
    torch.testing.assert_close(model.add_baseline(residual, batch.condition), batch.sample, rtol=1e-12, atol=1e-12)
    expected = loss(plain, batch._replace(sample=residual))["loss"]
    torch.testing.assert_close(loss(model, batch)["loss"], expected, rtol=1e-12, atol=0)
    fields, residuals = (network.sample(batch.condition, 2, size=(1, 8, 8)) for network in (model, plain))
    torch.testing.assert_close(fields[0], model.add_baseline(residuals[0], batch.condition), rtol=1e-10, atol=1e-10)
    with pytest.raises(DataError, match="the difference from a coarse field; give condition.field"):
        model.add_baseline(batch.sample, Condition())


def test_a_regression_predicts_the_mean_and_diffusion_generates_its_residual(tmp_path: Path) -> None:
    regression, batch = {"objective": {"prediction_type": "regression"}}, random_batch()
    mean = new_model(residual=0.5, **regression)
    zeros = torch.zeros_like(batch.sample)
    predicted = mean.add_baseline(mean(zeros, zeros[:, 0, 0, 0], batch.condition), batch.condition)
    torch.testing.assert_close(mean.sample(batch.condition, 2, size=(1, 8, 8)), predicted.expand(2, *predicted.shape))
    expected = ((batch.sample - predicted) / 0.5).square().mean()
    torch.testing.assert_close(loss(mean, batch)["loss"], expected, rtol=1e-12, atol=0)
    assert set(score(mean, batch)) == {"loss"}, "a regression has no levels of noise"

    settings = {"mean": mean.cfg.model_dump(), "residual": (0.3,)}
    model, plain = new_model(**settings), new_model()
    assert model.train().mean is not None and model.training and not model.mean.training  # type: ignore[union-attr]
    model.mean.load_state_dict(mean.state_dict())  # type: ignore[union-attr]
    residual = (batch.sample - predicted) / 0.3
    result, without = loss(model, batch)["loss"], loss(plain, batch._replace(sample=residual))["loss"]
    torch.testing.assert_close(result, without, rtol=1e-12, atol=0)
    result.backward()
    assert all((parameter.grad is None) == name.startswith("mean.") for name, parameter in model.named_parameters())
    rows = draw_ensemble(model, batch, members=2)
    torch.testing.assert_close(rows["mean"], predicted)
    members = plain.sample(batch.condition, 2, size=(1, 8, 8), indices=batch.indices, seed=3)
    torch.testing.assert_close(rows["members"].transpose(0, 1), predicted + 0.3 * members, rtol=1e-10, atol=1e-10)
    dressed = scores.gaussian_crps(predicted, 0.3, batch.sample).mean().item()
    assert finish_scores(ensemble_scores(model, batch, members=2))["dressed_crps"] == pytest.approx(dressed)
    model.save(tmp_path / "model.safetensors")
    loaded = Diffusion.load(tmp_path / "model.safetensors").double()
    torch.testing.assert_close(loaded.baseline(batch.condition, batch.sample), predicted)
    with pytest.raises(ValueError, match="mean needs residual, the deviation of samples from it"):
        new_model(mean=mean.cfg.model_dump())


def new_forecast() -> Diffusion:
    fields = {**FIELDS, "factor": 0, "static": ["z"], "weighted": True, "interval": (6.0, "hours")}
    model = new_model(unet={**UNET, "field": 0, "fine": 2}, size=(1, 8, 8), fields=fields, residual=0.5, channel_weights=(3.0,))
    assert model.static is not None and model.weights is not None
    model.static.copy_(torch.arange(64.0).view(1, 8, 8) / 64)
    model.weights.copy_((torch.arange(64).view(1, 8, 8) % 3).float())
    return model


def test_static_fields_and_weights_follow_the_shift_of_a_sample() -> None:
    model, batch = new_forecast(), random_batch()._replace(field=None)
    states, shift = batch._replace(fine=batch.sample.flip(0)), torch.tensor([[0, 0], [1, 0], [0, 3], [7, 5], [2, 2], [4, 4]])
    rolled = [model.static.roll(tuple(by), (1, 2)) for by in shift.tolist()]  # type: ignore[union-attr]
    complete = model.with_static(states.condition, 6, shift).fine
    assert complete is not None and torch.equal(complete, torch.cat((states.sample.flip(0), torch.stack(rolled)), 1))
    weights = model.loss_weights(states.sample, shift)
    assert weights is not None and torch.equal(weights[3], 3 * model.weights.roll((7, 5), (1, 2)))  # type: ignore[union-attr]
    moved = new_forecast()
    for name in ("static", "weights"):
        getattr(moved, name).copy_(getattr(model, name).roll((1, 3), (1, 2)))
    by = torch.tensor([[1, 3]]).expand(6, 2)
    torch.testing.assert_close(loss(model, states._replace(shift=by))["loss"], loss(moved, states)["loss"])
    assert not torch.equal(loss(model, states)["loss"], loss(moved, states)["loss"])
    moved.weights.zero_()  # type: ignore[union-attr]
    assert loss(moved, states)["loss"] == 0


def test_masked_cells_change_nothing_and_are_zero_in_samples() -> None:
    model, batch = new_forecast(), random_batch()._replace(field=None)
    masked, inputs = (model.weights == 0).expand(6, 1, 8, 8), list[torch.Tensor]()  # type: ignore[union-attr]
    states = batch._replace(fine=batch.sample.flip(0))
    other = states._replace(sample=torch.where(masked, 9.0, states.sample))
    torch.testing.assert_close(loss(model, other)["loss"], loss(model, states)["loss"], rtol=1e-12, atol=0)
    by = torch.tensor([[1, 3]]).expand(6, 2)
    rolled = other._replace(sample=torch.where(masked.roll((1, 3), (2, 3)), 9.0, states.sample), shift=by)
    torch.testing.assert_close(loss(model, rolled)["loss"], loss(model, states._replace(shift=by))["loss"], rtol=1e-12, atol=0)
    model.network.register_forward_pre_hook(lambda network, args: inputs.append(args[0]))
    members = model.roll_out(states.condition, 2, 3)
    assert inputs and not any(x[masked[:1].expand_as(x)].any() for x in inputs)
    assert (members == 0).equal(masked.expand(3, 2, 6, 1, 8, 8)) and members.isfinite().all()


def test_a_forecast_starts_from_the_state_before() -> None:
    model, batch = new_forecast(), random_batch()._replace(field=None)
    states = batch._replace(fine=batch.sample.flip(0), future=torch.stack([batch.sample, batch.sample.roll(1, 0)], 1))
    members = model.roll_out(states.condition, 2, 3, indices=batch.indices, seed=3)
    first = model.sample(states.condition, 3, indices=batch.indices, seed=3)
    torch.testing.assert_close(members[:, 0], first)
    second = model.sample(Condition(fine=first[1]), indices=batch.indices, seed=3, first_member=3 + 1)
    torch.testing.assert_close(members[1, 1], second[0])
    alone = model.roll_out(select(states, slice(4, 5)).condition, 2, 3, indices=batch.indices[4:5], seed=3)
    torch.testing.assert_close(alone[:, :, 0], members[:, :, 4])
    rows = draw_ensemble(model, states, members=3)
    torch.testing.assert_close(rows["members"], members.permute(2, 0, 1, 3, 4, 5))
    assert torch.equal(rows["start"], batch.sample.flip(0)) and torch.equal(rows["truth"], states.future)
    metrics = finish_scores(ensemble_scores(model, states, members=3))
    error = (batch.sample.roll(1, 0) - batch.sample.flip(0)).abs() * model.weights
    assert metrics["persistence_2"] == pytest.approx(float(error.sum() / (6 * model.weights.sum())))  # type: ignore[union-attr]
    crps = scores.crps(members[:, 1], states.future[:, 1], fair=True) * model.weights  # type: ignore[index]
    assert metrics["crps_2"] == pytest.approx(float(crps.sum() / (6 * model.weights.sum())))  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"the sample has \[16, 8\] cells, static fields of the model \[8, 8\]; give a condition"):
        model.roll_out(Condition(fine=torch.randn(1, 1, 16, 8)), 2)
    with pytest.raises(DataError, match="condition.fine: density goes from nan to nan; expected finite values"):
        model.roll_out(Condition(fine=torch.full((1, 1, 8, 8), torch.nan)), 2)
    with pytest.raises(ConfigError, match="the model was not trained on trajectories; give initial states to a model of forecasts"):
        Diffusion(DiffusionConfig.model_validate({"unet": UNET, "fields": FIELDS}, strict=False)).roll_out(states.condition, 2)


FIELDS = {"names": ["density"], "units": ["mean"], "mean": [-0.3], "deviation": [1.2], "floor": 0.05, "factor": 4}


def test_inputs_have_units_of_their_own_and_one_floor_of_all_channels_is_read() -> None:
    saved = str({**FIELDS, "transforms": [], "floors": []}).replace("'", '"')
    older, snow = DiffusionConfig.model_validate_json('{"fields": ' + saved + "}").fields, {**FIELDS, "names": ["snow"]}
    assert older is not None and (older.transforms, older.floors) == (("log",), (0.05,))
    coarse = {"names": ["z", "q"], "units": ["m", ""], "mean": [5, 1], "deviation": [2, 4]}
    fields = {**FIELDS, "fine": {name: value for name, value in snow.items() if name != "factor"}, "coarse": coarse}
    model = new_model(unet={**UNET, "field": 2, "fine": 1}, size=[1, 8, 8], fields=fields)
    low, fine = torch.rand(3, 2, 2, 2), torch.rand(3, 1, 8, 8)
    field, given = model.standardize(low, "coarse"), model.standardize(fine, "fine")
    torch.testing.assert_close(given, ((fine + 0.05).log() + 0.3) / 1.2)
    members = (model.sample(Condition(field=field, fine=x)) for x in (given, -given))
    assert field[0, 1, 0, 0] == (low[0, 1, 0, 0] - 1) / 4 and not torch.equal(*members)
    with pytest.raises(DataError, match=r"fine fields are \[3, 2, 2, 2\]; expected snow, on which the model was trained"):
        model.standardize(low, "fine")
    with pytest.raises(ConfigError, match=r"the coarse field has other channels than samples \(z, q\); set it to null"):
        new_model(residual=0.5, fields=fields)


def test_physical_units_and_sizes() -> None:
    settings = {"size": [1, 8, 8], "fields": FIELDS}
    model = Diffusion(DiffusionConfig.model_validate({"unet": UNET, **CASES["flow"], **settings}, strict=False))
    density = torch.rand(3, 1, 8, 8) + 0.1
    torch.testing.assert_close(model.to_physical(model.standardize(density)).float(), density, rtol=1e-5, atol=1e-6)
    assert model.sample(Condition(field=torch.zeros(2, 1, 2, 2)), 3).shape == (3, 2, 1, 8, 8)
    assert model.sample(Condition(field=torch.zeros(1, 1, 4, 3)), 1).shape == (1, 1, 1, 16, 12), "a larger region"
    with pytest.raises(ConfigError, match="The settings have none; give size="):
        new_model().sample(Condition(field=torch.zeros(1, 1, 2, 2)))
    with pytest.raises(ConfigError, match="cannot convert samples to physical units"):
        new_model().to_physical(density)
    with pytest.raises(DataError, match=r"conditions and indices are of \[2, 3\] samples"):
        model.sample(Condition(field=torch.zeros(2, 1, 2, 2)), indices=torch.arange(3))


def test_each_channel_has_its_transform_and_guidance_needs_training(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"names": ["t", "rain", "wind"], "units": ["K", "m", "m/s"], "mean": [280, -6, 3], "deviation": [10, 1.5, 1],
              "factor": 4, "transforms": ["none", "log", "sqrt"], "floors": [0, 1e-5, 0]}  # fmt: skip
    settings = {"unet": {**UNET, "inputs": 3, "outputs": 3, "field": 3}, **CASES["flow"], "size": [3, 8, 8], "fields": fields}
    model = Diffusion(DiffusionConfig.model_validate(settings, strict=False))
    physical = torch.rand(2, 3, 2, 2, dtype=torch.float64) + torch.tensor([280.0, 0.0, 3.0]).view(3, 1, 1)
    standard = model.standardize(physical)
    expected = torch.stack([(physical[:, 0] - 280) / 10, ((physical[:, 1] + 1e-5).log() + 6) / 1.5, physical[:, 2].sqrt() - 3], 1)
    torch.testing.assert_close(standard.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.to_physical(standard), physical, rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match=r"expected values with finite t, log\(rain \+ 1e-05\), sqrt\(wind\)"):
        model.standardize(-physical)
    model.sample(Condition(field=torch.full((2, 3, 8, 8), 1e-3)), size=(3, 32, 32))
    assert "t goes from 0.001 to 0.001 (RMS 0.001); expected standardized values" in caplog.messages[0]
    with pytest.raises(ConfigError, match="the network never saw an empty condition; set guidance to 1"):
        model.sample(Condition(field=standard), sampler=SamplerConfig(guidance=2.0))


def test_parameters_by_name_and_errors(caplog: pytest.LogCaptureFixture) -> None:
    ranges = {"parameters": ["Omega_m", "sigma_8"], "low": [0.1, 0.6], "high": [0.5, 1.0], "parameter_units": ["", ""]}
    extra = {"size": [1, 8, 8], "fields": {**FIELDS, **ranges}}
    model = Diffusion(DiffusionConfig.model_validate({"unet": {**UNET, "parameters": 2}, **CASES["flow"], **extra}, strict=False))
    parameters = model.standardize_parameters({"sigma_8": [0.6, 0.9], "Omega_m": 0.3})
    torch.testing.assert_close(parameters, torch.tensor([[0.0, -1.0], [0.0, 0.5]]))
    field = torch.zeros(2, 1, 2, 2)
    model.sample(Condition(field=field, parameters=parameters), 1)
    assert not caplog.messages
    model.sample(Condition(field=field, parameters=model.standardize_parameters({"sigma_8": [0.8, 0.5], "Omega_m": 0.3})), 1)
    assert caplog.messages == ["sigma_8 is 0.5, outside of 0.6 to 1, the range that the model was trained on"]
    with pytest.raises(DataError, match="parameters Omega_m; the model was trained on Omega_m, sigma_8"):
        model.standardize_parameters({"Omega_m": 0.3})
    with pytest.raises(DataError, match=r"sigma_8: 1 of 2 values are masked, the first at \[1\]"):
        model.standardize_parameters({"sigma_8": np.ma.masked_equal([0.6, 0.9], 0.9), "Omega_m": 0.3})
    with pytest.raises(DataError, match=r"condition.field has \[2, 3\] pixels and the sample \[8, 8\]; expected 4 times as many"):
        model.sample(Condition(field=torch.zeros(2, 1, 2, 3), parameters=parameters), size=(1, 8, 8))
