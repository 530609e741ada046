"""`hpcai doctor --ranks` as a job of real processes: what is fine, and the rank that is not, named, with one exit code for all."""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

import hpcai.cli.doctor.job  # noqa: F401  # once here, not in every forked rank
from tests import fork_script
from tests.ranks.test_launch_mpi import PROGRAMS, Ended, run_forked

pytestmark = pytest.mark.timeout(120)


def page(ended: list[Ended], code: int) -> str:
    """What rank 0 has said; the others say nothing."""
    assert [each.code for each in ended] == [code] * len(ended)
    assert not any(each.out for each in ended[1:])
    return ended[0].out


def test_four_ranks_that_are_alike(tmp_path: Path) -> None:
    out, told = tmp_path / "told", tmp_path / "told.json"
    out.mkdir()
    began, words = time.monotonic(), ["--directory", str(out), "--limit", "15", "--json", str(told)]
    ended = run_forked(4, "doctor.py", "none", "0", *words)
    text = page(ended, 0)
    assert time.monotonic() - began < 60
    assert text.startswith("hpcai doctor: 4 ranks on 1 node, RANK and WORLD_SIZE, ")
    assert re.search(r"^directory +\S+ \(.*\): .* free, write .*/s, read .*/s, seen by all ranks$", text, re.MULTILINE)
    assert re.search(r"^links of a node +6 by gloo: ", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith(("fine: 0 errors", "usable, with warnings: 0 errors"))
    assert os.listdir(out) == []
    found = json.loads(told.read_text())
    assert sorted((link["one"], link["other"]) for link in found["network"]["links"]) == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [member["rank"] for member in found["members"]] == [0, 1, 2, 3] and found["summary"]["errors"] == 0
    assert {folder["seen"] for folder in found["storage"]["run"].values()} == {True}
    assert set(found["network"]["paces"]) == {"0", "1", "2", "3"} and "8" in found["network"]["sums"]


def test_another_version_is_named(tmp_path: Path) -> None:
    text = page(run_forked(2, "doctor.py", "other", "1", "--directory", str(tmp_path), "--limit", "12"), 1)
    own = re.escape(sys.version.split()[0])
    assert re.search(rf"^  rank 1 on \S+: Python is 3\.9\.0, expected {own} as on rank 0 on \S+; give all", text, re.MULTILINE)


def test_ranks_that_hang_are_named_at_the_limit(tmp_path: Path) -> None:
    """Rank 1 holds its interpreter, rank 2 only its main thread."""
    told = tmp_path / "told.json"
    began = time.monotonic()
    ended = run_forked(3, "doctor.py", "hang", "1", "--directory", str(tmp_path), "--limit", "8", "--json", str(told))
    assert time.monotonic() - began < 40
    shown = page(ended, 1)
    held = r"rank 1 on \S+ does not respond: stopped, or blocked by a driver or a file system; check these nodes"
    stuck = r"rank 2 on \S+ is still at pace for \d+ s, and the others wait for it"
    assert re.search(rf"^  the job: not done after 8 s: {held}; {stuck}$", shown, re.MULTILINE)
    assert json.loads(told.read_text())["findings"][0]["code"] == "silent"
    assert shown.startswith("hpcai doctor: 3 ranks"), "what is known by then is shown"


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    out, err, words = tmp_path / "out", tmp_path / "err", ("none", "0", "--limit", "5")
    process = fork_script.fork_script(PROGRAMS / "doctor.py", *words, out=out, err=err, **place, MASTER_PORT=port)
    process.join(60)
    assert process.exitcode == 1
    assert "hpcai doctor: not done after 5 s: ranks 1-2 did not connect; check their processes and nodes" in err.read_text()
