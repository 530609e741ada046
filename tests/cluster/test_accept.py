"""`hpcai accept` on a real Slurm of two nodes: jobs of ReFrame on one and two nodes, and a partition that is full."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.one_machine_slurm import OneMachineSlurm

pytest.importorskip("reframe", reason="ReFrame is not installed (pip install -e '.[acceptance]'): its jobs are NOT tested")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def accept(slurm: OneMachineSlurm, output: Path, *args: str) -> tuple[int, str, dict[str, dict[str, object]]]:
    """Return the exit code, the output, and the results by test."""
    command = [sys.executable, "-m", "hpcai.cli", "accept", "--site", "generic", "--output", str(output), *args]
    result = subprocess.run(command, env=slurm.env, cwd=output.parent, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    report = json.loads((output / "report.json").read_text())
    cases = {case["display_name"]: case for run in report["runs"] for case in run["testcases"]}
    return result.returncode, result.stdout, cases


def test_jobs_on_one_and_two_nodes(slurm: OneMachineSlurm, tmp_path: Path) -> None:
    code, _, cases = accept(slurm, tmp_path / "out", "--nodes", "2", "--only", "ranks", "resume", "HPCAI_dlrm %mode=small")
    assert code == 0 and {name: case["result"] for name, case in cases.items()} == {
        "HPCAI_ranks %scale=1_node": "pass", "HPCAI_ranks %scale=2_nodes": "pass", "HPCAI_resume %scale=1_node": "pass",
        "HPCAI_resume %scale=2_nodes": "pass", "HPCAI_dlrm %mode=small %scale=1_node": "pass",
    }  # fmt: skip
    two = cases["HPCAI_ranks %scale=2_nodes"]
    assert sorted(two["job_nodelist"]) == ["n1", "n2"] and two["num_tasks"] == 2  # type: ignore[call-overload]
    assert {"all_reduce", "all_to_all"} <= {name.rpartition(":")[2] for name in two["perfvalues"]}  # type: ignore[attr-defined]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "accepted" in page and "n1" in page and "n2" in page


def test_a_full_partition_is_told(slurm: OneMachineSlurm, tmp_path: Path) -> None:
    job = slurm.sbatch("sleep 100", "-N2", "--exclusive", wait=False).out
    try:
        slurm.wait_for(job, "RUNNING")
        code, _, cases = accept(slurm, tmp_path / "out", "--only", "ranks", "--pending", "5s")
    finally:
        slurm.command("scancel", job)
    assert code == 1 and [case["result"] for case in cases.values()] == ["fail"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "not accepted" in page and "waited in the queue for longer than --pending" in page
