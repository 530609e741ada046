"""Images with segmentation masks: true classes outlined, predicted ones filled, and a confusion table.

N images, M of them drawn, H W pixels, V variables, K classes
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

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import PALETTE, WIDTH, Theme, escape_mathtext, format_score, hide_axes
from hpcai.errors import DataError

LEGEND = {"classes": "text K", "variables": "text V", "units": "text V", "fields": "real N H W V", "true": "whole N H W",
          "predicted": "whole N H W"}  # fmt: skip
PANELS = 6                                               # maximum number of drawn images
MAX_CELLS = 400                                          # pixels across; wider images are subsampled
LETTERS = 60                                             # of a line of a title
OPACITY, WRONG_OPACITY = 0.45, 0.8                               # of correctly and of wrongly predicted pixels


@dataclass(frozen=True)
class ImageKind:
    """The kind of images, with its score and its colours."""

    image: str                                           # such as map
    score: str                                           # IoU or Dice
    origin: str = "upper"                                # position of the first row: lower or upper
    colors: str = ""                                     # name of a colour map; empty: the theme's
    palette: Sequence[str] = PALETTE                     # of classes, without the first
    edge: str = "white"                                  # around outlines, for contrast with the image
    enlarged: bool = False                               # crop to the region with classes


@dataclass
class Masks:
    """Images with true and predicted masks, and their confusion matrices."""

    classes: list[str]                                   # the first is the background
    variables: list[str]
    units: list[str]
    drawn: list[int]                                     # drawn images: M of 0 ... N - 1
    fields: np.ndarray                                   # [M, H, W, V]
    true: np.ndarray                                     # [M, H, W]
    predicted: np.ndarray                                # [M, H, W]
    confusion: np.ndarray                                    # [N, K, K] confusion matrices: true, predicted
    colored: int = 0                                     # variable drawn in colours
    lines: int | None = None                             # variable drawn as contour lines
    limits: tuple[float, float] | None = None            # of the colours; None: minimum and maximum
    aspect: float = 1.0                                  # height of a pixel over its width
    note: str = ""                                      # on the pixels, in the caption

    def scores(self, kind: ImageKind, n: int | None = None) -> np.ndarray:
        """Return IoU or Dice of each class [K], in image ``n`` or over all pixels; NaN for a class that is neither true nor
        predicted."""
        cells = self.confusion.sum(0) if n is None else self.confusion[n]
        both, sizes = np.diagonal(cells), cells.sum(0) + cells.sum(1)
        numerator, denominator = (both, sizes - both) if kind.score == "IoU" else (2 * both, sizes)
        return np.divide(numerator, denominator, out=np.full(len(both), math.nan), where=denominator > 0)

    def field(self, variable: int) -> np.ndarray:
        """[M, H, W]"""
        return self.fields[..., variable].astype(float)


def read(path: Path, optional: Sequence[str] = (), color: str = "", lines: str = "") -> tuple[Masks, dict[str, np.ndarray]]:
    """Read masks from an .npz file with the arrays of ``LEGEND``, and the existing ``optional`` arrays. ``color`` and ``lines``
    name the variables to draw, if the file has them.

    The images with most classes, true or predicted, are drawn. Raises DataError if arrays do not fit together.
    """
    contents = arrays(path, LEGEND, optional)
    classes, variables, units = (contents.pop(name).tolist() for name in ("classes", "variables", "units"))
    fields, true, predicted = (contents.pop(name) for name in ("fields", "true", "predicted"))
    count = len(classes)
    for name, mask in (("true", true), ("predicted", predicted)):
        if mask.min() < 0 or mask.max() >= count:
            raise DataError(f"{name} is {mask.min()} to {mask.max()}, expected 0 to {count - 1}, one for each of classes")
    if min(fields.shape[1:3]) < 2:
        raise DataError(f"fields is {fields.shape}, expected at least 2 cells along H and W")
    colored = variables.index(color) if color in variables else 0
    samples = zip(true, predicted, np.isfinite(fields[..., colored]))  # pixels without a value are outside of an image
    cells = np.stack([np.bincount(t[known] * np.intp(count) + p[known], minlength=count**2) for t, p, known in samples])
    cells = cells.reshape(len(true), count, count)
    variety = ((cells.sum(1) > 0) | (cells.sum(2) > 0)).sum(1)
    drawn = sorted(np.argsort(-variety, kind="stable")[:PANELS].tolist())
    if not np.isfinite(fields[drawn][..., colored]).any():
        raise DataError(f"no cell has a finite {variables[colored]}")
    contours = variables.index(lines) if lines in variables else None
    return Masks(classes, variables, units, drawn, fields[drawn], true[drawn], predicted[drawn], cells, colored, contours), contents


def classes(masks: Masks) -> list[str]:
    return masks.classes


def caption(kind: ImageKind, masks: Masks) -> str:
    total, drawn, (height, width) = len(masks.confusion), len(masks.drawn), masks.true.shape[1:]
    which = f"{total} validation {kind.image}{'s' * (total > 1)}"
    if total > drawn:
        which = f"{drawn} of {which} (those with most classes)"
    return (f"{which}, {height} x {width} cells{masks.note}. Outlined: true. Filled: predicted; deep: predicted, but not true."
            f" {kind.score} of a class in its {kind.image}; –: neither true nor predicted.")


def table(kind: ImageKind, masks: Masks) -> Table:
    """Return the score of each class, and its row of the confusion matrix in percent."""
    rows = []
    for name, value, counts in zip(masks.classes, masks.scores(kind), masks.confusion.sum(0)):
        shares = [f"{100 * part / counts.sum():.2f} %" for part in counts] if counts.sum() else ["–"] * len(counts)
        rows.append((name, format_score(value, 4), f"{counts.sum():,}", *shares))
    note = (f"All {masks.confusion.sum():,} cells of {len(masks.confusion)} {kind.image}s together. An evaluation reports the"
            f" mean {kind.score} of samples, which is 1 where a class is neither true nor predicted.")
    head = ("class", kind.score, "cells", *(f"predicted as {name}" for name in masks.classes))
    return Table("Prediction per class", note, head, rows)


def finding(kind: ImageKind, masks: Masks) -> Finding:
    """Return what a network finds of each class, compared with marking every pixel as this class."""
    scores, cells = masks.scores(kind), masks.confusion.sum(0)
    shares = cells.sum(1) / cells.sum()  # the IoU of a mask of all pixels
    trivial = shares if kind.score == "IoU" else 2 * shares / (1 + shares)
    texts = {name: f"{name}: {f'{kind.score} {format_measured(score)}' if score > 0 else 'none found'}"
                   + (", no better than marking every cell" if 0 < score <= least else "")
             for name, score, least in list(zip(masks.classes, scores, trivial))[1:] if not math.isnan(score)}  # fmt: skip
    mean = float(np.nanmean(scores[1:])) if texts else math.nan
    sentence = f"What the network finds on unseen {kind.image}s: {'; '.join(texts.values()) or 'nothing, where nothing is'}."
    number = "none found" if mean == 0 else format_score(mean)
    return Finding(sentence, number, f"mean {kind.score} of {' and '.join(texts) or 'no class'}; 1 is perfect")


def draw(kind: ImageKind, masks: Masks, theme: Theme) -> list[Figure]:
    (_, height, width), field = masks.true.shape, masks.field(masks.colored)
    panel = WIDTH * min(max(masks.aspect * (1.0 if kind.enlarged else height / width), 0.3), 1.5)
    scale = Normalize(*masks.limits) if masks.limits else Normalize(np.nanmin(field), np.nanmax(field))
    stride = max(1, width // MAX_CELLS)
    figures = []
    for m in range(len(field)):
        figure = Figure(figsize=(WIDTH, panel + 0.9))
        axes = figure.subplots()
        hide_axes(axes)
        rows = (-0.5, height - 0.5) if kind.origin == "lower" else (height - 0.5, -0.5)
        image_kwargs: dict[str, Any] = {"origin": kind.origin, "extent": (-0.5, width - 0.5, *rows), "interpolation": "nearest"}
        image = axes.imshow(field[m, ::stride, ::stride], cmap=kind.colors or theme.values, norm=scale, **image_kwargs)
        axes.set_aspect(masks.aspect)
        if masks.lines is not None and np.isfinite(values := masks.field(masks.lines)[m, ::stride, ::stride]).any():
            x, y = np.arange(0, width, stride), np.arange(0, height, stride)
            axes.contour(x, y, values, 10, colors=theme.ink, alpha=0.55, linewidths=0.5)
        _draw_masks(axes, kind, masks, m, image_kwargs)
        pairs = list(zip(masks.classes, masks.scores(kind, masks.drawn[m])))[1:]
        scores = ", ".join(f"{name} {format_score(x)}" for name, x in pairs)
        title = textwrap.fill(f"{kind.image.capitalize()} {masks.drawn[m]}: {scores}", LETTERS)
        axes.set_title(escape_mathtext(title), fontsize=10, fontweight="bold", loc="left")
        bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, pad=0.02, extend="both" if masks.limits else "neither")
        bar.set_label(_label(masks, masks.colored))
        bar.outline.set_visible(False)
        if m == 0:
            handles = _legend(kind, masks, theme)
            figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(handles) / 2))
            figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=8)
        figures.append(figure)
    return figures


def _colors(kind: ImageKind, masks: Masks) -> list[str]:
    """Return the colours of all classes but the first; a short palette is repeated."""
    return list(islice(cycle(kind.palette), len(masks.classes) - 1))


def _label(masks: Masks, variable: int) -> str:
    unit = f" [{masks.units[variable]}]" if masks.units[variable] else ""
    return escape_mathtext(masks.variables[variable] + unit)


def _draw_masks(axes: Axes, kind: ImageKind, masks: Masks, m: int, image_kwargs: dict[str, Any]) -> None:
    true, predicted = masks.true[m], masks.predicted[m]
    fill = to_rgba_array(["none", *_colors(kind, masks)])[predicted]
    fill[..., 3] = np.where(predicted == 0, 0, np.where(true == predicted, OPACITY, WRONG_OPACITY))
    axes.imshow(fill, aspect=masks.aspect, **image_kwargs)
    x, y = (np.arange(-1, n + 1) for n in true.shape[::-1])
    for k, color in enumerate(_colors(kind, masks), 1):
        if (true == k).any():
            lines = axes.contour(x, y, np.pad(true == k, 1), [0.5], colors=color, linewidths=1.3)
            lines.set_path_effects([patheffects.withStroke(linewidth=2.6, foreground=kind.edge)])
    low, high = _bounding_square(true, predicted) if kind.enlarged else ((0, 0), true.shape)
    rows = low[0] - 0.5, high[0] - 0.5
    axes.set(xlim=(low[1] - 0.5, high[1] - 0.5), ylim=rows if kind.origin == "lower" else rows[::-1])


def _bounding_square(true: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last corner of the square around all classes with a margin, or of the full image without classes."""
    shape, occupied = np.array(true.shape), np.argwhere((true > 0) | (predicted > 0))
    if not len(occupied):
        return np.zeros(2, int), shape
    low, high = occupied.min(0), occupied.max(0) + 1
    side = np.minimum(max(int((high - low).max()) + 2 * max(2, int(shape.max()) // 24), int(shape.max()) // 3), shape)
    corner = np.clip((low + high - side) // 2, 0, shape - side)
    return corner, corner + side


def _legend(kind: ImageKind, masks: Masks, theme: Theme) -> list[Patch | Line2D]:
    colors_of_class = zip(masks.classes[1:], _colors(kind, masks))
    handles: list[Patch | Line2D] = [
        Patch(facecolor=(*to_rgb(color), OPACITY), edgecolor=color, linewidth=1.5, label=escape_mathtext(name))
        for name, color in colors_of_class
    ]
    handles += [Patch(facecolor=theme.faint, alpha=OPACITY, label="filled: predicted"),
              Patch(facecolor=theme.faint, alpha=WRONG_OPACITY, label="deep: predicted, but not true"),
              Patch(facecolor="none", edgecolor=theme.faint, linewidth=1.5, label="outlined: true")]
    if masks.lines is not None:
        handles.append(Line2D([], [], color=theme.ink, alpha=0.55, linewidth=0.8, label=_label(masks, masks.lines)))
    return handles
