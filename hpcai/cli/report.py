"""`hpcai report RUN`: a run's directory as one page that needs no network, RUN/report.html, with its plots in RUN/plots."""

import argparse
import base64
import io
import math
import statistics
import webbrowser
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcai.errors import DataError
from hpcai.log import METRICS, duration, metrics, number, per_second, read_metrics, size

Series = tuple[np.ndarray, np.ndarray]                   # steps, values

MOST = 12                                                # checkpoints in the table

# Words of metric names that are better when higher; a run's own `train.metric` obeys `train.better`
HIGHER = ("acc", "iou", "dice", "r2", "auc", "lddt", "score", "f1", "precision", "recall", "correlation")


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass
class Predictions:
    """What the network said about the validation samples, and what is true.   P parameters, N samples"""

    names: list[str]
    units: list[str]
    predicted: np.ndarray                                # [N, P]
    true: np.ndarray                                     # [N, P]

    def rmse(self, p: int) -> float:
        return float(np.sqrt(np.mean((self.predicted[:, p] - self.true[:, p]) ** 2)))

    def mae(self, p: int) -> float:
        return float(np.mean(np.abs(self.predicted[:, p] - self.true[:, p])))

    def spread(self, p: int) -> float:
        """RMSE of the network that always says the mean: the yardstick."""
        return float(np.std(self.true[:, p]))

    def r2(self, p: int) -> float:
        return 1 - (self.rmse(p) / self.spread(p)) ** 2 if self.spread(p) > 0 else math.nan


@dataclass
class Run:
    """All that a run's directory says."""

    directory: Path
    events: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    settings_text: str = ""
    predictions: Predictions | None = None
    left_out: list[str] = field(default_factory=list)    # what the page lacks, and why

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        return next(iter(reversed(self.of("start"))), {})

    @property
    def stop(self) -> dict[str, Any]:
        """The end of the last life, or nothing while it lasts."""
        last: dict[str, Any] = next((event for event in reversed(self.events) if event["kind"] in ("start", "stop")), {})
        return last if last.get("kind") == "stop" else {}

    @property
    def name(self) -> str:
        return str(self.start.get("name") or self.directory.resolve().name)

    def setting(self, path: str) -> Any:
        found: Any = self.settings
        for word in path.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        return found

    def series(self, kind: str, name: str) -> Series:
        pairs = {e["step"]: e[name] for e in self.of(kind) if "step" in e and isinstance(e.get(name), (int, float))}
        return np.array(sorted(pairs)), np.array([pairs[step] for step in sorted(pairs)], dtype=float)

    def names(self, kind: str) -> list[str]:
        """Metrics of all events of ``kind``, in the order in which they came up."""
        return list(dict.fromkeys(name for event in self.of(kind) for name in metrics(event) if name != "time"))

    def target(self, name: str) -> float | None:
        return self.setting("train.target") if name == self.setting("train.metric") else None

    def best(self, name: str) -> tuple[int, float] | None:
        """Step and value of the best evaluation; None where no value is finite."""
        if name == self.setting("train.metric"):
            higher = self.setting("train.better") == "higher"
        else:
            higher = any(word in name.lower() for word in HIGHER)
        pairs = [(int(step), float(value)) for step, value in zip(*self.series("evaluate", name)) if math.isfinite(value)]
        return (max if higher else min)(pairs, key=lambda pair: pair[1], default=None)

    @property
    def seconds(self) -> float:
        """Training time over all lives of the run, whether the clock went on after a resume or began again."""
        total = last = 0.0
        for event in self.events:
            if event["kind"] in ("train", "stop") and isinstance(event.get("seconds"), (int, float)):
                now = event["seconds"]
                total += now - last if now >= last else now
                last = now
        return total


def read(directory: Path) -> Run:
    """Raises DataError where ``directory`` holds no run; whatever else is missing is noted in ``left_out``."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; expected a run's directory, which holds {METRICS}")
    events = read_metrics(directory / METRICS)
    if not events:
        raise DataError(f"{directory / METRICS} holds no event; the run has not started, or died before its first line")
    run = Run(directory, events)
    path = directory / "settings.yaml"
    try:
        run.settings_text = path.read_text(encoding="utf-8")
        loaded = yaml.safe_load(run.settings_text)
        run.settings = loaded if isinstance(loaded, dict) else {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        run.left_out.append(f"settings.yaml: {_reason(error)}; the settings are those of the last start, as {METRICS} has them")
        run.settings = run.start.get("settings") or {}
        run.settings_text = yaml.safe_dump(run.settings, sort_keys=False) if run.settings else ""
    try:
        run.predictions = _predictions(directory / "predictions.npz")
    except (OSError, EOFError, AttributeError, TypeError, ValueError, zipfile.BadZipFile) as error:
        run.left_out.append(f"predicted against true: {_reason(error)}")
    return run


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(error.filename).name}"
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).replace("\n", " ")


def _predictions(path: Path) -> Predictions:
    with np.load(path, allow_pickle=False) as file:
        missing = [name for name in ("names", "units", "predicted", "true") if name not in file]
        if missing:
            raise DataError(f"{path.name} has no array {', '.join(missing)}")
        names, units = file["names"].astype(str).tolist(), file["units"].astype(str).tolist()
        predicted, true = file["predicted"].astype(float), file["true"].astype(float)
    found = (predicted.shape, true.shape, (len(true), len(names)), (len(true), len(units)))
    if len(set(found)) > 1 or not predicted.size:
        raise DataError(f"{path.name}: predicted {found[0]}, true {found[1]}, names [{len(names)}], units [{len(units)}];"
                        " expected predicted and true [N, P], names and units [P]")
    finite = np.isfinite(predicted).all(1) & np.isfinite(true).all(1)
    if not finite.any():
        raise DataError(f"{path.name}: no sample has finite predictions and truths")
    return Predictions(names, units, predicted[finite], true[finite])


# --------------------------------------------------------------------------------------------------------- plotting


class Theme(NamedTuple):
    paper: str
    ink: str
    faint: str
    grid: str
    main: str
    second: str
    good: str
    map: str


LIGHT = Theme("#ffffff", "#1c2430", "#6b7685", "#e6e9ee", "#2458d3", "#d9730d", "#15803d", "Blues")
DARK = Theme("#171b22", "#e4e8ef", "#8e99a9", "#2b323d", "#79a8ff", "#f5a962", "#4ade80", "Blues_r")


class Plot(NamedTuple):
    """One picture of the page; drawn once per theme."""

    name: str
    title: str
    caption: str
    draw: Callable[[Theme], Figure]
    wide: bool = False

    def png(self, theme: Theme) -> bytes:
        style: dict[Any, Any] = {
            "figure.facecolor": theme.paper, "axes.facecolor": theme.paper, "savefig.facecolor": theme.paper,
            "text.color": theme.ink, "axes.labelcolor": theme.faint, "axes.edgecolor": theme.grid, "axes.titlecolor": theme.ink,
            "xtick.color": theme.grid, "ytick.color": theme.grid, "xtick.labelcolor": theme.faint, "ytick.labelcolor": theme.faint,
            "axes.grid": True, "grid.color": theme.grid, "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.linewidth": 0.8,
            "axes.spines.top": False, "axes.spines.right": False, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
            "legend.frameon": False, "legend.fontsize": 9, "lines.solid_capstyle": "round", "agg.path.chunksize": 20000,
            "font.family": "sans-serif", "figure.constrained_layout.use": True,
        }
        with matplotlib.rc_context(style):
            file = io.BytesIO()
            self.draw(theme).savefig(file, format="png", dpi=160, metadata={"Software": None})
        return file.getvalue()


def _verbatim(text: str) -> str:
    """Names come from files: a "$" in them starts no formula."""
    return text.replace("$", r"\$")


def _axes(run: Run, theme: Theme, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.5))
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.set_ylabel(_verbatim(label))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.02)
    for life in run.of("start"):
        if life.get("resumed_from"):
            axes.axvline(life["resumed_from"], color=theme.faint, linewidth=0.9, linestyle=(0, (1, 3)), zorder=1)
    return figure, axes


def _zoom(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where the values span more than a factor of 20."""
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > 20:
        axes.set_yscale("log")


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of about a tenth of the curve, centred, so that it does not lag; NaN is passed over."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    reach = min(max(3, len(values) // 10) // 2, (len(values) - 1) // 2)
    window = np.ones(2 * reach + 1)
    total = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    count = np.convolve(finite.astype(float), window, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1), np.nan)


def _loss(run: Run, theme: Theme) -> Figure:
    figure, axes = _axes(run, theme, "loss")
    steps, values = run.series("train", "loss")
    axes.plot(steps, values, color=theme.main, alpha=0.45, linewidth=1, label="training, every report")
    axes.plot(steps, smooth(values), color=theme.main, linewidth=2, label="training, smoothed")
    at, evaluated = run.series("evaluate", "loss")
    if len(at):
        axes.plot(at, evaluated, color=theme.second, linewidth=1.6, marker="o", markersize=4, label="validation")
    _zoom(axes, np.concatenate([values, evaluated]))
    axes.legend()
    return figure


def _metric(run: Run, name: str, theme: Theme) -> Figure:
    figure, axes = _axes(run, theme, name)
    steps, values = run.series("train", name)
    if len(steps):
        axes.plot(steps, smooth(values), color=theme.main, alpha=0.55, linewidth=1.4, label="training, smoothed")
    at, evaluated = run.series("evaluate", name)
    axes.plot(at, evaluated, color=theme.second, linewidth=2, marker="o", markersize=4.5, label="validation")
    target, best = run.target(name), run.best(name)
    if target is not None:
        axes.axhline(target, color=theme.good, linewidth=1.4, linestyle=(0, (5, 3)), label=f"target {number(target)}")
    if best is not None:
        axes.plot(*best, marker="o", markersize=11, markerfacecolor="none", markeredgecolor=theme.second, markeredgewidth=1.4,
                  linestyle="none", label=f"best {number(best[1])}")
    _zoom(axes, np.concatenate([values, evaluated]))
    axes.legend()
    return figure


def _rate(run: Run, theme: Theme) -> Figure:
    figure, axes = _axes(run, theme, "learning rate")
    axes.plot(*run.series("train", "lr"), color=theme.main, linewidth=2)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    return figure


def _throughput(run: Run, theme: Theme) -> Figure:
    figure, axes = _axes(run, theme, "samples per second")
    steps, values = run.series("train", "samples_per_second")
    marks = {"marker": "o", "markersize": 2.5, "linewidth": 1.2} if len(steps) < 200 else {"linewidth": 0.7}
    axes.plot(steps, values, color=theme.main, alpha=0.75, **marks)
    median = float(np.nanmedian(values))
    axes.axhline(median, color=theme.second, linewidth=1.4, linestyle=(0, (5, 3)), label=f"median {per_second(median)}")
    axes.set_ylim(bottom=0, top=1.15 * float(np.nanmax(values)))
    axes.legend(loc="lower right")
    return figure


def _power(run: Run, theme: Theme) -> Figure:
    figure, axes = _axes(run, theme, "watts of the first GPU")
    axes.plot(*run.series("train", "gpu_power_w"), color=theme.main, linewidth=1.2)
    each = run.series("train", "gpu_samples_per_joule")[1]
    if np.isfinite(each).any():
        axes.set_title(f"median {np.nanmedian(each):.3g} samples per joule", fontsize=9, loc="right", color=theme.faint)
    axes.set_ylim(bottom=0)
    return figure


def _scatter(found: Predictions, theme: Theme) -> Figure:
    count = len(found.names)
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(3.3 * columns, 3.8 * rows))
    panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axes in panels[count:]:
        axes.remove()
    for p, axes in enumerate(panels[:count]):
        true, predicted = found.true[:, p], found.predicted[:, p]
        low, high = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
        pad = 0.04 * (high - low) or 1.0
        box = (low - pad, high + pad)
        if len(true) > 4000:
            axes.hexbin(true, predicted, gridsize=60, bins="log", mincnt=1, cmap=theme.map, linewidths=0.1, extent=(*box, *box))
        else:
            axes.scatter(true, predicted, s=14 if len(true) < 500 else 6, alpha=0.55, color=theme.main, linewidths=0)
        axes.plot(box, box, color=theme.ink, linewidth=1, label="perfect")
        axes.axhline(float(true.mean()), color=theme.second, linewidth=1.3, linestyle=(0, (5, 3)), label="the mean")
        unit = _verbatim(f" [{found.units[p]}]") if found.units[p] else ""
        axes.set(xlim=box, ylim=box, xlabel=f"true{unit}", ylabel=f"predicted{unit}" if p % columns == 0 else "")
        axes.set_box_aspect(1)
        axes.xaxis.set_major_locator(MaxNLocator(5, prune="both"))
        axes.set_title(_verbatim(found.names[p]) + "\n", fontsize=11.5, fontweight="bold", loc="left")
        axes.text(0, 1.03, f"R² {found.r2(p):.3f}   RMSE {found.rmse(p):.3g}  (the mean: {found.spread(p):.3g})",
                  transform=axes.transAxes, fontsize=8.5, color=theme.faint)
        if p == 0:
            axes.legend(loc="upper left", fontsize=8)
    return figure


def plots(run: Run) -> list[Plot]:
    """The pictures that the run has numbers for; the others are noted in ``run.left_out``."""
    resumed = " Dotted: resumed." if any(life.get("resumed_from") for life in run.of("start")) else ""

    def drawable(kind: str, name: str, title: str) -> bool:
        if np.isfinite(run.series(kind, name)[1]).any():
            return True
        run.left_out.append(f"{title}: the run has no finite value of it yet")
        return False

    drawn = []
    if drawable("train", "loss", "loss"):
        drawn.append(Plot("loss", "Loss", f"Training loss at every report and its running mean.{resumed}", partial(_loss, run)))
    evaluated = [name for name in run.names("evaluate") if name != "loss"]
    if not run.of("evaluate"):
        run.left_out.append("evaluations: none so far")
    for name in evaluated:
        if drawable("evaluate", name, name):
            slug = "".join(letter if letter.isalnum() else "_" for letter in name)
            drawn.append(Plot(f"evaluate_{slug}", f"Validation {name}", "One point per evaluation.", partial(_metric, run, name)))
    if drawable("train", "lr", "learning rate"):
        drawn.append(Plot("learning_rate", "Learning rate", "As the optimizer used it.", partial(_rate, run)))
    if drawable("train", "samples_per_second", "throughput"):
        caption = "Whole job, between two reports."
        drawn.append(Plot("throughput", "Throughput", caption, partial(_throughput, run)))
    if np.isfinite(run.series("train", "gpu_power_w")[1]).any():
        drawn.append(Plot("power", "Power", "At each report, by NVML.", partial(_power, run)))
    if run.predictions is not None:
        caption = (f"{len(run.predictions.true):,} validation samples. A network that has learned nothing says the mean (dashed):"
                   " R² 0. A perfect one lies on the diagonal: R² 1.")
        drawn.append(Plot("predictions", "Predicted against true", caption, partial(_scatter, run.predictions), wide=True))
    return drawn


# --------------------------------------------------------------------------------------------------------- the page

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --page: #f3f5f8; --ink: #1c2430; --faint: #6b7685; --line: #e1e5eb;
  --main: #2458d3; --good: #15803d; --warn: #b45309; --bad: #b91c1c; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #171b22; --page: #0e1116; --ink: #e4e8ef; --faint: #8e99a9;
  --line: #2b323d; --main: #79a8ff; --good: #4ade80; --warn: #fbbf24; --bad: #f87171; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 36px 20px 60px }
h1 { font-size: 30px; margin: 0; letter-spacing: -.02em; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 0 0 2px }
header { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: center }
.state { font-size: 13px; font-weight: 600; padding: 3px 12px; border-radius: 99px; border: 1.5px solid }
.good { color: var(--good) } .warn { color: var(--warn) } .bad { color: var(--bad) } .live { color: var(--main) }
.faint, figcaption { color: var(--faint); font-size: 13.5px }
.tiles, .plots { display: grid; gap: 16px; margin: 16px 0 }
.tiles { grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); margin-top: 24px }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)) }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 16px 20px; min-width: 0 }
figure { margin: 0 }
.tile b { display: block; font-size: 25px; line-height: 1.25; letter-spacing: -.01em; font-variant-numeric: tabular-nums }
.wide { grid-column: 1 / -1 }
img { width: 100%; height: auto; display: block; margin-top: 10px }
section { overflow-x: auto } main > section { margin-top: 16px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin-top: 6px }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top }
tr:last-child td { border-bottom: 0 }
th { color: var(--faint); font-weight: 500; font-size: 13px }
td:first-child { white-space: nowrap }
td:last-child { overflow-wrap: anywhere }
.n { text-align: right; white-space: nowrap }
.n:last-child { padding-right: 0 }
.words td:last-child { width: 100% }
ul { margin: 6px 0 0; padding-left: 20px }
summary { cursor: pointer; font-weight: 600; font-size: 17px }
pre { font-size: 12.5px; line-height: 1.45; overflow-x: auto; margin: 12px 0 0 }
@media print { body { background: #fff; font-size: 11px } main { max-width: none; padding: 0 } .card { break-inside: avoid }
  .faint, figcaption, th { font-size: 10px } h2 { font-size: 13px } .tile b { font-size: 17px } .card { padding: 10px 14px }
  .tiles { grid-template-columns: repeat(4, 1fr) } .plots { grid-template-columns: 1fr 1fr } .screen { display: none } }
"""

STATES = {
    "finished": ("finished", "good"),
    "target": ("target reached", "good"),
    "signal": ("stopped by a signal", "warn"),
    "error": ("stopped by an error", "bad"),
}


def _date(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: int = 0) -> str:
    """An HTML table of plain text whose columns from ``numbers`` on are right-aligned; 0: none is."""

    def cells(row: Sequence[Any], tag: str) -> str:
        marks = [' class="n"' if numbers and column >= numbers else "" for column in range(len(row))]
        return "<tr>" + "".join(f"<{tag}{mark}>{escape(str(cell))}</{tag}>" for cell, mark in zip(row, marks)) + "</tr>"

    top = cells(head, "th") if any(head) else ""
    mark = "" if numbers else ' class="words"'
    return f"<table{mark}>{top}{''.join(cells(row, 'td') for row in rows)}</table>"


def _card(title: str, body: str, note: str = "") -> str:
    faint = f'<div class="faint">{escape(note)}</div>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{faint}{body}</section>'


def _header(run: Run) -> str:
    stop, last = run.stop, run.events[-1]
    if stop:
        text, mark = STATES.get(str(stop.get("reason")), (str(stop.get("reason")), "warn"))
        if stop.get("target_reached") and stop.get("reason") != "target":
            text += ", target reached"
    else:
        text, mark = f"still running, last heard of {_date(last['time'])}", "live"
    when = f"{_date(run.events[0]['time'])} to {_date(last['time'])}"
    return (f'<header><h1>{escape(run.name)}</h1><span class="state {mark}">{escape(text)}</span></header>'
            f'<div class="faint">{escape(str(run.directory))} · {escape(when)}</div>')


def _tiles(run: Run) -> str:
    last = (run.of("train") or run.of("stop") or [{}])[-1]
    rate = run.series("train", "samples_per_second")[1]
    tiles = []
    name = run.setting("train.metric") or next(iter(run.names("evaluate")), None)
    if name and (best := run.best(name)):
        target = f", target {number(run.target(name))}" if run.target(name) is not None else ""
        tiles.append((f"best validation {name}", number(best[1]), f"at step {best[0]:,}{target}"))
    if np.isfinite(rate).any():
        world = run.start.get("world") or 1
        median = float(np.nanmedian(rate))
        each = f"; {per_second(median / world)} per process" if world > 1 else ""
        tiles.append(("throughput", per_second(median), f"median{each}"))
    tiles.append(("training time", duration(run.seconds), f"{last.get('samples') or 0:,} samples seen"))
    steps, planned = last.get("step") or 0, run.start.get("steps")
    share = f"{100 * steps / planned:.0f} % of the plan" if planned else ""
    tiles.append(("steps", f"{steps:,}" + (f" / {planned:,}" if planned else ""), share))
    cards = [f'<div class="card tile"><span class="faint">{escape(label)}</span><b>{escape(value)}</b>'
             f'<span class="faint">{escape(note)}</span></div>' for label, value, note in tiles]
    return f'<div class="tiles">{"".join(cards)}</div>'


def _results(run: Run) -> str:
    rows = []
    for name in run.names("evaluate"):
        steps, values = run.series("evaluate", name)
        best, target = run.best(name), run.target(name)
        first = (name, number(best[1]), f"{best[0]:,}") if best else (name, "none", "")
        rows.append((*first, number(values[-1]), f"{steps[-1]:,}", number(target) if target is not None else ""))
    return _card("Evaluations", _table(("metric", "best", "at step", "last", "at step", "target"), rows, numbers=1)) if rows else ""


def _parameters(found: Predictions) -> str:
    head = ("parameter", "R²", "RMSE", "RMSE of the mean", "mean absolute error")
    rows = []
    for p, (name, unit) in enumerate(zip(found.names, found.units)):
        errors = found.rmse(p), found.spread(p), found.mae(p)
        rows.append((f"{name} [{unit}]" if unit else name, f"{found.r2(p):.4f}", *map(number, errors)))
    overall = statistics.fmean(found.r2(p) for p in range(len(found.names)))
    return _card("Prediction per parameter", _table(head, rows, numbers=1), f"mean R² {overall:.4f}")


def _facts(run: Run) -> str:
    get = run.start.get
    last: dict[str, Any] = (run.of("train") or run.of("stop") or [{}])[-1]
    epochs = f"{round(last.get('epoch') or 0, 2):g}" + (f" of {get('epochs')}" if get("epochs") else "")
    rows = [
        ("processes and device", f"{get('world', '?')} x {get('device', '?')}"),
        ("parameters", f"{get('parameters'):,}" if get("parameters") else "?"),
        ("epochs", epochs + (f", {get('steps_per_epoch'):,} steps each" if get("steps_per_epoch") else "")),
        ("global batch", get("global_batch", "?")),
        ("samples", f"{get('train_samples') or 0:,} for training, {get('validation_samples') or 0:,} for validation"),
        ("last training loss", f"{number(last.get('loss', '?'))} at step {last.get('step') or 0:,}"),
        ("lives", f"{len(run.of('start'))}" + "".join(f", resumed from step {life['resumed_from']:,}" for life in run.of("start")
                                                     if life.get("resumed_from") is not None)),
    ]
    return _card("The run", _table(("", ""), rows))


def _checkpoints(run: Run) -> str:
    rows = []
    for event in run.of("checkpoint"):
        written = size(event.get("bytes") or 0), f"{event.get('seconds') or 0:.2f} s", _date(event["time"])
        rows.append((event.get("path", ""), f"{event.get('step') or 0:,}", *written))
    if not rows:
        return ""
    note = f"{len(rows)} written" + (f", the last {MOST} shown" if len(rows) > MOST else "") + "; a run keeps the newest ones"
    return _card("Checkpoints", _table(("path", "step", "size", "took", "when"), rows[-MOST:], numbers=1), note)


def page(run: Run, drawn: Sequence[Plot], pictures: Sequence[tuple[bytes, bytes]]) -> str:
    """The whole page; ``pictures`` are the light and the dark PNG of each plot in ``drawn``."""

    def uri(png: bytes) -> str:
        return "data:image/png;base64," + base64.b64encode(png).decode()

    def figure(plot: Plot, light: bytes, dark: bytes) -> str:
        return (f'<figure class="card{" wide" if plot.wide else ""}"><h2>{escape(plot.title)}</h2>'
                f"<figcaption>{escape(plot.caption)}</figcaption>"
                f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{uri(dark)}">'
                f'<img src="{uri(light)}" alt="{escape(plot.title)}"></picture></figure>')

    figures = "".join(figure(plot, *pair) for plot, pair in zip(drawn, pictures))
    notes = [(_date(event["time"]), f"{event['step']:,}" if event.get("step") is not None else "", event.get("text", ""))
             for event in run.of("note")]
    gaps = "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in run.left_out) + "</ul>"
    settings = f"<details><summary>Settings</summary><pre>{escape(run.settings_text)}</pre></details>"
    parts = [
        _header(run), _tiles(run), f'<div class="plots">{figures}</div>',
        _parameters(run.predictions) if run.predictions else "",
        f'<div class="plots">{_facts(run)}{_results(run)}</div>', _checkpoints(run),
        _card("Notes", _table(("when", "step", "what"), notes)) if notes else "",
        _card("Left out", gaps) if run.left_out else "",
        f'<section class="card screen">{settings}</section>' if run.settings_text else "",
    ]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(run.name)}</title><style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(filter(None, parts))
            + "\n</main></body></html>\n")


def draw(run: Path) -> Path:
    """Draws the run in the directory ``run`` and returns the page's path. Raises DataError where there is no run."""
    found = read(run)
    drawn = plots(found)
    pictures = [(plot.png(LIGHT), plot.png(DARK)) for plot in drawn]
    folder = run / "plots"
    folder.mkdir(exist_ok=True)
    for plot, (light, _) in zip(drawn, pictures):
        (folder / f"{plot.name}.png").write_bytes(light)
    path = run / "report.html"
    path.write_text(page(found, drawn, pictures), encoding="utf-8")
    return path


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcai report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help=f"directory of a run, with {METRICS}")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    words = parser.parse_args(argv)
    path = draw(words.run)
    print(path)
    if words.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
