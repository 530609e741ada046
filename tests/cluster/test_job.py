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
from tests.cluster.submitted import Submit, losses, of, start_again, wait_for_step

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def vanish(number: str, node: str) -> None:
    """The processes of a job on one node are there no more, and nobody was told."""
    ranks = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            about = (process / "environ").read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={number}".encode() in about and f"SLURMD_NODENAME={node}".encode() in about:
                ranks.append(process)
    assert ranks
    for process in ranks:
        parent = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
        for pid in ([parent] if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text() else []) + [int(process.name)]:
            os.kill(pid, signal.SIGKILL)


def test_a_time_limit_ends_in_a_checkpoint_and_the_same_curve(
    slurm: OneMachineSlurm, submit: Submit, tmp_path: Path
) -> None:
    """Slurm asks the run to stop 30 s before its minute is over and the script requeues it; scancel leaves a checkpoint, too."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    (number,) = submit(run, "--nodes", "2", "--time", "1", "--stop-before", "30")
    (endless,) = submit(whole, "--nodes", "2")
    wait_for_step(run, 1)
    start_again(slurm, number)
    first = of(run, "stop")[0]
    assert first["reason"] == "signal" and [path.name for path in checkpoints(run / "checkpoints")] == [f"step-{first['step']:08d}"]
    wait_for_step(run, first["step"] + 5)
    slurm.command("scancel", number)
    assert slurm.wait_for(number, "CANCELLED", "COMPLETED") == "CANCELLED"
    second = of(run, "stop")[1]
    assert second["reason"] == "signal"
    assert [e["resumed_from"] for e in of(run, "start")] == [None, first["step"]]
    assert checkpoints(run / "checkpoints")[-1].name == f"step-{second['step']:08d}"
    wait_for_step(whole, second["step"])
    slurm.command("scancel", endless)
    found = losses(run)
    assert list(found) == list(range(1, second["step"] + 1))
    assert found == {step: loss for step, loss in losses(whole).items() if step <= second["step"]}


@pytest.mark.claim
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(
    slurm: OneMachineSlurm, submit: Submit, tmp_path: Path
) -> None:
    """Meanwhile a second job in the same directory is refused, and changes nothing there."""
    run = tmp_path / "run"
    (number,) = submit(run, "--nodes", "2", "checkpoint.every_steps=5")
    wait_for_step(run, 12)
    (other,) = submit(run, "--nodes", "1")
    assert slurm.wait_for(other, "FAILED", "COMPLETED") == "FAILED"
    assert "another run uses this directory" in (run / f"job-{other}.out").read_text()
    assert len(of(run, "start")) == 1
    vanish(number, "n2")
    slurm.command("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.wait_for(number, "PENDING")
    reached = max(losses(run))
    while "DOWN" in slurm.command("sinfo", "--noheader", "--nodes=n2", "--format=%T").upper():  # it comes back by itself
        time.sleep(0.2)
    start_again(slurm, number)
    wait_for_step(run, reached + 1)
    resumed = of(run, "start")[1]["resumed_from"]
    assert reached - 10 <= resumed <= reached and resumed % 5 == 0
    slurm.command("scancel", number)
    slurm.wait_for(number, "CANCELLED")

    saved = of(run, "stop")[-1]["step"]
    (number,) = submit(run, "--nodes", "1", f"train.steps={saved + 5}")
    assert slurm.wait_for(number, "COMPLETED", "FAILED", timeout=90) == "COMPLETED"
    assert of(run, "start")[-1]["resumed_from"] == saved and of(run, "stop")[-1]["step"] == saved + 5
    assert (run / "report.html").exists()


def test_runs_of_an_array_have_directories_of_their_own(slurm: OneMachineSlurm, submit: Submit, tmp_path: Path) -> None:
    sweep = tmp_path / "a 50% sweep"
    runs = [sweep / f"seed-{seed}" for seed in (3, 4)]
    (number,) = submit(sweep, "--nodes", "1", "--array", "seed=3-4", "train.steps=4")
    for task in (0, 1):
        assert slurm.wait_for(f"{number}_{task}", "COMPLETED", "FAILED", timeout=90) == "COMPLETED"
    assert all(list(losses(run)) == [1, 2, 3, 4] and (run / "report.html").exists() for run in runs)
    assert losses(runs[0]) != losses(runs[1])
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
    stopped = [e["step"] for e in of(run, "stop")]
    assert [e["resumed_from"] for e in of(run, "start")] == [None, stopped[0]] and stopped[1] == 150
    assert sorted(path.name for path in disk.iterdir()) == [first, second]
    assert str(disk / second) in (run / "settings.yaml").read_text()


def test_an_environment_is_unpacked_on_the_node_and_deleted_at_the_end(
    slurm: OneMachineSlurm, submit: Submit, tmp_path: Path
) -> None:
    """The environment's Python is a shell script, which says what it is started with."""
    run, disk, small = tmp_path / "run", tmp_path / "disk", tmp_path / "small/bin"
    small.mkdir(parents=True)
    disk.mkdir()
    (small / "python").write_text('#!/bin/sh\necho "started $0 $*"\n')
    (small / "python").chmod(0o755)
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
        archive.add(small, "bin")
    words = ["--environment", str(tmp_path / "small.tar.gz"), "--environment-at", f"{disk}/$SLURM_JOB_ID"]
    (number,) = submit(run, "--nodes", "1", *words)
    state = slurm.wait_for(number, "COMPLETED", "FAILED", timeout=90)
    text = (run / f"job-{number}.out").read_text()
    assert state == "COMPLETED" and text.count(f"started {disk}/{number}/bin/python -m hpcai.cli run cosmoflow ") == 1, text
    assert f"started {disk}/{number}/bin/python -m hpcai.cli report {run}" in text and not any(disk.iterdir())
