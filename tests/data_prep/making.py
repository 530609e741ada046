"""What every simulated data set promises: the same bytes however it is made, growth, and refusals of what is wrong."""

import contextlib
import functools
import io
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
from hpcai.cli.subprocesses import fork_processes
from hpcai.data.index import write_index

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


def plain(fields: store.Fields) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Types and shapes of rows, as readers ask for them."""
    return {name: (field.dtype, field.shape) for name, field in fields.items()}


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
    """The files of a simulation that is killed as soon as there is one with its record."""
    with fork_processes(lambda: run("simulate", folder, *small), folder.with_name(f"{folder.name}.out")) as forks:
        while not (records := [*folder.glob("[!.]*/.records/*.json")]) and forks.processes[0].is_alive():
            time.sleep(0.002)
    return {path.parents[1] / path.stem for path in records}


def put(name: str, where: Any, value: Any) -> Callable[[h5py.File], None]:
    """A change of a dataset, for ``harm``."""

    def change(file: h5py.File) -> None:
        file[name][where] = value

    return change


def harm(out: Path, change: Callable[[h5py.File], object]) -> None:
    """Changes the first training file, and what the index says of its bytes."""
    path, index = min(out.glob("train/*.h5")), loaded(out / "train" / "index.json")
    with h5py.File(path, "r+") as file:
        change(file)
    index["files"][0] |= {"sha256": store.digest(path), "bytes": path.stat().st_size}
    write_index(out / "train", {name: value for name, value in index.items() if name != "format"})


def found_harm(run: Run, made: Path, out: Path, change: Callable[[h5py.File], object], *words: str) -> bool:
    """Whether the check of a changed copy ends with an error that it names; it draws no picture of it."""
    harm(shutil.copytree(made, out), change)
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = run("check", out, "--no-picture")
    assert code == 1 and all(word in told.getvalue() for word in ("wrong: ", *words)), told.getvalue()
    return True


class Promises:
    """For a class of tests in a module with ``run`` and ``SMALL``. What the frame does alike for all is tested of cosmoflow."""

    run: Run
    small: list[str]
    wrong: dict[str, str]
    """options that the folder of ``made`` cannot have, and what is told"""

    def test_workers_make_the_same_bytes_and_the_check_draws(self, made: Path, tmp_path: Path, capsys: Any) -> None:
        small = [word for word in self.small if word != "--no-check"]
        assert self.run("simulate", tmp_path / "two", *small, workers="2") == 0 and content(tmp_path / "two") == content(made)
        (picture,) = (tmp_path / "two").glob("*.png")
        told = capsys.readouterr().out
        assert picture.read_bytes().startswith(b"\x89PNG") and " samples against index.json: equal" in told and "next: " in told

    def test_a_wrong_setting_is_refused(self, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
        out = shutil.copytree(made, tmp_path / "same")
        assert self.run("simulate", out, *self.small, *more.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and self.wrong[more] in error, error
        assert content(out) == content(made)


def goes_on_when_killed(run: Run, small: Sequence[str], made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed simulation goes on with what is missing, also where files and records are lost or cut off."""
    there, train = kill_after_a_file(run, folder, small), folder / "train"
    written, create_file = list[Path](), store.create_file
    monkeypatch.setattr(store, "create_file", lambda path, *words: written.append(path) or create_file(path, *words))
    (train / ".records").mkdir(parents=True, exist_ok=True)
    for half in (".x.h5.partial", ".records/.x.h5.json.0123.partial"):
        (train / half).touch()
    assert run("simulate", folder, *small) == 0 and there and not there & {*written}
    assert content(folder) == content(made) and not list(folder.rglob("*.partial"))
    (lost, cut, unknown, *_), beside = sorted(train.glob("*.h5")), sorted(folder.glob("templates/*.h5"))[1:2]
    for path in (lost, *beside):
        path.unlink()
    cut.write_bytes(b"cut off")
    (train / ".records" / f"{unknown.name}.json").unlink()                      # stopped between file and record
    written.clear()
    assert run("simulate", folder, *small) == 0
    assert written == [lost, cut, unknown, *beside] and content(folder) == content(made)
