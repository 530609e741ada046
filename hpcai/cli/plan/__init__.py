"""`hpcai plan APP`: what a training will take on GPUs that are not here, before the job has cost anything.

The app's own step runs on paper: the code that a GPU would be given, as one process of a job of any size, with tensors that have
sizes and no numbers. That gives its kernels, the bytes that they move, its messages and where they are waited for, and its memory.
Rates are those of the GPU's sheet (hpcai.plan.machines). How much slower kernels are than these is taken from one published step of
the app; `--measured` takes it from a step of yours, and `--slower 1` plans what no code can beat. Steps to the target are those
that the benchmark's reference needs at each batch. Along other axes than the one of `--ways` a sample is cut as the settings say
(mesh.pipeline, mesh.context), and then by default in one way.

    --check    plan what others have published, and print how wrong that is
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from hpcai.cli import tables
from hpcai.cli.plan.planner import Job, Planner
from hpcai.plan import machines
from hpcai.plan.machines import MACHINES, Machine
from hpcai.stop import show_to_reader

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    words = _parsed(argv)
    files = [word for word in words.words if word.endswith((".yaml", ".yml"))][:1]
    planner = Planner(words.app, [word for word in words.words if word not in files], files[0] if files else None)
    found: Row = {"plan": words.app, "source": planner.workload.source}
    with Console(stderr=True).status("a step on paper"):
        if words.check:
            found["check"] = check(planner)
        else:
            on = machines.find_machine(words.machine)
            slower = words.slower or (planner.measured(words.measured, on) if words.measured else planner.slower)
            found |= {"machine": on.name, "slower": slower}
            on, ways = replace(on, slowdown=slower), words.ways or planner.ways
            found["axes"] = planner.axes()
            found["jobs"] = {gpus: [row(job, on) for job in best(planner, gpus, ways, on, words.evaluate)] for gpus in words.gpus}
    print(json.dumps(found)) if words.json else show(found)
    return 0


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpcai plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", metavar="APP", help="a folder of apps/ with a file plan.py")
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml|key=value", help="settings of the app")
    parser.add_argument("--machine", default="h100", help=f"one of {', '.join(MACHINES)}")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 2048], metavar="N", help="GPUs that train")
    parser.add_argument("--ways", type=int, nargs="+", metavar="N", help="processes that a sample is cut over, along one axis")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="more GPUs that only evaluate")
    parser.add_argument("--slower", type=float, metavar="FACTOR", help="than the machine's rates allow")
    parser.add_argument("--measured", type=float, metavar="SECONDS", help="of a step of one sample on one GPU of this machine")
    parser.add_argument("--check", action="store_true", help="plan what others have published")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    words = parser.parse_intermixed_args(argv)
    if min(*words.gpus, *(words.ways or [1])) < 1 or words.evaluate < 0 or min(words.slower or 1, words.measured or 1) <= 0:
        parser.error("numbers of GPUs and ways are at least 1, factors and seconds more than 0")
    return words


def best(planner: Planner, gpus: int, ways: Sequence[int], on: Machine, evaluating: int) -> list[Job]:
    """For each way of cutting the fastest job on ``gpus``."""
    every = planner.jobs(gpus, ways, on, evaluating)
    return [next(job for job in every if job.ways == cut) for cut in ways if any(job.ways == cut for job in every)]


def row(job: Job, on: Machine) -> Row:
    step, peak, lean, _ = job.fit
    return {
        "gpus": job.gpus, "ways": job.ways, "batch": job.batch, "memory_gb": peak / 1e9, "of_gb": on.capacity / 1e9,
        "lean": list(lean), "step_s": job.seconds, "kernels_s": step.compute_bound + step.memory_bound,
        "launches_s": step.launches, "messages_s": step.exposed_communication, "idle_s": step.idle, "loader_s": job.loader,
        "sent_gb": step.sent / 1e9, "steps": job.steps, "minutes": job.minutes, "evaluation_minutes": job.evaluation,
    }  # fmt: skip


def check(planner: Planner) -> list[Row]:
    """What is published, what is planned with the first step's slowness, and what no code could beat."""
    rows = []
    for number, point in enumerate(planner.workload.published):
        planned, least = (planner.planned(point, slower) for slower in (planner.slower, 1.0))
        rows.append({
            "what": point.what, "of": point.of, "machine": point.machine, "gpus": point.gpus, "evaluating": point.evaluating,
            "ways": point.ways, "batch": point.batch, "published": point.value, "planned": planned,
            "error_percent": None if number == 0 else 100 * (planned / point.value - 1), "at_best": least,
        })  # fmt: skip
    return rows


def show(found: Row) -> None:
    show_to_reader(lambda: print(*(_checked(found) if "check" in found else _jobs(found)), sep="\n"))


def _checked(found: Row) -> Iterator[str]:
    yield f"{found['plan']}: published and planned"
    rows = []
    for one in found["check"]:
        unit, scale = ("ms a step", 1e3) if one["what"] == "step" else ("minutes", 1)
        gpus = f"{one['gpus']:,} {one['machine']}" + (f" + {one['evaluating']}" if one["evaluating"] else "")
        error = "taken from it" if one["error_percent"] is None else f"{one['error_percent']:+.0f} %"
        published, planned, least = (_number(scale * one[key]) for key in ("published", "planned", "at_best"))
        rows.append((unit, one["of"], gpus, one["ways"], one["batch"], published, planned, error, least))
    yield from tables.lines(rows, ("", "by", "GPUs", "ways", "batch", "published", "planned", "error", "at best"), left=("", "by"))


def _jobs(found: Row) -> Iterator[str]:
    slower = f"kernels {found['slower']:.2f} times slower than its rates"
    yield f"{found['plan']} on {found['machine']}; {slower}; {found['source']}"
    if found["axes"]:
        yield "each of them over " + " x ".join(f"{name} {size}" for name, size in found["axes"].items())
    rows: list[tuple[object, ...]] = []
    for jobs in found["jobs"].values():
        least = min((one["minutes"] for one in jobs), default=0)
        for one in jobs:
            took = (_number(1e3 * one[key]) for key in ("step_s", "kernels_s", "launches_s", "messages_s", "idle_s", "loader_s"))
            ends = f"{one['steps']:,.0f}", _number(one["minutes"]), _number(one["evaluation_minutes"])
            best = "best" if len(jobs) > 1 and one["minutes"] == least else ""
            rows.append((f"{one['gpus']:,}", one["ways"], one["batch"], _number(one["memory_gb"]), *took, *ends, best))
    parts = "kernels", "launches", "exposed", "idle", "loader"
    yield from tables.lines(rows, ("GPUs", "ways", "batch", "GB", "ms a step", *parts, "steps", "minutes", "evaluating", ""))
    yield "ms of a step: kernels, launches, exposed communication, pipeline bubbles, loader; minutes that training waits"
    for gpus in [gpus for gpus, jobs in found["jobs"].items() if not jobs]:
        yield f"{int(gpus):,} GPUs: no batch that is known to reach the target divides among them and fits their memory"


def _number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
