"""The picture of a run: validation maps of the weather, what is in them and what the network sees.

N maps, M of them drawn, H W cells, K classes
"""

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpcai.cli.report import masks
from hpcai.cli.report.masks import Masks, colors
from hpcai.cli.report.picture import Table, panels
from hpcai.cli.report.theme import PALETTE, WIDTH, Theme, bare, verbatim
from hpcai.errors import DataError

FILE = "maps.npz"
TITLE = "Predicted and true maps"
HIGHER = ("iou",)
LARGE = 10.5                                             # inches of a picture of large maps, whose file grows with its square
FINE = 400                                               # cells across: more need larger panels and thinner lines
LETTERS = 16                                             # of the small print in an inch
OPACITY = 0.6                                            # of what the network sees
NAMES = {"TMQ": "precipitable water (TMQ)"}
HECTOPASCAL = {"Pa": 0.01, "hPa": 1.0, "mbar": 1.0, "mb": 1.0}


@dataclass
class Maps:
    """The maps, the variable in colour and the pressure in lines."""

    masks: Masks
    variable: int                                        # which of the variables is in colour
    colour: np.ndarray                                   # [M, H, W]
    pressure: np.ndarray | None                          # [M, H, W] at sea level, hPa

    def iou(self, n: int | None = None) -> np.ndarray:
        """Intersection over union of each class, in map ``n`` or in all cells of all maps together; NaN where a class is neither
        there nor seen.   [K]"""
        both, sizes = self.masks.overlap(n)
        return masks.ratio(both, sizes - both)


def read(path: Path) -> Maps:
    found, _ = masks.read(path)
    names, units = found.variables, found.units
    variable = names.index("TMQ") if "TMQ" in names else 0
    colour = found.field(variable)
    if not np.isfinite(colour).any():
        raise DataError(f"no cell has a finite {names[variable]}")
    pressure = None
    if "PSL" in names and (scale := HECTOPASCAL.get(units[names.index("PSL")])):
        pressure = scale * found.field(names.index("PSL"))
    return Maps(found, variable, colour, pressure)


def classes(found: Maps) -> list[str]:
    return found.masks.classes


def caption(found: Maps) -> str:
    total, (height, width) = len(found.masks.cells), found.colour.shape[1:]
    which = f"{total} validation map{'s' * (total > 1)}"
    if total > len(found.colour):
        which = f"{len(found.colour)} of {which} (those with most classes)"
    return (f"{which}, {height} x {width} cells, north up. Filled: what the network sees; outlined: what is"
            " there. IoU: intersection over union of a class in its map; –: neither there nor seen.")


def table(found: Maps) -> Table:
    cells = found.masks.cells
    note = (f"All {cells.sum():,} cells of {len(cells)} validation maps together. An evaluation means something else by IoU:"
            " the mean over maps of the IoU in each, which is 1 where a class is neither there nor seen.")
    return masks.table(found.masks, "IoU", found.iou(), "cells", note)


def draw(found: Maps, theme: Theme) -> Figure:
    count, height, width = found.colour.shape
    columns = min(count, 2 if count == 4 or width > FINE else 3)
    rows = math.ceil(count / columns)
    inches = (WIDTH if width <= FINE else LARGE) / max(columns, 2)
    panel = min(max(height / width, 0.3), 1.5) * inches
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.06)
    figure = Figure(figsize=(inches * columns, rows * (panel + 0.45) + 1.2), layout=layout)
    every = panels(figure, count, columns)
    finite = found.colour[np.isfinite(found.colour)]
    limits = Normalize(finite.min(), finite.max())
    scale = ScalarMappable(limits, theme.values)
    levels, step, extent = _levels(found), max(1, width // FINE), (-0.5, width - 0.5, -0.5, height - 0.5)
    for m, axes in enumerate(every):
        bare(axes)
        axes.imshow(found.colour[m, ::step, ::step], origin="lower", cmap=scale.cmap, norm=limits, extent=extent)
        if found.pressure is not None and len(levels):
            _isobars(axes, found.pressure[m], levels, step, theme)
        _masks(axes, found.masks.true[m], found.masks.predicted[m], len(found.masks.classes))
        _head(axes, found, m, int(LETTERS * inches), theme)
    name = NAMES.get(found.masks.variables[found.variable], "")
    masks.bar(figure, every, scale, found.masks.label(found.variable, name), shrink=0.5)
    _legend(figure, found, levels, theme)
    return figure


def _levels(found: Maps) -> np.ndarray:
    """Pressures of the lines, hPa: every 4 as on weather charts, or a multiple of 4."""
    finite = found.pressure[np.isfinite(found.pressure)] if found.pressure is not None else np.empty(0)
    if not finite.size:
        return finite
    step = 4 * math.ceil(float(np.ptp(finite)) / 200) or 4
    return np.arange(math.ceil(finite.min() / step), math.floor(finite.max() / step) + 1) * step


def _isobars(axes: Axes, pressure: np.ndarray, levels: np.ndarray, every: int, theme: Theme) -> None:
    height, width = pressure.shape
    inside = levels[(levels >= np.nanmin(pressure)) & (levels <= np.nanmax(pressure))] if np.isfinite(pressure).any() else []
    if not len(inside):
        return
    thick = [1.0 if level % 20 == 0 else 0.45 for level in inside]
    x, y = np.arange(0, width, every), np.arange(0, height, every)
    lines = axes.contour(x, y, pressure[::every, ::every], inside, colors=theme.ink, alpha=0.55, linewidths=thick)
    if every == 1:
        axes.clabel(lines, [level for level in inside if level % 20 == 0], fontsize=6.5, fmt="%d", inline_spacing=2)


def _masks(axes: Axes, true: np.ndarray, predicted: np.ndarray, kinds: int) -> None:
    thin = 1.0 if true.shape[1] <= FINE else 0.6
    fills = [(0, 0, 0, 0), *([round(255 * part) for part in (*to_rgb(color), OPACITY)] for color in colors(PALETTE, kinds))]
    axes.imshow(np.array(fills, np.uint8)[predicted], origin="lower")
    # The edges are white on both papers, because eyes that lack red or green receptors hardly tell some classes from moist air by
    # colour alone.
    for mask, width, white in ((predicted, 0.0, 0.8), (true, 1.5, 2.8)):
        for k, color in enumerate(colors(PALETTE, kinds), 1):
            rows, columns = (_around((mask == k).any(axis)) for axis in (1, 0))
            part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] == k if len(rows) else mask
            if len(rows) and not part.all():
                lines = axes.contour(columns, rows, part, [0.5], colors=color, linewidths=thin * width)
                lines.set_path_effects([patheffects.withStroke(linewidth=thin * white, foreground="white")])


def _around(there: np.ndarray) -> np.ndarray:
    """Indices from the one before the first that is there to the one after the last, because a line is drawn in a small part of a
    large map."""
    found = np.flatnonzero(there)
    return np.arange(max(found[0] - 1, 0), min(found[-1] + 2, len(there))) if len(found) else found


def _head(axes: Axes, found: Maps, m: int, letters: int, theme: Theme) -> None:
    n = found.masks.shown[m]
    parts = [part.replace(" ", "\xa0") for part in masks.scores(found.masks.classes, found.iou(n))]
    lines = textwrap.wrap("IoU: " + ",  ".join(parts), letters)
    axes.set_title(f"Map {n}", fontsize=11, fontweight="bold", loc="left", pad=6 + 11 * len(lines))
    text = axes.text(0, 1.02, verbatim("\n".join(lines)), transform=axes.transAxes, fontsize=8.5, color=theme.faint, va="bottom")
    text.set_in_layout(False)


def _legend(figure: Figure, found: Maps, levels: np.ndarray, theme: Theme) -> None:
    filled, outlined = masks.legend(found.masks, PALETTE, OPACITY, theme)
    marks: list[Patch | Line2D] = [*filled, outlined]
    if len(levels):
        step = levels[1] - levels[0] if len(levels) > 1 else 4
        label = f"sea-level pressure every {step:g} hPa, thick every 20"
        marks.append(Line2D([], [], color=theme.ink, alpha=0.55, linewidth=0.8, label=label))
    figure.legend(handles=marks, loc="outside upper left", ncols=min(len(marks), 5))
