"""The figure of a run: which communities papers cross into, predicted and planted, their shares by year, and the calibration.

N papers, K classes, P papers of the graph
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report import classes
from hpcai.cli.report.classes import MAX_CLASSES, Classified, calibrate, draw_reliability
from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, escape_mathtext, panel_title

FILE = "papers.npz"
TITLE = "Communities of papers"
HIGHER = ("accuracy",)
UNCERTAIN = 0.2                                          # fraction of the papers in the matrix of crossings
TRUTH = "year", "community", "second", "share"           # of the papers of a simulation
DRAWN = 5                                                # communities in the plot of shares


@dataclass
class Papers(Classified):
    """Validation papers of known class, and of simulated ones the truth of all papers of the graph."""

    numbers: np.ndarray                                  # [N] of the papers in the graph
    year: np.ndarray | None                              # [P]
    community: np.ndarray | None                         # [P]
    second: np.ndarray | None                            # [P] into which a paper crosses
    share: np.ndarray | None                             # [P] of the second community

    def uncertain(self) -> np.ndarray:
        """Return the papers whose class is least certain, which may cross into a second one."""
        count = round(UNCERTAIN * len(self.true))
        return np.argsort(self.raw.max(1), kind="stable")[:count]

    def crossings(self) -> tuple[np.ndarray, np.ndarray]:
        """Return per cent of the pairs of the two most probable classes of uncertain papers, and of planted pairs.   [K, K] each"""
        assert self.second is not None and self.share is not None
        first, second = np.argsort(-self.raw[self.uncertain()], 1)[:, :2].T
        crossing = self.share[self.numbers] > 0
        pairs = (first, second), (self.true[crossing], self.second[self.numbers[crossing]])
        matrices = []
        for left, right in pairs:
            matrix = np.zeros((len(self.names), len(self.names)))
            np.add.at(matrix, (np.append(left, right), np.append(right, left)), 50 / max(len(left), 1))
            matrices.append(matrix)
        return matrices[0], matrices[1]

    def correlation(self) -> float:
        """Return that of the two matrices, over pairs."""
        a, b = (matrix[np.triu_indices(len(self.names), 1)] for matrix in self.crossings())
        return float(np.corrcoef(a, b)[0, 1]) if len(a) > 1 and a.std() and b.std() else 0.0


def read(path: Path) -> Papers:
    content = arrays(path, {"classes": "text K", "paper": "whole N", "true": "whole N", "logits": "real N K"})
    known = content["true"] >= 0
    with np.load(path, allow_pickle=False) as file:
        truth: dict[str, Any] = {key: file.get(f"truth_{key}") for key in TRUTH}
    fields = calibrate(content["logits"][known], content["true"][known], "papers of known class")
    return Papers(content["classes"].tolist(), **fields, numbers=content["paper"][known].astype(np.int64), **truth)


def caption(results: Papers) -> str:
    text = f"{len(results.true):,} validation papers. A probability of 80 % should be right 80 times in 100."
    if results.share is None:
        return text
    return (f"Later papers than those of the training. First the pairs of communities between which the {UNCERTAIN:.0%} least"
            " certain papers lie, then the pairs that were planted: communities that some papers share in citations, authors and"
            f" topics. {text}")


def finding(results: Papers) -> Finding:
    number = f"{format_measured(100 * results.accuracy())} %"
    most = float(np.bincount(results.true).max() / len(results.true))
    text = f"{number} of unseen papers are classified correctly, {format_measured(100 * most)} % are of the most frequent class"
    if results.share is not None:
        crossing = (results.share[results.numbers[results.uncertain()]] > 0).mean()
        text += f"; of the {UNCERTAIN:.0%} least certain ones {crossing:.0%} lie between two communities, "
        text += f"with a correlation of {results.correlation():.2f} between found and planted pairs"
    return Finding(f"{text}.", number, "correctly classified papers; higher is better")


def draw(results: Papers, theme: Theme) -> list[Figure]:
    if results.share is None:
        return [draw_reliability(results, "papers", theme)]
    return [*_draw_crossings(results, theme), _draw_shares(results, theme), draw_reliability(results, "papers", theme)]


def _draw_crossings(results: Papers, theme: Theme) -> list[Figure]:
    figures, matrices = [], results.crossings()
    titles = ("Found crossings", "of the least certain papers"), ("Planted crossings", "of all papers")
    for matrix, (title, text) in zip(matrices, titles):
        figures.append(figure := Figure(figsize=(WIDTH, WIDTH * 0.85)))
        axes = figure.subplots()
        image = axes.imshow(matrix, cmap=theme.counts, vmin=0, vmax=max(m.max() for m in matrices))
        axes.set(xlabel="community", ylabel="community")
        axes.grid(False)
        if len(results.names) <= MAX_CLASSES:
            names = [escape_mathtext(name) for name in results.names]
            axes.set_xticks(range(len(names)), names, fontsize=7)
            axes.set_yticks(range(len(names)), names, fontsize=7)
        figure.colorbar(image, ax=axes, label="per cent of pairs")
        panel_title(axes, title, text, theme)
    return figures


def _draw_shares(results: Papers, theme: Theme) -> Figure:
    """Draw the shares of the communities that change most."""
    assert results.year is not None and results.community is not None
    size, years = len(results.names), np.unique(results.year)
    table = np.stack([np.bincount(results.community[results.year == year], minlength=size) for year in years])
    table = 100 * table / table.sum(1, keepdims=True)
    own = results.year[results.numbers]
    held = np.unique(own)
    guess = np.stack([100 * np.bincount(results.predicted[own == year], minlength=size) / (own == year).sum() for year in held])
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes = figure.subplots()
    for kind in np.argsort(-np.ptp(table, 0))[:DRAWN]:
        (line,) = axes.plot(years, table[:, kind], linewidth=1.2, label=f"community {results.names[kind]}")
        axes.plot(held, guess[:, kind], linestyle="", marker="o", markersize=5, color=line.get_color())
    axes.axvline(held.min() - 0.5, color=theme.ink, linewidth=0.8, linestyle=":")
    axes.set(xlabel="year", ylabel="papers, per cent")
    axes.legend(loc="upper left", fontsize=8)
    panel_title(axes, "Shares of communities", "lines: true; dots: predicted for unseen years", theme)
    return figure


def table(results: Papers) -> Table:
    return classes.table(results, "papers")
