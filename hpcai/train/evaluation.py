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

from hpcai.dist.collect import agree, distinct, least, rows_to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError
from hpcai.settings import AXES
from hpcai.train.background import submit
from hpcai.train.flight_recorder import HEARTBEAT, pause_watchdog
from hpcai.train.metrics import MetricSums, Total, Value
from hpcai.train.step import SingleStage, Step, samples_in

T = TypeVar("T")
Metric = Callable[[nn.Module, Any], Mapping[str, Value | Total]]
PredictFunction = Callable[[nn.Module, Any], dict[str, Tensor]]
Position = dict[str, Any]
TimedMetrics = tuple[dict[str, float], float]  # metrics, and the seconds that it took to find them
_MAX_PENDING = 2  # at most so many evaluations are under way; the next one waits, for each holds a copy of the weights


@torch.no_grad()
def evaluate(step: Step, metric: Metric, batches: Any) -> dict[str, float]:
    """Each metric over every sample exactly once, whatever the number of processes and however uneven their parts."""
    with step.average.applied():
        return compute_metrics(step, step.pipeline, metric, batches, step.mesh["replicate"], step.mesh.device)


@torch.no_grad()
def compute_metrics(step: Step, pipeline: Any, metric: Metric, batches: Any, axis: Axis, device: torch.device) -> dict[str, float]:
    """Each metric of the model of ``act`` as it is, with sums added over ``axis`` on ``device``."""
    sums = MetricSums()
    for batch in _eval_mode_batches(pipeline.model, batches):
        if (values := pipeline.forward(metric, batch, step.autocast)) is not None:
            sums.add(values, samples_in(batch))
    return _broadcast_from_outputs(sums.reduce(axis, device, uneven=True), step)


def _broadcast_from_outputs(result: T, step: Step) -> T:
    """What the stage of a pipeline found that alone has the outputs of the model."""
    return agree(result, step.mesh["pipeline"], step.pipeline.source)


@torch.no_grad()
def predict(step: Step, function: PredictFunction, batches: Any) -> dict[str, Tensor]:
    """Rows that ``function(model, batch)`` gives for every sample, from all copies, on the CPU of the first process; nothing on all
    others, which keep no more than what they have made until it is fetched."""
    outputs: dict[str, list[Tensor]] = {}
    with step.average.applied():
        for batch in _eval_mode_batches(step.model, batches):
            for name, value in (step.pipeline.forward(function, batch, step.autocast) or {}).items():
                outputs.setdefault(name, []).append(value.cpu())
    mesh, rows = step.mesh, dict[str, Tensor]()
    if any(mesh[name].rank for name in AXES if name not in ("replicate", "pipeline", "evaluate")):
        return rows  # another process has the same
    ranks = mesh.over("replicate", "pipeline")
    local = {name: torch.cat(values) for name, values in outputs.items()}
    specs = distinct({name: (value.shape[1:], value.dtype) for name, value in local.items()} or None, ranks)
    for name, (shape, dtype) in max(specs.values(), key=len, default={}).items():
        rows[name] = rows_to_first(local.get(name, torch.empty((0, *shape), dtype=dtype)), ranks)
    return rows if mesh.rank == 0 else {}


class SampleCache:
    """Batches that are read once and then stay on the device, for a validation set that fits there."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._cached = batches, list[Any]()
        self.samples, self._complete = batches.samples, False

    def epoch(self, epoch: int) -> Iterator[Any]:
        if self._complete:
            yield from self._cached
            return
        self._cached = []
        for batch in self._batches.epoch(epoch):
            self._cached.append(batch)
            yield batch
        self._complete = True

    def news(self) -> list[str]:
        return list(self._batches.news())


def _eval_mode_batches(model: nn.Module, batches: Any) -> Iterator[Any]:
    """The batches, with the model in evaluation mode meanwhile."""
    was_training = model.training
    model.eval()
    try:
        for batch in batches.epoch(0) if hasattr(batches, "epoch") else batches:
            yield batch
            HEARTBEAT.beats += 1
    finally:
        model.train(was_training)


# ---- when, and by which processes


@dataclass
class Evaluation:
    """Metrics of the weights at ``position``, and the seconds that it took to find them."""

    position: Position
    values: dict[str, float]
    seconds: float


class InlineEvaluation:
    """Evaluation by the processes that train, which wait for it."""

    def __init__(self, step: Step, metric: Metric, validation: Any) -> None:
        self.step, self.metric, self.validation = step, metric, validation
        self._done: list[Evaluation] = []

    @property
    def pending(self) -> bool:
        return bool(self._done)

    def start(self, position: Position) -> None:
        began = time.perf_counter()
        values = evaluate(self.step, self.metric, self.validation)
        self._done.append(Evaluation(position, values, time.perf_counter() - began))

    def results(self, wait: bool = False) -> list[Evaluation]:
        """The evaluations that all processes of the run know to be done; with ``wait``, all that were started."""
        done, self._done = self._done, []
        return done

    def close(self, reason: str) -> None:
        """No evaluation follows."""


class BackgroundEvaluation(InlineEvaluation):
    """Evaluation of a copy of the weights in a thread, while training goes on. Subclasses say which processes do it."""

    def __init__(self, step: Step, metric: Metric, validation: Any) -> None:
        super().__init__(step, metric, validation)
        self._stream = torch.cuda.Stream() if step.mesh.device.type == "cuda" else None
        self._futures: list[tuple[Position, Future[TimedMetrics]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._futures or self._done)

    def start(self, position: Position) -> None:
        if len(self._futures) >= _MAX_PENDING:
            self._done += self._take(1)
        weights = self.step.snapshot()
        ready: Any = torch.cuda.current_stream().record_event() if self._stream else None

        def run() -> TimedMetrics:
            with torch.cuda.stream(self._stream):  # None: no stream
                if self._stream is not None:
                    self._stream.wait_event(ready)
                return self._evaluate(weights)

        before = self._futures[-1][1] if self._futures else None
        self._futures.append((position, submit(run, "evaluation", before)))

    def _evaluate(self, weights: dict[str, Tensor]) -> TimedMetrics:
        """The metrics of ``weights``."""
        raise NotImplementedError

    def _agree_count(self, count: int) -> int:
        """How many evaluations are taken, where ``count`` are done on this process: the same on all of them."""
        raise NotImplementedError

    def results(self, wait: bool = False) -> list[Evaluation]:
        done, self._done = self._done, []
        count = len(self._futures)
        if not wait and count:
            count = self._agree_count(sum(future.done() for _, future in self._futures))
        return done + self._take(count)

    def _take(self, count: int) -> list[Evaluation]:
        taken, self._futures = self._futures[:count], self._futures[count:]
        return [Evaluation(position, *future.result()) for position, future in taken]


class TrainingRanksEvaluation(BackgroundEvaluation):
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
        self.model = step.mesh.beside(step.model).requires_grad_(False)
        self.axis, self.everyone = step.mesh.aside("replicate"), step.mesh.aside("everyone")

    @torch.no_grad()
    def _evaluate(self, weights: dict[str, Tensor]) -> TimedMetrics:
        began = time.perf_counter()
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        values = compute_metrics(self.step, SingleStage(self.model), self.metric, self.validation, self.axis, torch.device("cpu"))
        return values, time.perf_counter() - began

    def _agree_count(self, count: int) -> int:
        return int(least(torch.tensor(count), self.everyone).item())


class DedicatedRanksEvaluation(BackgroundEvaluation):
    """Evaluation by processes set apart for it, which get the weights from the first copy of the model; see ``serve``."""

    def _evaluate(self, weights: dict[str, Tensor]) -> TimedMetrics:
        link = self.step.mesh.link
        result: TimedMetrics = ({}, 0.0)
        if link.size > 1:  # a process of another copy hears from the first copy's in _take
            packed = torch.cat([t.cpu().contiguous().flatten().view(torch.uint8) for t in weights.values()])
            agree({"weights": [tensor.dtype for tensor in weights.values()]}, link)
            torch_dist.broadcast(packed, group=link.group, group_src=0)
            result = agree(result, link, source=1)
        return result

    def _agree_count(self, count: int) -> int:
        return agree(count, self.step.mesh.everyone)

    def _take(self, count: int) -> list[Evaluation]:
        taken, self._futures = self._futures[:count], self._futures[count:]
        with pause_watchdog():
            local = [future.result() for _, future in taken]
        results = agree(local, self.step.mesh.everyone) if taken else []  # the first copy alone has heard
        return [Evaluation(position, *result) for (position, _), result in zip(taken, results)]

    def close(self, reason: str) -> None:
        for _, future in self._futures:  # these are not asked for any more, but end before the others hear of the end
            future.exception()
        if self.step.mesh.link.size > 1:
            agree({"end": reason}, self.step.mesh.link)


def choose_evaluation(
    step: Step, metric: Metric | None, validation: Any, mode: Literal["wait", "background"],
) -> InlineEvaluation | None:  # fmt: skip
    """How this process's part of the job has its weights evaluated. Raises ConfigError where the settings contradict each other."""
    if metric is None:
        if step.mesh.sizes["evaluate"]:
            raise ConfigError(f"mesh.evaluate is {step.mesh.sizes['evaluate']}, but nothing is evaluated; set it to 0")
        return None
    if step.mesh.sizes["evaluate"]:
        if mode == "background":
            raise ConfigError("train.evaluate is background, but mesh.evaluate gives it processes of its own; keep one of them")
        return DedicatedRanksEvaluation(step, metric, validation)
    return (TrainingRanksEvaluation if mode == "background" else InlineEvaluation)(step, metric, validation)


def serve_evaluations(step: Step, metric: Metric, validation: Any) -> str:
    """Evaluate the weights that come, on the processes of ``mesh.evaluate``, until the training ends -> why it ended."""
    mesh: Mesh = step.mesh
    state = list(step.model.state_dict().values())
    header: dict[str, Any] = {}
    while True:
        with pause_watchdog():
            header = agree(header, mesh.link)
        if "end" in header:
            return str(header["end"])
        dtypes = header["weights"]
        sizes = [tensor.numel() * kind.itemsize for tensor, kind in zip(state, dtypes)]
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        torch_dist.broadcast(incoming, group=mesh.link.group, group_src=0)
        began = time.perf_counter()
        for tensor, part, kind in zip(state, incoming.split(sizes), dtypes):
            tensor.copy_(part.clone().view(kind).view(tensor.shape))  # a clone is aligned
        values = compute_metrics(step, step.pipeline, metric, validation, mesh["replicate"], mesh.device)
        agree((values, time.perf_counter() - began), mesh.link, source=1)
