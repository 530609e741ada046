"""``hpcai job --site generic --submit`` under real Slurm: time limits, lost nodes, arrays, chains, fewer nodes."""

import contextlib
import os
import signal
import tarfile
import time
from pathlib import Path

import pytest

from hpcai.train.checkpoint_reader import list_checkpoints as checkpoints
from tests.cluster.one_machine_slurm import OneMachineSlurm
from tests.cluster.slurm_jobs import Submit, loss_by_step, read_events, restart_requeued, wait_for_step

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def kill_job_on_node(number: str, node: str) -> None:
    ranks = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={number}".encode() in environ and f"SLURMD_NODENAME={node}".encode() in environ:
                ranks.append(process)
    assert ranks
    for process in ranks:
        parent = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
        for pid in ([parent] if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text() else []) + [int(process.name)]:
            os.kill(pid, signal.SIGKILL)


def test_a_time_limit_ends_in_a_checkpoint_and_the_same_curve(slurm: OneMachineSlurm, submit: Submit, tmp_path: Path) -> None:
    """Slurm signals the run 20 s before its limit of a minute, and the script requeues it; scancel leaves a checkpoint too."""
    run, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    (number,) = submit(run, "--nodes", "2", "--time", "1", "--stop-before", "20")
    wait_for_step(run, 1)
    (endless,) = submit(uninterrupted, "--nodes", "2")
    restart_requeued(slurm, number)
    first = read_events(run, "stop")[0]
    assert first["reason"] == "signal" and [path.name for path in checkpoints(run / "checkpoints")] == [f"step-{first['step']:08d}"]
    wait_for_step(run, first["step"] + 5)
    slurm.command("scancel", number)
    assert slurm.wait_for(number, "CANCELLED", "COMPLETED") == "CANCELLED"
    second = read_events(run, "stop")[1]
    assert second["reason"] == "signal"
    assert [e["resumed_from"] for e in read_events(run, "start")] == [None, first["step"]]
    assert checkpoints(run / "checkpoints")[-1].name == f"step-{second['step']:08d}"
    wait_for_step(uninterrupted, second["step"])
    slurm.command("scancel", endless)
    actual = loss_by_step(run)
    assert list(actual) == list(range(1, second["step"] + 1))
    assert actual == {step: loss for step, loss in loss_by_step(uninterrupted).items() if step <= second["step"]}


@pytest.mark.claim
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(slurm: OneMachineSlurm, submit: Submit, tmp_path: Path) -> None:
    """Meanwhile a second job in the same directory is refused, and changes nothing there."""
    run = tmp_path / "run"
    (number,) = submit(run, "--nodes", "2", "checkpoint.every_steps=5")
    wait_for_step(run, 12)
    (other,) = submit(run, "--nodes", "1")
    assert slurm.wait_for(other, "FAILED", "COMPLETED") == "FAILED"
    assert "another run uses this directory" in (run / f"job-{other}.out").read_text()
    assert len(read_events(run, "start")) == 1
    kill_job_on_node(number, "n2")
    slurm.command("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.wait_for(number, "PENDING")
    reached = max(loss_by_step(run))
    while "DOWN" in slurm.command("sinfo", "--noheader", "--nodes=n2", "--format=%T").upper():  # it returns to service by itself
        time.sleep(0.2)
    restart_requeued(slurm, number)
    wait_for_step(run, reached + 1)
    resumed = read_events(run, "start")[1]["resumed_from"]
    assert reached - 10 <= resumed <= reached and resumed % 5 == 0
    slurm.command("scancel", number)
    slurm.wait_for(number, "CANCELLED")

    saved = read_events(run, "stop")[-1]["step"]
    (number,) = submit(run, "--nodes", "1", f"train.steps={saved + 5}")
    assert slurm.wait_for(number, "COMPLETED", "FAILED", timeout=90) == "COMPLETED"
    assert read_events(run, "start")[-1]["resumed_from"] == saved and read_events(run, "stop")[-1]["step"] == saved + 5
    assert (run / "report.html").exists()


def test_runs_of_an_array_have_directories_of_their_own(slurm: OneMachineSlurm, submit: Submit, tmp_path: Path) -> None:
    sweep = tmp_path / "a 50% sweep"
    runs = [sweep / f"seed-{seed}" for seed in (3, 4)]
    (number,) = submit(sweep, "--nodes", "1", "--array", "seed=3-4", "train.steps=4")
    for task in (0, 1):
        assert slurm.wait_for(f"{number}_{task}", "COMPLETED", "FAILED", timeout=90) == "COMPLETED"
    assert all(list(loss_by_step(run)) == [1, 2, 3, 4] and (run / "report.html").exists() for run in runs)
    assert loss_by_step(runs[0]) != loss_by_step(runs[1])
    assert sorted(path.name for path in sweep.glob("job-*.out")) == [f"job-{number}_{task}.out" for task in (0, 1)]


@pytest.mark.claim
def test_a_chain_resumes_and_ends_with_the_run(slurm: OneMachineSlurm, submit: Submit, tmp_path: Path) -> None:
    """The data are copied to a folder of the node first."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    first, second, third = submit(run, "--nodes", "1", "--chain", "3", "train.steps=150", "--stage", f"{disk}/$SLURM_JOB_ID")
    wait_for_step(run, 3)
    slurm.command("scancel", "--signal=USR1", first)
    assert slurm.wait_for(first, "FAILED", "COMPLETED", "PENDING") == "FAILED"
    assert slurm.wait_for(second, "FAILED", "COMPLETED", timeout=120) == "COMPLETED"
    assert slurm.wait_for(third, "CANCELLED", "COMPLETED") == "CANCELLED"
    stopped = [e["step"] for e in read_events(run, "stop")]
    assert [e["resumed_from"] for e in read_events(run, "start")] == [None, stopped[0]] and stopped[1] == 150
    assert sorted(path.name for path in disk.iterdir()) == [first, second]
    assert str(disk / second) in (run / "settings.yaml").read_text()


def test_an_environment_is_unpacked_on_the_node_and_deleted_at_the_end(
    slurm: OneMachineSlurm, submit: Submit, tmp_path: Path
) -> None:
    """The environment's Python is a shell script that prints its arguments."""
    run, disk, small = tmp_path / "run", tmp_path / "disk", tmp_path / "small/bin"
    small.mkdir(parents=True)
    disk.mkdir()
    (small / "python").write_text('#!/bin/sh\necho "started $0 $*"\n')
    (small / "python").chmod(0o755)
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
        archive.add(small, "bin")
    args = ["--environment", str(tmp_path / "small.tar.gz"), "--environment-at", f"{disk}/$SLURM_JOB_ID"]
    (number,) = submit(run, "--nodes", "1", *args)
    state = slurm.wait_for(number, "COMPLETED", "FAILED", timeout=90)
    text = (run / f"job-{number}.out").read_text()
    assert state == "COMPLETED" and text.count(f"started {disk}/{number}/bin/python -m hpcai.cli run cosmoflow ") == 1, text
    assert f"started {disk}/{number}/bin/python -m hpcai.cli report {run}" in text and not any(disk.iterdir())


def test_a_crash_of_slurmd_does_not_lose_jobs(slurm: OneMachineSlurm) -> None:
    os.kill(int((slurm.folder / "slurmd.n2.pid").read_text()), signal.SIGKILL)
    with pytest.warns(UserWarning, match="slurmd of n2 ended"):
        assert slurm.sbatch("srun --mpi=none hostname", "--nodelist=n2").code == 0
