"""Samples per second by number of GPUs, as `hpcai plan` predicts them."""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch

from hpcai import __version__
from hpcai.cli.plan.planner import Planner
from hpcai.cli.report.run import describe_error
from hpcai.errors import ConfigError, HpcaiError
from hpcai.host_limits import count_cpus
from hpcai.json_file import read_object
from hpcai.plan import machines

Settings = tuple[str, tuple[str, ...]]
"""a file in an app's folder ``configs`` ("": that of its plan), and overrides of it"""
DEFAULT: Settings = ("", ())
Curve = list[tuple[int, float]]
Workload = tuple[str, str]
"""app and mode"""
Wanted = tuple[Sequence[int], int, Settings]
"""numbers of GPUs, batch of a rank or of the job, and settings"""


def curve(app: str, mode: str, gpus: Sequence[int], machine: str, batch: int, settings: Settings = DEFAULT) -> Curve:
    """Return numbers of GPUs with the samples per second that `hpcai plan` predicts for them. ``batch`` is that of a rank in the
    mode ``weak``, of the job in ``strong``. Numbers that do not divide the batch, or whose memory is too small, are left out."""
    rates = ((count, _rate(app, machine, count, batch * count if mode == "weak" else batch, settings)) for count in gpus)
    return [(count, rate) for count, rate in rates if rate]


@cache
def _planner(app: str, settings: Settings) -> Planner:
    planner, (yaml, overrides) = Planner(app), settings
    default = Path(planner.yaml)
    return planner if not overrides and yaml in ("", default.name) else Planner(app, overrides, default.with_name(yaml))


def _rate(app: str, machine: str, gpus: int, batch: int, settings: Settings) -> float | None:
    with suppress(ConfigError):  # an app without a plan, or settings that no plan has
        planner = _planner(app, settings)
        on = machines.find_machine(machine, slowdown=planner.slowdown)
        for ways in planner.ways:  # the fewest that fit the memory
            with suppress(ConfigError):
                fit, loader = planner.plan_step(gpus, ways, batch, on)
                return batch / (fit.step.seconds + loader)
    return None


def compute_curves(
    path: Path, machine: str, wanted: Mapping[Workload, Wanted], report: Callable[[str], object], seconds: float = 60.0
) -> tuple[dict[Workload, Curve], dict[Workload, str]]:
    """Return the curves, and the reasons why others are missing. Curves are kept in the JSON file ``path``, and computed by child
    processes, as many as there are cores, for at most ``seconds``."""
    known: dict[str, Any] = {}
    with suppress(HpcaiError):
        known = read_object(path, "the curves that were computed before") if path.exists() else {}
    keys = {workload: json.dumps([__version__, machine, *workload, *args]) for workload, args in wanted.items()}
    missing = {workload: args for workload, args in wanted.items() if keys[workload] not in known}
    problems, end = dict.fromkeys(missing, f"takes longer than {seconds:.0f} s, start it by itself"), time.monotonic() + seconds
    processes, late = max(1, min(count_cpus(), len(missing))), known.pop("late", ())
    jobs = sorted(missing.items(), key=lambda job: keys[job[0]] in late)  # that others have their turn
    with get_context("fork").Pool(processes, _begin) as pool, suppress(TimeoutError):
        results = pool.imap_unordered(partial(_compute, machine), jobs)
        for _ in missing:
            report(f"hpcai plan: curves of {', '.join(dict.fromkeys(app for app, _ in problems))}, for at most {seconds:.0f} s")
            workload, computed = results.next(max(end - time.monotonic(), 0.0))
            if isinstance(computed, str):
                problems[workload] = computed
            else:
                known[keys[workload]] = computed
                del problems[workload]
    began = jobs[: len(jobs) - len(problems) + processes]
    path.write_text(json.dumps(known | {"late": [keys[job] for job, _ in began if job in problems]}), encoding="utf-8")
    return {workload: [(int(gpus), float(rate)) for gpus, rate in known.get(key, ())] for workload, key in keys.items()}, problems


def _begin() -> None:
    """Begin a child process. The end of its pool is SIGTERM, which the parent may block or handle."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)


def _compute(machine: str, job: tuple[Workload, Wanted]) -> tuple[Workload, Curve | str]:
    """Return the workload, and its curve or the reason if there is none."""
    (app, mode), (gpus, batch, settings) = job
    try:
        return (app, mode), curve(app, mode, gpus, machine, batch, settings)
    except Exception as error:  # anything that an app's code raises; the page is still drawn
        return (app, mode), describe_error(error)
