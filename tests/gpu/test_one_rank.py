"""NCCL in a process group of one: sums in a captured step, and an end that does not wait for its graphs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs/one_rank.py"
SOON = 30.0  # seconds from the last step to the end of the process


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("diverge", 1)])
def test_a_process_with_captured_sums_ends(how: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, str(PROGRAM), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])})  # fmt: skip
    try:
        out, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        raise AssertionError(f"it does not end: {out}\n{errors}") from None
    ended = time.time()
    told = json.loads(out.splitlines()[-1]) if out else pytest.fail(errors)
    assert process.returncode == code, errors
    assert ended - told["time"] < SOON
    assert told["asked"] == 3 * told["buckets"] > 3, "two steps and what is recorded ask for sums, replays do not"
    assert len(set(told["losses"])) == 5
    assert ("DivergedError: step 6" in errors) is (how == "diverge")
