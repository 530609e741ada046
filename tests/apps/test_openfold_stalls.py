"""What ``hpcai bench openfold stalls`` says of steps that wait: the real loaders beside what is computed of them."""

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from apps.openfold import stalls
from hpcai.cli import trial
from tests.apps.running import ROOT

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def test_strict_order_waits_for_a_late_sample_and_ready_order_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(random: Any, count: Any, **words: Any) -> np.ndarray:
        times = np.full(count, 0.2)
        times[..., 10] = 16.0  # of 24 steps of 1 s in the first epoch
        return times

    small = {"_FASTER": 20, "_EPOCH": 24, "_SECONDS": 2.4, "_WORKERS": 2, "_COPIES": (1, 2), "_TAILS": ((1.0, 10.0),),
             "_CASES": (stalls.Case("few", 1.0, 10**9, False),) * 3, "heavy_tail": late}  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(stalls, name, value)
    rows = trial.find("openfold").parts["stalls"](None, 1)
    strict, ready, nothing, by_torch = (
        [row for row in rows if row.get("loader") == name] for name in ("strict", "ready", "nothing to prepare", "torch")
    )
    assert len(strict) == len(ready) == len(nothing) == len(by_torch) == 3 and strict[0]["ahead"] == 4
    for one, other in zip(strict, ready):
        assert one["computed_longest"] > 5 and one["longest"] == pytest.approx(one["computed_longest"], abs=3)
        assert other["computed_of_steps"] == 0 and other["longest"] < 3
    together = [row for row in rows if "loader" not in row]
    assert [row["copies"] for row in together] == [1, 2] * 5 and all(row["strict_of_time"] == 0 for row in together)


def test_shares_are_of_all_steps_and_of_all_time() -> None:
    found = stalls.told(np.array([0, 0.005, 2.0, 0.0]), 1.0)
    assert found == {"of_steps": 0.25, "of_time": round(2.005 / 6.005, 4), "longest": 2.0}


def test_a_worker_process_reads_the_samples_without_torch() -> None:
    source = pickle.dumps(stalls.Sleeping(np.zeros(stalls._EPOCH)))
    code = f"import pickle, sys; print(pickle.loads({source!r}).sample(3, 1), 'torch' in sys.modules)"
    words = {"capture_output": True, "text": True, "check": True, "cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    assert subprocess.run([sys.executable, "-c", code], **words).stdout.split() == ["3", "False"]  # type: ignore[call-overload]
