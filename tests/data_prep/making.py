"""What every simulated data set promises: the same bytes however it is made, growth, and refusals of what is wrong."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import pytest

from data_prep import store
from tests.forks import forked

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


def kill_after(run: Run, first: str, folder: Path, small: Sequence[str]) -> None:
    """A simulation that is killed as soon as a file like ``first`` is there."""
    output = folder.with_name(f"{folder.name}.out")
    with forked(lambda: run("simulate", folder, *small), output) as forks:
        while not list(folder.glob(first)) and forks.processes[0].is_alive():
            time.sleep(0.002)


def harm(out: Path, change: Callable[[h5py.File], object]) -> None:
    """Changes the first training file, and what the index says of its bytes."""
    path, index = min(out.glob("train/*.h5")), json.loads((out / "train" / "index.json").read_text())
    with h5py.File(path, "r+") as file:
        change(file)
    index["files"][0] |= {"sha256": store.digest(path), "bytes": path.stat().st_size}
    (out / "train" / "index.json").write_text(json.dumps(index))


class Promises:
    """For a class of tests beside a fixture ``made``."""

    run: Run
    content: Content
    small: list[str]
    more: tuple[list[str], int]
    """options of a larger set, and its files"""
    wrong: dict[str, str]
    """options that the folder of ``made`` cannot have, and what is told"""

    def test_workers_and_ranks_make_the_same_bytes(self, made: Path, tmp_path: Path) -> None:
        workers_and_ranks_agree(self.run, self.content, made, tmp_path, self.small)

    def test_a_set_grows_and_does_not_shrink(self, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out, (words, files) = shutil.copytree(made, tmp_path / "more"), self.more
        assert self.run("simulate", out, *self.small, *words) == 0
        before, after = self.content(made), self.content(out)
        assert all(after[name] == data for name, data in before.items() if name.endswith(".h5"))
        assert sum(name.endswith(".h5") for name in after) == files
        assert self.run("simulate", out, *self.small) == 2 and "ask for at least as many" in capsys.readouterr().err

    def test_a_wrong_setting_is_refused(self, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
        out = shutil.copytree(made, tmp_path / "same")
        assert self.run("simulate", out, *self.small, *more.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and self.wrong[more] in error and self.content(out) == self.content(made)
