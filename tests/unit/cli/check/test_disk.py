"""File systems and the rate of random reads."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcai.cli.check import disk
from hpcai.data.direct import Reader
from hpcai.errors import DataError
from tests.unit.cli.check.datasets import check


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b" / "c"
    folder.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    above = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"x / ext4 rw\ny {above} nfs4 rw\nbroken\nz {above}/c gpfs rw\nw {above}/c beegfs rw\nv {above}/cc xfs rw\n")
    assert disk.file_system(Path("/proc")) == "proc"
    monkeypatch.setattr(disk, "MOUNTS", mounts)
    assert disk.file_system(folder) == "beegfs"
    assert disk.file_system(tmp_path / "a b") == "nfs4"
    assert disk.file_system(tmp_path) == "ext4"
    monkeypatch.setattr(disk, "MOUNTS", tmp_path / "nothing")
    assert disk.file_system(tmp_path) is None


def test_the_rate_counts_full_samples(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        time.sleep(0.05)
        return disk.os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr(disk, "Reader", partial(Reader, preadv=slow))
    options = {"batch": 4, "step_time": 0.01, "seconds": 0.1, "quick": True}
    outcome = check(root, **options)
    rate = outcome.figures["rate"]
    assert rate["bytes_per_sample"] == (root / "train" / "u0.h5").stat().st_size / 4
    # 8 threads, one read to a sample, each 0.05 s: about 160 samples a second
    for mode in ("direct", "buffered"):
        assert 30 < rate[mode]["samples_per_s"] <= 161, rate
        assert rate[mode]["gb_per_s"] == pytest.approx(rate[mode]["samples_per_s"] * rate["bytes_per_sample"] / 1e9, rel=1e-3)
        assert 0.1 <= rate[mode]["seconds"] < 2
    assert check(root, nodes=100, **options).findings == ()
    assert rate["needed_per_node"] == {"samples_per_s": 400.0, "gb_per_s": pytest.approx(400 * rate["bytes_per_sample"] / 1e9)}


def test_the_rate_without_o_direct_and_without_files(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[Path] = []
    monkeypatch.setattr(disk, "evict", evicted.append)

    def refuse(mode: str, **kwargs: Any) -> Reader:
        if mode == "direct":
            raise DataError("no O_DIRECT here")
        return Reader(mode, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "Reader", refuse)
    rate = check(root, quick=True, seconds=0.1).figures["rate"]
    assert evicted and set(evicted) <= set((root / "train").glob("*.h5"))  # of the largest split, before they are read
    assert rate["direct"] == {"problem": "no O_DIRECT here"} and rate["buffered"]["samples_per_s"] > 0
    (tmp_path / "none").mkdir()
    assert check(tmp_path / "none", seconds=0.02).figures["rate"] is None
