"""What docs/benchmarks.md claims of DeepCAM's step, measured here."""

import pytest

from hpcai.cli.bench_deepcam import _group, _memory, _steps
from hpcai.train.choices import fast_bf16
from tests.slow.trying import until

pytestmark = [pytest.mark.timing, pytest.mark.usefixtures("one_thread")]


def test_a_step_is_faster_than_that_of_a_plain_network() -> None:
    until(lambda row: row["ratio"] >= 1.0, lambda: _steps((384, 576), 1, 3, "fp32"))


def test_with_the_precision_that_an_app_takes_it_is_much_faster() -> None:
    import torch

    if not fast_bf16(torch.device("cpu")):
        pytest.skip("this CPU does not compute in bfloat16 at full speed")
    until(lambda row: row["ratio"] >= 1.3, lambda: _steps((192, 288), 2, 3, "auto"))


def test_training_needs_no_more_memory_than_a_plain_network() -> None:
    row = _memory((384, 576), 1, "fp32")
    assert row["ours_mb"] <= 1.01 * row["plain_mb"], row


def test_batch_norm_over_a_group_costs_less_than_as_syncbatchnorm_does_it() -> None:
    # The large layer; for a small one both cost what their messages do.
    until(lambda row: row["group_overhead"] < row["sync_overhead"], lambda: _group(4)[0])
