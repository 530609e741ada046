"""Learning rates by global step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcai.settings import ScheduleConfig
from hpcai.train.schedule import make_lr_schedule


def test_per_step_warm_up_and_cosine() -> None:
    at = make_lr_schedule(ScheduleConfig(warmup=2, start=0.1, decay="cosine", floor=0.1), 1.0, 10, 61)
    assert at(0) == 0.1 and at(10) == pytest.approx(0.55) and at(20) == 1.0
    assert at(40) == pytest.approx(0.1 + 0.9 * 0.5) and at(60) == pytest.approx(0.1)


def test_per_epoch_holds_within_an_epoch() -> None:
    at = make_lr_schedule(ScheduleConfig(warmup=3, start=0.0, held=True), 0.3, 5, 50)
    assert [at(s) for s in (0, 4, 5, 9, 10, 15, 49)] == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.3, 0.3])


def test_no_warm_up_is_no_division_by_zero() -> None:
    assert make_lr_schedule(ScheduleConfig(warmup=0, start=0.5), 1.0, 3, 9)(0) == 1.0
    assert make_lr_schedule(ScheduleConfig(warmup=0, decay="linear"), 1.0, 1, 1)(0) == 1.0


@given(st.integers(1, 50), st.integers(1, 300), st.floats(0, 5), st.sampled_from(["none", "linear", "cosine"]), st.floats(0, 1))
def test_rates_stay_between_zero_and_the_peak(per_epoch: int, steps: int, warmup: float, decay: str, floor: float) -> None:
    at = make_lr_schedule(ScheduleConfig(warmup=warmup, decay=decay, floor=floor), 0.7, per_epoch, steps)
    rates = [at(s) for s in range(steps + 3)]
    assert all(0 <= r <= 0.7 * (1 + 1e-12) for r in rates)
    begun = [r for s, r in enumerate(rates) if s / per_epoch >= warmup]
    assert all(a >= b - 1e-12 for a, b in zip(begun, begun[1:]))
