"""Damaged files are read, or refused with an HpcaiError that names them, in bounded time and memory."""

from pathlib import Path

import pytest

from tests.fuzz.attack import GOOD, Reader, attack
from tests.fuzz.readers import READERS

FEW, MANY = 40, 10_000


def find_failures(reader: Reader, folder: Path, count: int) -> str:
    (folder := folder / "folder").mkdir()
    outcome = attack(reader, folder, range(count))
    print(f"| {reader.name} | {count} | {outcome.counts['read']} | {outcome.counts['refused']} |")
    assert outcome.counts.total() == count
    return "\n".join(f"{outcome.counts[kind]} {kind}, {text}" for kind, text in outcome.first.items() if kind not in GOOD)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_is_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    assert not (failures := find_failures(reader, tmp_path, FEW)), failures


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_ten_thousand_damaged_files_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    assert not (failures := find_failures(reader, tmp_path, MANY)), failures
