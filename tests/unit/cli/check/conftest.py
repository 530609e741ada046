import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcai.cli.check import pool
from tests.inline_worker import InlineWorker
from tests.unit.cli.check.datasets import arrays, index, write

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
