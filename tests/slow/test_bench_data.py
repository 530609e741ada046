"""What docs/benchmarks.md claims of reading samples, measured here; CPU seconds and refaults hold on any machine."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slow.trying import bench, until

pytestmark = pytest.mark.timing
Rows = list[dict[str, Any]]


def measured(folder: Path, part: str, *words: str) -> Rows:
    found = bench("data", "--directory", str(folder), part, *words)[part]
    assert list(folder.iterdir()) == [], "nothing is left behind"
    return found


def tries(folder: Path, words: tuple[str, ...], good: Callable[[Rows], bool]) -> None:
    until(good, lambda: measured(folder, *words))


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio (make fio)")
def test_the_direct_reader_gives_what_the_disk_gives_to_fio(tmp_path: Path) -> None:
    tries(tmp_path, ("direct", "--gib", "1"), lambda rows: all(row["ours_over_fio"] >= 0.95 for row in rows))


def test_a_set_larger_than_the_memory_is_read_faster_than_through_the_page_cache(tmp_path: Path) -> None:
    rows = measured(tmp_path, "larger", "--gib", "1")
    if "left out" in rows[0]:
        pytest.skip(rows[0]["left out"])
    torch, ours = rows
    assert ours["refaults"] == 0 < torch["refaults"]
    assert ours["cpu_ratio"] <= 1 / 3, rows
    assert ours["ratio"] >= 1.8, rows


def test_a_late_sample_costs_nothing(tmp_path: Path) -> None:
    tries(tmp_path, ("late", "--repeats", "1", "--gib", "0.5"), lambda rows: rows[0]["throughput_kept"] >= 0.98)


def test_samples_come_no_slower_than_by_anything_else(tmp_path: Path) -> None:
    """On a disk as fast as memory h5py alone, which hands over no batches, reaches the disk's rate too: then equal to a fifth."""

    def good(rows: list[dict[str, Any]]) -> bool:
        return all(row["ours_over_it"] >= (0.8 if row["loader"] == "h5py alone" else 1) for row in rows if row["loader"] != "ours")

    tries(tmp_path, ("peers", "--gib", "0.5", "--repeats", "3"), good)
