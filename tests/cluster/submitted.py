"""Helpers of the tests of jobs: a run's files, and Slurm's state."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcai import log
from tests.cluster.one_machine_slurm import OneMachineSlurm

# Without a schedule or an evaluation a loss depends on its step alone, however many steps there will be.
ENDLESS = [
    "data.batch=8", "model.filters=2", "model.dropout=0", "train.epochs=null", "train.steps=1000000", "train.report_every=1",
    "train.evaluate_every=1000000", "checkpoint.every_steps=1000000", "step.schedule.decay=none", "report.sinks=[]",
]  # fmt: skip
Submit = Callable[..., list[str]]


def of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == kind] if (run / "metrics.jsonl").exists() else []


def losses(run: Path) -> Mapping[int, float]:
    """By step; where a step was made again, the last."""
    return {event["step"]: event["loss"] for event in of(run, "train")}


def wait_for_step(run: Path, step: int, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while max(losses(run), default=0) < step:
        assert time.monotonic() < end, f"no step {step} within {timeout} s: {[p.read_text() for p in run.glob('job-*.out')]}"
        time.sleep(0.1)


def start_again(slurm: OneMachineSlurm, number: str) -> None:
    """A requeued job waits for two minutes; here it need not. In the second of its end it cannot be started again."""
    slurm.wait_for(number, "PENDING", timeout=120)
    time.sleep(2.5)
    slurm.command("scontrol", "update", f"JobId={number}", "StartTime=now")
