"""Masks over fields: what there is in images and what the network sees in them, as classes of cells.

N images, M of them drawn, H W cells, V variables, K classes
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hpcai.cli.report.picture import Table, arrays
from hpcai.cli.report.theme import Theme, score, verbatim
from hpcai.errors import DataError

LEGEND = {"classes": "text K", "variables": "text V", "units": "text V", "fields": "real N H W V", "true": "whole N H W",
          "predicted": "whole N H W"}  # fmt: skip
PANELS = 6                                               # images that are drawn


@dataclass
class Masks:
    """Validation images with masks, and the counts of their cells."""

    classes: list[str]                                   # the first is what is none of the others
    variables: list[str]
    units: list[str]
    shown: list[int]                                     # which are drawn: M of 0 ... N - 1
    fields: np.ndarray                                   # [M, H, W, V]
    true: np.ndarray                                     # [M, H, W]
    predicted: np.ndarray                                # [M, H, W]
    cells: np.ndarray                                    # [N, K, K]: so many of each true class (first K) are seen as each

    def overlap(self, n: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Cells of each class that are both true and predicted, and the sum of the true and of the predicted ones; of image ``n``
        or of all images together.   [K], [K]"""
        cells = self.cells.sum(0) if n is None else self.cells[n]
        return np.diagonal(cells), cells.sum(0) + cells.sum(1)

    def field(self, variable: int) -> np.ndarray:
        """The values of one variable in the images that are drawn.   [M, H, W]"""
        return self.fields[..., variable].astype(float)

    def label(self, variable: int, name: str = "") -> str:
        """The name of a variable, or ``name`` in its place, and its unit."""
        unit = f" [{self.units[variable]}]" if self.units[variable] else ""
        return verbatim((name or self.variables[variable]) + unit)


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """``part / whole``, and NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), math.nan), where=whole > 0)


def read(path: Path, optional: Sequence[str] = ()) -> tuple[Masks, dict[str, np.ndarray]]:
    """Masks from an .npz file with the arrays of ``LEGEND``, and those of the ``optional`` arrays that the file has.

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
    cells = np.stack([np.bincount(t.ravel() * np.intp(kinds) + p.ravel(), minlength=kinds**2) for t, p in zip(true, predicted)])
    cells = cells.reshape(len(true), kinds, kinds)
    variety = ((cells.sum(1) > 0) | (cells.sum(2) > 0)).sum(1)
    shown = sorted(np.argsort(-variety, kind="stable")[:PANELS].tolist())
    return Masks(classes, variables, units, shown, fields[shown], true[shown], predicted[shown], cells), found


def scores(classes: Sequence[str], values: np.ndarray) -> Iterator[str]:
    """Each class with its score, or with a dash where the score is NaN."""
    return (f"{name} {score(value)}" for name, value in zip(classes, values))


def table(found: Masks, name: str, values: np.ndarray, cell: str, note: str) -> Table:
    """The score of each class, named ``name``, and the shares of its cells that are seen as each class."""
    rows = []
    for kind, value, seen in zip(found.classes, values, found.cells.sum(0)):
        shares = [f"{100 * part / seen.sum():.2f} %" for part in seen] if seen.sum() else ["–"] * len(seen)
        rows.append((kind, score(value, 4), f"{seen.sum():,}", *shares))
    return Table("Prediction per class", note, ("class", name, cell, *(f"seen as {kind}" for kind in found.classes)), rows)


def colors(palette: Sequence[str], kinds: int) -> Iterator[str]:
    """Colours of all classes but the first; a short palette begins again."""
    return islice(cycle(palette), kinds - 1)


def bar(figure: Figure, panels: Sequence[Axes], scale: ScalarMappable, label: str, **words: Any) -> None:
    """The colour bar of all panels, below them."""
    bar = figure.colorbar(scale, ax=panels, location="bottom", aspect=60, pad=0.02, **words)
    bar.set_label(label)
    bar.outline.set_visible(False)


def legend(found: Masks, palette: Sequence[str], opacity: float, theme: Theme) -> tuple[list[Patch], Patch]:
    """Marks of the classes and of what is filled, and that of what is outlined."""
    marks = [
        Patch(facecolor=(*to_rgb(color), opacity), edgecolor=color, linewidth=1.5, label=verbatim(name))
        for name, color in zip(found.classes[1:], colors(palette, len(found.classes)))
    ]
    filled = Patch(facecolor=theme.faint, alpha=opacity, label="filled: predicted")
    return [*marks, filled], Patch(facecolor="none", edgecolor=theme.faint, linewidth=1.5, label="outlined: true")
