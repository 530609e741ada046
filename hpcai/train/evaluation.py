"""Metrics and predictions over all samples of a loader, on the processes that train."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.dist.collect import gather_objects, gather_rows
from hpcai.train.measure import Sums, Value
from hpcai.train.step import Step, samples_in

Metric = Callable[[nn.Module, Any], dict[str, Value]]


@torch.no_grad()
def evaluate(step: Step, metric: Metric, batches: Any) -> dict[str, float]:
    """Each metric over every sample exactly once, whatever the number of processes and however uneven their parts."""
    sums = Sums()
    for batch in _batches(step, batches):
        with step.autocast():
            values = metric(step.model, batch)
        sums.add(values, samples_in(batch))
    return sums.reduce(step.mesh["replicate"], step.mesh.device, uneven=True)


@torch.no_grad()
def predict(step: Step, function: Callable[[nn.Module, Any], dict[str, Tensor]], batches: Any) -> dict[str, Tensor]:
    """Rows that ``function(model, batch)`` gives for every sample, gathered from all copies, on the CPU of every process."""
    parts: dict[str, list[Tensor]] = {}
    for batch in _batches(step, batches):
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


def _batches(step: Step, batches: Any) -> Any:
    """The batches with the model in evaluation mode and its average in place, put back at the end."""
    step.model.eval()
    try:
        with step.average.applied():
            yield from batches.epoch(0) if hasattr(batches, "epoch") else batches
    finally:
        step.model.train()
