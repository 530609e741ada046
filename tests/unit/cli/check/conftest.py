import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from hpcai.cli.check import Options, Outcome, examine, repair, work
from hpcai.cli.check.inspector import Inspectors
from tests.unit.cli.check.making import index, values, write


@pytest.fixture(scope="package")
def children() -> Iterator[Inspectors]:
    with closing(Inspectors(1)) as inspectors:
        yield inspectors


@contextmanager
def lent(children: Inspectors) -> Iterator[None]:
    """Work does not start children of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "Inspectors", lambda *_: children)
        patch.setattr(work, "closing", nullcontext)
        yield


@pytest.fixture(autouse=True)
def nothing_leaks(children: Inspectors) -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    opened = [fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in opened]
    assert not [name for name in files if name.startswith("/") and not name.startswith("/dev/null")]
    assert len(opened) <= 2  # the pipes of a child that this test was the first to need


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


@pytest.fixture
def look(children: Inspectors) -> Any:
    def looked(folder: Path, **options: Any) -> Outcome:
        with lent(children):
            return examine(folder, Options(**{"seconds": 0, "threads": 2, **options}))

    return looked


@pytest.fixture
def mend(look: Any, children: Inspectors) -> Any:
    def mended(folder: Path) -> list[str]:
        outcome = look(folder)
        with lent(children):
            return repair(folder, outcome)

    return mended
