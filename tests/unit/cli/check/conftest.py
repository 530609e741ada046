import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcai.cli.check import pool
from hpcai.errors import DataError
from tests.unit.cli.check.datasets import index, values, write


class Here:
    """A worker without a process of its own."""

    def call(self, act: pool.Task, *words: Any, advance: Callable[[int], None]) -> Any:
        answer = None
        try:
            for answer in act(*words):
                if isinstance(answer, int):
                    advance(answer)
        except Exception as problem:
            raise problem if isinstance(problem, DataError) else DataError(f"{type(problem).__name__}: {problem}") from problem
        return answer

    def kill(self, stop: bool = False) -> None:
        pass


Worker = pool.Worker


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", Here)


@pytest.fixture
def children(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files in child processes, as outside of tests."""
    monkeypatch.setattr(pool, "Worker", Worker)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    opened = [fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [name for name in (os.readlink(f"/proc/self/fd/{fd}") for fd in opened) if not name.startswith("/dev/null")]


@pytest.fixture(scope="package")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for split, count in (("train", 4), ("validation", 2)):
        for i in range(count):
            write(folder / split / f"u{i}.h5", values(100 * len(split) + i))
        index(folder / split)
    return folder


@pytest.fixture
def made(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "set")
