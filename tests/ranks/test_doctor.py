"""`hpcai doctor --ranks` as a job of real processes: the report, faulty ranks by name, and one exit code for all."""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

import hpcai.cli.doctor.job  # noqa: F401  # imported once, not in every forked rank
from tests import fork_script
from tests.ranks.test_launch_mpi import PROGRAMS, ProcessResult, run_forked

pytestmark = pytest.mark.timeout(120)


def rank_0_output(results: list[ProcessResult], exit_code: int) -> str:
    """Return the output of rank 0. Assert that the others print nothing, and that all exit with ``exit_code``."""
    assert [result.exit_code for result in results] == [exit_code] * len(results)
    assert not any(result.stdout for result in results[1:])
    return results[0].stdout


def test_four_ranks_without_a_fault(tmp_path: Path) -> None:
    directory, path = tmp_path / "out", tmp_path / "report.json"
    directory.mkdir()
    start, args = time.monotonic(), ["--directory", str(directory), "--limit", "15", "--json", str(path)]
    results = run_forked(4, "doctor.py", "none", "0", *args)
    text = rank_0_output(results, 0)
    assert time.monotonic() - start < 60
    assert text.startswith("hpcai doctor: 4 ranks on 1 node, RANK and WORLD_SIZE, ")
    assert re.search(r"^directory +\S+ \(.*\): .* free, write .*/s, read .*/s, seen by all ranks$", text, re.MULTILINE)
    assert re.search(r"^links of a node +6 by gloo: ", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith(("fine: 0 errors", "usable, with warnings: 0 errors"))
    assert os.listdir(directory) == []
    report = json.loads(path.read_text())
    assert sorted((link["one"], link["other"]) for link in report["network"]["links"]) == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [member["rank"] for member in report["members"]] == [0, 1, 2, 3] and report["summary"]["errors"] == 0
    assert {folder["seen"] for folder in report["storage"]["run"].values()} == {True}
    assert set(report["network"]["paces"]) == {"0", "1", "2", "3"} and "8" in report["network"]["sums"]


def test_another_version_is_named(tmp_path: Path) -> None:
    text = rank_0_output(run_forked(2, "doctor.py", "other", "1", "--directory", str(tmp_path), "--limit", "12"), 1)
    own = re.escape(sys.version.split()[0])
    assert re.search(rf"^  rank 1 on \S+: Python is 3\.9\.0, expected {own} as on rank 0 on \S+; give all", text, re.MULTILINE)


@pytest.mark.slow
def test_ranks_that_hang_are_named_at_the_limit(tmp_path: Path) -> None:
    """Rank 1 holds the GIL; rank 2 blocks only its main thread."""
    path = tmp_path / "report.json"
    start = time.monotonic()
    results = run_forked(3, "doctor.py", "hang", "1", "--directory", str(tmp_path), "--limit", "6", "--json", str(path))
    assert time.monotonic() - start < 40
    text = rank_0_output(results, 1)
    unresponsive = r"rank 1 on \S+ does not respond: stopped, or blocked by a driver or a file system; check these nodes"
    stuck = r"rank 2 on \S+ is still at pace for \d+ s, and the others wait for it"
    assert re.search(rf"^  the job: not done after 6 s: {unresponsive}; {stuck}$", text, re.MULTILINE)
    assert json.loads(path.read_text())["findings"][0]["code"] == "silent"
    assert text.startswith("hpcai doctor: 3 ranks"), "results so far are shown"


@pytest.mark.slow
def test_ranks_that_do_not_connect_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    out, err, args = tmp_path / "out", tmp_path / "err", ("none", "0", "--limit", "5")
    process = fork_script.fork_script(PROGRAMS / "doctor.py", *args, out=out, err=err, **environ, MASTER_PORT=port)
    process.join(60)
    assert process.exitcode == 1
    assert "hpcai doctor: not done after 5 s: ranks 1-2 did not connect; check their processes and nodes" in err.read_text()
