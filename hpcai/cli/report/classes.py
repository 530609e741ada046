"""Classified samples in a picture: calibrated probabilities, a reliability diagram, a table.   N samples, K classes"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from hpcai.cli.report.picture import Table
from hpcai.cli.report.theme import WIDTH, Theme, panel_title
from hpcai.errors import DataError
from hpcai.nn.calibration import calibration_error, fit_temperature

MAX_CLASSES = 20                                         # of a matrix, and of the table
BINS, LEAST = 10, 10                                     # bins of the diagram, and samples of one that is drawn


@dataclass
class Classified:
    """True classes, and probabilities of all classes as predicted and calibrated."""

    names: list[str]
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

    def confusion(self) -> np.ndarray:
        """Return the number of samples of each true and each predicted class.   [K, K]"""
        size = len(self.names)
        return np.bincount(self.true * size + self.predicted, minlength=size**2).reshape(size, size)


def calibrate(logits: np.ndarray, true: np.ndarray, unit: str) -> dict[str, Any]:
    """Return the fields of ``Classified`` but for the names. Raises DataError for less than two samples, or NaN.
    [N, K], [N]"""
    x, labels = torch.from_numpy(logits.astype(float)), torch.from_numpy(true.astype(np.int64))
    if len(labels) < 2 or not torch.isfinite(x).all():
        raise DataError(f"{len(labels)} {unit}, expected two or more with finite logits")
    scaled = x.clone()
    for half, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        scaled[half] /= fit_temperature(x[other], labels[other])
    probabilities = {"raw": x.softmax(1).numpy(), "calibrated": scaled.softmax(1).numpy()}
    return {"true": labels.numpy(), **probabilities, "temperature": fit_temperature(x, labels)}


def draw_reliability(results: Classified, unit: str, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=theme.ink, linewidth=1, label="perfect")
    lines = (("predicted", theme.second), (f"with temperature {results.temperature:.2f}", theme.main))
    for p, error, (name, color) in zip((results.raw, results.calibrated), results.errors(), lines):
        confidence, correct = p.max(1), p.argmax(1) == results.true
        bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
        filled = [k for k, count in enumerate(np.bincount(bins)) if count >= min(LEAST, len(bins) // BINS)]
        x, y = ([values[bins == k].mean() for k in filled if (bins == k).any()] for values in (confidence, correct))
        axes.plot(x, y, marker="o", markersize=4, color=color, label=f"{name}: error {100 * error:.1f} points")
    axes.set(xlabel="probability of the predicted class", ylabel="fraction of correct ones", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(loc="upper left", fontsize=8)
    panel_title(axes, "Calibration", f"{len(results.true):,} {unit}", theme)
    return figure


def table(results: Classified, unit: str) -> Table:
    counts = results.confusion()
    right, true, predicted = np.diagonal(counts), counts.sum(1), counts.sum(0)
    order = np.argsort(right / np.maximum(true, 1), kind="stable")[:MAX_CLASSES]
    rows = []
    for k in order:
        recall, precision = (f"{right[k] / count:.3f}" if count else "-" for count in (true[k], predicted[k]))
        rows.append((results.names[k], f"{true[k]:,}", recall, precision))
    return Table("Classes", "Those with the lowest recall first.", ("", unit, "recall", "precision"), rows)
