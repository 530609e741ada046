"""The directory of a run: one owner at a time, and errors before the first step."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcai import dist
from hpcai.durable import lock_directory, unlock_directory
from hpcai.errors import CheckpointError
from hpcai.settings import ReportConfig, RunConfig
from hpcai.train import Run


def run_in(folder: Path | None) -> Run:
    return Run("test", RunConfig(report=ReportConfig(directory=folder, sinks=())), dist.single_process())


HOLD = """
import sys
from pathlib import Path
from hpcai.durable import lock_directory
file = lock_directory(Path(sys.argv[1]))
print(1, flush=True)
input()
"""


def test_a_second_run_in_a_directory_is_refused_with_host_and_process_of_the_first(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "1\n"
    with run_in(tmp_path) as second, pytest.raises(CheckpointError) as refused:
        second.begin()
    assert f"process {first.pid} on {os.uname().nodename}" in str(refused.value)
    assert not (tmp_path / "settings.yaml").exists(), "a refused run changes no file"
    first.kill()
    first.wait()
    with run_in(tmp_path) as third:
        third.begin()
        with run_in(tmp_path) as fourth, pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
            fourth.begin()
    with run_in(tmp_path) as last:
        last.begin()


def test_a_lock_whose_file_was_removed_before_it_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner before removes its file after this one opened it: a lock on the removed file would protect nothing."""
    first, flock, opened = lock_directory(tmp_path), fcntl.flock, []

    def flock_after_the_end_of_the_first(file: Any, operation: int) -> None:
        opened.append(os.fstat(file.fileno()).st_ino)
        if len(opened) == 1:
            unlock_directory(first)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_the_end_of_the_first)
    second = lock_directory(tmp_path)
    assert len(opened) == 2 and os.path.samestat(os.fstat(second.fileno()), os.stat(tmp_path / ".owner"))
    with pytest.raises(CheckpointError, match="another run uses this directory .*; wait for its end, or choose another OUT"):
        lock_directory(tmp_path, "choose another OUT")
    unlock_directory(second)


def test_an_unusable_directory_is_reported_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with run_in(tmp_path) as run, pytest.raises(CheckpointError, match="checkpoints: File exists; choose another report.directory"):
        run.begin()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".owner").mkdir()
    with run_in(tmp_path / "other") as run, pytest.raises(CheckpointError, match=".owner: Is a directory; choose another report"):
        run.begin()
