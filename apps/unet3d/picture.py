"""The picture of a run: axial slices of validation scans, what is in them and what the network sees.

N volumes with one slice of each, M of them drawn, H W voxels, K classes
"""

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from hpcai.cli.report import masks
from hpcai.cli.report.masks import Masks, colors
from hpcai.cli.report.picture import Table
from hpcai.cli.report.theme import WIDTH, Theme, bare, verbatim
from hpcai.errors import DataError

FILE = "maps.npz"
TITLE = "Predicted and true slices"
HIGHER = ("dice",)
# Tissues on the grey of a scan: eyes without red or green receptors tell blue and orange from it and apart
PALETTE = ("#2f8fff", "#ff9f1c", "#00c08b", "#e64980", "#b197fc", "#f2e205")
SOFT = -79.0, 250.0                                      # HU from black to white: soft tissue and enhanced kidneys apart
OPACITY, WRONG = 0.42, 0.8                               # of what the network sees, and where it is not there
LETTERS = 72                                             # of the heading of a pair
HALO = "#101010"                                         # around lines and letters on a scan, on either paper


@dataclass
class Slices:
    """One axial slice of each volume, with the front of the body in the first row."""

    masks: Masks
    scan: np.ndarray                                     # [M, H, W]
    spacing_mm: tuple[float, float] | None               # of rows and of columns

    def dice(self, n: int | None = None) -> np.ndarray:
        """Dice of each class, in slice ``n`` or in all slices together; NaN where a class is neither there nor seen.   [K]"""
        both, sizes = self.masks.overlap(n)
        return masks.ratio(2 * both, sizes)

    def mean_dice(self) -> np.ndarray:
        """The mean Dice of each class over those slices drawn in which it is there or seen; NaN where there is none.   [K]"""
        each = np.array([self.dice(n) for n in self.masks.shown])
        return masks.ratio(np.nansum(each, 0), np.isfinite(each).sum(0))


def read(path: Path) -> Slices:
    found, more = masks.read(path, optional=("kind", "spacing_mm"))
    if (kind := str(more.get("kind", "slices"))) != "slices":
        raise DataError(f"kind is {kind!r}, expected 'slices'")
    scan, spacing = found.field(0), more.get("spacing_mm")
    if not np.isfinite(scan).any():
        raise DataError(f"no voxel has a finite {found.variables[0]}")
    if spacing is None:
        return Slices(found, scan, None)
    if spacing.shape != (2,) or spacing.dtype.kind not in "fiu" or not (np.isfinite(spacing).all() and spacing.min() > 0):
        raise DataError(f"spacing_mm is {spacing.tolist()}, expected two numbers above 0, of rows and of columns")
    return Slices(found, scan, (float(spacing[0]), float(spacing[1])))


def classes(found: Slices) -> list[str]:
    return found.masks.classes


def caption(found: Slices) -> str:
    total, (count, height, width) = len(found.masks.cells), found.scan.shape
    which = f"{total} validation volume{'s' * (total > 1)}"
    if total > count:
        which = f"{count} of {which} (those with most classes in their slices)"
    each = " x ".join(dict.fromkeys(f"{n:g}" for n in found.spacing_mm)) if found.spacing_mm else ""
    return (f"{which}, an axial slice of each, {height} x {width} voxels{f' of {each} mm' if each else ''}; the front is on top,"
            " the patient's right on the left. Each slice as it is, then the framed part with what is there (outlined) and what"
            " the network sees (filled; deep: wrongly). Dice of a class in its slice; –: neither there nor seen. Mean over the"
            f" {count} shown: {_said(found, found.mean_dice())}.")


def table(found: Slices) -> Table:
    cells = found.masks.cells
    which = f"{len(cells)} slices, one of each volume," if len(cells) > 1 else "one slice"
    note = (f"All {cells.sum():,} voxels of {which} together. An evaluation means something else by Dice: the mean over"
            " volumes of the Dice in each whole volume, which is 1 where a class is neither there nor seen.")
    return masks.table(found.masks, "Dice", found.dice(), "voxels", note)


def draw(found: Slices, theme: Theme) -> Figure:
    count, height, width = found.scan.shape
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
        pair = [figure.add_subplot(grid[row, column + k]) for k in (0, 1)]
        panels += pair
        for axes in pair:
            bare(axes)
            axes.imshow(found.scan[m], origin="upper", cmap="gray", norm=window, aspect=aspect, interpolation="nearest")
        _pair(pair[0], pair[1], found, m)
    extend = "both" if found.masks.units[0] == "HU" else "neither"
    masks.bar(figure, panels, ScalarMappable(window, "gray"), found.masks.label(0), shrink=0.4, extend=extend)
    _legend(figure, found, theme)
    return figure


def _pair(whole: Axes, part: Axes, found: Slices, m: int) -> None:
    """Draws what is to be seen on the whole slice, and on the part of it that is enlarged."""
    true, predicted, n = found.masks.true[m], found.masks.predicted[m], found.masks.shown[m]
    low, high = _part(true, predicted)
    frame = Rectangle((low[1] - 0.5, low[0] - 0.5), *(high - low)[::-1])
    frame.set(fill=False, edgecolor="white", linewidth=0.7, alpha=0.7)
    whole.add_patch(frame)
    _ruler(whole, found)
    part.set(xlim=(low[1] - 0.5, high[1] - 0.5), ylim=(high[0] - 0.5, low[0] - 0.5))
    _masks(part, true, predicted, len(found.masks.classes))
    title = textwrap.fill(verbatim(f"Volume {n}: {_said(found, found.dice(n))}"), LETTERS)
    whole.set_title(title, fontsize=11, fontweight="bold", loc="left", pad=5)


def _said(found: Slices, dice: np.ndarray) -> str:
    """The Dice of all classes but the first."""
    return ", ".join(masks.scores(found.masks.classes[1:], dice[1:]))


def _window(found: Slices) -> tuple[float, float]:
    finite = found.scan[np.isfinite(found.scan)]
    return SOFT if found.masks.units[0] == "HU" else (float(finite.min()), float(finite.max()))


def _part(true: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the square begins and ends, along both dims, that holds what is there or seen and a little around it; the whole slice
    where there is nothing."""
    shape, there = np.array(true.shape), np.argwhere((true > 0) | (predicted > 0))
    if not len(there):
        return np.zeros(2, int), shape
    low, high = there.min(0), there.max(0) + 1
    side = np.minimum(max(int((high - low).max()) + 2 * max(2, int(shape.max()) // 24), int(shape.max()) // 3), shape)
    first = np.clip((low + high - side) // 2, 0, shape - side)
    return first, first + side


def _masks(axes: Axes, true: np.ndarray, predicted: np.ndarray, kinds: int) -> None:
    # Both follow the same lines between voxels: where truth and prediction agree, the filling ends at the outline.
    x, y = (np.arange(-1, n + 1) for n in true.shape[::-1])
    for k, color in enumerate(colors(PALETTE, kinds), 1):
        agreed, wrong = ((predicted == k) & part for part in (true == k, true != k))
        for there, opacity in ((agreed, OPACITY), (wrong, WRONG)):
            if there.any():
                axes.contourf(x, y, np.pad(there, 1), [0.5, 1.5], colors=color, alpha=opacity)
    for k, color in enumerate(colors(PALETTE, kinds), 1):
        if (true == k).any():
            lines = axes.contour(x, y, np.pad(true == k, 1), [0.5], colors=color, linewidths=1.2)
            lines.set_path_effects([patheffects.withStroke(linewidth=2.4, foreground=HALO)])


def _ruler(axes: Axes, found: Slices) -> None:
    """Draws 5 cm, or the round length that is nearest to a quarter of the slice."""
    if not found.spacing_mm:
        return
    whole = found.scan.shape[2] * found.spacing_mm[1]
    mm = min((5, 10, 20, 50, 100, 200), key=lambda length: abs(math.log(4 * length / whole)))
    text = axes.text(0.03, 0.045, f"{mm / 10:g} cm", transform=axes.transAxes, color="white", fontsize=8, va="bottom")
    text.set_path_effects([patheffects.withStroke(linewidth=2, foreground=HALO)])
    end = 0.03 + mm / whole
    line = Line2D([0.03, end], [0.03, 0.03], transform=axes.transAxes, color="white", linewidth=2, solid_capstyle="butt")
    line.set_path_effects([patheffects.withStroke(linewidth=3.4, foreground=HALO)])
    axes.add_line(line)


def _legend(figure: Figure, found: Slices, theme: Theme) -> None:
    filled, outlined = masks.legend(found.masks, PALETTE, OPACITY, theme)
    marks = [*filled, Patch(facecolor=theme.faint, alpha=WRONG, label="deep: predicted, but not true"), outlined]
    figure.legend(handles=marks, loc="outside upper left", ncols=3 * min(len(found.scan), 2))
