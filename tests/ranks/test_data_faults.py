"""What happens to data in the middle of an epoch ends all ranks within seconds, with file, sample and rank, and leaves nothing."""

import os
import time
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.ranks.test_launch_mpi import SOON, mpich, run

OF_OTHERS = ("mpich_shm", "sm_segment", "vader_segment", "sem.mp-")  # an MPI library keeps its own of ranks that were killed

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def volumes(folder: Path) -> Path:
    """16 files of 4 rows."""
    folder.mkdir()
    for i in range(16):
        with h5py.File(folder / f"v{i:02d}.h5", "w") as file:
            file["counts"] = np.random.default_rng(i).random((4, 16, 16, 16), np.float32)
    return folder


@pytest.mark.parametrize(
    "what, texts",
    [
        ("vanished", ["v08.h5", "no such file", "train, rank "]),
        ("truncated", ["v0", "truncated", "train, rank "]),
        ("EIO", ["train, rank 1, sample ", ".h5: bytes ", "Input/output error (EIO)"]),
        ("NaN", ["train, rank 1, sample 43: ", "v10.h5: row 3 of 'counts' holds NaN or infinity; make it again"]),
        ("killed", ["was killed by signal 9 (SIGKILL)", "train, rank 1, sample 43"]),
        ("vanished tensor", ["v08.h5", "no such file", "train, rank "]),
        ("EIO tensor", ["train, rank 1, sample ", ".h5: bytes ", "Input/output error (EIO)"]),
        ("killed tensor", ["was killed by signal 9 (SIGKILL)", "train, rank 1, sample 43"]),
    ],
)
def test_all_ranks_end_within_seconds(tmp_path: Path, what: str, texts: list[str]) -> None:
    folder = volumes(tmp_path / "train")
    if what == "NaN":
        with h5py.File(folder / "v10.h5", "r+") as file:
            file["counts"][3, 2, 1, 0] = np.nan
    shared = set(os.listdir("/dev/shm"))
    ended = run(mpich(2), "read.py", str(folder), *what.split())
    assert ended.code != 0 and ended.after < SOON + (20 if what == "NaN" else 0)  # this one counts from the start
    assert all(text in ended.err for text in texts), ended.err
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
def test_without_a_fault_all_is_read(tmp_path: Path, axis: str) -> None:
    ended = run(mpich(2), "read.py", str(volumes(tmp_path / "train")), "nothing", axis)
    assert ended.code == 0 and "Error" not in ended.err
