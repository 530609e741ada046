"""The figure of a run: validation images with their predicted classes, a reliability diagram, and a confusion matrix.

N images, K classes
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, escape_mathtext, hide_axes, panel_title
from hpcai.errors import DataError
from hpcai.models.resnet import calibration_error, fit_temperature

FILE = "classes.npz"
TITLE = "Predicted and true classes"
HIGHER = ("accuracy", "top5")
COLUMNS, DRAWN = 6, 18
MAX_CLASSES = 20                                         # of a confusion matrix
BINS = 10


@dataclass
class Classes:
    """Images of the validation split, their true classes, and probabilities of all classes as predicted and calibrated."""

    names: list[str]
    images: np.ndarray                                   # [N, H, W, 3]
    true: np.ndarray                                     # [N]
    raw: np.ndarray                                      # [N, K]
    calibrated: np.ndarray                               # [N, K] each half with the temperature of the other
    temperature: float

    @property
    def predicted(self) -> np.ndarray:
        return self.raw.argmax(1)

    def accuracy(self) -> float:
        return float((self.predicted == self.true).mean())

    def errors(self) -> list[float]:
        """Return the expected calibration error, as predicted and calibrated."""
        return [calibration_error(torch.from_numpy(p), torch.from_numpy(self.true)) for p in (self.raw, self.calibrated)]


def read(path: Path) -> Classes:
    content = arrays(path, {"classes": "text K", "image": "whole N H W C", "true": "whole N", "logits": "real N K"})
    logits, true = torch.from_numpy(content["logits"].astype(float)), torch.from_numpy(content["true"].astype(np.int64))
    if len(true) < 2 or not torch.isfinite(logits).all():
        raise DataError(f"{len(true)} images, expected two or more with finite logits")
    scaled = logits.clone()
    for half, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        scaled[half] /= fit_temperature(logits[other], true[other])
    raw, calibrated, names = logits.softmax(1).numpy(), scaled.softmax(1).numpy(), content["classes"].tolist()
    return Classes(names, content["image"].astype(np.uint8), true.numpy(), raw, calibrated, fit_temperature(logits, true))


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
    figures = [_draw_images(results, theme), _draw_reliability(results, theme)]
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


def _draw_reliability(results: Classes, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes, before_after = figure.subplots(), results.errors()
    axes.plot([0, 1], [0, 1], color=theme.ink, linewidth=1, label="perfect")
    lines = (("predicted", theme.second), (f"with temperature {results.temperature:.2f}", theme.main))
    for p, error, (name, color) in zip((results.raw, results.calibrated), before_after, lines):
        confidence, correct = p.max(1), p.argmax(1) == results.true
        bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
        filled = [k for k in range(BINS) if (bins == k).any()]
        x, y = ([values[bins == k].mean() for k in filled] for values in (confidence, correct))
        axes.plot(x, y, marker="o", markersize=4, color=color, label=f"{name}: error {100 * error:.1f} points")
    axes.set(xlabel="probability of the predicted class", ylabel="fraction of correct ones", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(loc="upper left", fontsize=8)
    panel_title(axes, "Calibration", f"{len(results.true):,} images", theme)
    return figure


def _draw_confusion(results: Classes, theme: Theme) -> Figure:
    table = _confusion(results)
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


def _confusion(results: Classes) -> np.ndarray:
    size = len(results.names)
    return np.bincount(results.true * size + results.predicted, minlength=size**2).reshape(size, size)


def table(results: Classes) -> Table:
    counts = _confusion(results)
    right, true, predicted = np.diagonal(counts), counts.sum(1), counts.sum(0)
    order = np.argsort(right / np.maximum(true, 1), kind="stable")[:MAX_CLASSES]
    rows = []
    for k in order:
        recall, precision = (f"{right[k] / count:.3f}" if count else "-" for count in (true[k], predicted[k]))
        rows.append((results.names[k], f"{true[k]:,}", recall, precision))
    return Table("Classes", "Those with the lowest recall first.", ("", "images", "recall", "precision"), rows)
