"""Metrics and predictions over all samples of a loader, with the averaged weights where there is an average."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.dist.collect import gather_objects, gather_rows
from hpcai.dist.mesh import Axis
from hpcai.train.measure import Sums, Value
from hpcai.train.step import Step, samples_in

Metric = Callable[[nn.Module, Any], dict[str, Value]]


@torch.no_grad()
def evaluate(step: Step, metric: Metric, batches: Any) -> dict[str, float]:
    """Each metric over every sample exactly once, whatever the number of processes and however uneven their parts."""
    with step.average.applied():
        return score(step, step.model, metric, batches, step.mesh["replicate"], step.mesh.device)


@torch.no_grad()
def score(step: Step, model: nn.Module, metric: Metric, batches: Any, axis: Axis, device: torch.device) -> dict[str, float]:
    """``evaluate`` of ``model`` as it is, its sums added over ``axis`` on ``device``."""
    sums = Sums()
    for batch in _batches(model, batches):
        with step.autocast():
            values = metric(model, batch)
        sums.add(values, samples_in(batch))
    return sums.reduce(axis, device, uneven=True)


@torch.no_grad()
def predict(step: Step, function: Callable[[nn.Module, Any], dict[str, Tensor]], batches: Any) -> dict[str, Tensor]:
    """Rows that ``function(model, batch)`` gives for every sample, gathered from all copies, on the CPU of every process."""
    parts: dict[str, list[Tensor]] = {}
    with step.average.applied():
        for batch in _batches(step.model, batches):
            with step.autocast():
                rows = function(step.model, batch)
            for name, value in rows.items():
                parts.setdefault(name, []).append(value)
    axis, device = step.mesh["replicate"], step.mesh.device
    shapes = next(kinds for kinds in gather_objects({n: (v[0].shape[1:], v[0].dtype) for n, v in parts.items()}, axis) if kinds)
    whole: dict[str, Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        own = torch.cat(parts[name]) if name in parts else torch.empty((0, *shape), dtype=dtype, device=device)
        whole[name] = gather_rows(own, axis).cpu()
    return whole


class Kept:
    """Batches that are read once and then stay on the device: for a validation set that fits."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._kept = batches, list[Any]()
        self._whole = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def epoch(self, epoch: int) -> Iterator[Any]:
        if self._whole:
            yield from self._kept
            return
        self._kept = []
        for batch in self._batches.epoch(epoch):
            self._kept.append(batch)
            yield batch
        self._whole = True


def _batches(model: nn.Module, batches: Any) -> Iterator[Any]:
    """The batches, with the model in evaluation mode meanwhile."""
    was = model.training
    model.eval()
    try:
        yield from batches.epoch(0) if hasattr(batches, "epoch") else batches
    finally:
        model.train(was)
