"""Averages of weights with a half-life and by a power, against their papers' formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai import dist
from hpcai.errors import ConfigError
from hpcai.settings import CheckpointConfig, StepConfig, TrainConfig
from hpcai.train.average import exponent, half_life_take, power_take
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.loop import fit
from hpcai.train.saved import Progress
from hpcai.train.step import Step
from tests.stored import arrays, told

STORED, ASKED = arrays("diffusion/ema/ema"), told("diffusion/ema/settings")
HALF, RAMP, BATCH = ASKED["halflife_images"], ASKED["rampup_ratio"], ASKED["batch"]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


class Walk(nn.Module):
    """A weight and a buffer that go where they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 7.0))
        self.register_buffer("place", torch.full((8,), 7.0))

    def forward(self, to: Tensor) -> Tensor:
        self.place = self.place.copy_(to[0])
        return (self.weight * (self.weight.detach() - to[0])).sum()


def loss(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    return {"loss": model(batch)}


def new_step(**words: Any) -> Step:
    cfg = StepConfig(optimizer="sgd", momentum=0.0, lr=1.0, precision="fp64", **words)
    return Step(Walk(), loss, cfg, dist.alone())


def tracked(step: Step, every: int = 20, rows: int = 1, begin: int = 0, end: int = 400) -> list[list[Tensor]]:
    """Averages of the weight and of the buffer after every ``every`` steps along the stored walk."""
    found = []
    for i in range(begin, end):
        step(torch.from_numpy(STORED["walk"][i]).expand(rows, -1))
        if (i + 1) % every == 0:
            found.append([t.clone() for t in step.average.state().values()])  # type: ignore[union-attr]
    return found


def same(found: list[list[Tensor]], right: np.ndarray) -> None:
    assert len(found) == len(right)
    for both, row in zip(found, right):
        assert len(both) == 2
        for one in both:
            np.testing.assert_allclose(one.numpy(), row, **CLOSE)


def test_what_an_average_takes_is_that_of_the_formulas() -> None:
    seen = STORED["images_before_step"].tolist()
    for ramp, name in ((RAMP, "ramped"), (None, "plain")):
        found = [1 - half_life_take(HALF, ramp, BATCH, n) for n in seen]
        np.testing.assert_allclose(found, STORED[f"halflife_beta_{name}"], **CLOSE)
    for k, deviation in enumerate(STORED["sigma_rel"].tolist()):
        assert exponent(deviation) == pytest.approx(STORED["gamma"][k], rel=1e-12)
        found = [1 - power_take(deviation, t) for t in range(1, 401)]
        np.testing.assert_allclose(found, STORED["power_beta"][:, k], **CLOSE)
    assert exponent(12**-0.5) == pytest.approx(0, abs=1e-9)
    for deviation in (0.0, 0.29):
        with pytest.raises(ConfigError, match="is no power"):
            exponent(deviation)


def test_averages_with_a_half_life_are_those_of_the_reference() -> None:
    step = new_step(average_half_life=HALF, average_ramp=RAMP)
    same(tracked(step, rows=BATCH), STORED["halflife_ramped_every_20"])
    assert step.average.seen == 400 * BATCH
    step = new_step(average_half_life=HALF, average_ramp=None)
    step.average.batch = BATCH
    tracked(step, end=1)
    for mean in step.average.state().values():
        mean.copy_(torch.from_numpy(STORED["walk"][0]))  # type: ignore[union-attr, arg-type]
    same(tracked(step, begin=1), STORED["halflife_plain_every_20"])


@pytest.mark.parametrize("k", range(5))
def test_averages_by_a_power_are_those_of_the_reference(k: int) -> None:
    step = new_step(average_power=STORED["sigma_rel"][k].item())
    same(tracked(step), STORED["power_ema_every_20"][:, k])


@pytest.mark.parametrize("words", [{"average_half_life": 50.0}, {"average_power": 0.1}], ids=str)
def test_a_resumed_average_goes_on_as_if_nothing_had_happened(tmp_path: Path, words: dict[str, Any]) -> None:
    whole = tracked(new_step(**words), every=1, rows=3, end=9)
    step = new_step(**words)
    tracked(step, rows=3, end=5)
    Checkpoints(tmp_path, CheckpointConfig(), dist.alone()).save(step, Progress(step=5, seen=15))
    again = new_step(**words)
    Checkpoints(tmp_path, CheckpointConfig(), dist.alone()).resume(again)
    for found, right in zip(tracked(again, every=1, rows=3, begin=5, end=9), whole[5:]):
        assert all(torch.equal(a, b) for a, b in zip(found, right))


def test_the_loop_counts_samples_where_a_batch_does_not_show_them() -> None:
    class Packed(list):
        size, samples = 5, 30  # samples that lie in one row

        def epoch(self, *_: Any) -> Any:
            return iter(self)

        def late(self) -> list[int]:
            return []

        news = late

    step = new_step(average_half_life=50.0)
    fit(step, Packed([torch.from_numpy(STORED["walk"][i])[None] for i in range(6)]), TrainConfig(steps=6))
    assert step.average.seen == 30
    right = torch.full((8,), 7.0, dtype=torch.float64)
    for i in range(6):
        right.lerp_(torch.from_numpy(STORED["walk"][i]), half_life_take(50.0, 0.05, 5, 5 * i))
    np.testing.assert_allclose(step.average.state()["weight"].numpy(), right, **CLOSE)  # type: ignore[union-attr]
