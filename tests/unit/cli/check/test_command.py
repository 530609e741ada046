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
from hpcai.cli import progress
from hpcai.cli.check import command
from tests.apps import universes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return universes.write_universes(tmp_path_factory.mktemp("whole") / "set", size=8, train=3, validation=2)


def run(*words: Any, seconds: float = 0) -> int:
    return cli.main(["data", "check", *map(str, words), "--threads", "1", "--seconds", str(seconds)])


def nan(path: Path, row: int = 1) -> None:
    with h5py.File(path, "a") as file:
        file["target"][row, 2] = np.nan


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, hpcai.cli\n"
        "try: hpcai.cli.main(['data', 'check', '--help'])\n"
        "except SystemExit as end: print('code', end.code)\n"
        "print([name for name in ('torch', 'numpy', 'h5py', 'rich') if name in sys.modules])\n"
        "import hpcai.cli.check.examination, hpcai.cli.check.indexing\n"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("code 0\n[]\nFalse\n") and "--step-time SECONDS" in out


def test_findings_are_grouped_and_the_first_five_shown(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(made) == 0 and run(made, "--strict") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "train       3 files, 12 samples, 55.5 kB, no SHA-256 verified"
    assert out[1].strip() == "counts: <i2 (8, 8, 8, 4)"
    assert out[-1].startswith("fine: 5 files, 20 samples, 92.5 kB in ") and out[-1].endswith("; 0 errors, 0 warnings, 0 notes")
    for path in sorted(made.glob("*/*.h5")):
        nan(path)
    for i in range(3, 9):
        (made / "train" / f"universe_{i:05d}.h5").write_bytes((made / "train" / "universe_00000.h5").read_bytes()[:-1])
    assert run(made) == 1
    out = capsys.readouterr().out
    assert "error: nan (5)\n  train/universe_00000.h5 'target' row 1: row 1 of 4 holds NaN or infinity" in out
    assert "error: unreadable (6)\n" in out and "  and 1 more; --json FILE names all\n" in out and out.count("cannot be read") == 5
    assert out.splitlines()[-1].startswith("FAILED: 11 files,") and out.endswith("; 11 errors, 6 warnings, 0 notes\n")


def test_exit_codes(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(made, "--world", 2, "--batch", 8) == 0  # a note: some samples are left out
    assert "leaves 4 out of each epoch" in capsys.readouterr().out
    assert run(made, "--world", 3, "--batch", 8) == 1
    (made / "train" / "index.json").unlink()
    assert run(made) == 0 and run(made, "--strict") == 1
    assert "usable, with warnings: 5 files" in capsys.readouterr().out
    os.truncate(next((made / "validation").glob("*.h5")), 5000)  # its rows are those of the index
    assert run(made) == 1 and "FAILED: 5 files, 20 samples" in capsys.readouterr().out
    assert run(tmp_path / "nowhere") == 2
    assert capsys.readouterr().err.startswith(f"hpcai data check: {tmp_path}/nowhere: no such folder; name the folder")


@pytest.mark.parametrize(
    "words, text",
    [
        (["--world", "0"], "world: Input should be greater than 0"),
        (["--range", "counts=5:1"], "range counts=5:1: expected the least value first"),
        (["--range", "counts"], "expected FIELD=LOW:HIGH such as counts=0:32767"),
        (["--range", "=0:1"], "expected FIELD=LOW:HIGH"),
        (["--range", "a=x:1"], "expected FIELD=LOW:HIGH"),
        (["--range", "a=nan:1"], "expected FIELD=LOW:HIGH"),
        (["--json", "no/such/folder/out.json"], "out.json cannot be written: No such file or directory"),
    ],
)
def test_invalid_arguments_are_refused(made: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    try:
        code = run(made, *words)
    except SystemExit as end:
        code = end.code
    assert code == 2 and text in capsys.readouterr().err


def test_ranges(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command._range("a=b=-1.5:") == ("a=b", (-1.5, None)) and command._range("x=:7") == ("x", (None, 7))
    assert run(made, "--range", "counts=0:32767", "--range", "target=-1:1") == 0
    assert run(made, "--range", "counts=1:") == 1
    assert "such as 0, expected 1 to any" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["-", "file"])
def test_json_is_complete(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    path = made / "train" / "universe_00001.h5"
    nan(path)
    where = "-" if target == "-" else tmp_path / "out.json"
    assert run(made, "--json", where, "--batch", 4, "--step-time", 9, seconds=0.02) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out if target == "-" else (tmp_path / "out.json").read_text())
    assert ("FAILED" in captured.err) == (target == "-")
    assert found["summary"] == {"errors": 1, "warnings": 0, "notes": 0, "codes": {"nan": 1}}
    (finding,) = found["findings"]
    assert finding.pop("text").startswith("row 1 of 4 holds NaN")
    about = {"severity": "error", "code": "nan", "path": str(path), "dataset": "target", "row": 1, "repairable": False}
    assert finding == {**about, "place": "train/universe_00001.h5 'target' row 1"}
    assert found["splits"][0]["division"]["batches"] == 3 and found["splits"][0]["fields"]["counts"] == "<i2 (8, 8, 8, 4)"
    assert found["figures"]["rate"]["needed_per_node"]["samples_per_s"] == pytest.approx(4 / 9)
    assert {"direct", "buffered", "bytes_per_sample"} <= found["figures"]["rate"].keys()


def test_names_are_escaped_for_the_terminal(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = b"\xff\x1b[31m[red].h5"
    (Path(os.fsdecode(os.fsencode(made / "train") + b"/" + name))).write_bytes(b"no HDF5")
    assert run(made) == 1
    out = capsys.readouterr().out
    assert "train/\\udcff\\x1b[31m[red].h5" in out and "\x1b" not in out


def test_measured_and_needed_rates_are_shown(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(made, "--quick", "--batch", 1_000_000, "--step-time", 0.001, "--nodes", 2, seconds=0.02) == 1
    out = capsys.readouterr().out
    assert "random rows, buffered: " in out and "needed by each node: 2.31e+03 GB/s, 500,000,000.0 samples/s" in out
    assert "error: rate (1)" in out and "FAILED: sizes and headers of 5 files" in out


def test_progress_is_lines_or_a_bar_on_a_terminal(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(made)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EVERY", 0)
    run(made)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("reading: ") and line.endswith(" of 92.5 kB") for line in lines)
    run(made, "--quick")
    assert "headers: 5 of 5 files" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(made) == 0
    captured = capsys.readouterr()
    assert "reading" in captured.err and "fine: 5 files" in captured.out


def test_ctrl_c_ends_it_and_its_children(made: Path) -> None:
    code = (
        "import hpcai.cli, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background inherits that it is ignored
        f"sys.exit(hpcai.cli.main(['data', 'check', {str(made)!r}, '--seconds', '60']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (below := below_it(child.pid)) and time.monotonic() < end:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "") and err == "hpcai data check: interrupted; nothing was left behind\n"
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)


def below_it(pid: int) -> list[str]:
    return [line for task in Path(f"/proc/{pid}/task").glob("*/children") for line in task.read_text().split()]
