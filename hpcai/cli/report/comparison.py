"""Several runs on one page: different settings, results, and overlaid curves."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import cycle, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import hpcai.cli.report.document as document
from hpcai.cli.report.curves import set_log_scale, smooth
from hpcai.cli.report.document import card, run_state, table
from hpcai.cli.report.picture import Finding
from hpcai.cli.report.run import RunRecord
from hpcai.cli.report.step_time import bars
from hpcai.cli.report.theme import PALETTE, WIDTH, Plot, Theme, escape_mathtext
from hpcai.log import flatten, format_duration, format_number, format_rate

SEED = "train.seed"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (7, 2, 1, 2)))
UNITS = ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
MISSING = "–"


class Comparison:
    """Runs, each labelled by its path below their common parent folder."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        places = [run.directory.resolve() for run in runs]
        self.folder = Path(os.path.commonpath([place.parent for place in places]))
        self.runs = {os.path.relpath(place, self.folder): run for place, run in zip(places, runs)}
        self.apps = list(dict.fromkeys(run.name for run in runs))
        self.left_out: list[str] = []
        self.settings = {
            label: {name: value if isinstance(value, str) else json.dumps(value)
                    for name, value in flatten(run.settings).items() if name != "report.directory"}
            for label, run in self.runs.items()
        }  # fmt: skip

    @property
    def first(self) -> RunRecord:
        return next(iter(self.runs.values()))

    def differing_settings(self) -> dict[str, list[str]]:
        """Return the settings, versions and processes that differ between runs, with the value of each run."""
        facts = [self.settings[label] | _run_facts(run) for label, run in self.runs.items()]
        every = {name: [fact.get(name, MISSING) for fact in facts] for name in dict.fromkeys(n for fact in facts for n in fact)}
        return {name: values for name, values in every.items() if len(set(values)) > 1}

    def metrics(self) -> list[str]:
        """Return the evaluated metrics without their parts; for runs of several apps only the common ones."""
        each = [[*run.metric_families(), *(name for name in run.names("evaluate") if name == "loss")] for run in self.runs.values()]
        each = [sorted(names, key=lambda name: name != self.first.setting("train.metric")) for names in each]
        all_names = list(dict.fromkeys(name for names in each for name in names))
        if len(self.apps) == 1:
            return all_names
        shared = [name for name in all_names if all(name in names for names in each)]
        self.left_out += [f"{name}: not a metric of all of {', '.join(self.apps)}" for name in all_names if name not in shared]
        return shared

    def group_by_settings(self) -> dict[str, list[str]]:
        """Return labels of runs that differ only in their seed, grouped by their other differing settings."""
        rows = {label: {name: value for name, value in row.items() if name != SEED} for label, row in self.settings.items()}
        varying = [name for name in dict.fromkeys(name for row in rows.values() for name in row)
                if len({row.get(name) for row in rows.values()}) > 1]
        groups: dict[str, list[str]] = {}
        for label in self.runs:
            groups.setdefault(", ".join(f"{name}={rows[label].get(name, MISSING)}" for name in varying) or "all", []).append(label)
        return groups

    def line_styles(self, theme: Theme) -> dict[str, tuple[str, Any]]:
        """Return colour and dashes of each run. With several groups, runs that differ only in their seed share a colour."""
        colors = (theme.main, *PALETTE)
        groups = list(self.group_by_settings().values())
        if 1 < len(groups) < len(self.runs):
            pairs = zip(groups, cycle(colors))
            return {label: (color, dash) for group, color in pairs for label, dash in zip(group, cycle(DASHES))}
        return {label: (color, dash) for label, (dash, color) in zip(self.runs, product(DASHES * 99, colors))}


def _run_facts(run: RunRecord) -> dict[str, str]:
    """Return facts of a run other than its settings."""
    start = run.start
    facts = {name: start.get(name) for name in ("name", "device", "world", "nodes", "parameters", "train_samples")}
    facts |= {f"version of {name}": version for name, version in (start.get("versions") or {}).items()}
    names = {"name": "app", "world": "processes", "train_samples": "training samples"}
    return {names.get(name, name): str(value) for name, value in facts.items() if value is not None}


class Column(NamedTuple):
    """A column of results: its title, its value for a run (None if missing) and its format."""

    title: str
    value: Callable[[RunRecord], float | None]
    format: Callable[[float], str] = format_number


def columns(comparison: Comparison, names: Sequence[str]) -> list[Column]:
    """Return the columns with a value for at least one run."""
    all_columns = [Column(f"best {name}", partial(_best, name=name)) for name in names]
    all_columns += [
        Column("last training loss", _last_loss), Column("time to target", _time_to_target, format_duration),
        Column("training time", lambda run: run.seconds, format_duration),
        Column("samples/s", lambda run: run.rates.get("samples_per_second")),
        Column("tokens/s", lambda run: run.rates.get("tokens_per_second")),
        Column("MFU in %", lambda run: 100 * run.rates["mfu"] if "mfu" in run.rates else None),
        Column("J a sample", lambda run: run.energy.get("joules_per_sample")),
        Column("W, limit of a GPU", lambda run: max(run.energy.get("gpu_limits_w") or (), default=None)),
    ]  # fmt: skip
    return [column for column in all_columns if any(column.value(run) is not None for run in comparison.runs.values())]


def _best(run: RunRecord, name: str) -> float | None:
    best = run.best(name)
    return best[1] if best else None


def _last_loss(run: RunRecord) -> float | None:
    values = run.series("train", "loss")[1]
    return float(values[-1]) if len(values) else None


def _time_to_target(run: RunRecord) -> float | None:
    """Return the training time of the first evaluation that reached the target."""
    name = str(run.setting("train.metric"))
    target = run.target(name)
    if target is None:
        return None
    steps, values = run.series("evaluate", name)
    reached = values >= target if run.higher_is_better(name) else values <= target
    return float(np.interp(steps[reached.argmax()], *run.training_time)) if reached.any() else None


def _results(comparison: Comparison, columns: Sequence[Column]) -> str:
    rows = []
    for label, run in comparison.runs.items():
        step = (run.events_of("train") or run.events_of("stop") or [{}])[-1].get("step") or 0
        values = [column.value(run) for column in columns]
        rows.append([label, run_state(run)[0].partition(",")[0], f"{step:,}",
                     *(MISSING if value is None else column.format(value) for column, value in zip(columns, values))])
    return card("Results", table(("run", "state", "steps", *(column.title for column in columns)), rows, "numbers"))


def _seeds(comparison: Comparison, columns: Sequence[Column]) -> str:
    rows = []
    for name, labels in comparison.group_by_settings().items():
        runs = [comparison.runs[label] for label in labels]
        if 1 < len(runs) == len({run.setting(SEED) for run in runs}):
            rows.append([name, len(runs), *(_mean_and_deviation(column, runs) for column in columns)])
    note = "Mean ± standard deviation (n - 1) of runs that differ in their seeds alone."
    return card("Over seeds", table(("runs", "n", *(column.title for column in columns)), rows, "numbers"), note) if rows else ""


def _mean_and_deviation(column: Column, runs: Sequence[RunRecord]) -> str:
    values = [value for value in map(column.value, runs) if value is not None and math.isfinite(value)]
    if len(values) < 2:
        return MISSING
    count_text = f" ({len(values)} of {len(runs)})" if len(values) < len(runs) else ""
    return f"{column.format(mean(values))} ± {column.format(stdev(values))}{count_text}"


def plots(comparison: Comparison, names: Sequence[str]) -> Iterator[Plot]:
    """Yield the training loss and each of the metrics ``names``, of all runs; runs without finite values are noted."""
    for kind, name in (("train", "loss"), *(("evaluate", name) for name in names)):
        missing = [label for label, run in comparison.runs.items() if not np.isfinite(run.series(kind, name)[1]).any()]
        title = "Training loss" if kind == "train" else f"Validation {name}"
        if missing:
            comparison.left_out.append(f"{title}: no finite value of it yet in {', '.join(missing)}")
        if len(missing) < len(comparison.runs):
            caption = "Running mean; by step and by time of training." if kind == "train" else "By step and by time of training."
            yield Plot(title, title, caption, partial(_overlay, comparison, kind, name))


def _overlay(comparison: Comparison, kind: str, name: str, theme: Theme) -> list[Figure]:
    figures = [Figure(figsize=(WIDTH, 3.2 + 0.16 * (len(comparison.runs) // 2))) for _ in range(2)]
    by_step, by_time = (figure.subplots() for figure in figures)
    longest = max(run.seconds for run in comparison.runs.values())
    seconds_per_unit, unit = next((seconds_per_unit, unit) for minimum, seconds_per_unit, unit in UNITS if longest >= minimum)
    all_values = []
    for label, (color, dash) in comparison.line_styles(theme).items():
        run = comparison.runs[label]
        steps, values = run.series(kind, name)
        if not len(steps):
            continue
        all_values.append(values)
        style: dict[str, Any] = {"color": color, "linestyle": dash, "linewidth": 1.5}
        style |= {"marker": "o", "markersize": 3} if kind == "evaluate" else {}
        values = smooth(values) if kind == "train" else values
        by_step.plot(steps, values, label=escape_mathtext(label), **style)
        by_time.plot(np.interp(steps, *run.training_time) / seconds_per_unit, values, label=escape_mathtext(label), **style)
    by_step.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    targets = {run.target(name) for run in comparison.runs.values()}
    target = targets.pop() if len(targets) == 1 else None
    for figure, axes, label in zip(figures, (by_step, by_time), ("step", unit)):
        axes.set(xlabel=label, ylabel=escape_mathtext(name))
        axes.margins(x=0.02)
        if target is not None:
            axes.axhline(target, color=theme.good, linewidth=1.2, linestyle=(0, (5, 3)))
        if kind == "train" or not comparison.first.higher_is_better(name):
            set_log_scale(axes, np.concatenate(all_values))
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figures


def render_page(comparison: Comparison, columns: Sequence[Column], images: document.Images) -> str:
    title = f"{len(comparison.runs)} runs of {', '.join(comparison.apps)}"
    differing = [[name, *values] for name, values in comparison.differing_settings().items()]
    same = "<p>Nothing: settings, versions and processes are the same.</p>"
    differences = card("What differs", table(("", *comparison.runs), differing, "numbers") if differing else same)
    return document.html_page(title, [
        document.header(title, "", "", str(comparison.folder)), document.lead(_finding(comparison)), _tiles(comparison),
        _results(comparison, columns), _seeds(comparison, columns), differences, document.figure_cards(images),
        bars(comparison.runs), document.left_out_card(comparison.left_out),
        document.details(f"Settings of {next(iter(comparison.runs))}", f"<pre>{escape(comparison.first.settings_text)}</pre>"),
    ])  # fmt: skip


def _finding(comparison: Comparison) -> Finding:
    """Return the best run by the metric of the first one."""
    name = comparison.first.metric or "loss"
    values = {label: value for label, run in comparison.runs.items() if (value := _best(run, name)) is not None}
    if not values:
        return Finding(f"No run has a finite validation {name} yet.", "–", f"validation {name}")
    ordered = sorted(values, key=lambda label: values[label], reverse=comparison.first.higher_is_better(name))
    best, worst = ordered[0], ordered[-1]
    number = format_number(values[best])
    text = f"No run has a better validation {name} than {best}, {number}"
    if values[best] != values[worst]:
        text = f"{best} has the best validation {name}, {number}; {worst} has the worst, {format_number(values[worst])}"
    return Finding(f"{text}.", number, f"best validation {name}")


def _tiles(comparison: Comparison) -> str:
    runs = comparison.runs.values()
    rates = [rate for run in runs if (rate := run.rates.get("samples_per_second")) is not None]
    rows = [("runs", str(len(runs)), f"{sum(bool(run.stop) for run in runs)} ended"),
            ("training time", format_duration(sum(run.seconds for run in runs)), "of all runs")]  # fmt: skip
    rows += [("throughput", format_rate(max(rates)), f"of the fastest; {format_rate(min(rates))} of the slowest")] if rates else []
    return document.tiles(rows)
