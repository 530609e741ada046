"""Maps of the weather with what the network sees in them.   N maps, H W cells, K classes"""

import math
import textwrap
from collections.abc import Iterator
from itertools import cycle, islice

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpcai.cli.report.run import Maps
from hpcai.cli.report.theme import CLASSES, Theme, verbatim

WIDTH, LARGE = 13.2, 10.5                                # inches of the picture; of large maps, whose file grows with its square
FINE = 400                                               # cells across: more need larger panels and thinner lines
LETTERS = 16                                             # of the small print in an inch
OPACITY = 0.6                                            # of what the network sees
NAMES = {"TMQ": "precipitable water (TMQ)"}


def caption(found: Maps) -> str:
    total, (height, width) = len(found.cells), found.true.shape[1:]
    which = f"{total} validation map{'s' * (total > 1)}"
    if total > len(found.shown):
        which = f"{len(found.shown)} of {which} (those with most classes)"
    return (f"{which}, {height} x {width} cells, north up. Filled: what the network sees; outlined: what is"
            " there. IoU: intersection over union of a class in its map; –: neither there nor seen.")


def draw(found: Maps, theme: Theme) -> Figure:
    count, (height, width) = len(found.shown), found.true.shape[1:]
    columns = min(count, 2 if count == 4 or width > FINE else 3)
    rows = math.ceil(count / columns)
    inches = (WIDTH if width <= FINE else LARGE) / max(columns, 2)
    panel = min(max(height / width, 0.3), 1.5) * inches
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.06)
    figure = Figure(figsize=(inches * columns, rows * (panel + 0.45) + 1.2), layout=layout)
    panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axes in panels[count:]:
        axes.remove()
    finite = found.colour[np.isfinite(found.colour)]
    scale = ScalarMappable(Normalize(finite.min(), finite.max()), theme.water)
    levels, every, extent = _levels(found), max(1, width // FINE), (-0.5, width - 0.5, -0.5, height - 0.5)
    for m, axes in enumerate(panels[:count]):
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.imshow(found.colour[m, ::every, ::every], origin="lower", cmap=scale.cmap, norm=scale.norm, extent=extent)
        if found.pressure is not None and len(levels):
            _isobars(axes, found.pressure[m], levels, every, theme)
        _masks(axes, found.true[m], found.predicted[m], len(found.classes))
        _head(axes, found, m, int(LETTERS * inches), theme)
    unit = f" [{found.unit}]" if found.unit else ""
    bar = figure.colorbar(scale, ax=list(panels[:count]), location="bottom", shrink=0.5, aspect=60, pad=0.02)
    bar.set_label(verbatim(NAMES.get(found.variable, found.variable) + unit))
    bar.outline.set_visible(False)
    _legend(figure, found, levels, theme)
    return figure


def _levels(found: Maps) -> np.ndarray:
    """Pressures of the lines: every 4 hPa as on weather charts, or a multiple of it."""
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
    colors = [(0, 0, 0, 0), *([round(255 * part) for part in (*to_rgb(color), OPACITY)] for color in _colors(kinds))]
    axes.imshow(np.array(colors, np.uint8)[predicted], origin="lower")
    # White on both papers: eyes that lack red or green receptors hardly tell some classes from moist air by colour alone.
    for mask, width, white in ((predicted, 0.0, 0.8), (true, 1.5, 2.8)):
        for k, color in enumerate(_colors(kinds), 1):
            rows, columns = (_around((mask == k).any(axis)) for axis in (1, 0))
            part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] == k if len(rows) else mask
            if len(rows) and not part.all():
                lines = axes.contour(columns, rows, part, [0.5], colors=color, linewidths=thin * width)
                lines.set_path_effects([patheffects.withStroke(linewidth=thin * white, foreground="white")])


def _colors(kinds: int) -> Iterator[str]:
    """Of all classes but the first."""
    return islice(cycle(CLASSES), kinds - 1)


def _around(there: np.ndarray) -> np.ndarray:
    """From the one before the first that is there to the one after the last; a line is drawn in a small part of a large map."""
    found = np.flatnonzero(there)
    return np.arange(max(found[0] - 1, 0), min(found[-1] + 2, len(there))) if len(found) else found


def _head(axes: Axes, found: Maps, m: int, letters: int, theme: Theme) -> None:
    parts = [f"{name} {'–' if math.isnan(iou) else f'{iou:.2f}'}".replace(" ", "\xa0")
             for name, iou in zip(found.classes, found.iou(found.shown[m]))]
    lines = textwrap.wrap("IoU: " + ",  ".join(parts), letters)
    axes.set_title(f"Map {found.shown[m]}", fontsize=11, fontweight="bold", loc="left", pad=6 + 11 * len(lines))
    text = axes.text(0, 1.02, verbatim("\n".join(lines)), transform=axes.transAxes, fontsize=8.5, color=theme.faint, va="bottom")
    text.set_in_layout(False)


def _legend(figure: Figure, found: Maps, levels: np.ndarray, theme: Theme) -> None:
    marks: list[Patch | Line2D] = [
        Patch(facecolor=(*to_rgb(color), OPACITY), edgecolor=color, linewidth=1.5, label=verbatim(name))
        for name, color in zip(found.classes[1:], _colors(len(found.classes)))
    ]
    marks += [
        Patch(facecolor=theme.faint, alpha=OPACITY, label="filled: predicted"),
        Patch(facecolor="none", edgecolor=theme.faint, linewidth=1.5, label="outlined: true"),
    ]
    if len(levels):
        step = levels[1] - levels[0] if len(levels) > 1 else 4
        label = f"sea-level pressure every {step:g} hPa, thick every 20"
        marks.append(Line2D([], [], color=theme.ink, alpha=0.55, linewidth=0.8, label=label))
    figure.legend(handles=marks, loc="outside upper left", ncols=min(len(marks), 5))
