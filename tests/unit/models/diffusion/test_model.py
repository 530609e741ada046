"""A diffusion model learns, is measured and draws by numbers that are counted: what lies beside a sample changes nothing of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion import Batch, Condition, Diffusion, DiffusionConfig, ensemble, loss, score
from hpcai.models.diffusion.objective import LEVELS

UNET: dict[str, Any] = {
    "inputs": 1, "outputs": 1, "field": 1, "tokens": None, "channels": (8, 16), "blocks": 1, "attention": ("none", "none"),
    "middle": "self", "heads": (1, 2), "groups": 4, "patch": 2, "zero": False,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "epsilon": {"objective": {"says": "epsilon"}, "sampler": {"method": "ddim", "steps": 3}},
    "v": {"objective": {"says": "v", "min_snr": 5.0}, "sampler": {"method": "dpm++", "steps": 3}},
    "x0": {"objective": {"says": "x0", "schedule": "cosine"}, "sampler": {"method": "ddpm", "steps": 3}},
    "edm": {
        "objective": {"says": "edm", "mean": -1.2, "deviation": 1.2},
        "sampler": {"method": "heun", "steps": 3, "spacing": "karras", "churn": 2.0},
    },
    "flow": {"objective": {"says": "flow", "times": "logit_normal"}, "sampler": {"method": "euler", "steps": 3}},
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
    made, whole, order = model(way), batch(), torch.tensor([4, 0, 2, 5, 1, 3])
    parts = [some(whole, which) for which in order.split(2)]
    mean = sum(loss(made, part)["loss"] for part in parts) / len(parts)
    torch.testing.assert_close(mean, loss(made, whole)["loss"], rtol=1e-12, atol=0)
    assert loss(made, batch(epoch=3))["loss"] != loss(made, whole)["loss"], "another epoch, other noise"

    found, each = score(made, whole), [score(made, part) for part in parts]
    torch.testing.assert_close(sum(one["loss"][0] for one in each), found["loss"][0], rtol=1e-12, atol=0)
    (sums, finish), others = found["levels"], [one["levels"][0] for one in each]
    for kind in (0, 1):
        torch.testing.assert_close(sum(other[kind] for other in others), sums[kind], rtol=1e-12, atol=0)
    levels = finish(*sums)
    assert set(levels) == {f"loss_{1 + number % LEVELS}" for number in whole.number.tolist()}
    torch.testing.assert_close(score(made, batch(epoch=7))["loss"][0], found["loss"][0], rtol=0, atol=0)

    rows = ensemble(made, whole, members=3)["members"]
    assert rows.shape == (6, 3, 1, 8, 8) and rows.isfinite().all()
    for number in (0, 5):
        alone = ensemble(made, some(whole, slice(number, number + 1)), members=2)["members"]
        torch.testing.assert_close(alone[0], rows[number, :2], rtol=1e-10, atol=1e-10)
    assert not torch.equal(rows[:, 0], rows[:, 1]) and made.training


def test_few_at_once_is_many_at_once() -> None:
    made, whole = model("edm"), batch()
    every = made.sample(whole.condition, 4, size=(1, 8, 8))
    few = made.sample(whole.condition, 4, size=(1, 8, 8), at_once=5)
    torch.testing.assert_close(few, every, rtol=1e-10, atol=1e-10)
    assert not torch.equal(made.sample(whole.condition, 4, size=(1, 8, 8), seed=1), every)


class Recorder(nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.space, self.fields = network, network.space, list[Tensor]()

    def forward(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        assert condition.field is not None
        self.fields.append(condition.field)
        return self.network(x, time, condition)  # type: ignore[no-any-return]


def test_a_share_of_training_samples_has_no_condition() -> None:
    made, whole = model(unconditional=0.4), batch(200)
    made.network = Recorder(made.network)
    loss(made, whole)
    score(made, whole)
    left, kept = made.network.fields
    gone = (left == 0).flatten(1).all(1)
    assert 50 < int(gone.sum()) < 110 and torch.equal(left[~gone], whole.field[~gone]) and torch.equal(kept, whole.field)  # type: ignore[index, arg-type]


def test_a_residual_is_what_a_sample_differs_by_from_its_coarse_field() -> None:
    made, whole = model(residual=0.5), batch()
    inside = made.drawn_to(whole.sample, whole.condition)
    torch.testing.assert_close(made.drawn_from(inside, whole.condition), whole.sample, rtol=1e-12, atol=1e-12)
    plain = model()
    again = loss(plain, whole._replace(sample=inside))["loss"]
    torch.testing.assert_close(loss(made, whole)["loss"], again, rtol=1e-12, atol=0)
    found = made.sample(whole.condition, 2, size=(1, 8, 8))
    given = plain.sample(whole.condition, 2, size=(1, 8, 8))
    torch.testing.assert_close(found[0], made.drawn_from(given[0], whole.condition), rtol=1e-10, atol=1e-10)
    with pytest.raises(DataError, match="differences from a coarse field; give condition.field"):
        made.drawn_from(whole.sample, Condition())


FIELDS = {"names": ["density"], "units": ["mean"], "mean": [-0.3], "deviation": [1.2], "floor": 0.05, "factor": 4}


def test_physical_units_and_sizes() -> None:
    words = {"size": [1, 8, 8], "fields": FIELDS}
    made = Diffusion(DiffusionConfig.model_validate({"unet": UNET, **WAYS["flow"], **words}, strict=False))
    density = torch.rand(3, 1, 8, 8) + 0.1
    torch.testing.assert_close(made.physical(made.standard(density)).float(), density, rtol=1e-5, atol=1e-6)
    assert made.sample(Condition(field=torch.zeros(2, 1, 2, 2)), 3).shape == (3, 2, 1, 8, 8)
    assert made.sample(Condition(field=torch.zeros(1, 1, 4, 3)), 1).shape == (1, 1, 1, 16, 12), "a larger region"
    with pytest.raises(ConfigError, match="The settings have none; give size="):
        model().sample(Condition(field=torch.zeros(1, 1, 2, 2)))
    with pytest.raises(ConfigError, match="does not know what its samples are in physical units"):
        model().physical(density)
    with pytest.raises(DataError, match=r"conditions and their numbers are of \[2, 3\] samples"):
        made.sample(Condition(field=torch.zeros(2, 1, 2, 2)), number=torch.arange(3))


def test_parameters_by_name_and_what_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    known = {"parameters": ["Omega_m", "sigma_8"], "low": [0.1, 0.6], "high": [0.5, 1.0], "parameter_units": ["", ""]}
    words = {"size": [1, 8, 8], "fields": {**FIELDS, **known}}
    made = Diffusion(DiffusionConfig.model_validate({"unet": {**UNET, "parameters": 2}, **WAYS["flow"], **words}, strict=False))
    asked = made.standard_parameters({"sigma_8": [0.6, 0.9], "Omega_m": 0.3})
    torch.testing.assert_close(asked, torch.tensor([[0.0, -1.0], [0.0, 0.5]]))
    field = torch.zeros(2, 1, 2, 2)
    made.sample(Condition(field=field, parameters=asked), 1)
    assert not caplog.messages
    made.sample(Condition(field=field, parameters=made.standard_parameters({"sigma_8": [0.8, 0.5], "Omega_m": 0.3})), 1)
    assert caplog.messages == ["sigma_8 is 0.5, outside of 0.6 to 1, the range that the model was trained on"]
    with pytest.raises(DataError, match="parameters Omega_m; the model was trained on Omega_m, sigma_8"):
        made.standard_parameters({"Omega_m": 0.3})
    with pytest.raises(DataError, match=r"condition.field has \[2, 3\] places and the sample \[8, 8\]; expected 4 times as many"):
        made.sample(Condition(field=torch.zeros(2, 1, 2, 3), parameters=asked), size=(1, 8, 8))


@pytest.mark.parametrize(
    "words",
    [{"dit": {"inputs": 2, "outputs": 2, "size": 8, "layers": 1, "heads": 2, "head": 8, "classes": 5}},
     {"flux": {"inputs": 8, "double": 1, "single": 1, "heads": 2, "head": 12, "tokens": 6, "pooled": 4, "turned": (2, 4, 6)}}],
    ids=["dit", "flux"],
)  # fmt: skip
def test_networks_of_tokens_learn_and_draw(words: dict[str, Any]) -> None:
    made = Diffusion(DiffusionConfig.model_validate({"unet": None, **words, **WAYS["flow"]}))
    sample, number = torch.randn(3, 2, 8, 8), torch.arange(3)
    given = Batch(sample, number, number, classes=number) if "dit" in words else Batch(
        sample, number, number, tokens=torch.randn(3, 4, 6), pooled=torch.randn(3, 4)
    )  # fmt: skip
    loss(made, given)["loss"].backward()
    assert any(p.grad is not None and p.grad.any() for p in made.parameters())
    assert ensemble(made, given, members=2)["members"].shape == (3, 2, 2, 8, 8)
