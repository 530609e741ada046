"""Damaged files are read, or refused with an HpcaiError that names them, in bounded time and memory."""

from pathlib import Path

import pytest

from tests.fuzz.attack import GOOD, Reader, attack
from tests.fuzz.readers import READERS

MANY = pytest.param(10_000, marks=[pytest.mark.fuzz, pytest.mark.timeout(3600)])


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, MANY])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_is_read_or_refused(reader: Reader, count: int, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    outcome = attack(reader, folder, range(count))
    print(f"| {reader.name} | {count} | {outcome.counts['read']} | {outcome.counts['refused']} |")
    assert outcome.counts.total() == count
    failures = [f"{outcome.counts[kind]} {kind}, {text}" for kind, text in outcome.first.items() if kind not in GOOD]
    assert not failures, "\n".join(failures)
