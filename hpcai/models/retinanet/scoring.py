"""The metric of an evaluation: the detections of all ranks, scored in a process of its own."""

import multiprocessing
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.data.workers import spawn_environment
from hpcai.errors import DataError
from hpcai.json_file import check_fields, parse_object, read_regular
from hpcai.models.retinanet.coco import STATS, begin, import_scores, score_images
from hpcai.models.retinanet.objective import detections

_MAX_CLASSES = 20  # whose average precisions are metrics
_UNKNOWN = 1 << 32


class Scoring(AbstractContextManager["Scoring"]):
    """A metric for ``train.fit``: COCO's scores (``STATS``) of the detections in the images of the file ``truth``, and ap50_<class>
    of up to 20 classes.

    Each image has a row of a table, which ranks and batches fill by a sum, exactly: 24 bytes per detection. The ``first`` rank of
    the replicas passes the table to a process, bound to ``cores`` if there are any (``async_coco`` of MLPerf). With train.evaluate=background, or
    mesh.evaluate, training goes on meanwhile. An image that a loader reads twice, in place of one that it cannot read, has no
    detections. Raises MissingExtraError without faster-coco-eval, and DataError for a ``truth`` that is no file of COCO.
    """

    def __init__(self, truth: Path, cores: Collection[int] = (), first: bool = True) -> None:
        import_scores()
        try:
            content = parse_object(read_regular(truth, None), str(truth), "annotations of COCO", DataError)
        except OSError as problem:
            text = f"{truth}: cannot be read ({problem.strerror}); data_prep.coco and data_prep.survey write it beside the images"
            raise DataError(text) from problem
        with check_fields(truth, "annotations of COCO", DataError):
            names = sorted((int(each["id"]), str(each["name"])) for each in content["categories"])
            ids = sorted(int(image["id"]) for image in content["images"])
        self.truth, self.ids = truth, torch.tensor(ids)
        self.categories, self.names = torch.tensor([key for key, _ in names]), [name for _, name in names]
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=begin, initargs=(sorted(cores),))
        if first:  # started by this thread, with which it ends; it imports its packages meanwhile
            with spawn_environment():
                self._pool.submit(int)

    def __call__(self, model: Any, batch: Any) -> dict[str, Any]:
        values = detections(model, batch)
        bits, known = values["detections"].float().view(torch.int64).flatten(1), self.ids.to(batch.id.device)
        row = torch.searchsorted(known, batch.id).clamp(max=len(known) - 1)
        count = torch.where(known[row] == batch.id, 1, _UNKNOWN)
        table = bits.new_zeros(len(known), 1 + bits.shape[1])
        table[row] = torch.cat((count[:, None], bits), 1)
        return {"scores of COCO": (table, self._score)}

    def _score(self, table: Tensor) -> dict[str, float]:
        count, found = table[:, 0], table[:, 1:].contiguous().view(torch.float32).unflatten(1, (-1, 6))
        if (count >= _UNKNOWN).any():
            raise DataError(f"{self.truth}: lacks an image of the validation split; write both again")
        found[count != 1, :, 5] = -1.0
        arrays = (values.numpy() for values in (self.categories, self.ids, found))
        scores = self._pool.submit(score_images, self.truth, *arrays).result()
        classes = zip(self.names, scores["per_category"].values()) if len(self.names) <= _MAX_CLASSES else ()
        return {name: scores[name] for name in STATS} | {f"ap50_{name.replace(' ', '_')}": own["ap50"] for name, own in classes}

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
