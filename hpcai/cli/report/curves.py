"""The curves of a run."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.run import RunRecord, metric_stem
from hpcai.cli.report.theme import MARKS, PALETTE, WIDTH, Plot, Theme, escape_mathtext
from hpcai.log import format_number

LINES = (  # metrics of the training's reports
    ("lr", "learning_rate", "Learning rate", "learning rate", "As the optimizer used it."),
    ("samples_per_second", "throughput", "Throughput", "samples per second", "Whole job, between two reports."),
    ("gpu_power_w", "power", "Power", "watts of the first GPU", "At each report, by NVML."),
)


def _figure(run: RunRecord, theme: Theme, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 3.0))
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.set_ylabel(escape_mathtext(label))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.02)
    for start in run.events_of("start"):
        if start.get("resumed_from"):
            axes.axvline(start["resumed_from"], color=theme.faint, linewidth=0.9, linestyle=(0, (1, 3)), zorder=1)
    return figure, axes


def set_log_scale(axes: Axes, values: np.ndarray) -> None:
    """Make the y axis logarithmic if the values span more than a factor of 20."""
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > 20:
        axes.set_yscale("log")


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean over a tenth of the curve, which does not lag; NaN is ignored."""
    if not len(values):
        return values
    finite = np.isfinite(values)
    reach = min(max(3, len(values) // 10) // 2, (len(values) - 1) // 2)
    window = np.ones(2 * reach + 1)
    total = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    count = np.convolve(finite.astype(float), window, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1), np.nan)


def _draw_loss(run: RunRecord, theme: Theme) -> Figure:
    figure, axes = _figure(run, theme, "loss")
    steps, values = run.series("train", "loss")
    axes.plot(steps, values, color=theme.main, alpha=0.45, linewidth=1, label="training, every report")
    axes.plot(steps, smooth(values), color=theme.main, linewidth=2, label="training, smoothed")
    at, evaluated = run.series("evaluate", "loss")
    if len(at):
        axes.plot(at, evaluated, color=theme.second, linewidth=1.6, marker="o", markersize=4, label="validation")
    set_log_scale(axes, np.concatenate([values, evaluated]))
    axes.legend()
    return figure


def _draw_metric(run: RunRecord, name: str, members: Sequence[str], theme: Theme) -> Figure:
    """Draw a metric, and as thinner lines its parts."""
    figure, axes = _figure(run, theme, name)
    at, evaluated = run.series("evaluate", name)
    main = theme.ink if members else theme.second
    steps, values = run.series("train", name)
    color, label = theme.main, "training, smoothed"
    if not len(steps) and metric_stem(name) != name:
        steps, values = run.series("train", metric_stem(name))
        color, label = main, f"{escape_mathtext(metric_stem(name))} in training, smoothed"
    if len(steps):
        axes.plot(steps, smooth(values), color=color, alpha=0.55, linewidth=1.4, label=label)
    label = escape_mathtext(name) if members else "validation"
    axes.plot(at, evaluated, color=main, linewidth=2, marker="o", markersize=4.5, label=label)
    for member, (color, mark) in zip(members, _colors(run, name, members, theme)):
        series, label = run.series("evaluate", member), member.removeprefix(f"{metric_stem(name)}_").replace("_", " ")
        axes.plot(*series, color=color, linewidth=1.2, marker=mark, markersize=4, zorder=1.9, label=escape_mathtext(label))
        values = np.concatenate([values, series[1]])
    target, best = run.target(name), run.best(name)
    if target is not None:
        axes.axhline(target, color=theme.good, linewidth=1.4, linestyle=(0, (5, 3)), label=f"target {format_number(target)}")
    if best is not None:
        axes.plot(*best, marker="o", markersize=11, markerfacecolor="none", markeredgecolor=main, markeredgewidth=1.4,
                  linestyle="none", label=f"best {format_number(best[1])}")
    if not run.higher_is_better(name):  # for high scores the differences near the maximum matter
        set_log_scale(axes, np.concatenate([values, evaluated]))
    axes.legend(ncols=2 if len(members) > 3 else 1)
    return figure


def _colors(run: RunRecord, name: str, members: Sequence[str], theme: Theme) -> Iterator[tuple[str, str]]:
    """Yield colour and marker of each part; a class has the same as in the picture of the run's app."""
    styles = zip(cycle(getattr(run.picture, "PALETTE", PALETTE)), cycle(MARKS))
    classes = [f"{metric_stem(name)}_{class_name.replace(' ', '_')}" for class_name in run.classes]
    styles_of_class = dict(zip(classes[1:], styles)) | dict.fromkeys(classes[:1], (theme.faint, "o"))
    return (styles_of_class[member] if member in styles_of_class else next(styles) for member in members)


def _draw_line(run: RunRecord, name: str, label: str, theme: Theme) -> Figure:
    """Draw the values of ``name`` in the reports of a run, and their median."""
    figure, axes = _figure(run, theme, label)
    steps, values = run.series("train", name)
    axes.plot(steps, values, color=theme.main, linewidth=2 if name == "lr" else 1)
    if name != "lr":
        median = float(np.nanmedian(values))
        axes.axhline(median, color=theme.second, linewidth=1.4, linestyle=(0, (5, 3)), label=f"median {format_number(median)}")
        axes.legend(loc="lower right")
    axes.set_ylim(bottom=0, top=1.15 * float(np.nanmax(values)) or None)
    return figure


def plots(run: RunRecord) -> list[Plot]:
    """Return the curves of metrics with finite values, and the picture of the app; missing ones are noted in ``run.left_out``."""
    resumed = " Dotted: resumed." if any(start.get("resumed_from") for start in run.events_of("start")) else ""

    def drawable(kind: str, name: str, title: str) -> bool:
        if np.isfinite(run.series(kind, name)[1]).any():
            return True
        run.left_out.append(f"{title}: the run has no finite value of it yet")
        return False

    result = []
    if drawable("train", "loss", "loss"):
        caption = f"Training loss at every report and its running mean.{resumed}"
        result.append(Plot("loss", "Loss", caption, partial(_draw_loss, run)))
    if not run.events_of("evaluate"):
        run.left_out.append("evaluations: none so far")
    for name, members in run.metric_families().items():
        members = [member for member in members if drawable("evaluate", member, member)]
        if drawable("evaluate", name, name) or members:
            slug = "".join(letter if letter.isalnum() else "_" for letter in name)
            caption = f"One point per evaluation.{' Thin: its parts.' if members else ''}"
            result.append(Plot(f"evaluate_{slug}", f"Validation {name}", caption, partial(_draw_metric, run, name, members)))
    for name, slug, title, label, caption in (*LINES, *getattr(run.picture, "LINES", ())):
        if (name in ("lr", "samples_per_second") or run.series("train", name)[1].size) and drawable("train", name, title.lower()):
            result.append(Plot(slug, title, caption, partial(_draw_line, run, name, label)))
    if run.picture is not None and run.predictions is not None:
        draw = partial(run.picture.draw, run.predictions)
        result.append(Plot(Path(run.picture.FILE).stem, run.picture.TITLE, run.caption, draw))
    return result
