"""``hpcai data check``: output, exit codes and JSON; a usage error or Ctrl-C prints no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcai import cli
from hpcai.cli import check, progress
from tests.apps import universes
from tests.reference_data import load_json
from tests.unit.cli.check.datasets import child_pids


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return universes.write_universes(tmp_path_factory.mktemp("pristine") / "set", size=8, train=3, validation=2)


def run(*args: Any, seconds: float = 0) -> int:
    return cli.main(["data", "check", *map(str, args), "--threads", "1", "--seconds", str(seconds)])


def write_nan(path: Path, row: int = 1) -> None:
    with h5py.File(path, "a") as file:
        file["target"][row, 2] = np.nan


def test_an_examination_does_not_import_torch() -> None:
    code = "import sys, hpcai.cli.check.examination, hpcai.cli.check.indexing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_findings_are_grouped_and_the_first_five_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root) == 0 and run(root, "--strict") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "train       3 files, 12 samples, 55.5 kB, no SHA-256 verified"
    assert out[1].strip() == "counts: <i2 (8, 8, 8, 4)"
    assert out[-1].startswith("fine: 5 files, 20 samples, 92.5 kB in ") and out[-1].endswith("; 0 errors, 0 warnings, 0 notes")
    for path in sorted(root.glob("*/*.h5")):
        write_nan(path)
    for i in range(3, 9):
        (root / "train" / f"universe_{i:05d}.h5").write_bytes((root / "train" / "universe_00000.h5").read_bytes()[:-1])
    assert run(root) == 1
    out = capsys.readouterr().out
    assert "error: nan (5)\n  train/universe_00000.h5 'target' row 1: row 1 of 4 holds NaN or infinity" in out
    assert "error: unreadable (6)\n" in out and "  and 1 more; --json FILE names all\n" in out and out.count("cannot be read") == 5
    assert out.splitlines()[-1].startswith("FAILED: 11 files,") and out.endswith("; 11 errors, 6 warnings, 0 notes\n")


def test_exit_codes(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "--world", 2, "--batch", 8) == 0  # a note: some samples are left out
    assert run(root, "--batch", 12) == 0  # 8 samples of validation are one batch, which need not be full
    assert "leaves 4 out of each epoch" in capsys.readouterr().out
    assert run(root, "--world", 3, "--batch", 8) == 1
    (root / "train" / "index.json").unlink()
    assert run(root) == 0 and run(root, "--strict") == 1
    assert "usable, with warnings: 5 files" in capsys.readouterr().out
    os.truncate(next((root / "validation").glob("*.h5")), 5000)  # its rows agree with the index
    assert run(root) == 1 and "FAILED: 5 files, 20 samples" in capsys.readouterr().out
    assert run(tmp_path / "nowhere") == 2
    assert capsys.readouterr().err.startswith(f"hpcai data check: {tmp_path}/nowhere: no such folder; name the folder")


@pytest.mark.parametrize("args, text", load_json("refused/check_arguments"))
def test_invalid_arguments_are_refused(root: Path, capsys: pytest.CaptureFixture[str], args: list[str], text: str) -> None:
    try:
        code = run(root, *args)
    except SystemExit as end:
        code = end.code
    assert code == 2 and text in capsys.readouterr().err


def test_ranges(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check._range("a=b=-1.5:") == ("a=b", (-1.5, None)) and check._range("x=:7") == ("x", (None, 7))
    assert run(root, "--range", "counts=0:32767", "--range", "target=-1:1") == 0
    assert run(root, "--range", "counts=1:") == 1
    assert "such as 0, expected 1 to any" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["-", "file"])
def test_json_is_complete(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    path = root / "train" / "universe_00001.h5"
    write_nan(path)
    output = "-" if target == "-" else tmp_path / "out.json"
    assert run(root, "--json", output, "--batch", 4, "--step-time", 9, seconds=0.02) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out if target == "-" else (tmp_path / "out.json").read_text())
    assert ("FAILED" in captured.err) == (target == "-")
    assert document["summary"] == {"errors": 1, "warnings": 0, "notes": 0, "codes": {"nan": 1}}
    (finding,) = document["findings"]
    assert finding.pop("text").startswith("row 1 of 4 holds NaN")
    expected = {"severity": "error", "code": "nan", "path": str(path), "dataset": "target", "row": 1, "repairable": False}
    assert finding == {**expected, "place": "train/universe_00001.h5 'target' row 1"}
    assert document["splits"][0]["division"]["batches"] == 3 and document["splits"][0]["fields"]["counts"] == "<i2 (8, 8, 8, 4)"
    assert document["figures"]["rate"]["needed_per_node"]["samples_per_s"] == pytest.approx(4 / 9)
    assert {"direct", "buffered", "bytes_per_sample"} <= document["figures"]["rate"].keys()


def test_names_are_escaped_for_the_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = b"\xff\x1b[31m[red].h5"
    (Path(os.fsdecode(os.fsencode(root / "train") + b"/" + name))).write_bytes(b"no HDF5")
    assert run(root) == 1
    out = capsys.readouterr().out
    assert "train/\\udcff\\x1b[31m[red].h5" in out and "\x1b" not in out


def test_measured_and_needed_rates_are_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "--quick", "--batch", 1_000_000, "--step-time", 0.001, "--nodes", 2, seconds=0.02) == 1
    out = capsys.readouterr().out
    assert "random rows, buffered: " in out and "needed by each node: 2.31e+03 GB/s, 500,000,000.0 samples/s" in out
    assert "error: rate (1)" in out and "FAILED: sizes and headers of 5 files" in out


def test_progress_is_lines_or_a_bar_on_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(root)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EVERY", 0)
    run(root)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("reading: ") and line.endswith(" of 92.5 kB") for line in lines)
    run(root, "--quick")
    assert "headers: 5 of 5 files" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(root) == 0
    captured = capsys.readouterr()
    assert "reading" in captured.err and "fine: 5 files" in captured.out


def test_ctrl_c_ends_the_command_and_its_children(root: Path) -> None:
    code = (
        "import hpcai.cli, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background process inherits an ignored SIGINT
        f"sys.argv[1:] = ['data', 'check', {str(root)!r}, '--seconds', '60']\n"
        "sys.exit(hpcai.cli.main())"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (children := child_pids(child.pid)) and time.monotonic() < end:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "") and err == "hpcai data check: interrupted by Ctrl-C; nothing was left behind\n"
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
