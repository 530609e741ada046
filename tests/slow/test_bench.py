"""What docs/benchmarks.md and the README claim of speed and memory, measured here."""

import subprocess
import sys
import time

import pytest

from tests.slow.trying import ROOT, bench, until

pytestmark = pytest.mark.timing


def test_a_step_is_at_least_1_3_times_as_fast_as_that_of_a_plain_network() -> None:
    from hpcai.cli.bench import _steps

    for size, batch in ((64, 1), (64, 4), (128, 1)):
        until(lambda found: found["ratio_cpu"] >= 1.3, lambda size=size, batch=batch: _steps(size, batch, 3, "fp32"))


def test_training_at_128_needs_no_more_memory_than_a_plain_network() -> None:
    row = bench("cosmoflow", "--memory", "--sizes", "128")["memory"][0]
    assert row["ours_mb"] <= row["plain_mb"], row


def test_the_loop_costs_less_than_2_percent() -> None:
    words = ("cosmoflow", "--loop", "--sizes", "64", "--repeats", "5")
    until(lambda percent: percent < 2.0, lambda: bench(*words)["loop"]["overhead_percent"])


@pytest.mark.parametrize(
    "code, limit", [("import hpcai", 0.3), ("import hpcai.settings, hpcai.models.cosmoflow, hpcai.train, hpcai.dist", 0.6)]
)
def test_importing_costs_little_and_no_torch(code: str, limit: float) -> None:
    best = 9.0
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; import sys; print('torch' in sys.modules)"], cwd=ROOT, capture_output=True, text=True
        )
        best = min(best, time.perf_counter() - began)
        assert done.stdout.strip() == "False", done.stderr
    assert best < limit


def test_help_is_there_within_a_second() -> None:
    best = 9.0
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "apps.cosmoflow", "--help"], cwd=ROOT, capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0 and "step.lr" in done.stdout
    assert best < 1.0
