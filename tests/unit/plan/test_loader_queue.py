"""The simulated queue of the loader: cases computed by hand, and the capacity of a real loader."""

import time
from typing import Any

import numpy as np
import pytest

from hpcai.data import Loader
from hpcai.dist.launch import single_process
from hpcai.plan.loader_queue import heavy_tail, simulate_waits
from tests.index_source import IndexSource

SECONDS = np.array([1.0, 1, 5, 1, 1, 1])
FAST = np.array([1.0, 1, 1, 3, 3, 3])


def test_a_step_waits_for_no_straggler_while_other_samples_are_ready() -> None:
    # Samples 0 and 1 are ready at 1, when 2 (until 6) and 3 begin; 3, 4 and 5 are delivered before 2.
    assert simulate_waits(SECONDS, 2, workers=2, capacity=3).tolist() == [1, 0, 0, 0, 0, 0]
    assert simulate_waits(np.array([1.0, 1, 1, 9, *12 * [1]]), 1, workers=2, capacity=4).tolist() == [1] + 15 * [0]


def test_workers_are_idle_when_the_queue_is_full() -> None:
    # Each begins when the previous one is delivered, at 0, 1, 2, 3, 6 and 9; sample 5 is ready at 12 and due at 11.
    assert simulate_waits(FAST, 2, workers=2, capacity=1).tolist() == [1, 0, 0, 0, 0, 1]
    assert simulate_waits(FAST, 2, workers=2, capacity=2).tolist() == [1, 0, 0, 0, 0, 0]


def test_replicas_start_each_step_together() -> None:
    other = np.array([1.0, 5, 1, 1, 1, 1])  # 1 is due at 3 and ready at 6, when it is 3 s late; then FAST is in time
    assert simulate_waits(other, 2, 2, 1).tolist() == [1, 3, 0, 0, 0, 0]
    assert simulate_waits(np.stack([other, FAST]), 2, 2, 1).tolist() == [1, 3, 0, 0, 0, 0]
    assert simulate_waits(np.stack([SECONDS] * 3), 2, 2, 3).tolist() == simulate_waits(SECONDS, 2, 2, 3).tolist()


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_the_simulated_capacity_is_that_of_the_loader(order: Any) -> None:
    """Batches of 2: one is delivered, one is taken for the next step, and the others are prefetched."""
    begun: list[int] = []

    class RecordingSource(IndexSource):
        def sample(self, index: int, epoch: int) -> np.ndarray:
            begun.append(index)
            return np.zeros(100)

    for prefetch, expected in ((800, 2 * 2 + 3), (8000, 10), (9599, 11)):  # the first is what a plan takes
        begun.clear()
        with Loader(RecordingSource(60), 2, single_process(), name="t", workers=3, prefetch=prefetch, order=order) as loader:
            batches = loader.epoch(0)
            next(batches)
            until = time.monotonic() + 10
            while len(begun) < expected + 4 and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(0.05)  # no further sample begins
            assert len(begun) == expected + 4
            batches.close()


def test_the_heavy_tail_has_the_documented_distribution() -> None:
    seconds = heavy_tail(np.random.default_rng(0), 20_000)
    slow = seconds[seconds >= 1]
    assert len(slow) / 20_000 == pytest.approx(0.03, abs=0.004) and slow.max() < 10
    assert np.median(slow) == pytest.approx(5.5, abs=0.5)
    assert np.median(seconds) == pytest.approx(0.1, rel=0.05) and heavy_tail(np.random.default_rng(0), (3, 5)).shape == (3, 5)
