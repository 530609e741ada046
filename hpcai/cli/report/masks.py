"""Images with the classes of their cells: true ones outlined, predicted ones filled, and a table of both.

N images, M of them drawn, H W cells, V variables, K classes
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_rgb, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpcai.cli.report.picture import Table, arrays, panels
from hpcai.cli.report.theme import PALETTE, WIDTH, Theme, escape_mathtext, format_score, hide_axes
from hpcai.errors import DataError

LEGEND = {"classes": "text K", "variables": "text V", "units": "text V", "fields": "real N H W V", "true": "whole N H W",
          "predicted": "whole N H W"}  # fmt: skip
PANELS = 6                                               # images that are drawn
MAX_CELLS = 400                                               # cells across: more need larger panels, but every other value at most
LETTERS_PER_INCH = 13                                             # of a title in an inch
OPACITY, WRONG_OPACITY = 0.45, 0.8                               # of predicted cells, and of those that are not true


@dataclass(frozen=True)
class ImageKind:
    """The kind of images, with its score and its colours."""

    image: str                                           # such as map
    score: str                                           # IoU or Dice
    origin: str = "upper"                                # where the first row is: lower or upper
    colors: str = ""                                     # name of a colour map; empty: the theme's
    palette: Sequence[str] = PALETTE                     # of classes without the first
    edge: str = "white"                                  # around outlines: some classes differ from the image by colour alone
    enlarged: bool = False                               # only the part that holds classes is drawn


@dataclass
class Masks:
    """Images with true and predicted masks, and the counts of their cells."""

    classes: list[str]                                   # the first is what is none of the others
    variables: list[str]
    units: list[str]
    drawn: list[int]                                     # which are drawn: M of 0 ... N - 1
    fields: np.ndarray                                   # [M, H, W, V]
    true: np.ndarray                                     # [M, H, W]
    predicted: np.ndarray                                # [M, H, W]
    cells: np.ndarray                                    # [N, K, K]: so many of each true class (first K) are predicted as each
    colored: int = 0                                     # variable that is drawn in colours
    lines: int | None = None                             # variable that is drawn in contour lines
    limits: tuple[float, float] | None = None            # of the colours; None: least and greatest value
    aspect: float = 1.0                                  # height of a cell over its width
    note: str = ""                                      # what the caption says of the cells

    def scores(self, kind: ImageKind, n: int | None = None) -> np.ndarray:
        """IoU or Dice of each class, in image ``n`` or in the cells of all together; NaN where a class is neither true nor
        predicted.   [K]"""
        cells = self.cells.sum(0) if n is None else self.cells[n]
        both, sizes = np.diagonal(cells), cells.sum(0) + cells.sum(1)
        part, whole = (both, sizes - both) if kind.score == "IoU" else (2 * both, sizes)
        return np.divide(part, whole, out=np.full(len(both), math.nan), where=whole > 0)

    def field(self, variable: int) -> np.ndarray:
        """[M, H, W]"""
        return self.fields[..., variable].astype(float)


def read(path: Path, optional: Sequence[str] = (), color: str = "", lines: str = "") -> tuple[Masks, dict[str, np.ndarray]]:
    """Masks from an .npz file with the arrays of ``LEGEND``, and those of the ``optional`` arrays that the file has. ``color`` and
    ``lines`` name the variables that are drawn, if the file has them.

    The images with most classes, true or predicted, are those that are drawn. Raises DataError for arrays that do not fit together.
    """
    found = arrays(path, LEGEND, optional)
    classes, variables, units = (found.pop(name).tolist() for name in ("classes", "variables", "units"))
    fields, true, predicted = (found.pop(name) for name in ("fields", "true", "predicted"))
    kinds = len(classes)
    for name, mask in (("true", true), ("predicted", predicted)):
        if mask.min() < 0 or mask.max() >= kinds:
            raise DataError(f"{name} is {mask.min()} to {mask.max()}, expected 0 to {kinds - 1}, one for each of classes")
    if min(fields.shape[1:3]) < 2:
        raise DataError(f"fields is {fields.shape}, expected at least 2 cells along H and W")
    colored = variables.index(color) if color in variables else 0
    cells = np.stack([np.bincount(t.ravel() * np.intp(kinds) + p.ravel(), minlength=kinds**2) for t, p in zip(true, predicted)])
    cells = cells.reshape(len(true), kinds, kinds)
    variety = ((cells.sum(1) > 0) | (cells.sum(2) > 0)).sum(1)
    shown = sorted(np.argsort(-variety, kind="stable")[:PANELS].tolist())
    if not np.isfinite(fields[shown][..., colored]).any():
        raise DataError(f"no cell has a finite {variables[colored]}")
    contours = variables.index(lines) if lines in variables else None
    return Masks(classes, variables, units, shown, fields[shown], true[shown], predicted[shown], cells, colored, contours), found


def classes(found: Masks) -> list[str]:
    return found.classes


def caption(kind: ImageKind, found: Masks) -> str:
    total, shown, (height, width) = len(found.cells), len(found.drawn), found.true.shape[1:]
    which = f"{total} validation {kind.image}{'s' * (total > 1)}"
    if total > shown:
        which = f"{shown} of {which} (those with most classes)"
    return (f"{which}, {height} x {width} cells{found.note}. Outlined: true. Filled: predicted; deep: predicted, but not true."
            f" {kind.score} of a class in its {kind.image}; –: neither true nor predicted.")


def table(kind: ImageKind, found: Masks) -> Table:
    """The score of each class, and the shares of its cells that are predicted as each class."""
    rows = []
    for name, value, seen in zip(found.classes, found.scores(kind), found.cells.sum(0)):
        shares = [f"{100 * part / seen.sum():.2f} %" for part in seen] if seen.sum() else ["–"] * len(seen)
        rows.append((name, format_score(value, 4), f"{seen.sum():,}", *shares))
    note = (f"All {found.cells.sum():,} cells of {len(found.cells)} {kind.image}s together. An evaluation means the mean of the"
            f" {kind.score} of each sample, which is 1 where a class is neither true nor predicted.")
    head = ("class", kind.score, "cells", *(f"predicted as {name}" for name in found.classes))
    return Table("Prediction per class", note, head, rows)


def draw(kind: ImageKind, found: Masks, theme: Theme) -> Figure:
    (count, height, width), field = found.true.shape, found.field(found.colored)
    columns = min(count, 2 if count == 4 or width > MAX_CELLS else 3)
    inches = WIDTH / max(columns, 3 if kind.enlarged else 2) * (0.8 if width > MAX_CELLS else 1.0)
    panel = inches * min(max(found.aspect * (1.0 if kind.enlarged else height / width), 0.3), 1.5)
    figure = Figure(figsize=(inches * columns, math.ceil(count / columns) * (panel + 0.45) + 1.2))
    every = panels(figure, count, columns)
    scale = Normalize(*found.limits) if found.limits else Normalize(np.nanmin(field), np.nanmax(field))
    step = max(1, width // MAX_CELLS)
    for m, axes in enumerate(every):
        hide_axes(axes)
        rows = (-0.5, height - 0.5) if kind.origin == "lower" else (height - 0.5, -0.5)
        place: dict[str, Any] = {"origin": kind.origin, "extent": (-0.5, width - 0.5, *rows), "interpolation": "nearest"}
        image = axes.imshow(field[m, ::step, ::step], cmap=kind.colors or theme.values, norm=scale, **place)
        axes.set_aspect(found.aspect)
        if found.lines is not None and np.isfinite(values := found.field(found.lines)[m, ::step, ::step]).any():
            x, y = np.arange(0, width, step), np.arange(0, height, step)
            axes.contour(x, y, values, 10, colors=theme.ink, alpha=0.55, linewidths=0.5)
        _draw_masks(axes, kind, found, m, place)
        scores = ", ".join(f"{name} {format_score(x)}" for name, x in list(zip(found.classes, found.scores(kind, found.drawn[m])))[1:])
        title = textwrap.fill(f"{kind.image.capitalize()} {found.drawn[m]}: {scores}", int(LETTERS_PER_INCH * inches))
        axes.set_title(escape_mathtext(title), fontsize=10, fontweight="bold", loc="left")
    ends = "both" if found.limits else "neither"
    bar = figure.colorbar(image, ax=every, location="bottom", aspect=60, pad=0.02, shrink=0.5, extend=ends)
    bar.set_label(_label(found, found.colored))
    bar.outline.set_visible(False)
    figure.legend(handles=_legend(kind, found, theme), loc="outside upper left", ncols=6)
    return figure


def _colors(kind: ImageKind, found: Masks) -> list[str]:
    """Colours of all classes but the first; a short palette begins again."""
    return list(islice(cycle(kind.palette), len(found.classes) - 1))


def _label(found: Masks, variable: int) -> str:
    unit = f" [{found.units[variable]}]" if found.units[variable] else ""
    return escape_mathtext(found.variables[variable] + unit)


def _draw_masks(axes: Axes, kind: ImageKind, found: Masks, m: int, place: dict[str, Any]) -> None:
    true, predicted = found.true[m], found.predicted[m]
    fill = to_rgba_array(["none", *_colors(kind, found)])[predicted]
    fill[..., 3] = np.where(predicted == 0, 0, np.where(true == predicted, OPACITY, WRONG_OPACITY))
    axes.imshow(fill, aspect=found.aspect, **place)
    x, y = (np.arange(-1, n + 1) for n in true.shape[::-1])
    for k, color in enumerate(_colors(kind, found), 1):
        if (true == k).any():
            lines = axes.contour(x, y, np.pad(true == k, 1), [0.5], colors=color, linewidths=1.3)
            lines.set_path_effects([patheffects.withStroke(linewidth=2.6, foreground=kind.edge)])
    low, high = _bounding_square(true, predicted) if kind.enlarged else ((0, 0), true.shape)
    rows = low[0] - 0.5, high[0] - 0.5
    axes.set(xlim=(low[1] - 0.5, high[1] - 0.5), ylim=rows if kind.origin == "lower" else rows[::-1])


def _bounding_square(true: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last corner of the square that holds all classes and a margin; of the whole image where there are
    none."""
    shape, there = np.array(true.shape), np.argwhere((true > 0) | (predicted > 0))
    if not len(there):
        return np.zeros(2, int), shape
    low, high = there.min(0), there.max(0) + 1
    side = np.minimum(max(int((high - low).max()) + 2 * max(2, int(shape.max()) // 24), int(shape.max()) // 3), shape)
    first = np.clip((low + high - side) // 2, 0, shape - side)
    return first, first + side


def _legend(kind: ImageKind, found: Masks, theme: Theme) -> list[Patch | Line2D]:
    named = zip(found.classes[1:], _colors(kind, found))
    marks: list[Patch | Line2D] = [Patch(facecolor=(*to_rgb(color), OPACITY), edgecolor=color, linewidth=1.5, label=escape_mathtext(name))
                                   for name, color in named]
    marks += [Patch(facecolor=theme.faint, alpha=OPACITY, label="filled: predicted"),
              Patch(facecolor=theme.faint, alpha=WRONG_OPACITY, label="deep: predicted, but not true"),
              Patch(facecolor="none", edgecolor=theme.faint, linewidth=1.5, label="outlined: true")]
    if found.lines is not None:
        marks.append(Line2D([], [], color=theme.ink, alpha=0.55, linewidth=0.8, label=_label(found, found.lines)))
    return marks
