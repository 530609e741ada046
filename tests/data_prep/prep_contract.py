"""Properties of all simulated data sets: equal bytes from any number of processes, growth, and refusal of invalid options."""

import contextlib
import functools
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest

from data_prep import store
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.data.index import write_index

Run = Callable[..., int]


def runner(module: ModuleType) -> Run:
    """Return a function that calls the commands of a data set, with one worker."""

    def run(command: str, *args: object, workers: str = "1") -> int:
        return int(module.main([command, *map(str, args), *(["--workers", workers] if command != "check" else [])]))

    return run


def content(out: Path) -> dict[str, bytes]:
    """Return the bytes of all files that readers use."""
    paths = [*out.glob("[!.]*/*.h5"), *out.glob("[!.]*/index.json"), *out.glob("*.json")]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(paths)}


def field_types(fields: store.Fields) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return the dtype and shape of each field, for readers."""
    return {name: (field.dtype, field.shape) for name, field in fields.items()}


def check_error(capsys: pytest.CaptureFixture[str], *texts: str) -> None:
    """Assert that the command has written one line of error with these texts."""
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and all(text in error for text in texts), error


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


def cache_results(owner: object, name: str) -> Callable[[], Iterator[None]]:
    """Return a module's fixture that caches the results of a function."""

    @pytest.fixture(scope="module", autouse=True)
    def results_cache() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, functools.cache(getattr(owner, name)))
            yield

    return results_cache


def kill_after_first_file(run: Run, folder: Path, small: Sequence[str]) -> set[Path]:
    """Kill a simulation as soon as one file has a record, and return the files with records."""
    with ForkedProcesses(lambda: run("simulate", folder, *small), folder.with_name(f"{folder.name}.out")) as forks:
        while not (records := [*folder.glob("[!.]*/.records/*.json")]) and forks.processes[0].is_alive():
            time.sleep(0.002)
    return {path.parents[1] / path.stem for path in records}


def set_to(name: str, index: Any, value: Any) -> Callable[[h5py.File], None]:
    """Return a function that assigns to elements of a dataset, for ``damage``."""

    def change(file: h5py.File) -> None:
        file[name][index] = value

    return change


def damage(out: Path, change: Callable[[h5py.File], object]) -> None:
    """Change the first training file, and its size and hash in the index."""
    path, index = min(out.glob("train/*.h5")), read_json(out / "train" / "index.json")
    with h5py.File(path, "r+") as file:
        change(file)
    index["files"][0] |= {"sha256": store.digest(path), "bytes": path.stat().st_size}
    write_index(out / "train", {name: value for name, value in index.items() if name != "format"})


def check_fails(run: Run, dataset: Path, out: Path, change: Callable[[h5py.File], object], *messages: str) -> bool:
    """Assert that the check of a damaged copy fails with ``messages``, and return True."""
    damage(shutil.copytree(dataset, out), change)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run("check", out, "--no-picture")
    assert code == 1 and all(text in output.getvalue() for text in ("wrong: ", *messages)), output.getvalue()
    return True


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


class PrepContract:
    """The tests of each simulated data set. Functions that all data sets share are tested with cosmoflow."""

    run: Run
    small: list[str]

    def test_workers_make_the_same_bytes_and_the_check_draws(self, dataset: Path, tmp_path: Path, capsys: Any) -> None:
        small = [option for option in self.small if option != "--no-check"]
        assert self.run("simulate", tmp_path / "two", *small, workers="2") == 0 and content(tmp_path / "two") == content(dataset)
        (picture,) = (tmp_path / "two").glob("*.png")
        output = capsys.readouterr().out
        assert picture.read_bytes().startswith(b"\x89PNG") and " samples against index.json: equal" in output and "next: " in output

    def test_bad_options_are_refused(self, dataset: Path, tmp_path: Path, capsys: Any, options: str, message: str) -> None:
        out = shutil.copytree(dataset, tmp_path / "same")
        assert self.run("simulate", out, *self.small, *options.split()) == 2
        check_error(capsys, message)
        assert content(out) == content(dataset)


def check_resumes_if_killed(run: Run, small: Sequence[str], dataset: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a killed simulation writes only missing files, also if files are lost or truncated, or records are lost."""
    finished, train = kill_after_first_file(run, folder, small), folder / "train"
    written, create_file = list[Path](), store.create_file
    monkeypatch.setattr(store, "create_file", lambda path, *args: written.append(path) or create_file(path, *args))
    (train / ".records").mkdir(parents=True, exist_ok=True)
    for partial in (".x.h5.partial", ".records/.x.h5.json.0123.partial"):
        (train / partial).touch()
    assert run("simulate", folder, *small) == 0 and finished and not finished & {*written}
    assert content(folder) == content(dataset) and not list(folder.rglob("*.partial"))
    (lost, truncated, unrecorded, *_), templates = sorted(train.glob("*.h5")), sorted(folder.glob("templates/*.h5"))[1:2]
    for path in (lost, *templates):
        path.unlink()
    truncated.write_bytes(b"cut off")
    (train / ".records" / f"{unrecorded.name}.json").unlink()                      # stopped between file and record
    written.clear()
    assert run("simulate", folder, *small) == 0
    assert written == [lost, truncated, unrecorded, *templates] and content(folder) == content(dataset)
