"""Samples per second by number of GPUs, as `hpcai plan` predicts them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import wait
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
    late, context, running, began = known.pop("late", ()), get_context("fork"), dict[Any, tuple[Workload, Any]](), list[Workload]()
    jobs = sorted(missing, key=lambda workload: keys[workload] in late)  # that others have their turn
    try:
        while (jobs or running) and time.monotonic() < end:
            while jobs and len(running) < max(1, count_cpus()):
                began.append(jobs.pop(0))
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_compute, args=(sender, machine, began[-1], *missing[began[-1]]))
                process.start()
                sender.close()
                running[receiver] = began[-1], process
            report(f"hpcai plan: curves of {', '.join(dict.fromkeys(app for app, _ in problems))}, for at most {seconds:.0f} s")
            for ready in list[Any](wait([*running], max(end - time.monotonic(), 0.0))):
                workload, process = running.pop(ready)
                try:
                    problems[workload] = computed = ready.recv()
                except EOFError:
                    computed = problems[workload] = "its process ended"
                if not isinstance(computed, str):
                    known[keys[workload]] = computed
                    del problems[workload]
                process.join()
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    path.write_text(json.dumps(known | {"late": [keys[workload] for workload in began if workload in problems]}), encoding="utf-8")
    return {workload: [(int(gpus), float(rate)) for gpus, rate in known.get(key, ())] for workload, key in keys.items()}, problems


def _compute(sender: Any, machine: str, workload: Workload, gpus: Sequence[int], batch: int, settings: Settings) -> None:
    """Send the curve of the workload, or the reason if there is none."""
    torch.set_num_threads(1)
    try:
        sender.send(curve(*workload, gpus, machine, batch, settings))
    except Exception as error:  # anything that an app's code raises; the page is still drawn
        sender.send(describe_error(error))
