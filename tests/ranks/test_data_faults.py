"""What happens to data in the middle of an epoch ends all ranks within seconds, with file, sample and rank, and leaves nothing."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.ranks.test_launch_mpi import SOON, Ended, mpich, run, run_forked

OF_OTHERS = ("mpich_shm", "sm_segment", "vader_segment", "sem.mp-")  # an MPI library keeps its own of ranks that were killed

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def volumes(folder: Path) -> Path:
    """16 files of 4 rows."""
    folder.mkdir()
    for i in range(16):
        with h5py.File(folder / f"v{i:02d}.h5", "w") as file:
            file["counts"] = np.random.default_rng(i).random((4, 16, 16, 16), np.float32)
    return folder


def under_mpiexec(*words: str) -> Ended:
    return run(mpich(2), "read.py", *words)


def forked(*words: str) -> Ended:
    ended = run_forked(2, "read.py", *words)
    (code,) = {bool(each.code) for each in ended}
    return Ended(code, "", "".join(each.err for each in ended), ended[0].after)


FAULTS = {
    "vanished": ["v08.h5", "no such file", "train, rank "],
    "truncated": ["v0", "truncated", "train, rank "],
    "EIO": ["train, rank 1, sample ", ".h5: bytes ", "Input/output error (EIO)"],
    "NaN": ["train, rank 1, sample 43: ", "v10.h5: row 3 of 'counts' holds NaN or infinity; make it again"],
    "killed": ["was killed by signal 9 (SIGKILL)", "train, rank 1, sample 43"],
    "vanished tensor": ["v08.h5", "no such file", "train, rank "],
    "EIO tensor": ["train, rank 1, sample ", ".h5: bytes ", "Input/output error (EIO)"],
    "killed tensor": ["was killed by signal 9 (SIGKILL)", "train, rank 1, sample 43"],
}
LAUNCHED = ("EIO", "killed tensor")  # these behind a launcher, and as a claim all of them


@pytest.mark.parametrize(
    ("ranks", "what"),
    [(forked, what) for what in FAULTS if what not in LAUNCHED]
    + [pytest.param(under_mpiexec, what, marks=[] if what in LAUNCHED else pytest.mark.claim) for what in FAULTS],
)
def test_all_ranks_end_within_seconds(tmp_path: Path, ranks: Callable[..., Ended], what: str) -> None:
    folder = volumes(tmp_path / "train")
    if what == "NaN":
        with h5py.File(folder / "v10.h5", "r+") as file:
            file["counts"][3, 2, 1, 0] = np.nan
    shared = set(os.listdir("/dev/shm"))
    ended = ranks(str(folder), *what.split())
    assert ended.code != 0 and ended.after < SOON + (20 if what == "NaN" else 0)  # this one counts from the start
    assert all(text in ended.err for text in FAULTS[what]), ended.err
    new = {name for name in set(os.listdir("/dev/shm")) - shared if not name.startswith(OF_OTHERS)}
    until = time.monotonic() + 5  # another test's processes may be about to use what they have made
    while (left := [name for name in new if not in_use(name)]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, "shared memory is left behind"


def in_use(name: str) -> bool:
    """Another process of this machine made it meanwhile, and still has it or has removed it."""
    mapped = False
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # another user's, or a process that has ended
            mapped = mapped or name in maps.read_text()
    return mapped or not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("axis", ["replicate", "tensor"])
@pytest.mark.parametrize("ranks", [forked, pytest.param(under_mpiexec, marks=pytest.mark.claim)])
def test_without_a_fault_all_is_read(tmp_path: Path, ranks: Callable[..., Ended], axis: str) -> None:
    ended = ranks(str(volumes(tmp_path / "train")), "nothing", axis)
    assert ended.code == 0 and "Error" not in ended.err
