"""`hpcai plan APP`: predict time and memory of a training on GPUs that this machine does not have.

The app's own training step is traced without a GPU, as one process of a job of any size, with tensors that have shapes but no
values. The trace yields the kernels, the bytes that they move, the communication and its synchronization points, and the memory.
Rates are those of the GPU's data sheet (hpcai.plan.machines). The slowdown of kernels relative to them is fitted to one published
step of the app; `--measured` fits it to your own step, and `--slower 1` predicts the lower bound. Steps to the target are those of
the benchmark's reference at each batch size. `--ways` varies one axis of the mesh; a sample is split along other axes as the
settings say (mesh.pipeline, mesh.context), and then by default not along this one. `--search` compares all meshes of language
models (tensor, context, pipeline and expert parallelism) and what activations are recomputed, at the batch of the settings.

    --check        predict published results, and print the errors
    --inference    plan the generation of texts instead: latency and throughput of meshes of tensor and pipeline parallelism
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpcai.cli import apps, make_parser, tables
from hpcai.plan import machines
from hpcai.plan.machines import MACHINES, Machine

if TYPE_CHECKING:
    from hpcai.cli.plan.planner import Job, Planner

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    if args.inference:
        apps.require_module(args.app, "inference").main(args)
        return 0

    from rich.console import Console

    from hpcai.cli.plan.planner import Planner  # imports torch

    files = [arg for arg in args.overrides if arg.endswith((".yaml", ".yml"))][:1]
    planner = Planner(args.app, [arg for arg in args.overrides if arg not in files], files[0] if files else None)
    result: Row = {"plan": args.app, "source": planner.training.source}
    with Console(stderr=True).status("") as status:
        planner.report = status.update
        if args.check:
            result["check"] = check_published(planner)
        else:
            on = machines.find_machine(args.machine)
            slowdown = args.slower or (planner.slowdown_of_step(args.measured, on) if args.measured else planner.slowdown)
            result |= {"machine": on.name, "slower": slowdown}
            on, ways = replace(on, slowdown=slowdown), args.ways or planner.ways
            result["axes"] = planner.fixed_axes()
            result["jobs"] = {}
            for gpus in args.gpus:
                if args.search:
                    jobs = planner.search_meshes(gpus, on, args.evaluate)
                    result["jobs"][gpus] = [job_row(job, on) | {"sent_over_gb": planner.sent_gb(job, on)} for job in jobs]
                    continue
                fastest: dict[int, Job] = {}  # for each of the ways, in their order
                for job in planner.plan_jobs(gpus, ways, on, args.evaluate):
                    fastest.setdefault(job.ways, job)
                result["jobs"][gpus] = [job_row(fastest[n], on) for n in ways if n in fastest]
    print(json.dumps(result)) if args.json else print_tables(result)
    return 0


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("plan", __doc__, machines=", ".join(MACHINES))
    args = parser.parse_intermixed_args(argv)
    counts, factors = (*args.gpus, *args.lengths, *(args.ways or [1])), (args.slower or 1, args.measured or 1)
    if min(counts) < 1 or args.evaluate < 0 or min(factors) <= 0:
        parser.error("numbers of GPUs, tokens and ways are at least 1, factors and seconds more than 0")
    return args


def job_row(job: "Job", on: Machine) -> Row:
    step, peak, _, lean = job.fit
    return {
        "gpus": job.gpus, "ways": job.ways, "batch": job.batch, "memory_gb": peak / 1e9, "of_gb": on.capacity / 1e9,
        "lean": list(lean), "step_s": job.seconds, "kernels_s": step.compute_bound + step.memory_bound,
        "launches_s": step.launches, "messages_s": step.exposed_communication, "idle_s": step.idle, "loader_s": job.loader,
        "sent_gb": step.sent / 1e9, "steps": job.steps, "minutes": job.minutes, "evaluation_minutes": job.evaluation,
        "mesh": dict(job.mesh),
    }  # fmt: skip


def check_published(planner: "Planner") -> list[Row]:
    """Return rows with the published value, the prediction with the slowdown of the first step, and the lower bound."""
    rows = []
    for index, point in enumerate(planner.training.published):
        planned, lower_bound = (planner.predict(point, slower) for slower in (planner.slowdown, 1.0))
        rows.append({
            "what": point.kind, "of": point.publisher, "machine": point.machine, "gpus": point.gpus, "evaluating": point.evaluating,
            "ways": point.ways, "batch": point.batch, "published": point.value, "planned": planned,
            "error_percent": None if index == 0 else 100 * (planned / point.value - 1), "at_best": lower_bound,
        })  # fmt: skip
    return rows


def print_tables(result: Row) -> None:
    print(*(_check_lines(result) if "check" in result else _job_lines(result)), sep="\n")


def _check_lines(result: Row) -> Iterator[str]:
    yield f"{result['plan']}: published and planned"
    rows = []
    for entry in result["check"]:
        unit, scale = ("ms a step", 1e3) if entry["what"] == "step" else ("minutes", 1)
        gpus = f"{entry['gpus']:,} {entry['machine']}" + (f" + {entry['evaluating']}" if entry["evaluating"] else "")
        error = "taken from it" if entry["error_percent"] is None else f"{entry['error_percent']:+.0f} %"
        published, planned, lower_bound = (_format_number(scale * entry[key]) for key in ("published", "planned", "at_best"))
        rows.append((unit, entry["of"], gpus, entry["ways"], entry["batch"], published, planned, error, lower_bound))
    yield from tables.lines(rows, ("", "by", "GPUs", "ways", "batch", "published", "planned", "error", "at best"), left=("", "by"))


def _job_lines(result: Row) -> Iterator[str]:
    slower = f"kernels {result['slower']:.2f} times slower than its rates"
    yield f"{result['plan']} on {result['machine']}; {slower}; {result['source']}"
    if result["axes"]:
        yield "each of them over " + " x ".join(f"{name} {size}" for name, size in result["axes"].items())
    rows: list[tuple[object, ...]] = []
    for jobs in result["jobs"].values():
        fastest = min((job["minutes"] for job in jobs), default=0)
        for job in jobs:
            times = (_format_number(1e3 * job[f"{x}_s"]) for x in ("step", "kernels", "launches", "messages", "idle", "loader"))
            totals = f"{job['steps']:,.0f}", _format_number(job["minutes"]), _format_number(job["evaluation_minutes"])
            mark, sent = "best" if len(jobs) > 1 and job["minutes"] == fastest else "", job.get("sent_over_gb", {})
            if sent:  # of a search
                mark = " ".join((*job["lean"][-1:], *(f"{axis}={_format_number(gb)}" for axis, gb in sent.items())))
            mesh = " ".join(f"{axis}={job['mesh'].get(axis, 1)}" for axis in sent) or job["ways"]
            rows.append((f"{job['gpus']:,}", mesh, job["batch"], _format_number(job["memory_gb"]), *times, *totals, mark))
    parts = "kernels", "launches", "exposed", "idle", "loader"
    yield from tables.lines(rows, ("GPUs", "ways", "batch", "GB", "ms a step", *parts, "steps", "minutes", "evaluating", ""))
    if any("sent_over_gb" in job for jobs in result["jobs"].values() for job in jobs):
        yield "at the end of a line: what is recomputed, and GB that a rank sends in a step over each axis"
    yield "ms of a step: kernels, launches, exposed communication, pipeline bubbles, loader; minutes that training waits"
    for gpus in [gpus for gpus, jobs in result["jobs"].items() if not jobs]:
        yield f"{int(gpus):,} GPUs: no batch that is known to reach the target divides among them and fits their memory"


def _format_number(value: float) -> str:
    """Return three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
