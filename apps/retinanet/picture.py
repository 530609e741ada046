"""The figure of a run: validation images with true and found boxes, precision by recall of each class, and recall by size.

N images, K classes, n true and m found objects. An object is found if a detection of its class overlaps by half of their union; each
detection takes the object that it overlaps most, the best detections first, as by the rules of COCO.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import MARKS, PALETTE, WIDTH, Theme, escape_mathtext, hide_axes, panel_title
from hpcai.errors import DataError

FILE = "objects.npz"
TITLE = "Found and true objects"
HIGHER = ("ap", "ar")
COLUMNS, DRAWN, MAX_CLASSES, SIZES = 2, 4, 20, 6
RECALLS = np.linspace(0, 1, 101)


@dataclass
class Objects:
    """Images of the validation split, true objects (number of the image, x1 y1 x2 y2, class) and found ones (number, x1 y1 x2 y2,
    score, class)."""

    names: list[str]
    images: np.ndarray                                   # [N, H, W, 3]
    ids: np.ndarray                                      # [N]
    true: np.ndarray                                     # [n, 6]
    found: np.ndarray                                    # [m, 7] by score

    @cached_property
    def match(self) -> np.ndarray:
        """The true object of each found one, or -1.   [m]"""
        result, taken = np.full(len(self.found), -1), np.zeros(len(self.true), bool)
        for number, row in enumerate(self.found):
            same = np.flatnonzero((self.true[:, 0] == row[0]) & (self.true[:, 5] == row[6]) & ~taken)
            overlap = iou(row[1:5], self.true[same, 1:5])
            if len(same) and overlap.max() >= 0.5:
                result[number] = same[overlap.argmax()]
                taken[result[number]] = True
        return result

    def curve(self, k: int) -> np.ndarray:
        """Return the best precision of a class at each of ``RECALLS`` or a higher recall; its mean is the average precision."""
        right, count = self.match[self.found[:, 6] == k] >= 0, (self.true[:, 5] == k).sum()
        hits = np.cumsum(right)
        best = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
        return np.append(best, 0.0)[np.searchsorted(hits / max(count, 1), RECALLS)]

    @cached_property
    def average_precisions(self) -> dict[int, float]:
        """Average precision of the classes that have objects."""
        return {k: float(self.curve(k).mean()) for k in range(len(self.names)) if (self.true[:, 5] == k).any()}

    @cached_property
    def chosen(self) -> int:
        """The number of found objects, those with the highest scores, at which the F1 score is highest."""
        hits, places = np.cumsum(self.match >= 0), np.arange(1, len(self.match) + 1)
        return int((2 * hits / (places + len(self.true))).argmax()) + 1 if len(hits) else 0


def iou(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the intersection over union of a box with others.   [4], [n, 4] -> [n]"""
    sides = np.clip(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]), 0, None).prod(1)
    return sides / np.maximum((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - sides, 1e-9)


def read(path: Path) -> Objects:
    content = arrays(path, {"classes": "text K", "image": "whole N H W C", "id": "whole N"}, ("true", "found"))
    true, found = (np.asarray(content.get(name, ()), float) for name in ("true", "found"))
    if true.ndim != 2 or true.shape[1] != 6 or not len(true) or found.ndim != 2 or found.shape[1] != 7:
        raise DataError(f"true is {true.shape}, found {found.shape}; expected [n, 6] with an object, and [m, 7]")
    found = found[np.argsort(-found[:, 5], kind="stable")]
    return Objects(content["classes"].tolist(), content["image"].astype(np.uint8), content["id"], true, found)


def caption(results: Objects) -> str:
    return (f"{len(results.images):,} validation images with {len(results.true):,} objects. One is found if a detection of its class"
            " overlaps by half of their union. Boxes are drawn down to the score at which the F1 score of all objects is highest.")


def finding(results: Objects) -> Finding:
    mean, count = float(np.mean([*results.average_precisions.values()])), results.chosen
    right, number = int((results.match[:count] >= 0).sum()), format_measured(float(np.mean([*results.average_precisions.values()])))
    text = f"The average precision is {number}, a mean over {len(results.average_precisions)} classes at an overlap of 0.5"
    text += f": {format_measured(100 * right / count)} % of the detections are right that find " if right and mean else ": finds "
    return Finding(f"{text}{format_measured(100 * right / len(results.true))} % of the objects.", number, "average precision; higher is better")


def draw(results: Objects, theme: Theme) -> list[Figure]:
    figures = [_draw_images(results, theme), _draw_recall(results, theme)]
    return [figures[0], _draw_precision(results, theme), figures[1]] if len(results.names) <= MAX_CLASSES else figures


def _draw_images(results: Objects, theme: Theme) -> Figure:
    shown = min(DRAWN, len(results.images))
    rows = -(-shown // COLUMNS)
    figure = Figure(figsize=(WIDTH, rows * (WIDTH / COLUMNS + 0.2) + 0.4))
    for n, axes in enumerate(figure.subplots(rows, COLUMNS, squeeze=False).flat):
        hide_axes(axes)
        if n >= shown:
            axes.set_visible(False)
            continue
        axes.imshow(results.images[n])
        chosen = results.found[: results.chosen]
        own, boxes = results.true[results.true[:, 0] == results.ids[n]], chosen[chosen[:, 0] == results.ids[n]]
        for box in own:
            _draw_box(axes, box[1:5], "white", 2.2)
        for box in boxes:
            _draw_box(axes, box[1:5], _color(int(box[6])), 1.0)
        axes.set_title(f"{len(own)} true, {len(boxes)} found", fontsize=8)
    handles = [axes.plot([], [], color=_color(k), label=escape_mathtext(name))[0] for k, name in enumerate(results.names[:6])]
    handles += axes.plot([], [], color=theme.faint, linewidth=2.2, label="true (white)")
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=7)
    return figure


def _draw_box(axes: Any, box: np.ndarray, color: str, width: float) -> None:
    left, top, right, bottom = box
    axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=color, linewidth=width)


def _color(k: int) -> str:
    return PALETTE[k % len(PALETTE)]


def _draw_precision(results: Objects, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes = figure.subplots()
    for k, value in results.average_precisions.items():
        name = escape_mathtext(results.names[k])
        axes.plot(RECALLS, results.curve(k), color=_color(k), marker=MARKS[k % len(MARKS)], markevery=20, label=f"{name}: {value:.2f}")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(loc="lower left", fontsize=8)
    panel_title(axes, "Precision by recall", "overlap of 0.5; average precisions", theme)
    return figure


def _draw_recall(results: Objects, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.6))
    axes, size, is_found = figure.subplots(), np.sqrt((results.true[:, 3:5] - results.true[:, 1:3]).prod(1)), np.zeros(len(results.true))
    for count, color, name in ((None, theme.faint, "all detections"), (results.chosen, theme.main, "those drawn")):
        is_found[:] = False
        is_found[results.match[:count][results.match[:count] >= 0]] = True
        groups = np.array_split(np.argsort(size, kind="stable"), min(SIZES, len(size)))
        x, y = ([float(values[group].mean()) for group in groups] for values in (size, is_found))
        axes.plot(x, y, marker="o", markersize=4, color=color, label=name)
    axes.set(xlabel="square root of the area of the box in pixels", ylabel="recall", xscale="log", ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize=8)
    panel_title(axes, "Recall by size", f"{len(size):,} objects in groups of equal numbers", theme)
    return figure


def table(results: Objects) -> Table:
    order = sorted(results.average_precisions, key=results.average_precisions.__getitem__)[:MAX_CLASSES]
    chosen, kept = results.match[: results.chosen], results.found[: results.chosen, 6]
    rows = []
    for k in order:
        right, true, found = int((chosen[kept == k] >= 0).sum()), int((results.true[:, 5] == k).sum()), int((kept == k).sum())
        recall, precision = (f"{right / count:.3f}" if count else "-" for count in (true, found))
        rows.append((results.names[k], f"{true:,}", f"{results.average_precisions[k]:.3f}", recall, precision))
    return Table("Classes", "Those with the lowest average precision first.", ("", "objects", "average precision", "recall", "precision"), rows)
