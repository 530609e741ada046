"""NCCL in a process group of one rank: all-reduce in a captured step, and a shutdown that does not wait for graphs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs/one_rank.py"
MAX_SHUTDOWN = 30.0  # seconds from the last step to the end of the process


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("diverge", 1)])
def test_a_process_with_captured_sums_ends(ending: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, str(PROGRAM), ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])})  # fmt: skip
    try:
        output, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"the process does not end: {output}\n{errors}") from None
    end_time = time.time()
    report = json.loads(output.splitlines()[-1]) if output else pytest.fail(errors)
    assert process.returncode == code, errors
    assert end_time - report["time"] < MAX_SHUTDOWN
    assert report["calls"] == 3 * report["buckets"] > 3, "two eager steps and the capture call all-reduce, replays do not"
    assert len(set(report["losses"])) == 5
    assert ("DivergedError: step 6" in errors) is (ending == "diverge")
