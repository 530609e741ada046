"""File systems, stripes, and how fast random rows come."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcai.cli.check import disk
from hpcai.data.direct import Reader
from hpcai.errors import DataError
from tests.unit.cli.check.making import PACKED, SHAPE, index, look, told, values, write


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b" / "c"
    place.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    above = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"x / ext4 rw\ny {above} nfs4 rw\nbroken\nz {above}/c gpfs rw\nw {above}/c beegfs rw\nv {above}/cc xfs rw\n")
    assert disk.file_system(Path("/proc")) == "proc"
    monkeypatch.setattr(disk, "MOUNTS", mounts)
    assert disk.file_system(place) == "beegfs"
    assert disk.file_system(tmp_path / "a b") == "nfs4"
    assert disk.file_system(tmp_path) == "ext4"
    monkeypatch.setattr(disk, "MOUNTS", tmp_path / "nothing")
    assert disk.file_system(tmp_path) is None


def test_many_small_files_are_a_warning(tmp_path: Path) -> None:
    assert not list(disk.metadata_bound(tmp_path, 10_000, 10_000))
    assert not list(disk.metadata_bound(tmp_path, 10_001, 10_001 << 20))
    assert len(list(disk.metadata_bound(tmp_path, 10_001, 10_001))) == 1


@pytest.mark.parametrize("answer, status, found", [("8", 0, ", found on 8:"), ("what", 0, ":"), ("1", 1, ":"), ("1", 0, None)])
def test_the_stripes_of_files_are_asked_for(
    made: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: int, found: str | None
) -> None:
    mounts, script = made.parent / "mounts", made.parent / "bin" / "lfs"
    mounts.write_text(f"mds@tcp:/home {made.parent} lustre rw 0 0\n")
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\n[ "$1 $2" = "getstripe -c" ] && [ -f "$3" ] && echo {answer}\nexit {status}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(disk, "MOUNTS", mounts)
    outcome = look(made, quick=True)
    assert outcome.figures["file_system"] == "lustre"
    expected = [("note", "stripe", "train", None, None), ("note", "stripe", "validation", None, None)] if found else []
    assert told(outcome) == expected
    assert all(f"on 1 server{found} each further server costs an open" in finding.text for finding in outcome.findings)


@pytest.mark.parametrize(
    "kind, size, present, text",
    [
        ("lustre", 5e9, 1, "lfs setstripe -c 8 -S 4m "), ("lustre", 5e9, -1, ""), ("lustre", 5e9, 8, ""), ("lustre", 1e6, 1, ""),
        ("lustre", 1e6, -1, "found on all"), ("ext4", 1e6, None, ""), (None, 1e6, None, ""),
        ("beegfs", 5e9, None, "--numtargets=8"), ("beegfs", 1e6, None, ""), ("gpfs", 1e4, None, "pack samples"),
        ("gpfs", 1e9, None, ""), ("nfs4", 1e9, None, "data stage"),
    ],
)  # fmt: skip
def test_stripe_hint(tmp_path: Path, kind: str | None, size: float, present: int | None, text: str) -> None:
    findings = list(disk.stripe_hint(kind, tmp_path, [int(size)] * 3, present))
    assert len(findings) == bool(text) and all(text in finding.text for finding in findings)
    assert not list(disk.stripe_hint(kind, tmp_path, [], present))
    assert [disk.stripes(int(n)) for n in (1e6, 9e8, 2e9, 2e10, 2e12)] == [1, 1, 8, 24, 72]


def test_the_rate_is_that_of_whole_samples(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        time.sleep(0.05)
        return disk.os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr(disk, "Reader", partial(Reader, preadv=slow))
    need = {"batch": 4, "step_time": 0.01, "seconds": 0.1, "quick": True}
    outcome = look(made, **need)
    rate = outcome.figures["rate"]
    assert rate["bytes_per_sample"] == (made / "train" / "u0.h5").stat().st_size / 4
    # 8 threads, one read to a sample, each 0.05 s: about 160 samples a second
    for mode in ("direct", "buffered"):
        assert 30 < rate[mode]["samples_per_s"] <= 161, rate
        assert rate[mode]["gb_per_s"] == pytest.approx(rate[mode]["samples_per_s"] * rate["bytes_per_sample"] / 1e9, rel=1e-3)
        assert 0.1 <= rate[mode]["seconds"] < 2
    assert look(made, nodes=100, **need).findings == ()
    assert rate["needed_per_node"] == {"samples_per_s": 400.0, "gb_per_s": pytest.approx(400 * rate["bytes_per_sample"] / 1e9)}


def test_the_rate_of_packed_rows_and_of_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        write(made / "train" / f"u{i}.h5", values(500 + i), **PACKED)
    index(made / "train")
    evicted: list[Path] = []
    monkeypatch.setattr(disk, "evict", evicted.append)

    def refuse(mode: str, **more: Any) -> Reader:
        if mode == "direct":
            raise DataError("no O_DIRECT here")
        return Reader(mode, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "Reader", refuse)
    rate = look(made, quick=True, seconds=0.1).figures["rate"]
    assert evicted and set(evicted) <= set((made / "train").glob("*.h5"))  # of the largest split, before they are read
    assert 0 < rate["bytes_per_sample"] < 2 * np.prod(SHAPE) and rate["buffered"]["samples_per_s"] > 0
    assert rate["direct"] == {"problem": "no O_DIRECT here"}
    (tmp_path / "none").mkdir()
    assert look(tmp_path / "none", seconds=0.02).figures["rate"] is None
