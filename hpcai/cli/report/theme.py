"""How the pictures look, and what several of them have in common."""

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 13.2                                             # inches of a picture that is as wide as the page
DPI = 160


class Theme(NamedTuple):
    """Colours, and at the end the names of the colour maps for counts and for values of a field."""

    paper: str
    ink: str
    faint: str
    grid: str
    main: str
    second: str
    good: str
    counts: str
    values: str


LIGHT = Theme("#ffffff", "#1c2430", "#6b7685", "#e6e9ee", "#2458d3", "#d9730d", "#15803d", "Blues", "YlGnBu")
DARK = Theme("#171b22", "#e4e8ef", "#8e99a9", "#2b323d", "#79a8ff", "#f5a962", "#4ade80", "Blues_r", "YlGnBu_r")

# Colours and marks of classes, without the first class, which is what is none of the others. All eyes tell these apart, on light
# and on dark paper.
PALETTE = ("#e8590c", "#d0219b", "#f2c500", "#6d3bef", "#8b4513", "#00b8c8")
MARKS = ("s", "^", "D", "v", "P", "X")


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
            self.draw(theme).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        return file.getvalue()


def panel_title(axes: Axes, title: str, said: str, theme: Theme) -> None:
    """A panel's title, and under it what the reader should know about the panel."""
    axes.set_title(f"{title}\n", fontsize=11.5, fontweight="bold", loc="left")
    axes.text(0, 1.03, said, transform=axes.transAxes, fontsize=8.5, color=theme.faint)


def hide_axes(axes: Axes) -> None:
    """Leaves nothing of a panel but what is drawn in it."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def escape_mathtext(text: str) -> str:
    """Names come from files: a "$" in them starts no formula."""
    return text.replace("$", r"\$")


def format_score(value: float, digits: int = 2) -> str:
    """A score with so many decimals, or a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
