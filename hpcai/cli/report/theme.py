"""The style of the pictures, and functions shared by several of them."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 4.8                                              # inches of a figure; on a phone it is as wide as the screen
DPI = 200
STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)


class Theme(NamedTuple):
    """Colours, and the names of the colour maps for counts and for fields."""

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

# Colours and markers of classes, without the background. They are distinguishable with colour vision deficiency, in both themes.
PALETTE = ("#e8590c", "#d0219b", "#f2c500", "#6d3bef", "#8b4513", "#00b8c8")
MARKS = ("s", "^", "D", "v", "P", "X")


class Plot(NamedTuple):
    """A picture of the page: one figure or several, which a phone shows one under another; drawn once per theme."""

    name: str
    title: str
    caption: str
    draw: Callable[[Theme], Figure | Sequence[Figure]]

    def png(self, theme: Theme) -> list[bytes]:
        colors: dict[Any, Any] = {
            "figure.facecolor": theme.paper, "axes.facecolor": theme.paper, "savefig.facecolor": theme.paper,
            "text.color": theme.ink, "axes.labelcolor": theme.faint, "axes.edgecolor": theme.grid, "axes.titlecolor": theme.ink,
            "xtick.color": theme.grid, "ytick.color": theme.grid, "xtick.labelcolor": theme.faint, "ytick.labelcolor": theme.faint,
            "grid.color": theme.grid,
        }
        with matplotlib.rc_context({**STYLE, **colors}):
            drawn = self.draw(theme)
            files = [(figure, io.BytesIO()) for figure in ([drawn] if isinstance(drawn, Figure) else drawn)]
            for figure, file in files:
                figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        return [file.getvalue() for _, file in files]


def panel_title(axes: Axes, title: str, details: str, theme: Theme) -> None:
    """Set a panel's title, and below it a line of details."""
    axes.set_title(title, fontsize=11.5, fontweight="bold", loc="left", pad=20)
    axes.annotate(details, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=8.5, color=theme.faint)


def hide_axes(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def escape_mathtext(text: str) -> str:
    """Escape "$", which would start a formula: names come from files."""
    return text.replace("$", r"\$")


def format_score(value: float, digits: int = 2) -> str:
    """Return a score with ``digits`` decimals, or a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
