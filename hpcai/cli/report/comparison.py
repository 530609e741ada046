"""Several runs on one page: what differs between them, what came of each, and their curves over one another."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import cycle, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.curves import set_log_scale, smooth
from hpcai.cli.report.document import Images, card, figure_cards, html_page, left_out_card, run_state, table
from hpcai.cli.report.run import RunRecord
from hpcai.cli.report.theme import PALETTE, WIDTH, Plot, Theme, escape_mathtext
from hpcai.log import duration, number

FILE = "comparison.html"
SEED = "train.seed"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (7, 2, 1, 2)))
UNITS = ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
MISSING = "–"


class Comparison:
    """Runs, each under the shortest name that tells it from the others: its path below the folder that holds them all."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        places = [run.directory.resolve() for run in runs]
        self.folder = Path(os.path.commonpath([place.parent for place in places]))
        self.runs = {os.path.relpath(place, self.folder): run for place, run in zip(places, runs)}
        self.apps = list(dict.fromkeys(run.name for run in runs))
        self.left_out: list[str] = []
        self.settings = {label: _flatten(run.settings) for label, run in self.runs.items()}

    @property
    def first(self) -> RunRecord:
        return next(iter(self.runs.values()))

    def differing_settings(self) -> dict[str, list[str]]:
        """Settings, and below them versions and processes, that are not the same in all runs, with the value of each run."""
        facts = [self.settings[label] | _run_facts(run) for label, run in self.runs.items()]
        every = {name: [fact.get(name, MISSING) for fact in facts] for name in dict.fromkeys(name for fact in facts for name in fact)}
        return {name: values for name, values in every.items() if len(set(values)) > 1}

    def metrics(self) -> list[str]:
        """Evaluated metrics without their parts; of runs of several apps those that all of them have."""
        each = [[*run.metric_families(), *(name for name in run.names("evaluate") if name == "loss")] for run in self.runs.values()]
        each = [sorted(names, key=lambda name: name != self.first.setting("train.metric")) for names in each]
        every = list(dict.fromkeys(name for names in each for name in names))
        if len(self.apps) == 1:
            return every
        shared = [name for name in every if all(name in names for names in each)]
        self.left_out += [f"{name}: not a metric of all of {', '.join(self.apps)}" for name in every if name not in shared]
        return shared

    def group_by_settings(self) -> dict[str, list[str]]:
        """Labels of runs that differ in the seed alone, by what tells them from others."""
        rows = {label: {name: value for name, value in row.items() if name != SEED} for label, row in self.settings.items()}
        told = [name for name in dict.fromkeys(name for row in rows.values() for name in row)
                if len({row.get(name) for row in rows.values()}) > 1]
        found: dict[str, list[str]] = {}
        for label in self.runs:
            found.setdefault(", ".join(f"{name}={rows[label].get(name, MISSING)}" for name in told) or "all", []).append(label)
        return found

    def line_styles(self, theme: Theme) -> dict[str, tuple[str, Any]]:
        """Colour and dashes of each run. Beside others, runs that differ in their seeds alone have one colour."""
        colors = (theme.main, *PALETTE)
        groups = list(self.group_by_settings().values())
        if 1 < len(groups) < len(self.runs):
            pairs = zip(groups, cycle(colors))
            return {label: (color, dash) for group, color in pairs for label, dash in zip(group, cycle(DASHES))}
        return {label: (color, dash) for label, (dash, color) in zip(self.runs, product(DASHES * 99, colors))}


def _flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Each setting by its dotted name, but for the run's folder."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{path}.")
        elif path != "report.directory":
            found[path] = value if isinstance(value, str) else json.dumps(value)
    return found


def _run_facts(run: RunRecord) -> dict[str, str]:
    """What a run says of itself beside its settings."""
    start = run.start
    found = {name: start.get(name) for name in ("name", "device", "world", "nodes", "parameters", "train_samples")}
    found |= {f"version of {name}": version for name, version in (start.get("versions") or {}).items()}
    names = {"name": "app", "world": "processes", "train_samples": "training samples"}
    return {names.get(name, name): str(value) for name, value in found.items() if value is not None}


class Column(NamedTuple):
    """A result: its title, its value in a run (None where there is none) and how it is written."""

    title: str
    value: Callable[[RunRecord], float | None]
    format: Callable[[float], str] = number


def columns(several: Comparison, names: Sequence[str]) -> list[Column]:
    """Results that at least one run has."""
    every = [Column(f"best {name}", partial(_best, name=name)) for name in names]
    every += [
        Column("last training loss", _last_loss), Column("time to target", _time_to_target, duration),
        Column("training time", lambda run: run.seconds, duration), Column("samples/s", _median_throughput),
        Column("J a sample", lambda run: run.energy.get("joules_per_sample")),
        Column("W, limit of a GPU", lambda run: max(run.energy.get("gpu_limits_w") or (), default=None)),
    ]  # fmt: skip
    return [column for column in every if any(column.value(run) is not None for run in several.runs.values())]


def _best(run: RunRecord, name: str) -> float | None:
    best = run.best(name)
    return best[1] if best else None


def _last_loss(run: RunRecord) -> float | None:
    values = run.series("train", "loss")[1]
    return float(values[-1]) if len(values) else None


def _median_throughput(run: RunRecord) -> float | None:
    values = run.series("train", "samples_per_second")[1]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


def _time_to_target(run: RunRecord) -> float | None:
    """Training time of the first evaluation that was good enough."""
    name = str(run.setting("train.metric"))
    target = run.target(name)
    if target is None:
        return None
    steps, values = run.series("evaluate", name)
    enough = values >= target if run.higher_is_better(name) else values <= target
    return float(np.interp(steps[enough.argmax()], *run.training_time)) if enough.any() else None


def _results(several: Comparison, found: Sequence[Column]) -> str:
    rows = []
    for label, run in several.runs.items():
        step = (run.events_of("train") or run.events_of("stop") or [{}])[-1].get("step") or 0
        values = [column.value(run) for column in found]
        rows.append([label, run_state(run)[0].partition(",")[0], f"{step:,}",
                     *(MISSING if value is None else column.format(value) for column, value in zip(found, values))])
    return card("Results", table(("run", "state", "steps", *(column.title for column in found)), rows, "numbers"))


def _seeds(several: Comparison, found: Sequence[Column]) -> str:
    rows = []
    for name, labels in several.group_by_settings().items():
        runs = [several.runs[label] for label in labels]
        if 1 < len(runs) == len({run.setting(SEED) for run in runs}):
            rows.append([name, len(runs), *(_mean_and_deviation(column, runs) for column in found)])
    note = "Mean ± standard deviation (n - 1) of runs that differ in their seeds alone."
    return card("Over seeds", table(("runs", "n", *(column.title for column in found)), rows, "numbers"), note) if rows else ""


def _mean_and_deviation(column: Column, runs: Sequence[RunRecord]) -> str:
    values = [value for value in map(column.value, runs) if value is not None and math.isfinite(value)]
    if len(values) < 2:
        return MISSING
    few = f" ({len(values)} of {len(runs)})" if len(values) < len(runs) else ""
    return f"{column.format(mean(values))} ± {column.format(stdev(values))}{few}"


def _differences(several: Comparison) -> str:
    rows = [[name, *values] for name, values in several.differing_settings().items()]
    if not rows:
        return card("What differs", "<p>Nothing: settings, versions and processes are the same.</p>")
    return card("What differs", table(("", *several.runs), rows, "numbers"))


# ---- Curves ---------------------------------------------------------------------------------------------------------------------


def plots(several: Comparison, names: Sequence[str]) -> Iterator[Plot]:
    """The training loss, and each of the metrics ``names``, of all runs; what some of them lack is noted."""
    for kind, name in (("train", "loss"), *(("evaluate", name) for name in names)):
        lack = [label for label, run in several.runs.items() if not np.isfinite(run.series(kind, name)[1]).any()]
        title = "Training loss" if kind == "train" else f"Validation {name}"
        if lack:
            several.left_out.append(f"{title}: no finite value of it yet in {', '.join(lack)}")
        if len(lack) < len(several.runs):
            caption = "Running mean; by step and by time of training." if kind == "train" else "By step and by time of training."
            yield Plot(title, title, caption, partial(_overlay, several, kind, name), wide=True)


def _overlay(several: Comparison, kind: str, name: str, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, 4.2 + 0.16 * (len(several.runs) // 6)))
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    longest = max(run.seconds for run in several.runs.values())
    second, unit = next((second, unit) for least, second, unit in UNITS if longest >= least)
    drawn = []
    for label, (color, dash) in several.line_styles(theme).items():
        run = several.runs[label]
        steps, values = run.series(kind, name)
        if not len(steps):
            continue
        drawn.append(values)
        marks: dict[str, Any] = {"color": color, "linestyle": dash, "linewidth": 1.5}
        marks |= {"marker": "o", "markersize": 3} if kind == "evaluate" else {}
        values = smooth(values) if kind == "train" else values
        by_step.plot(steps, values, label=escape_mathtext(label), **marks)
        by_time.plot(np.interp(steps, *run.training_time) / second, values, **marks)
    _format_axes(by_step, "step", theme, several, name)
    _format_axes(by_time, unit, theme, several, name)
    by_step.set_ylabel(escape_mathtext(name))
    by_step.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if kind == "train" or not several.first.higher_is_better(name):
        set_log_scale(by_step, np.concatenate(drawn))
    figure.legend(loc="outside lower center", ncols=min(6, len(drawn)), fontsize=8.5)
    return figure


def _format_axes(axes: Axes, label: str, theme: Theme, several: Comparison, name: str) -> None:
    axes.set_xlabel(label)
    axes.margins(x=0.02)
    targets = {run.target(name) for run in several.runs.values()}
    if len(targets) == 1 and (target := targets.pop()) is not None:
        axes.axhline(target, color=theme.good, linewidth=1.2, linestyle=(0, (5, 3)))


def render_page(several: Comparison, found: Sequence[Column], drawn: Images) -> str:
    title = f"{len(several.runs)} runs of {', '.join(several.apps)}"
    header = f'<header><h1>{escape(title)}</h1></header><div class="faint">{escape(str(several.folder))}</div>'
    cards = [_results(several, found), _seeds(several, found), _differences(several)]
    return html_page(title, [header, *cards, figure_cards(drawn), left_out_card(several.left_out)])
