"""Metrics and predictions over all samples of a loader, with the averaged weights where there is an average.

A run is evaluated by the processes that train, which wait or go on meanwhile, or by processes set apart for it. In every case the
weights are those of the step at which ``start`` was called, and the metrics are the same.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.collectives import broadcast_object, gather_distinct, all_reduce_min, gather_rows_to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError
from hpcai.settings import AXES
from hpcai.train.aside import later
from hpcai.train.failure import PULSE, resting
from hpcai.train.measure import Measured, Total, Value
from hpcai.train.step import Step, Whole, samples_in

T = TypeVar("T")
Metric = Callable[[nn.Module, Any], Mapping[str, Value | Total]]
RowsOf = Callable[[nn.Module, Any], dict[str, Tensor]]
Position = dict[str, Any]
Found = tuple[dict[str, float], float]  # metrics, and the seconds that it took to find them
_WAITING = 2  # at most so many evaluations are under way; the next one waits, for each holds a copy of the weights


@torch.no_grad()
def evaluate(step: Step, metric: Metric, batches: Any) -> dict[str, float]:
    """Each metric over every sample exactly once, whatever the number of processes and however uneven their parts."""
    with step.average.applied():
        return score(step, step.act, metric, batches, step.mesh["replicate"], step.mesh.device)


@torch.no_grad()
def score(step: Step, act: Any, metric: Metric, batches: Any, axis: Axis, device: torch.device) -> dict[str, float]:
    """Each metric of the model of ``act`` as it is, with sums added over ``axis`` on ``device``."""
    measured = Measured()
    for batch in _batches(act.model, batches):
        if (values := act.forward(metric, batch, step.autocast)) is not None:
            measured.add(values, samples_in(batch))
    return _told(measured.reduce(axis, device, uneven=True), step)


def _told(found: T, step: Step) -> T:
    """What the stage of a pipeline found that alone has the outputs of the model."""
    return broadcast_object(found, step.mesh["pipeline"], step.act.source)


@torch.no_grad()
def predict(step: Step, function: RowsOf, batches: Any) -> dict[str, Tensor]:
    """Rows that ``function(model, batch)`` gives for every sample, from all copies, on the CPU of the first process; nothing on all
    others, which keep no more than what they have made until it is fetched."""
    parts: dict[str, list[Tensor]] = {}
    with step.average.applied():
        for batch in _batches(step.model, batches):
            for name, value in (step.act.forward(function, batch, step.autocast) or {}).items():
                parts.setdefault(name, []).append(value.cpu())
    mesh, rows = step.mesh, dict[str, Tensor]()
    if any(mesh[name].rank for name in AXES if name not in ("replicate", "pipeline", "evaluate")):
        return rows  # another process has the same
    copies = mesh.flatten("replicate", "pipeline")
    own = {name: torch.cat(values) for name, values in parts.items()}
    kinds = gather_distinct({name: (value.shape[1:], value.dtype) for name, value in own.items()} or None, copies)
    for name, (shape, dtype) in max(kinds.values(), key=len, default={}).items():
        rows[name] = gather_rows_to_first(own.get(name, torch.empty((0, *shape), dtype=dtype)), copies)
    return rows if mesh.rank == 0 else {}


class Kept:
    """Batches that are read once and then stay on the device, for a validation set that fits there."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._kept = batches, list[Any]()
        self.samples, self._whole = batches.samples, False

    def epoch(self, epoch: int) -> Iterator[Any]:
        if self._whole:
            yield from self._kept
            return
        self._kept = []
        for batch in self._batches.epoch(epoch):
            self._kept.append(batch)
            yield batch
        self._whole = True

    def news(self) -> list[str]:
        return list(self._batches.news())


def _batches(model: nn.Module, batches: Any) -> Iterator[Any]:
    """The batches, with the model in evaluation mode meanwhile."""
    was = model.training
    model.eval()
    try:
        for batch in batches.epoch(0) if hasattr(batches, "epoch") else batches:
            yield batch
            PULSE.beats += 1
    finally:
        model.train(was)


# ---- when, and by which processes


@dataclass
class Scored:
    """Metrics of the weights at ``position``, and the seconds that it took to find them."""

    position: Position
    values: dict[str, float]
    seconds: float


class Here:
    """Evaluation by the processes that train, which wait for it."""

    def __init__(self, step: Step, metric: Metric, validation: Any) -> None:
        self.step, self.metric, self.validation = step, metric, validation
        self._done: list[Scored] = []

    @property
    def pending(self) -> bool:
        return bool(self._done)

    def start(self, position: Position) -> None:
        began = time.perf_counter()
        values = evaluate(self.step, self.metric, self.validation)
        self._done.append(Scored(position, values, time.perf_counter() - began))

    def results(self, wait: bool = False) -> list[Scored]:
        """The evaluations that all processes of the run know to be done; with ``wait``, all that were started."""
        done, self._done = self._done, []
        return done

    def close(self, reason: str) -> None:
        """No evaluation follows."""


class Beside(Here):
    """Evaluation of a copy of the weights in a thread, while training goes on. Subclasses say which processes do it."""

    def __init__(self, step: Step, metric: Metric, validation: Any) -> None:
        super().__init__(step, metric, validation)
        self._stream = torch.cuda.Stream() if step.mesh.device.type == "cuda" else None
        self._under_way: list[tuple[Position, Future[Found]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._under_way or self._done)

    def start(self, position: Position) -> None:
        if len(self._under_way) >= _WAITING:
            self._done += self._take(1)
        weights = self.step.snapshot()
        ready: Any = torch.cuda.current_stream().record_event() if self._stream else None

        def act() -> Found:
            with torch.cuda.stream(self._stream):  # None: no stream
                if self._stream is not None:
                    self._stream.wait_event(ready)
                return self._scored(weights)

        before = self._under_way[-1][1] if self._under_way else None
        self._under_way.append((position, later(act, "evaluation", before)))

    def _scored(self, weights: dict[str, Tensor]) -> Found:
        """The metrics of ``weights``."""
        raise NotImplementedError

    def _agreed(self, count: int) -> int:
        """How many evaluations are taken, where ``count`` are done on this process: the same on all of them."""
        raise NotImplementedError

    def results(self, wait: bool = False) -> list[Scored]:
        done, self._done = self._done, []
        count = len(self._under_way)
        if not wait and count:
            count = self._agreed(sum(future.done() for _, future in self._under_way))
        return done + self._take(count)

    def _take(self, count: int) -> list[Scored]:
        taken, self._under_way = self._under_way[:count], self._under_way[count:]
        return [Scored(position, *future.result()) for position, future in taken]


class Background(Beside):
    """Evaluation by the processes that train, with a copy of the model."""

    def __init__(self, step: Step, metric: Metric, validation: Any) -> None:
        super().__init__(step, metric, validation)
        if step.cfg.shard == "weights" and step.mesh["replicate"].size > 1:
            raise ConfigError(
                "train.evaluate is background, but step.shard is weights, so that no process has a whole model; "
                "set mesh.evaluate, step.shard=optimizer or train.evaluate=wait"
            )
        if step.mesh["pipeline"].size > 1:
            raise ConfigError("train.evaluate is background, but a pipeline has one schedule: set mesh.evaluate, or wait")
        self.model = step.mesh.background_copy(step.model).requires_grad_(False)
        self.axis, self.everyone = step.mesh.background_axis("replicate"), step.mesh.background_axis("peers")

    @torch.no_grad()
    def _scored(self, weights: dict[str, Tensor]) -> Found:
        began = time.perf_counter()
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        values = score(self.step, Whole(self.model), self.metric, self.validation, self.axis, torch.device("cpu"))
        return values, time.perf_counter() - began

    def _agreed(self, count: int) -> int:
        return int(all_reduce_min(torch.tensor(count), self.everyone).item())


class Elsewhere(Beside):
    """Evaluation by processes set apart for it, which get the weights from the first copy of the model; see ``serve``."""

    def _scored(self, weights: dict[str, Tensor]) -> Found:
        link = self.step.mesh.link
        answer: Found = ({}, 0.0)
        if link.size > 1:  # a process of another copy hears from the first copy's in _take
            packed = torch.cat([t.cpu().contiguous().flatten().view(torch.uint8) for t in weights.values()])
            broadcast_object({"weights": [tensor.dtype for tensor in weights.values()]}, link)
            torch_dist.broadcast(packed, group=link.group, group_src=0)
            answer = broadcast_object(answer, link, source=1)
        return answer

    def _agreed(self, count: int) -> int:
        return broadcast_object(count, self.step.mesh.peers)

    def _take(self, count: int) -> list[Scored]:
        taken, self._under_way = self._under_way[:count], self._under_way[count:]
        with resting():
            own = [future.result() for _, future in taken]
        told = broadcast_object(own, self.step.mesh.peers) if taken else []  # the first copy alone has heard
        return [Scored(position, *found) for (position, _), found in zip(taken, told)]

    def close(self, reason: str) -> None:
        for _, future in self._under_way:  # these are not asked for any more, but end before the others hear of the end
            future.exception()
        if self.step.mesh.link.size > 1:
            broadcast_object({"end": reason}, self.step.mesh.link)


def scoring(step: Step, metric: Metric | None, validation: Any, how: Literal["wait", "background"]) -> Here | None:
    """How this process's part of the job has its weights evaluated. Raises ConfigError where the settings contradict each other."""
    if metric is None:
        if step.mesh.sizes["evaluate"]:
            raise ConfigError(f"mesh.evaluate is {step.mesh.sizes['evaluate']}, but nothing is evaluated; set it to 0")
        return None
    if step.mesh.sizes["evaluate"]:
        if how == "background":
            raise ConfigError("train.evaluate is background, but mesh.evaluate gives it processes of its own; keep one of them")
        return Elsewhere(step, metric, validation)
    return (Background if how == "background" else Here)(step, metric, validation)


def serve(step: Step, metric: Metric, validation: Any) -> str:
    """Evaluate the weights that come, on the processes of ``mesh.evaluate``, until the training ends -> why it ended."""
    mesh: Mesh = step.mesh
    state = list(step.model.state_dict().values())
    word: dict[str, Any] = {}
    while True:
        with resting():
            word = broadcast_object(word, mesh.link)
        if "end" in word:
            return str(word["end"])
        kinds = word["weights"]
        sizes = [tensor.numel() * kind.itemsize for tensor, kind in zip(state, kinds)]
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        torch_dist.broadcast(incoming, group=mesh.link.group, group_src=0)
        began = time.perf_counter()
        for tensor, part, kind in zip(state, incoming.split(sizes), kinds):
            tensor.copy_(part.clone().view(kind).view(tensor.shape))  # a clone is aligned
        values = score(step, step.act, metric, validation, mesh["replicate"], mesh.device)
        broadcast_object((values, time.perf_counter() - began), mesh.link, source=1)
