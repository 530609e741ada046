"""`hpcai accept` on this machine, by ReFrame's local scheduler: faults that are planted turn it red and are named."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.reference_data import ROOT

pytest.importorskip("reframe", reason="ReFrame is not installed (pip install -e '.[acceptance]'): hpcai accept is NOT tested")

# Rank 1 multiplies three times as slowly, as with a low clock. The loss of DLRM is five percent too high.
FAULTS = """
import importlib.abc, importlib.machinery, os, sys

def slow(network):
    multiply = network.torch.Tensor.__matmul__
    network.torch.Tensor.__matmul__ = lambda *args: [multiply(*args) for _ in range(3)][0]

def wrong(objective):
    loss = objective.loss
    objective.loss = lambda *args: (found := loss(*args)) | {"loss": 1.05 * found["loss"]}

faults = {"hpcai.models.dlrm.objective": wrong}
if os.environ.get("PMI_RANK") == "1":
    faults["hpcai.cli.doctor.network"] = slow

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in faults:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), faults[name](module))
        return spec

sys.meta_path.insert(0, Finder())
"""


def accept(folder: Path, *args: str, path: Path | None = None) -> tuple[int, str, dict[str, str]]:
    """Return the exit code, the output, and the reasons of failures by test, "" for a test that has passed."""
    command = [sys.executable, "-m", "hpcai.cli", "accept", "--site", "local", "--output", str(folder), *args]
    environ = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}" if path else str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environ, cwd=folder.parent, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    report = json.loads((folder / "report.json").read_text())
    cases = [*report.get("restored_cases", []), *(case for run in report["runs"] for case in run["testcases"])]
    return result.returncode, result.stdout, {case["display_name"].split()[0]: case["fail_reason"] or "" for case in cases}


@pytest.mark.slow
def test_a_slow_rank_and_a_wrong_number_are_named(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/sitecustomize.py").write_text(FAULTS)
    (tmp_path / "out").mkdir()
    kept = {"display_name": "HPCAI_bert %mode=small %scale=1_node", "system": "local", "partition": "default", "result": "pass",
            "fail_reason": None, "job_nodelist": ["here"], "num_tasks": 2, "outputdir": "", "stagedir": "", "job_stdout": "",
            "perfvalues": {"local:default:throughput": [12.5, 0, None, None, "samples/s", "pass"]}}  # fmt: skip
    (tmp_path / "out/passed.jsonl").write_text(json.dumps(kept) + "\n")  # of a session that was cut off
    tests = ["--quick", "--per-node", "2", "--only", "HPCAI_ranks", "HPCAI_dlrm", "HPCAI_bert"]
    code, out, reasons = accept(tmp_path / "out", *tests, path=tmp_path / "faults")
    assert code == 1 and "goes on with a session that was cut off: 1 tests passed before" in out
    assert set(reasons) == {"HPCAI_bert", "HPCAI_ranks", "HPCAI_dlrm"} and not reasons["HPCAI_bert"]
    assert re.search(r"rank 1 on node \S+ computes [\d.]+ GFLOP/s, \d\d % of rank 0 on node", reasons["HPCAI_ranks"])
    assert re.search(r"train\.loss is [\d.]+, expected [\d.]+ within \d", reasons["HPCAI_dlrm"])
    page = (tmp_path / "out/report.html").read_text()
    assert "not accepted" in page and "What failed" in page and "rank 1 on node" in page
    assert not (tmp_path / "out/passed.jsonl").exists()


@pytest.mark.claim
def test_this_machine_is_accepted_in_six_minutes(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, reasons = accept(tmp_path / "out", "--quick")
    assert code == 0 and len(reasons) >= 16 and not any(reasons.values()), reasons
    assert time.monotonic() - start < 360
    assert "not accepted" not in (tmp_path / "out/report.html").read_text()
    with tarfile.open(tmp_path / "out/mlperf.tar.gz") as archive:
        names = archive.getnames()
    assert sum(name.endswith("result_0.txt") for name in names) >= 11 and "local/cosmoflow-small-1-node/verdict.json" in names
