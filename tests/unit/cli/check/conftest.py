import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcai.cli.check import pool
from hpcai.errors import DataError
from tests.unit.cli.check.datasets import arrays, index, write


class InlineWorker:
    """A worker in the process of the test."""

    def __init__(self, *args: Any) -> None:
        pass

    def call(self, task: pool.Task, *args: Any, advance: Callable[[int], None]) -> Any:
        result = None
        try:
            for result in task(*args):
                if isinstance(result, int):
                    advance(result)
        except Exception as error:
            raise error if isinstance(error, DataError) else DataError(f"{type(error).__name__}: {error}") from error
        return result

    def kill(self, stop: bool = False) -> None:
        pass


Worker = pool.Worker


@pytest.fixture(autouse=True)
def inline_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", InlineWorker)


@pytest.fixture
def child_processes(inline_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files in child processes, as in the product."""
    monkeypatch.setattr(pool, "Worker", Worker)


@pytest.fixture(autouse=True)
def no_open_files_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    opened = [fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [name for name in (os.readlink(f"/proc/self/fd/{fd}") for fd in opened) if not name.startswith("/dev/null")]


@pytest.fixture(scope="package")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for split, count in (("train", 4), ("validation", 2)):
        for i in range(count):
            write(folder / split / f"u{i}.h5", arrays(100 * len(split) + i))
        index(folder / split)
    return folder


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "set")
