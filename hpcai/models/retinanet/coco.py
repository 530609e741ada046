"""Annotations, results and scores in the formats of COCO. Does not import torch, so that processes that score start at once."""

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcai.data.workers import die_with_parent, ignore_signals, spawn_environment
from hpcai.errors import DataError
from hpcai.json_file import check_fields, parse_object, read_regular
from hpcai.lazy import import_optional

STATS = "ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"


class Annotations(NamedTuple):
    """The objects of a set of images."""

    images: list[dict[str, Any]]  # id, file_name, height, width
    categories: dict[int, str]  # name by number, in the order of the classes of a network
    boxes: list[np.ndarray]  # of each image, float32 [n, 4], x1 y1 x2 y2
    labels: list[np.ndarray]  # of each image, int64 [n], positions in ``categories``
    counts: Counter[str]  # of boxes: used, clipped, crowd, bad


def read_annotations(path: str | Path, bad: Literal["skip", "error"] = "skip") -> Annotations:
    """Read objects from a JSON file of COCO. A box that exceeds its image is clipped. One without any area in it (empty, reversed,
    outside) is skipped and counted, or is an error. Crowds (``iscrowd``) are omitted: they are for scores alone.

    Raises DataError for other content, such as the number of an image that is not listed, or a value that is not finite.
    """
    try:
        content = parse_object(read_regular(Path(path), None), str(path), "annotations of COCO", DataError)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); expected annotations of COCO") from problem
    with check_fields(path, "annotations of COCO", DataError):
        images = [{**image, "id": int(image["id"])} for image in content["images"]]
        categories = {int(c["id"]): str(c["name"]) for c in sorted(content["categories"], key=lambda c: int(c["id"]))}
        place, label = {image["id"]: i for i, image in enumerate(images)}, {key: i for i, key in enumerate(categories)}
        if len(place) < len(images) or len(label) < len(content["categories"]):
            raise DataError(f"{path}: several images or categories have the same id; expected different ones")
        objects_of, counts = [list[tuple[Any, ...]]() for _ in images], Counter(used=0, clipped=0, crowd=0, bad=0)
        for annotation in content["annotations"]:
            where = f"{path}: annotation {annotation['id']}"
            for key, known in (("image_id", place), ("category_id", label)):
                if annotation[key] not in known:
                    raise DataError(f"{where}: {key} is {annotation[key]}, expected one of the {len(known)} ids listed")
            if annotation.get("iscrowd", 0):
                counts["crowd"] += 1
                continue
            (x, y, w, h), image = map(float, annotation["bbox"]), images[place[annotation["image_id"]]]
            if not np.isfinite((x, y, w, h)).all():
                raise DataError(f"{where}: bbox is {annotation['bbox']}, expected finite numbers x, y, width, height")
            box = max(x, 0.0), max(y, 0.0), min(x + w, float(image["width"])), min(y + h, float(image["height"]))
            if np.float32(box[2]) <= np.float32(box[0]) or np.float32(box[3]) <= np.float32(box[1]):
                if bad == "error":
                    size = f"its image, {image['width']} x {image['height']}"
                    raise DataError(f"{where}: bbox {annotation['bbox']} has no area in {size}; remove it, or skip bad ones")
                counts["bad"] += 1
                continue
            counts.update(used=1, clipped=int(box != (x, y, x + w, y + h)))
            objects_of[place[annotation["image_id"]]].append((*box, label[annotation["category_id"]]))
    rows = [np.array(objects, np.float64).reshape(-1, 5) for objects in objects_of]
    boxes, labels = [r[:, :4].astype(np.float32) for r in rows], [r[:, 4].astype(np.int64) for r in rows]
    return Annotations(images, categories, boxes, labels, counts)


def results(ids: np.ndarray, detections: np.ndarray, categories: Sequence[int]) -> np.ndarray:
    """Return the detections of images as rows of image, x, y, width, height, score, category.

    Shape: ids [N], detections [N, D, 6] padded with class -1 (``objective.detections``) -> [n, 7]
    """
    image, slot = np.nonzero(detections[..., 5] >= 0)
    rows = detections[image, slot].astype(np.float64)
    category = np.asarray(categories, np.float64)[rows[:, 5].astype(np.int64)]
    return np.column_stack((np.asarray(ids)[image], rows[:, :2], rows[:, 2:4] - rows[:, :2], rows[:, 4], category))


def write_results(path: str | Path, rows: np.ndarray) -> None:
    """Write ``results`` as a JSON file of COCO."""
    names = ("image_id", "category_id", "bbox", "score")
    content = [dict(zip(names, (int(r[0]), int(r[6]), r[1:5], r[5]))) for r in rows.tolist()]
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def evaluate(truth: str | Path | Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Return COCO's scores of detections (``results``), by faster-coco-eval, with ``truth`` the annotations of COCO, or their file.

    They are those of ``STATS``, of which ``ap`` is the mAP of MLPerf (target 0.34), and ``per_category``: {id: {ap, ap50, recall50,
    precision50 at recall 0, 0.1 .. 1}}. A score without any object is -1. Raises DataError for images that are not in ``truth``.
    """
    package: Any = import_optional("faster_coco_eval", "scores of COCO need", "detection")
    reference = package.COCO(truth if isinstance(truth, Mapping) else str(truth))
    unknown = set(rows[:, 0].astype(int)) - set(reference.getImgIds())
    if unknown:
        raise DataError(f"detections of image {min(unknown)}, which is not among the annotations; score those of the same images")
    run = package.COCOeval_faster(reference, reference.loadRes([
        {"image_id": int(r[0]), "category_id": int(r[6]), "bbox": r[1:5], "score": r[5]} for r in rows.tolist()
    ]), iouType="bbox")  # fmt: skip
    run.run()
    precision, recall = run.eval["precision"][:, :, :, 0, -1], run.eval["recall"][:, :, 0, -1]  # [IoU, recall, K], [IoU, K]
    per_category = {}
    for k, category in enumerate(run.params.catIds):
        values, half = precision[:, :, k], precision[0, :, k]
        means = {name: float(v[v > -1].mean()) if (v > -1).any() else -1.0 for name, v in (("ap", values), ("ap50", half))}
        per_category[int(category)] = {**means, "recall50": float(recall[0, k]), "precision50": half[::10].tolist()}
    return {**dict(zip(STATS, map(float, run.stats))), "per_category": per_category}


class BackgroundScoring:
    """Scores in processes of their own while training continues (``async_coco`` of MLPerf). They are spawned and bound to ``cores``
    if there are any. The first rank has one, and broadcasts what it polls."""

    def __init__(self, truth: str | Path, cores: Collection[int] = (), processes: int = 1) -> None:
        self.truth, context = truth, multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(sorted(cores),))
        self._pending: list[tuple[Any, Future[dict[str, Any]]]] = []

    def submit(self, tag: Any, rows: np.ndarray) -> None:
        """Begin to score the detections ``rows``; ``tag``, such as the step, is returned with the scores."""
        with spawn_environment():
            self._pending.append((tag, self._pool.submit(evaluate, self.truth, rows)))

    def poll(self, wait: bool = False) -> list[tuple[Any, dict[str, Any]]]:
        """Return tag and scores of those that are done, in the order of ``submit``, without waiting; with ``wait``, all. Raises the
        error of one that failed when those before it have been returned."""
        done = list[tuple[Any, dict[str, Any]]]()
        while self._pending and (wait or self._pending[0][1].done()) and not (done and self._pending[0][1].exception()):
            tag, future = self._pending.pop(0)
            done.append((tag, future.result()))
        return done

    def close(self) -> None:
        """End the processes; scores that were not polled are lost."""
        self._pool.shutdown(cancel_futures=True)


def _begin(cores: Sequence[int]) -> None:
    die_with_parent()
    ignore_signals()  # of Ctrl-C and a scheduler, which the parent handles
    if cores:
        os.sched_setaffinity(0, cores)
