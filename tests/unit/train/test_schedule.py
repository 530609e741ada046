"""Learning rate schedules by global step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcai.settings import ScheduleConfig
from hpcai.train.schedule import make_lr_schedule


def test_per_step_warm_up_and_cosine() -> None:
    lr = make_lr_schedule(ScheduleConfig(warmup=2, start=0.1, decay="cosine", floor=0.1), 1.0, 10, 61)
    assert lr(0) == 0.1 and lr(10) == pytest.approx(0.55) and lr(20) == 1.0
    assert lr(40) == pytest.approx(0.1 + 0.9 * 0.5) and lr(60) == pytest.approx(0.1)


def test_per_epoch_rates_are_constant_within_an_epoch() -> None:
    lr = make_lr_schedule(ScheduleConfig(warmup=3, start=0.0, held=True), 0.3, 5, 50)
    assert [lr(s) for s in (0, 4, 5, 9, 10, 15, 49)] == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.3, 0.3])


def test_no_warm_up_is_no_division_by_zero() -> None:
    assert make_lr_schedule(ScheduleConfig(warmup=0, start=0.5), 1.0, 3, 9)(0) == 1.0
    assert make_lr_schedule(ScheduleConfig(warmup=0, decay="linear"), 1.0, 1, 1)(0) == 1.0


@given(st.integers(1, 50), st.integers(1, 300), st.floats(0, 5), st.sampled_from(["none", "linear", "cosine"]), st.floats(0, 1))
def test_rates_stay_between_zero_and_the_peak(per_epoch: int, steps: int, warmup: float, decay: str, floor: float) -> None:
    lr = make_lr_schedule(ScheduleConfig(warmup=warmup, decay=decay, floor=floor), 0.7, per_epoch, steps)
    rates = [lr(s) for s in range(steps + 3)]
    assert all(0 <= r <= 0.7 * (1 + 1e-12) for r in rates)
    after_warmup = [r for s, r in enumerate(rates) if s / per_epoch >= warmup]
    assert all(a >= b - 1e-12 for a, b in zip(after_warmup, after_warmup[1:]))
