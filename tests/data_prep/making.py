"""What every simulated data set promises: the same bytes however it is made, growth, and refusals of what is wrong."""

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest

from data_prep import store
from hpcai.cli.forks import forked

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., int]


def runner(module: ModuleType) -> Run:
    """What calls a data set's commands, with one worker."""

    def run(command: str, *words: object, workers: str = "1") -> int:
        return int(module.main([command, *map(str, words), *(["--workers", workers] if command != "check" else [])]))

    return run


def content(out: Path) -> dict[str, bytes]:
    """All files that readers see."""
    paths = [*out.glob("[!.]*/*.h5"), *out.glob("[!.]*/index.json"), *out.glob("*.json")]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(paths)}


def loaded(path: Path) -> Any:
    return json.loads(path.read_text())


def whole(folder: Path) -> dict[str, np.ndarray]:
    """All datasets of a split, each in one piece, one file after the other."""
    files = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            assert all(file[name].chunks is None for name in file)
            files.append({name: file[name][...] for name in file})
    return {name: np.concatenate([file[name] for file in files]) for name in files[0]}


def remembering(owner: object, name: str) -> Callable[[], Iterator[None]]:
    """A fixture for a module's tests, in which a function is called once with each of its arguments."""

    @pytest.fixture(scope="module", autouse=True)
    def remembered() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, functools.cache(getattr(owner, name)))
            yield

    return remembered


def kill_after_a_file(run: Run, folder: Path, small: Sequence[str]) -> set[Path]:
    """The files of a simulation that is killed as soon as there is one."""
    with forked(lambda: run("simulate", folder, *small), folder.with_name(f"{folder.name}.out")) as forks:
        while not (found := set(folder.glob("[!.]*/*.h5"))) and forks.processes[0].is_alive():
            time.sleep(0.002)
    return found


def harm(out: Path, change: Callable[[h5py.File], object]) -> None:
    """Changes the first training file, and what the index says of its bytes."""
    path, index = min(out.glob("train/*.h5")), loaded(out / "train" / "index.json")
    with h5py.File(path, "r+") as file:
        change(file)
    index["files"][0] |= {"sha256": store.digest(path), "bytes": path.stat().st_size}
    (out / "train" / "index.json").write_text(json.dumps(index))


class Promises:
    """For a class of tests in a module with ``run`` and ``SMALL``."""

    run: Run
    small: list[str]
    more: tuple[list[str], int]
    """options of a larger set, and its files"""
    wrong: dict[str, str]
    """options that the folder of ``made`` cannot have, and what is told"""

    def test_workers_and_ranks_make_the_same_bytes(self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run("simulate", tmp_path / "two", *self.small, workers="2") == 0 and content(tmp_path / "two") == content(made)
        monkeypatch.setenv("PMI_SIZE", "2")
        for rank in "10":
            monkeypatch.setenv("PMI_RANK", rank)
            assert self.run("simulate", tmp_path / "ranks", *self.small) == 0
        assert content(tmp_path / "ranks") == content(made)

    def test_a_set_grows_and_does_not_shrink(self, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out, (words, files) = shutil.copytree(made, tmp_path / "more"), self.more
        assert self.run("simulate", out, *self.small, *words) == 0
        before, after = content(made), content(out)
        assert all(after[name] == data for name, data in before.items() if name.endswith(".h5"))
        assert sum(name.endswith(".h5") for name in after) == files
        assert self.run("simulate", out, *self.small) == 2 and "ask for at least as many" in capsys.readouterr().err

    def test_a_killed_run_goes_on_with_what_is_missing(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there, train = kill_after_a_file(self.run, tmp_path, self.small), tmp_path / "train"
        written, rows_file = list[Path](), store.rows_file
        monkeypatch.setattr(store, "rows_file", lambda path, *words: written.append(path) or rows_file(path, *words))
        (train / ".records").mkdir(parents=True, exist_ok=True)
        for half in (".x.h5.partial", ".records/.x.h5.json.0123.partial"):
            (train / half).touch()
        assert self.run("simulate", tmp_path, *self.small) == 0 and there and not there & {*written}
        assert content(tmp_path) == content(made) and not list(tmp_path.rglob("*.partial"))
        (lost, cut, unknown, *_), beside = sorted(train.glob("*.h5")), sorted(tmp_path.glob("templates/*.h5"))[1:2]
        for path in (lost, *beside):
            path.unlink()
        cut.write_bytes(b"cut off")
        (train / ".records" / f"{unknown.name}.json").unlink()                  # stopped between file and record
        written.clear()
        assert self.run("simulate", tmp_path, *self.small) == 0
        assert written == [lost, cut, *beside] and content(tmp_path) == content(made)

    def test_a_wrong_setting_is_refused(self, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
        out = shutil.copytree(made, tmp_path / "same")
        assert self.run("simulate", out, *self.small, *more.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and self.wrong[more] in error, error
        assert content(out) == content(made)
