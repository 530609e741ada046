"""The figure of a run: validation images with true and found boxes, precision by recall of each class, and recall by size.

N images, K classes, n true and m found objects. A true object is found by a detection of its class that overlaps by half of their
union. The best detections choose first, each the object that it overlaps most (COCO).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import PALETTE, WIDTH, Theme, escape_mathtext, hide_axes, panel_title
from hpcai.errors import DataError

FILE = "objects.npz"
TITLE = "Found and true objects"
HIGHER = ("ap", "ar")
DRAWN, MAX_CLASSES, SIZES = 4, 20, 6
RECALLS = np.linspace(0, 1, 101)


@dataclass
class Objects:
    """Images of the validation split, true objects (number of the image, x1 y1 x2 y2, class) and detected ones (number, x1 y1 x2
    y2, score, class)."""

    names: list[str]
    images: np.ndarray                                   # [N, H, W, 3]
    ids: np.ndarray                                      # [N]
    true: np.ndarray                                     # [n, 6]
    detected: np.ndarray                                 # [m, 7] by score

    @cached_property
    def match(self) -> np.ndarray:
        """The true object of each detected one, or -1.   [m]"""
        result, free = np.full(len(self.detected), -1), np.ones(len(self.true), bool)
        for number, row in enumerate(self.detected):
            same = np.flatnonzero((self.true[:, 0] == row[0]) & (self.true[:, 5] == row[6]) & free)
            overlap = iou(row[1:5], self.true[same, 1:5])
            if len(same) and overlap.max() >= 0.5:
                result[number] = same[overlap.argmax()]
                free[result[number]] = False
        return result

    @cached_property
    def curves(self) -> dict[int, np.ndarray]:
        """The best precision at each of ``RECALLS`` or above, by class that has objects; its mean is the average precision."""
        curves = {}
        for k in np.unique(self.true[:, 5]).astype(int):
            hits = np.cumsum(self.match[self.detected[:, 6] == k] >= 0)
            best = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
            curves[int(k)] = np.append(best, 0.0)[np.searchsorted(hits / (self.true[:, 5] == k).sum(), RECALLS)]
        return curves

    @cached_property
    def chosen(self) -> int:
        """The number of detections, those with the highest scores, at which the F1 score is highest."""
        f1 = np.cumsum(self.match >= 0) / (np.arange(1, len(self.match) + 1) + len(self.true))
        return int(f1.argmax()) + 1 if f1.any() else 0


def iou(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the intersection over union of a box with others.   [4], [n, 4] -> [n]"""
    both = np.clip(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]), 0, None).prod(1)
    return both / np.maximum((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - both, 1e-9)


def read(path: Path) -> Objects:
    content = arrays(path, {"classes": "text K", "image": "whole N H W C", "id": "whole N"}, ("true", "detected"))
    true, detected = (np.asarray(content.get(name, ()), float) for name in ("true", "detected"))
    if true.shape[1:] != (6,) or not len(true) or detected.shape[1:] != (7,):
        raise DataError(f"true is {true.shape}, detected {detected.shape}; expected [n, 6] with an object, and [m, 7]")
    detected = detected[np.argsort(-detected[:, 5], kind="stable")]
    return Objects(content["classes"].tolist(), content["image"].astype(np.uint8), content["id"], true, detected)


def caption(results: Objects) -> str:
    return (f"{len(results.images):,} validation images with {len(results.true):,} objects. One is found if a detection of its"
            " class overlaps by half of their union. True boxes are white; others are drawn down to the score of the highest F1.")


def finding(results: Objects) -> Finding:
    number = format_measured(float(np.mean([curve.mean() for curve in results.curves.values()])))
    right, count = int((results.match[: results.chosen] >= 0).sum()), results.chosen
    text = f"{format_measured(100 * right / len(results.true))} % of the objects in unseen images are found"
    text += f", by detections of which {format_measured(100 * right / count)} % are right" if count else ""
    text += f"; the average precision is {number}, a mean over {len(results.curves)} classes."
    return Finding(text, number, "average precision; higher is better")


def draw(results: Objects, theme: Theme) -> list[Figure]:
    return [_draw_images(results, theme), _draw_precision(results, theme), _draw_recall(results, theme)]


def _draw_images(results: Objects, theme: Theme) -> Figure:
    shown, chosen = min(DRAWN, len(results.images)), results.detected[: results.chosen]
    figure = Figure(figsize=(WIDTH, -(-shown // 2) * (WIDTH / 2 + 0.2) + 0.7))
    for axes, number, image in zip(figure.subplots(-(-shown // 2), 2, squeeze=False).flat, results.ids[:shown], results.images):
        axes.imshow(image)
        true, detected = (rows[rows[:, 0] == number] for rows in (results.true, chosen))
        for box, color, width in [*((row, "white", 1.3) for row in true), *((row, _color(row[6]), 0.7) for row in detected)]:
            axes.plot(box[[1, 3, 3, 1, 1]], box[[2, 2, 4, 4, 2]], color=color, linewidth=width)
        axes.set(xlim=(-0.5, image.shape[1] - 0.5), ylim=(image.shape[0] - 0.5, -0.5))
        axes.set_title(f"{len(true)} true, {len(detected)} found", fontsize=8)
    for axes in figure.axes:
        hide_axes(axes)
    handles = [axes.plot([], [], color=_color(k), label=escape_mathtext(name))[0] for k, name in enumerate(results.names[:6])]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7)
    return figure


def _color(k: float) -> str:
    return PALETTE[int(k) % len(PALETTE)]


def _draw_precision(results: Objects, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes, classes = figure.subplots(), sorted(results.curves, key=lambda k: -results.curves[k].mean())
    for k in classes[:MAX_CLASSES]:
        label = f"{escape_mathtext(results.names[k])}: {results.curves[k].mean():.2f}"
        axes.plot(RECALLS, results.curves[k], color=_color(k), label=label)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(loc="best", fontsize=8)
    panel_title(axes, "Precision by recall", "overlap of 0.5, with average precisions", theme)
    return figure


def _draw_recall(results: Objects, theme: Theme) -> Figure:
    figure, size = Figure(figsize=(WIDTH, WIDTH * 0.6)), np.sqrt((results.true[:, 3:5] - results.true[:, 1:3]).prod(1))
    axes, groups = figure.subplots(), np.array_split(np.argsort(size, kind="stable"), min(SIZES, len(size)))
    for count, color, name in ((len(results.match), theme.faint, "all detections"), (results.chosen, theme.main, "those drawn")):
        is_found = np.isin(np.arange(len(size)), results.match[:count])
        x, y = ([float(values[group].mean()) for group in groups] for values in (size, is_found))
        axes.plot(x, y, marker="o", markersize=4, color=color, label=name)
    axes.set(xlabel="square root of the area of the box in pixels", ylabel="recall", xscale="log", ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize=8)
    panel_title(axes, "Recall by size", f"{len(size):,} objects in groups of equal numbers", theme)
    return figure


def table(results: Objects) -> Table:
    rows, (kept, match) = [], (values[: results.chosen] for values in (results.detected[:, 6], results.match))
    for k in sorted(results.curves, key=lambda k: results.curves[k].mean())[:MAX_CLASSES]:
        right, true, detected = (int(part.sum()) for part in ((kept == k) & (match >= 0), results.true[:, 5] == k, kept == k))
        shares = (f"{right / count:.3f}" if count else "-" for count in (true, detected))
        rows.append((results.names[k], f"{true:,}", f"{results.curves[k].mean():.3f}", *shares))
    head = "", "objects", "average precision", "recall", "precision"
    return Table("Classes", "Those with the lowest average precision first.", head, rows)
