"""Jobs of tests: their settings, the events that they log, and waiting for them."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcai import log
from tests.cluster.one_machine_slurm import OneMachineSlurm

# Without a schedule and evaluations, a loss depends on its step, not on the number of steps.
ENDLESS = [
    "data.batch=8", "model.filters=2", "model.dropout=0", "train.epochs=null", "train.steps=1000000", "train.report_every=1",
    "train.evaluate_every=1000000", "checkpoint.every_steps=1000000", "step.schedule.decay=none", "report.sinks=[]",
]  # fmt: skip
Submit = Callable[..., list[str]]


def read_events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == kind] if (run / "metrics.jsonl").exists() else []


def loss_by_step(run: Path) -> Mapping[int, float]:
    """Return losses by step; the last one of a repeated step."""
    return {event["step"]: event["loss"] for event in read_events(run, "train")}


def wait_for_step(run: Path, step: int, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while max(loss_by_step(run), default=0) < step:
        assert time.monotonic() < end, f"no step {step} within {timeout} s: {[p.read_text() for p in run.glob('job-*.out')]}"
        time.sleep(0.1)


def restart_requeued(slurm: OneMachineSlurm, number: str) -> None:
    """Start a requeued job, which would wait for two minutes. Slurm cannot start it in the second in which it ended."""
    slurm.wait_for(number, "PENDING", timeout=120)
    time.sleep(2.5)
    slurm.command("scontrol", "update", f"JobId={number}", "StartTime=now")
