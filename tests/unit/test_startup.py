"""Times of consecutive parts of the startup."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcai import startup
from hpcai.startup import Part


def test_parts_are_consecutive_and_add_up() -> None:
    start = time.perf_counter()
    with startup.clock(age=2.0):
        startup.begin("network")
        time.sleep(0.02)
        with startup.during("checkpoint"):
            time.sleep(0.01)
        time.sleep(0.01)
        startup.begin("first step")
        startup.begin("first step")
        time.sleep(0.03)
        assert startup.is_running()
        parts = startup.end(compiled=0.02)
        elapsed = 2 + time.perf_counter() - start
        assert not startup.is_running()
    assert sum(parts.values()) == pytest.approx(elapsed, abs=2e-3)
    assert parts["imports"] == pytest.approx(2, abs=5e-3) and parts["compile"] == 0.02
    for name, least in (("network", 0.03), ("checkpoint", 0.01), ("first step", 0.01)):
        assert least <= parts[name] < least + 0.02
    assert startup.combine_ranks([parts]) == {**dict.fromkeys(startup.combine_ranks([{}]), 0.0), **parts}, "no part is lost"


def test_nothing_is_recorded_without_a_clock_or_after_its_end() -> None:
    startup.begin("network")
    with startup.during("data"):
        assert not startup.is_running()
    with pytest.raises(ZeroDivisionError), startup.clock():
        raise ZeroDivisionError
    assert not startup.is_running()


def test_between_synchronizations_the_slowest_rank_counts() -> None:
    names: list[Part] = ["imports", "processes", "data", "network", "connections", "first batch", "compile", "first step"]
    ranks = [dict(zip(names, (3, 4, 1, 1, 9, 1, 20, 2), strict=True)), dict(zip(names, (6, 1, 8, 1, 2, 3, 10, 10), strict=True))]
    combined = startup.combine_ranks(ranks)
    assert {name: seconds for name, seconds in combined.items() if seconds} == {
        "imports": 6, "processes": 1, "data": 8, "network": 1, "connections": 2, "first batch": 1, "compile": 20, "first step": 2,
    }  # fmt: skip
    assert sum(combined.values()) == sum(ranks[0].values()) == sum(ranks[1].values()) == 41
    expected = "first step after 41.0 s: imports 6.0, processes 1.0, data 8.0, network 1.0, connections 2.0, first batch 1.0"
    assert startup.format_parts(combined) == f"{expected}, compile 20.0, first step 2.0"


def test_the_clock_starts_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(0.3); from hpcai import startup; print(startup.process_age())"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    start = time.perf_counter()
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert 0.3 <= float(process.stdout) <= time.perf_counter() - start + 0.02
    monkeypatch.setattr(startup, "Path", lambda name: Path("/nowhere"))
    assert 0 < startup.process_age() <= time.perf_counter() - startup._IMPORTED, "a system without /proc"
