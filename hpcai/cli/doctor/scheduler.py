"""How long the job may go on, as its scheduler says."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime

Ask = Callable[..., str]


def ask(*words: str) -> str:
    """What a scheduler's program answers within some seconds; "" where there is none, or it refuses."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=8, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def left(environ: Mapping[str, str] = os.environ, ask: Ask = ask, now: float | None = None) -> tuple[str, float | None]:
    """The scheduler's name and seconds to the end of the job: None where it sets no end, or does not tell; "" outside of a job."""
    now = time.time() if now is None else now
    if job := environ.get("SLURM_JOB_ID"):
        end = environ.get("SLURM_JOB_END_TIME", "")
        at = float(end) if end.isdigit() else scontrol_end(ask("scontrol", "show", "job", job))
        return "Slurm", None if at is None else at - now
    if job := environ.get("PBS_JOBID"):
        return "PBS", qstat_left(ask("qstat", "-f", job))
    return "", None


def scontrol_end(text: str) -> float | None:
    """Seconds since 1970 of ``EndTime=2026-11-24T13:45:00``, in this machine's zone; None for Unknown and for no answer."""
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return datetime.fromisoformat(found[1]).timestamp() if found else None


def qstat_left(text: str) -> float | None:
    """What ``resources_used.walltime`` leaves of ``Resource_List.walltime``, both as hours:minutes:seconds."""
    asked = re.search(r"Resource_List\.walltime\s*=\s*([\d:]+)", text)
    used = re.search(r"resources_used\.walltime\s*=\s*([\d:]+)", text)
    return _seconds(asked[1]) - (_seconds(used[1]) if used else 0.0) if asked else None


def _seconds(text: str) -> float:
    total = 0.0
    for part in text.split(":"):
        total = 60 * total + float(part or 0)
    return total
