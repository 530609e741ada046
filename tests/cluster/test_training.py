"""A training job under real Slurm with ``slurm/job.sh``: asked to stop, saved, requeued, finished."""

import os
import sys
import time
from pathlib import Path

import pytest

from hpcai import log
from tests.apps.universes import make
from tests.cluster.one_machine_slurm import OneMachineSlurm

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.claim, pytest.mark.timeout(300)]


def events(run: Path) -> list[dict]:
    return log.read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []


def wait_for_steps(run: Path, count: int, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while sum(e["kind"] == "train" for e in events(run)) < count:
        assert time.monotonic() < end, f"no {count} steps within {timeout} s"
        time.sleep(0.1)


def test_a_job_that_is_asked_to_stop_is_requeued_and_finishes(slurm: OneMachineSlurm, tmp_path: Path) -> None:
    data, run = make(tmp_path / "data"), tmp_path / "run"
    words = [
        "apps/cosmoflow/configs/small.yaml", f"data.directory={data}", f"report.directory={run}", "data.batch=8", "model.filters=2",
        "train.epochs=40", "train.report_every=1", "checkpoint.every_steps=1000", "mesh.replicate=2", "model.dropout=0",
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    before = {"MASTER_ADDR": "127.0.0.1", "PATH": path}  # the names of make-believe nodes do not resolve
    line = " ".join(["exec bash", str(ROOT / "slurm/job.sh"), "apps.cosmoflow", *words])
    job = slurm.sbatch(f"#!/bin/bash\ncd {ROOT}\n{line}\n", "-N2", "-n2", "--ntasks-per-node=1", "--requeue", wait=False, **before)
    number = job.out.strip()
    wait_for_steps(run, 3)
    slurm.command("scancel", "--signal=USR1", number)
    slurm.wait_for(number, "PENDING", timeout=60)
    stopped = [e for e in events(run) if e["kind"] == "stop"]
    assert [e["reason"] for e in stopped] == ["signal"]
    time.sleep(2.5)  # in the second of its end a job cannot be started again
    slurm.command("scontrol", "update", f"JobId={number}", "StartTime=now")
    assert slurm.wait_for(number, "COMPLETED", "FAILED", timeout=150) == "COMPLETED"
    found = events(run)
    assert found[-1]["kind"] == "stop" and found[-1]["reason"] == "finished" and found[-1]["step"] == 120
    resumed = [e["resumed_from"] for e in found if e["kind"] == "start"]
    assert resumed == [None, stopped[0]["step"]]
    steps = [e["step"] for e in found if e["kind"] == "train"]
    assert steps == sorted(set(steps)) == list(range(1, 121))
    assert (run / "model.safetensors").exists()
