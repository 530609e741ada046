"""The metric of an evaluation: the detections of all ranks, scored in a process of its own."""

import multiprocessing
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcai.data.workers import spawn_environment
from hpcai.dist.collectives import broadcast_from_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.json_file import check_fields, parse_object, read_regular
from hpcai.models.retinanet.coco import STATS, begin, import_scores, score_images
from hpcai.models.retinanet.objective import detections

_MAX_CLASSES = 20  # whose average precisions are metrics
_UNKNOWN = 1 << 32


class Scoring(AbstractContextManager["Scoring"]):
    """A metric for ``train.fit``: COCO's scores (``STATS``) of the detections in the images of the file ``truth``, and ap50_<class>
    of up to 20 classes.

    Each image has a row of a table, which ranks and batches fill by a sum, exactly: 24 bytes per detection. The first rank passes
    the table to a process, bound to ``cores`` if there are any (``async_coco`` of MLPerf); with train.evaluate=background, or
    mesh.evaluate, training goes on meanwhile. An image that a loader reads twice, in place of one that it cannot read, has no
    detections. Raises MissingExtraError without faster-coco-eval, and DataError for a ``truth`` that is no file of COCO.
    """

    def __init__(self, truth: Path, cores: Collection[int] = (), mesh: Mesh | None = None) -> None:
        axis = Axis("alone") if mesh is None else mesh.peers
        self.truth, (ids, categories) = truth, broadcast_from_first(partial(_read_truth, truth), axis)
        self.ids, self.categories = torch.tensor(ids), categories
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=begin, initargs=(sorted(cores),))
        if mesh is None or mesh["replicate"].rank == 0:
            with spawn_environment():
                self._pool.submit(int)  # starts the process, which imports its packages during the first steps

    def __call__(self, model: Any, batch: Any) -> dict[str, Any]:
        values = detections(model, batch)
        bits, self.ids = values["detections"].float().view(torch.int64).flatten(1), self.ids.to(batch.id.device)
        row = torch.searchsorted(self.ids, batch.id).clamp(max=len(self.ids) - 1)
        count = torch.where(self.ids[row] == batch.id, 1, _UNKNOWN)
        table = bits.new_zeros(len(self.ids), 1 + bits.shape[1])
        table[row] = torch.cat((count[:, None], bits), 1)
        return {"scores of COCO": (table, self._score)}

    def _score(self, table: Tensor) -> dict[str, float]:
        count, detected = table[:, 0], table[:, 1:].contiguous().view(torch.float32).unflatten(1, (-1, 6))
        if (count >= _UNKNOWN).any():
            raise DataError(f"{self.truth}: lacks an image of the validation split; write both again")
        detected[count != 1, :, 5] = -1.0
        arrays = np.array([*self.categories]), self.ids.cpu().numpy(), detected.numpy()
        scores = self._pool.submit(score_images, self.truth, *arrays).result()
        classes = self.categories if len(self.categories) <= _MAX_CLASSES else ()
        by_class = {f"ap50_{self.categories[key].replace(' ', '_')}": scores["per_category"][key]["ap50"] for key in classes}
        return {name: scores[name] for name in STATS} | by_class

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _read_truth(path: Path) -> tuple[list[int], dict[int, str]]:
    """Return the numbers of images, and names by number of categories, sorted, of annotations of COCO."""
    import_scores()
    try:
        content = parse_object(read_regular(path, None), str(path), "annotations of COCO", DataError)
    except OSError as problem:
        text = f"{path}: cannot be read ({problem.strerror}); data_prep.coco and data_prep.survey write it beside the images"
        raise DataError(text) from problem
    with check_fields(path, "annotations of COCO", DataError):
        categories = sorted((int(each["id"]), str(each["name"])) for each in content["categories"])
        return sorted(int(image["id"]) for image in content["images"]), dict(categories)
