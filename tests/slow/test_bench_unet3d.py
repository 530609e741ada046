"""What docs/benchmarks.md claims of the 3D U-Net's step, measured here."""

import pytest

from hpcai.cli.bench_unet3d import _memory, _steps
from tests.slow.trying import until

pytestmark = [pytest.mark.timing, pytest.mark.usefixtures("one_thread")]


def test_a_step_is_no_slower_than_that_of_a_plain_network_in_its_better_layout() -> None:
    until(lambda row: row["ratio"] >= 1 / 1.05, lambda: _steps(64, 3, "fp32"))


def test_training_needs_little_more_memory_than_a_plain_network() -> None:
    row = _memory(64, "fp32")
    assert row["ours_mb"] <= 1.15 * row["contiguous_mb"], row
