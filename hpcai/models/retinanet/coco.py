"""Scores of detections by the rules of COCO. Does not import torch, so that a process that scores starts at once."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.data.workers import die_with_parent, ignore_signals
from hpcai.errors import DataError
from hpcai.lazy import import_optional

STATS = "ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"


def import_scores() -> Any:
    """Import faster-coco-eval. Raises MissingExtraError without it."""
    return import_optional("faster_coco_eval", "scores of COCO need", "detection")


def evaluate(truth: str | Path | Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Return COCO's scores of detections, rows of image, x, y, width, height, score and category, by faster-coco-eval, with
    ``truth`` the annotations of COCO, or their file.   [n, 7]

    They are those of ``STATS``, of which ``ap`` is the mAP of MLPerf (target 0.34), and ``per_category``: {id: {ap, ap50}}.
    A score without any object is -1. Raises DataError for images that are not in ``truth``.
    """
    package = import_scores()
    reference = package.COCO(truth if isinstance(truth, Mapping) else str(truth))
    if unknown := set(rows[:, 0].astype(int)) - set(reference.getImgIds()):
        raise DataError(f"detections of image {min(unknown)}, which is not among the annotations; score those of the same images")
    run = package.COCOeval_faster(reference, reference.loadRes([
        {"image_id": int(r[0]), "category_id": int(r[6]), "bbox": r[1:5], "score": r[5]} for r in rows.tolist()
    ]), iouType="bbox")  # fmt: skip
    run.run()
    per_category = {}
    for category, values in zip(run.params.catIds, run.eval["precision"][:, :, :, 0, -1].transpose(2, 0, 1)):  # [K, IoU, recall]
        both = ("ap", values), ("ap50", values[0])
        per_category[int(category)] = {name: float(v[v > -1].mean()) if (v > -1).any() else -1.0 for name, v in both}
    return {**dict(zip(STATS, map(float, run.stats))), "per_category": per_category}


def score_images(truth: Path, categories: np.ndarray, ids: np.ndarray, detected: np.ndarray) -> dict[str, Any]:
    """Return ``evaluate`` for the detections of images.   categories [K] of the classes, ids [N], detected [N, D, 6] with class -1
    for padding (``objective.detections``)"""
    image, slot = np.nonzero(detected[..., 5] >= 0)
    objects = detected[image, slot].astype(np.float64)
    sides, category = objects[:, 2:4] - objects[:, :2], categories[objects[:, 5].astype(np.int64)]
    return evaluate(truth, np.column_stack((ids[image], objects[:, :2], sides, objects[:, 4], category)))


def begin(cores: Sequence[int]) -> None:
    """Prepare a process that scores."""
    die_with_parent()
    ignore_signals()  # of Ctrl-C and a scheduler, which the parent handles
    if cores:
        os.sched_setaffinity(0, cores)
    import_scores()
