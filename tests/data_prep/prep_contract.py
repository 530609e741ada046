"""Properties of every simulated data set: equal bytes from any number of processes, growth, and refusal of wrong options."""

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
    """Return a function that calls the commands of a data set, with one worker."""

    def run(command: str, *words: object, workers: str = "1") -> int:
        return int(module.main([command, *map(str, words), *(["--workers", workers] if command != "check" else [])]))

    return run


def content(out: Path) -> dict[str, bytes]:
    """Return the bytes of all files that readers use."""
    paths = [*out.glob("[!.]*/*.h5"), *out.glob("[!.]*/index.json"), *out.glob("*.json")]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(paths)}


def field_types(fields: store.Fields) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return types and shapes of rows, for readers."""
    return {name: (field.dtype, field.shape) for name, field in fields.items()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def columns(folder: Path) -> dict[str, np.ndarray]:
    """Return all datasets of a split, concatenated over files."""
    files = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            assert all(file[name].chunks is None for name in file)
            files.append({name: file[name][...] for name in file})
    return {name: np.concatenate([file[name] for file in files]) for name in files[0]}


def cached(owner: object, name: str) -> Callable[[], Iterator[None]]:
    """Return a fixture of a module in which the results of a function are cached."""

    @pytest.fixture(scope="module", autouse=True)
    def remembered() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, functools.cache(getattr(owner, name)))
            yield

    return remembered


def kill_after_a_file(run: Run, folder: Path, small: Sequence[str]) -> set[Path]:
    """Kill a simulation as soon as a file has a record, and return the files with records."""
    with fork_processes(lambda: run("simulate", folder, *small), folder.with_name(f"{folder.name}.out")) as forks:
        while not (records := [*folder.glob("[!.]*/.records/*.json")]) and forks.processes[0].is_alive():
            time.sleep(0.002)
    return {path.parents[1] / path.stem for path in records}


def set_to(name: str, where: Any, value: Any) -> Callable[[h5py.File], None]:
    """Return a change of a dataset, for ``damage``."""

    def change(file: h5py.File) -> None:
        file[name][where] = value

    return change


def damage(out: Path, change: Callable[[h5py.File], object]) -> None:
    """Change the first training file, and its size and hash in the index."""
    path, index = min(out.glob("train/*.h5")), read_json(out / "train" / "index.json")
    with h5py.File(path, "r+") as file:
        change(file)
    index["files"][0] |= {"sha256": store.digest(path), "bytes": path.stat().st_size}
    write_index(out / "train", {name: value for name, value in index.items() if name != "format"})


def check_fails(run: Run, made: Path, out: Path, change: Callable[[h5py.File], object], *words: str) -> bool:
    """Assert that the check of a damaged copy fails with ``words``, and return True."""
    damage(shutil.copytree(made, out), change)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run("check", out, "--no-picture")
    assert code == 1 and all(word in output.getvalue() for word in ("wrong: ", *words)), output.getvalue()
    return True


class PrepContract:
    """Tests of a module with ``run`` and ``SMALL``. Functions that all data sets share are tested with cosmoflow."""

    run: Run
    small: list[str]
    wrong: dict[str, str]
    """options that do not fit the folder ``made``, and their error messages"""

    def test_workers_make_the_same_bytes_and_the_check_draws(self, made: Path, tmp_path: Path, capsys: Any) -> None:
        small = [word for word in self.small if word != "--no-check"]
        assert self.run("simulate", tmp_path / "two", *small, workers="2") == 0 and content(tmp_path / "two") == content(made)
        (picture,) = (tmp_path / "two").glob("*.png")
        output = capsys.readouterr().out
        assert picture.read_bytes().startswith(b"\x89PNG") and " samples against index.json: equal" in output and "next: " in output

    def test_a_wrong_setting_is_refused(self, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
        out = shutil.copytree(made, tmp_path / "same")
        assert self.run("simulate", out, *self.small, *more.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and self.wrong[more] in error, error
        assert content(out) == content(made)


def resumes_if_killed(run: Run, small: Sequence[str], made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a killed simulation writes only missing files, also if files and records are lost or truncated."""
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
