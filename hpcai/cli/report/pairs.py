"""Predicted against true values, with a constant baseline: panels, and a table of errors.   N samples of a quantity"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.picture import Finding, Table, compare_errors, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, escape_mathtext, panel_title
from hpcai.log import format_number

MAX_POINTS = 4000                                              # samples; more are drawn as a 2D histogram
CELLS = 110                                              # along each axis


@dataclass(frozen=True)
class Pair:
    """Predicted and true values of a quantity. The baseline predicts ``constant``, or if None the mean."""

    name: str
    true: np.ndarray                                     # [N]
    predicted: np.ndarray                                # [N]
    unit: str = ""
    constant: tuple[str, float] | None = None
    linear: float | None = None                          # asinh axes, linear up to this value; None: linear axes

    @property
    def baseline(self) -> tuple[str, float]:
        return self.constant or ("the mean", float(self.true.mean()))

    def mae(self, predicted: np.ndarray | float | None = None) -> float:
        return float(np.abs((self.predicted if predicted is None else predicted) - self.true).mean())

    def rmse(self, predicted: np.ndarray | float | None = None) -> float:
        return float(np.sqrt(np.square((self.predicted if predicted is None else predicted) - self.true).mean()))

    def r2(self) -> float:
        """Return 1 minus the squared error relative to that of the baseline."""
        least = self.rmse(self.baseline[1])
        return 1 - (self.rmse() / least) ** 2 if least > 0 else math.nan


def draw(pairs: Sequence[Pair], theme: Theme) -> list[Figure]:
    return [_draw(pair, theme) for pair in pairs]


def _draw(pair: Pair, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH + 0.4))
    axes = figure.subplots()
    unit, (name, constant) = f" [{pair.unit}]" if pair.unit else "", pair.baseline
    both = np.concatenate((pair.true, pair.predicted))
    low, high = float(both.min()), float(both.max())
    pad = 0.04 * (high - low) or 1.0
    edges = np.linspace(low - pad, high + pad, CELLS + 1)
    if pair.linear:
        end = 1.2 * max(-low, high) or 1.0
        edges = pair.linear * np.sinh(np.linspace(-1, 1, CELLS + 1) * math.asinh(end / pair.linear))
        axes.set_xscale("asinh", linear_width=pair.linear)
        axes.set_yscale("asinh", linear_width=pair.linear)
    if len(pair.true) > MAX_POINTS or pair.linear:
        # The palest shades are left out, so that a bin with a single sample is visible.
        shades = LinearSegmentedColormap.from_list("counts", matplotlib.colormaps[theme.counts](np.linspace(0.3, 1, 64)))
        counts, _, _, cells = axes.hist2d(pair.true, pair.predicted, (edges, edges), cmin=1, cmap=shades)
        cells.set_norm(LogNorm(1, max(np.nanmax(counts), 10)))
        inset = axes.inset_axes((0.58, 0.1, 0.38, 0.025))
        axes.figure.colorbar(cells, cax=inset, orientation="horizontal").outline.set_visible(False)
        inset.set_title("samples in a cell", fontsize=8, color=theme.faint, pad=3)
        inset.tick_params(labelsize=8)
    else:
        axes.scatter(pair.true, pair.predicted, s=14 if len(pair.true) < 500 else 8, alpha=0.55, color=theme.main, linewidths=0)
    axes.plot(edges[[0, -1]], edges[[0, -1]], color=theme.ink, linewidth=1, label="perfect")
    axes.axhline(constant, color=theme.second, linewidth=1.3, linestyle=(0, (5, 3)), label=name)
    axes.set(xlim=edges[[0, -1]], ylim=edges[[0, -1]])
    axes.set(xlabel=escape_mathtext(f"true{unit}"), ylabel=escape_mathtext(f"predicted{unit}"))
    axes.set_box_aspect(1)
    if not pair.linear:
        axes.xaxis.set_major_locator(MaxNLocator(5, prune="both"))
    axes.legend(loc="upper left", fontsize=8)
    details = f"R² {pair.r2():.3f}   MAE {pair.mae():.3g}  ({name}: {pair.mae(constant):.3g})"
    panel_title(axes, escape_mathtext(pair.name), details, theme)
    return figure


def table(pairs: Sequence[Pair], note: str = "") -> Table:
    """Return the errors of each quantity, and in the last columns those of the constant baseline."""
    rows = []
    for pair in pairs:
        constant = pair.baseline[1]
        errors = pair.rmse(), pair.mae(), pair.rmse(constant), pair.mae(constant)
        rows.append((f"{pair.name} [{pair.unit}]" if pair.unit else pair.name, f"{len(pair.true):,}", f"{pair.r2():.4f}",
                     *map(format_number, errors)))
    head = ("", "samples", "R²", "RMSE", "MAE", "RMSE of a constant", "MAE of a constant")
    return Table("Prediction per quantity", note, head, rows)


def finding(pair: Pair, what: str, score: Literal["rms", "mean absolute error"]) -> Finding:
    """Return what a network knows of a quantity, by its error and that of the constant baseline."""
    name, constant = pair.baseline
    error, baseline = (pair.rmse(), pair.rmse(constant)) if score == "rms" else (pair.mae(), pair.mae(constant))
    number = format_measured(error) + (f" {pair.unit}" if pair.unit else "")
    comparison = compare_errors(error, baseline, f"predicting {name}")
    return Finding(f"{what} predicted within {number} ({score}), {comparison}.", number, f"{score} error of {pair.name}")
