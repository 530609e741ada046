"""A rank that is stopped, or late: after a time the others tell for whom they wait, and a signal ends them within a second."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import hpcai.train.loop  # noqa: F401  # imported once, not in every forked rank
from tests.fork_script import fork_script
from tests.ranks.test_launch_mpi import ROOT, mpich
from tests.reference_data import load_json
from tests.unit.dist.test_waiting import wait_for

PROGRAM = Path(__file__).parent / "programs" / "wait.py"
REPORT = "waiting since [0-9] s: .*"
PLACES = load_json("waits")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "late", "number", "code"), [
    ("step", 0, signal.SIGINT, 130), ("resume", 0, signal.SIGUSR1, 85),
    *((place, 1, signal.SIGTERM, 85) for place in PLACES if place not in ("step", "resume")),
])  # fmt: skip
def test_a_wait_is_reported_and_ended_by_a_signal(tmp_path: Path, place: str, late: int, number: int, code: int) -> None:
    """The signal comes to the rank that waits. A rank that waits for its data is at work: the run then saves."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "data.npy").write_bytes(bytes(1 << 16))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    files = [tmp_path / "err0", tmp_path / "err1"]
    args = place, str(late), str(tmp_path)
    ranks = [
        fork_script(PROGRAM, *args, out=tmp_path / "out", err=file, RANK=rank, LOCAL_RANK=rank, **job)
        for rank, file in zip("01", files)
    ]
    try:
        wait_for(files[1 - late], REPORT + PLACES[place].format(late=late))
        began = time.monotonic()
        os.kill(ranks[late if place == "batch" else 1 - late].pid, number)
        ranks[1 - late].join(20)
        limit = 8 if place == "batch" else 4
        assert ranks[1 - late].exitcode == code and time.monotonic() - began < limit, files[1 - late].read_text()
        assert list(tmp_path.glob("checkpoints/step-*")) or place != "batch"
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.mpi
@pytest.mark.parametrize("place", ["MPI_Init_thread", "MPI_Finalize"])
def test_waits_in_mpi_are_reported_and_ended_by_a_signal(tmp_path: Path, place: str) -> None:
    command, environ = [*mpich(2), sys.executable, PROGRAM, place, "1", tmp_path], os.environ | {"PYTHONPATH": str(ROOT)}
    with open(tmp_path / "err", "w") as file:
        job = subprocess.Popen(command, stderr=file, env=environ)
    try:
        wait_for(tmp_path / "err", f"{REPORT}at {place} of all ranks")
        os.kill(int((tmp_path / "pid0").read_text()), signal.SIGTERM)
        assert job.wait(10) == 85
    finally:
        job.kill()
        for rank in "01":
            with suppress(OSError):  # it has not begun, or has ended
                os.kill(int((tmp_path / f"pid{rank}").read_text()), signal.SIGKILL)
