"""What every simulated data set promises: the same bytes however it is made."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., int]
Content = Callable[[Path], dict[str, bytes]]


def workers_and_ranks_agree(run: Run, content: Content, made: Path, folder: Path, small: Sequence[str]) -> None:
    """Two workers, and two ranks one after the other, write what one process wrote."""
    assert run("simulate", folder / "two", *small, workers="2") == 0 and content(folder / "two") == content(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMI_SIZE", "2")
        for rank in "10":
            patch.setenv("PMI_RANK", rank)
            assert run("simulate", folder / "ranks", *small) == 0
    assert content(folder / "ranks") == content(made)


def kill_after(first: str, name: str, folder: Path, small: Sequence[str]) -> None:
    """``data_prep.name simulate`` killed as soon as a file like ``first`` is there."""
    words = [sys.executable, "-m", f"data_prep.{name}", "simulate", str(folder), *small, "--workers", "1"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list(folder.glob(first)) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
