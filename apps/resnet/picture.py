"""The figure of a run: validation images with their predicted classes, a reliability diagram, and a confusion matrix.

N images, K classes
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report import classes
from hpcai.cli.report.classes import MAX_CLASSES, Classified, calibrate, draw_reliability
from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, escape_mathtext, hide_axes, panel_title

FILE = "classes.npz"
TITLE = "Predicted and true classes"
HIGHER = ("accuracy", "top5")
COLUMNS, DRAWN = 6, 18


@dataclass
class Classes(Classified):
    images: np.ndarray                                   # [N, H, W, 3]


def read(path: Path) -> Classes:
    content = arrays(path, {"classes": "text K", "image": "whole N H W C", "true": "whole N", "logits": "real N K"})
    fields = calibrate(content["logits"], content["true"], "images")
    return Classes(content["classes"].tolist(), **fields, images=content["image"].astype(np.uint8))


def caption(results: Classes) -> str:
    return (f"{len(results.true):,} validation images. A probability of 80 % should be right 80 times in 100. Calibration divides"
            " the logits by a temperature; each half of the images has the one that was fitted to the other half.")


def finding(results: Classes) -> Finding:
    most = float(np.bincount(results.true).max() / len(results.true))
    number, (before, after) = f"{format_measured(100 * results.accuracy())} %", results.errors()
    text = f"{number} of unseen images are classified correctly, {format_measured(100 * most)} % are of the most frequent class; "
    text += f"the probability of a prediction is off by {format_measured(100 * before)} points, "
    text += f"by {format_measured(100 * after)} with a temperature."
    return Finding(text, number, "correctly classified images; higher is better")


def draw(results: Classes, theme: Theme) -> list[Figure]:
    figures = [_draw_images(results, theme), draw_reliability(results, "images", theme)]
    return [*figures, _draw_confusion(results, theme)] if len(results.names) <= MAX_CLASSES else figures


def _draw_images(results: Classes, theme: Theme) -> Figure:
    count = min(DRAWN, len(results.true))
    rows = -(-count // COLUMNS)
    figure = Figure(figsize=(WIDTH, rows * (WIDTH / COLUMNS + 0.45)))
    for n, axes in enumerate(figure.subplots(rows, COLUMNS, squeeze=False).flat):
        hide_axes(axes)
        if n >= count:
            axes.set_visible(False)
            continue
        guess, true = results.predicted[n], results.true[n]
        axes.imshow(results.images[n])
        title = f"{results.names[guess]}\n{100 * results.raw[n, guess]:.0f} %"
        title += "" if guess == true else f", not\n{results.names[true]}"
        axes.set_title(escape_mathtext(title), fontsize=7, color=theme.ink if guess == true else theme.second)
    return figure


def _draw_confusion(results: Classes, theme: Theme) -> Figure:
    table = results.confusion()
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    figure = Figure(figsize=(WIDTH, WIDTH))
    axes = figure.subplots()
    axes.imshow(shares, cmap=theme.counts, vmin=0, vmax=1)
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if table[i, j]:
                color = "white" if share > 0.5 else theme.ink
                axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color)
    names = [escape_mathtext(name) for name in results.names]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="true")
    axes.grid(False)
    panel_title(axes, "Confusion", "per cent of the true class", theme)
    return figure


def table(results: Classes) -> Table:
    return classes.table(results, "images")
