import os
import shutil
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from hpcai.cli.check import work
from hpcai.cli.check.inspector import Inspectors
from tests.unit.cli.check.making import index, values, write


@pytest.fixture(scope="package")
def children() -> Iterator[Inspectors]:
    with closing(Inspectors(1)) as inspectors:
        yield inspectors


@pytest.fixture(autouse=True)
def lent(children: Inspectors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and repairs start no children of their own."""
    monkeypatch.setattr(work, "Inspectors", lambda _: children)
    monkeypatch.setattr(work, "closing", nullcontext)


@pytest.fixture
def own_children(lent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and repairs do so all the same."""
    monkeypatch.setattr(work, "Inspectors", Inspectors)
    monkeypatch.setattr(work, "closing", closing)


@pytest.fixture(autouse=True)
def nothing_leaks(lent: None) -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    opened = [fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in opened]
    assert not [name for name in files if name.startswith("/") and not name.startswith("/dev/null")]
    assert len(opened) <= 1  # the line to a child that this test was the first to need


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
