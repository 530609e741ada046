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


@pytest.mark.parametrize(("decay", "halfway"), [("linear", 0.5), ("sqrt", 1 - 0.5**0.5), ("cosine", 0.5)])
def test_a_stable_rate_decays_over_the_last_steps_of_the_run(decay: str, halfway: float) -> None:
    cfg = ScheduleConfig(unit="steps", warmup=10, decay=decay, stable=True, length=20, floor=0.1)
    short, long = (make_lr_schedule(cfg, 2.0, 7, steps) for steps in (101, 501))
    assert [short(s) for s in (5, 10, 50, 80)] == [1.0, 2.0, 2.0, 2.0] and short(81) < 2.0
    assert short(90) == pytest.approx(0.2 + 1.8 * halfway) and short(100) == pytest.approx(0.2)
    assert [long(s) for s in range(81)] == [short(s) for s in range(81)], "a checkpoint before the decay resumes for a longer run"
    assert long(480) == 2.0 and long(500) == pytest.approx(0.2)


def test_a_stable_rate_without_a_length_of_the_decay_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stable is true, but length is null; give the length of the decay"):
        ScheduleConfig(decay="linear", stable=True)


DECAYS = [("none", False), *((decay, stable) for decay in ("linear", "cosine", "sqrt") for stable in (False, True))]


@given(st.integers(1, 50), st.integers(1, 300), st.floats(0, 5), st.sampled_from(DECAYS), st.floats(0, 1), st.floats(0.1, 9))
def test_rates_stay_between_zero_and_the_peak(
    per_epoch: int, steps: int, warmup: float, decay: tuple[str, bool], floor: float, length: float,
) -> None:  # fmt: skip
    kwargs = {"decay": decay[0], "stable": decay[1], "length": length if decay[1] else None}
    lr = make_lr_schedule(ScheduleConfig(warmup=warmup, floor=floor, **kwargs), 0.7, per_epoch, steps)
    rates = [lr(s) for s in range(steps + 3)]
    assert all(0 <= r <= 0.7 * (1 + 1e-12) for r in rates)
    after_warmup = [r for s, r in enumerate(rates) if s / per_epoch >= warmup]
    assert all(a >= b - 1e-12 for a, b in zip(after_warmup, after_warmup[1:]))
