"""Axial slices of scans with what the network sees in them.   S slices, H W voxels, K classes"""

import math
import textwrap
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from hpcai.cli.report.run import Slices
from hpcai.cli.report.theme import TISSUES, Theme, verbatim

WIDTH = 13.2                                             # inches of the picture
SOFT = -79.0, 250.0                                      # HU from black to white: soft tissue and enhanced kidneys apart
OPACITY, WRONG = 0.42, 0.8                               # of what the network sees, and where it is not there
LETTERS = 72                                             # of the heading of a pair
HALO = "#101010"                                         # around lines and letters on a scan, on either paper


def caption(found: Slices) -> str:
    total, (height, width) = len(found.cells), found.true.shape[1:]
    which = f"{total} validation volume{'s' * (total > 1)}"
    if total > len(found.shown):
        which = f"{len(found.shown)} of {which} (those with most classes in their slices)"
    each = " x ".join(dict.fromkeys(f"{n:g}" for n in found.spacing_mm)) if found.spacing_mm else ""
    return (f"{which}, an axial slice of each, {height} x {width} voxels{f' of {each} mm' if each else ''}; the front is on top,"
            " the patient's right on the left. Each slice as it is, then the framed part with what is there (outlined) and what"
            " the network sees (filled; deep: wrongly). Dice of a class in its slice; –: neither there nor seen. Mean over the"
            f" {len(found.shown)} shown: {_said(found, found.mean_dice())}.")


def draw(found: Slices, theme: Theme) -> Figure:
    count, (height, width) = len(found.shown), found.true.shape[1:]
    pairs = min(count, 2)
    rows = math.ceil(count / pairs)
    inches = WIDTH / 4
    aspect = found.spacing_mm[0] / found.spacing_mm[1] if found.spacing_mm else 1.0
    panel = min(max(aspect * height / width, 0.3), 1.5) * inches
    layout = ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.02, hspace=0.02, wspace=0)
    figure = Figure(figsize=(2 * inches * pairs, rows * (panel + 0.4) + 1.3), layout=layout)
    grid = figure.add_gridspec(rows, 3 * pairs - 1, width_ratios=[1, 1, 0.04, 1, 1][: 3 * pairs - 1])
    window = Normalize(*_window(found))
    panels = []
    for m in range(count):
        row, column = m // pairs, 3 * (m % pairs)
        whole, part = (figure.add_subplot(grid[row, column + k]) for k in (0, 1))
        panels += [whole, part]
        for axes in (whole, part):
            axes.set(xticks=[], yticks=[])
            axes.grid(False)
            axes.spines[:].set_visible(False)
            axes.imshow(found.scan[m], origin="upper", cmap="gray", norm=window, aspect=aspect, interpolation="nearest")
        low, high = _part(found.true[m], found.predicted[m])
        frame = Rectangle((low[1] - 0.5, low[0] - 0.5), *(high - low)[::-1])
        frame.set(fill=False, edgecolor="white", linewidth=0.7, alpha=0.7)
        whole.add_patch(frame)
        _ruler(whole, found)
        part.set(xlim=(low[1] - 0.5, high[1] - 0.5), ylim=(high[0] - 0.5, low[0] - 0.5))
        _masks(part, found.true[m], found.predicted[m], len(found.classes))
        said = _said(found, found.dice(found.shown[m]))
        head = textwrap.fill(verbatim(f"Volume {found.shown[m]}: {said}"), LETTERS)
        whole.set_title(head, fontsize=11, fontweight="bold", loc="left", pad=5)
    unit = f" [{found.unit}]" if found.unit else ""
    words: dict[str, Any] = {"location": "bottom", "shrink": 0.4, "aspect": 60, "pad": 0.02}
    words["extend"] = "both" if found.unit == "HU" else "neither"
    bar = figure.colorbar(ScalarMappable(window, "gray"), ax=panels, **words)
    bar.set_label(verbatim(found.variable + unit))
    bar.outline.set_visible(False)
    _legend(figure, found, theme)
    return figure


def _said(found: Slices, dice: np.ndarray) -> str:
    """Of all classes but the first."""
    pairs = list(zip(found.classes, dice))[1:]
    return ", ".join(f"{name} {'–' if math.isnan(value) else f'{value:.2f}'}" for name, value in pairs)


def _window(found: Slices) -> tuple[float, float]:
    finite = found.scan[np.isfinite(found.scan)]
    return SOFT if found.unit == "HU" else (float(finite.min()), float(finite.max()))


def _part(true: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and end, along both dims, of what is there or seen and a little around it; all where there is nothing."""
    shape, there = np.array(true.shape), np.argwhere((true > 0) | (predicted > 0))
    if not len(there):
        return np.zeros(2, int), shape
    low, high = there.min(0), there.max(0) + 1
    side = np.minimum(max(int((high - low).max()) + 2 * max(2, int(shape.max()) // 24), int(shape.max()) // 3), shape)
    first = np.clip((low + high - side) // 2, 0, shape - side)
    return first, first + side


def _masks(axes: Axes, true: np.ndarray, predicted: np.ndarray, kinds: int) -> None:
    # Both along the same lines between voxels: where truth and prediction agree, the filling ends at the outline.
    x, y = (np.arange(-1, n + 1) for n in true.shape[::-1])
    for k, color in enumerate(_colors(kinds), 1):
        agreed, wrong = ((predicted == k) & part for part in (true == k, true != k))
        for there, opacity in ((agreed, OPACITY), (wrong, WRONG)):
            if there.any():
                axes.contourf(x, y, np.pad(there, 1), [0.5, 1.5], colors=color, alpha=opacity)
    for k, color in enumerate(_colors(kinds), 1):
        if (true == k).any():
            lines = axes.contour(x, y, np.pad(true == k, 1), [0.5], colors=color, linewidths=1.2)
            lines.set_path_effects([patheffects.withStroke(linewidth=2.4, foreground=HALO)])


def _ruler(axes: Axes, found: Slices) -> None:
    """5 cm, or what is nearest to a quarter of the slice."""
    if not found.spacing_mm:
        return
    width = found.true.shape[2]
    whole = width * found.spacing_mm[1]
    mm = min((5, 10, 20, 50, 100, 200), key=lambda length: abs(math.log(4 * length / whole)))
    text = axes.text(0.03, 0.045, f"{mm / 10:g} cm", transform=axes.transAxes, color="white", fontsize=8, va="bottom")
    text.set_path_effects([patheffects.withStroke(linewidth=2, foreground=HALO)])
    end = 0.03 + mm / whole
    line = Line2D([0.03, end], [0.03, 0.03], transform=axes.transAxes, color="white", linewidth=2, solid_capstyle="butt")
    line.set_path_effects([patheffects.withStroke(linewidth=3.4, foreground=HALO)])
    axes.add_line(line)


def _colors(kinds: int) -> Iterator[str]:
    """Of all classes but the first."""
    return islice(cycle(TISSUES), kinds - 1)


def _legend(figure: Figure, found: Slices, theme: Theme) -> None:
    marks: list[Patch] = [
        Patch(facecolor=(*to_rgb(color), OPACITY), edgecolor=color, linewidth=1.5, label=verbatim(name))
        for name, color in zip(found.classes[1:], _colors(len(found.classes)))
    ]
    marks += [
        Patch(facecolor=theme.faint, alpha=OPACITY, label="filled: predicted"),
        Patch(facecolor=theme.faint, alpha=WRONG, label="deep: predicted, but not true"),
        Patch(facecolor="none", edgecolor=theme.faint, linewidth=1.5, label="outlined: true"),
    ]
    figure.legend(handles=marks, loc="outside upper left", ncols=3 * min(len(found.shown), 2))
