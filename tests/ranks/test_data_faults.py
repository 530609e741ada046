"""A data fault during an epoch ends all ranks within seconds, names file, sample and rank, and leaves no shared memory."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.ranks.test_launch_mpi import SOON, ProcessResult, mpich, run, run_forked
from tests.reference_data import load_json

MPI_SEGMENTS = ("mpich_shm", "sm_segment", "vader_segment", "sem.mp-")  # MPI libraries leave those of killed ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def write_volumes(folder: Path) -> Path:
    """Write 16 files of 4 rows."""
    folder.mkdir()
    for i in range(16):
        with h5py.File(folder / f"v{i:02d}.h5", "w") as file:
            file["counts"] = np.random.default_rng(i).random((4, 16, 16, 16), np.float32)
    return folder


def run_mpiexec(*args: str) -> ProcessResult:
    return run(mpich(2), "read.py", *args)


def run_two_forked(*args: str) -> ProcessResult:
    results = run_forked(2, "read.py", *args)
    (code,) = {bool(result.exit_code) for result in results}
    return ProcessResult(code, "", "".join(result.stderr for result in results), results[0].seconds)


FAULTS = load_json("refused/data_faults")
LAUNCHED = ("EIO", "killed tensor")  # run under a launcher; the others are forked, and run under a launcher as claims


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_ranks", "fault"),
    [(run_two_forked, fault) for fault in FAULTS if fault not in LAUNCHED]
    + [pytest.param(run_mpiexec, fault, marks=[] if fault in LAUNCHED else pytest.mark.claim) for fault in FAULTS],
)
def test_all_ranks_end_within_seconds(tmp_path: Path, run_ranks: Callable[..., ProcessResult], fault: str) -> None:
    folder = write_volumes(tmp_path / "train")
    if fault == "NaN":
        with h5py.File(folder / "v10.h5", "r+") as file:
            file["counts"][3, 2, 1, 0] = np.nan
    before = set(os.listdir("/dev/shm"))
    result = run_ranks(str(folder), *fault.split())
    assert result.exit_code != 0 and result.seconds < SOON + (20 if fault == "NaN" else 0)  # counted from the start
    assert all(text in result.stderr for text in FAULTS[fault]), result.stderr
    created = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith(MPI_SEGMENTS)}
    until = time.monotonic() + 5  # other tests may not yet have mapped their new segments
    while (remaining := [name for name in created if not is_used_by_others(name)]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not remaining, "shared memory remains"


def is_used_by_others(name: str) -> bool:
    """Return whether another process has mapped the segment or removed it: it belongs to another test."""
    mapped = False
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # of another user, or of a process that has ended
            mapped = mapped or name in maps.read_text()
    return mapped or not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("axis", ["replicate", "tensor"])
@pytest.mark.parametrize("run_ranks", [run_two_forked, pytest.param(run_mpiexec, marks=pytest.mark.claim)])
def test_without_a_fault_all_is_read(tmp_path: Path, run_ranks: Callable[..., ProcessResult], axis: str) -> None:
    result = run_ranks(str(write_volumes(tmp_path / "train")), "none", axis)
    assert result.exit_code == 0 and "Error" not in result.stderr
