"""Acceptance runs that apps declare in apps/NAME/acceptance.toml: their commands, their figures, and whether these are right."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from hpcai import config
from hpcai.cli import apps
from hpcai.errors import DataError
from hpcai.log import BETWEEN, METRICS, format_number, read_metrics

Mode = Literal["small", "target", "weak", "strong"]
MODES: tuple[Mode, ...] = ("small", "target", "weak", "strong")
_STRONG = 4  # samples of a rank on one node in strong scaling, times those in weak scaling
_DATA = "data"  # folder of a run's data
NEVER_STARTED = (
    "the job waited in the queue for longer than --pending, was cancelled, or wrote to a folder of its node; the partition is full "
    "or down: give more time or another --queue, and an --output that all nodes see"
)
_FAILURE = re.compile(r"error|failed|cannot|not found|no such|refused|denied|expected|unable", re.IGNORECASE)


class Commands(NamedTuple):
    """The arguments of ``hpcai`` that prepare a run, on one process, and those of the run on all ranks."""

    prepare: Sequence[Sequence[str]]
    run: Sequence[str]


@cache
def read_declaration(app: str) -> dict[str, Any]:
    """Return the acceptance runs of the app."""
    return tomllib.loads((apps.app_folder(app) / "acceptance.toml").read_text(encoding="utf-8"))


def declared_apps() -> list[str]:
    return [app for app in apps.list_apps() if (apps.app_folder(app) / "acceptance.toml").is_file()]


def app_of(part: str) -> str:
    """Return the app whose declaration has the run of ``part``, checkpoint or resume."""
    return next(app for app in declared_apps() if part in read_declaration(app))


def unit(app: str) -> str:
    """Return the unit of the app's throughput, as its published rates have it: samples, unless a sample is a block of others."""
    return str(read_declaration(app)["scaling"].get("unit", "samples"))


def plan_run(app: str, mode: Mode, ranks: int, per_node: int, gpus: bool, part: str | None = None) -> Commands | None:
    """Return the commands of a run on ``ranks``, ``per_node`` of them on each node, or None if there is no such run; with ``part``,
    those of its run, which is a small one with other settings.

    Scaling has the published configuration on GPUs, and that of the small run on CPUs: in weak scaling each rank has the same
    number of samples, in strong scaling all ranks share four times those of a node."""
    declaration = read_declaration(app)
    scaling = mode in ("weak", "strong")
    table = declaration.get({"small": "small", "target": "target"}.get(mode, "scaling" if gpus else "small"))
    if table is None:
        return None
    more = declaration[part] if part else {}
    overrides, batch = [*table["overrides"], *more.get("overrides", ()), *(more.get("gpu", ()) if gpus else ())], 0
    if scaling:
        of_rank = table["batch"] if gpus else max(_small_batch(app) // 8, 1)
        batch = of_rank * (ranks if mode == "weak" else _STRONG * per_node)
        if batch % ranks:
            return None
        overrides += [] if gpus else ["data.batch={batch}"]
    names = {"data": _DATA, "batch": batch, "samples": max(2 * batch, 64), "ranks": ranks}

    def fill(text: str) -> str:
        return re.sub(r"\{(data|batch|samples|ranks)\}", lambda match: str(names[match[1]]), " ".join(text.split()))

    prepare = [["prepare", *fill(words).split()] for words in table["prepare"]]
    prepare += [["run", *fill(words).split()] for words in table.get("before", ())]
    return Commands(prepare, ["run", app, table["config"], *map(fill, overrides), "report.directory=run"])


def _small_batch(app: str) -> int:
    table = read_declaration(app)["small"]
    file = apps.app_folder(app) / "configs" / table["config"]
    overrides = [word.strip().replace("{data}", _DATA).replace("{ranks}", "1") for word in table["overrides"]]
    return int(config.load(apps.require_module(app, "settings").Config, file, overrides).data.batch)


def find_mistake(app: str, run: Path) -> str:
    """Return the values of a small run that differ from those of ``expected``, or "" if there are none."""
    lines = []
    for name, actual, value, tolerance in _compare(app, run):
        if actual is None or not abs(actual - value) <= tolerance * abs(value):
            text = "missing" if actual is None else format_number(actual)
            lines.append(f"{name} is {text}, expected {format_number(value)} within {100 * tolerance:g} %")
    advice = "the arithmetic of this system is wrong, or its ranks differ: compare with one rank, and with step.compile=none"
    return "; ".join([*lines, advice]) if lines else ""


def _compare(app: str, run: Path) -> Iterator[tuple[str, float | None, float, float]]:
    """Yield name, last value, expected value and relative tolerance."""
    events = read_metrics(run / METRICS)
    for name, (value, tolerance) in read_declaration(app)["small"]["expected"].items():
        kind, _, field = name.partition(".")
        values = (event[field] for event in reversed(events) if event["kind"] == kind and field in event)
        yield name, next(values, None), value, tolerance


def read_figures(app: str, mode: Mode, run: Path) -> dict[str, float | None]:
    """Return throughput and the loader's share (medians of the reports after the first), energy, the largest deviation from the
    expected values, and the time to the target; None where there is none."""
    events = read_metrics(run / METRICS)
    reports = [event for event in events if event["kind"] == "train"]
    reports = reports[1:] or reports
    stop: Mapping[str, Any] = next((event for event in reversed(events) if event["kind"] == "stop"), {})
    energy: Mapping[str, Any] = next((event for event in reversed(events) if event["kind"] == "energy"), {})
    parts = [{name: seconds for name, seconds in event.get("parts", {}).items() if name not in BETWEEN} for event in reports]
    shares = [100 * part.get("data", 0.0) / sum(part.values()) for part in parts if sum(part.values())]
    differences = [abs(actual / value - 1) for _, actual, value, _ in _compare(app, run) if actual] if mode == "small" else []
    return {
        "throughput": median(event[f"{unit(app)}_per_second"] for event in reports) if reports else None,
        "deviation": 100 * max(differences) if differences else None, "loader_share": median(shares) if shares else None,
        "energy": energy["joules"] / energy["samples"] if energy.get("samples") else None,
        "time_to_target": stop.get("seconds") if mode == "target" and stop.get("target_reached") else None,
    }  # fmt: skip


def describe_failure(code: str | None, errors: Path, output: Path) -> str:
    """Return the reason why a job has ended with ``code``, or before its run (None): the last lines that look like one."""
    if code is None and not output.is_file():
        return NEVER_STARTED
    lines = [line.strip() for path in (errors, output) if path.is_file() for line in path.read_text(errors="replace").splitlines()]
    last = [line for line in lines if _FAILURE.search(line)][-3:] or [line for line in lines if line][-1:]
    how = f"ended with exit code {code}" if code is not None else "ended before its run, in its data or the lines of the site file"
    return f"the job {how}: {' | '.join(last)[:600] or 'it printed nothing'}; see {errors} and {output}"


def judge_mlperf(app: str, run: Path) -> dict[str, Any] | None:
    """Return the verdict of MLPerf's compliance checker on the log of a run, or None without a log."""
    rules, log = read_declaration(app)["small"].get("mlperf"), run / "mlperf.log"
    if rules is None or not log.is_file():
        return None
    checker = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", rules[0], "--ruleset", rules[1], str(log)]
    result = subprocess.run(checker, capture_output=True, text=True)
    text = result.stdout + result.stderr
    missing = "mlperf-logging is not installed" if "No module named" in text else None
    rules_broken = re.findall(r"(?:CHECK for '|Failed checks for |Required \w+ occurrence of '|Required )(\w+)", text)
    failed = [missing] if missing else sorted({*rules_broken}) or ([] if result.returncode == 0 else [text.strip()[-200:]])
    return {"benchmark": app, "usage": " ".join(rules), "passed": not failed, "failed": failed, "log": f"{run.name}/{log.name}"}


def keep_result(path: Path, test: Any) -> None:
    """Append the result of a ReFrame test that has passed, in the form of its report, so that a session that is cut off goes on."""
    case = {
        "display_name": test.display_name, "system": test.current_system.name, "partition": test.current_partition.name,
        "result": "pass", "fail_reason": None, "job_nodelist": list(test.job.nodelist or ()), "num_tasks": test.num_tasks,
        "outputdir": test.outputdir, "stagedir": test.stagedir, "job_stdout": test.stdout.evaluate(),
        "perfvalues": dict(test.perfvalues),
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(case) + "\n")


def read_kept(path: Path) -> list[dict[str, Any]]:
    """Return the results in ``path``. Raises DataError for a damaged line before the last."""
    cases = []
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            cases.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"{path}:{number}: {line[:60]!r} is no result; remove the line: its test then runs again") from None
    return cases
