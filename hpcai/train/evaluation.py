"""Metrics and predictions over all samples of a loader, with the averaged weights if there is an average.

The training ranks evaluate a run, either inline or in the background, or dedicated ranks do. In each case the weights are those of
the step at which ``start`` was called, and the metrics are the same.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.background import submit
from hpcai.dist.collectives import all_reduce_min, broadcast_object, gather_distinct, gather_rows_to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.dist.watchdog import HEARTBEAT, waiting_at
from hpcai.errors import ConfigError, DataError
from hpcai.settings import AXES
from hpcai.train.flight_recorder import pause_watchdog
from hpcai.train.metrics import MetricSums, PerSample, Total, Value
from hpcai.train.step import SingleStage, Step, samples_in

Metric = Callable[[nn.Module, Any], Mapping[str, Value | Total | PerSample]]
PredictFunction = Callable[[nn.Module, Any], dict[str, Tensor]]
Position = dict[str, Any]
TimedMetrics = tuple[dict[str, float], float]  # metrics, and the seconds of the evaluation
_MAX_PENDING = 2  # pending evaluations, each of which holds a copy of the weights; a further one waits


@torch.no_grad()
def evaluate(step: Step, metric: Metric, batches: Any) -> dict[str, float]:
    """Return each metric over every sample exactly once, for any number of ranks and uneven shards of the samples."""
    with step.average.applied():
        return compute_metrics(step, step.pipeline, metric, batches, step.mesh["replicate"], step.mesh.device)


@torch.no_grad()
def compute_metrics(step: Step, pipeline: Any, metric: Metric, batches: Any, axis: Axis, device: torch.device) -> dict[str, float]:
    """Return each metric of the model of ``pipeline``, without averaging weights, with sums added over ``axis`` on ``device``."""
    sums = MetricSums()
    for batch, is_repeated in _eval_mode_batches(step, pipeline.model, batches):
        if (values := pipeline.forward(metric, batch, step.autocast)) is not None and not is_repeated:
            sums.add(values, samples_in(batch))
    metrics = sums.reduce(axis, device, uneven=True)
    return broadcast_object(metrics, step.mesh["pipeline"], step.pipeline.source)  # from the stage with the model's outputs


@torch.no_grad()
def predict(step: Step, function: PredictFunction, batches: Any) -> dict[str, Tensor]:
    """Return the rows of ``function(model, batch)`` for all samples of all replicas, on the CPU of the first rank, and nothing on
    others. These hold only their own rows until they are fetched."""
    outputs: dict[str, list[Tensor]] = {}
    with step.average.applied():
        for batch, is_repeated in _eval_mode_batches(step, step.model, batches):
            values = step.pipeline.forward(function, batch, step.autocast) or {}
            for name, value in {} if is_repeated else values.items():
                outputs.setdefault(name, []).append(value.cpu())
    mesh, rows = step.mesh, dict[str, Tensor]()
    if any(mesh[name].rank for name in AXES if name not in ("replicate", "pipeline", "evaluate")):
        return rows  # another rank has the same rows
    ranks = mesh.flatten("replicate", "pipeline")
    local = {name: torch.cat(values) for name, values in outputs.items()}
    specs = gather_distinct({name: (value.shape[1:], value.dtype) for name, value in local.items()} or None, ranks)
    for name, (shape, dtype) in max(specs.values(), key=len, default={}).items():
        rows[name] = gather_rows_to_first(local.get(name, torch.empty((0, *shape), dtype=dtype)), ranks)
    return rows if mesh.rank == 0 else {}


class SampleCache:
    """A cache of batches on the device, for a validation set that fits there. They are read once."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._cached = batches, list[Any]()
        self.samples, self._complete = getattr(batches, "dataset_size", batches.samples), False

    def __len__(self) -> int:
        return len(self._batches)

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


def _eval_mode_batches(step: Step, model: nn.Module, batches: Any) -> Iterator[tuple[Any, bool]]:
    """Iterate over (batch, False) with the model in evaluation mode. If its forward pass is a collective of the replicas, (the last
    batch, True) follows on ranks with fewer batches than others, since a loader leaves out empty ones."""
    was_training, batch, count = model.training, None, 0
    model.eval()
    try:
        for batch in batches.epoch(0) if hasattr(batches, "epoch") else batches:
            yield batch, False
            count += 1
            HEARTBEAT.beats += 1
        together = step.cfg.shard == "weights" or step.mesh.sizes["expert"] > 1 or step.self_updating
        if together and (replicas := step.mesh["replicate"]).size > 1:
            for _ in range(count, len(batches)):
                if batch is None:
                    fault = f"replica {replicas.rank} of {replicas.size} has no sample to evaluate, but others need its weights"
                    raise DataError(f"{fault}; take batches of at least {replicas.size} samples")
                yield batch, True
    finally:
        model.train(was_training)


# ---- inline, in the background, or on dedicated ranks


@dataclass
class Evaluation:
    """Metrics of the weights at ``position``, and the seconds of their evaluation."""

    position: Position
    values: dict[str, float]
    seconds: float


class InlineEvaluation:
    """Evaluation by the training ranks, which wait for it."""

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
        """Return the evaluations that have finished on all ranks of the run. With ``wait``, wait for all that were started."""
        done, self._done = self._done, []
        return done

    def close(self, reason: str) -> None:
        """End the evaluations of a run."""


class BackgroundEvaluation(InlineEvaluation):
    """Evaluation of a copy of the weights in a thread, while training continues. Subclasses choose the ranks."""

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
            with torch.cuda.stream(self._stream):  # a no-op if None
                if self._stream is not None:
                    self._stream.wait_event(ready)
                return self._evaluate(weights)

        before = self._futures[-1][1] if self._futures else None
        self._futures.append((position, submit(run, "evaluation", before)))

    def _evaluate(self, weights: dict[str, Tensor]) -> TimedMetrics:
        """Return the metrics of ``weights``, and their seconds."""
        raise NotImplementedError

    def _agree_count(self, count: int) -> int:
        """Return the number of evaluations to collect, the same on all ranks, if ``count`` are done on this rank."""
        raise NotImplementedError

    def results(self, wait: bool = False) -> list[Evaluation]:
        count = len(self._futures)
        if not wait and count:
            count = self._agree_count(sum(future.done() for _, future in self._futures))
        return super().results() + self._take(count)

    def _take(self, count: int) -> list[Evaluation]:
        taken, self._futures = self._futures[:count], self._futures[count:]
        with waiting_at("an evaluation", is_work=True):
            return [Evaluation(position, *future.result()) for position, future in taken]


class TrainingRanksEvaluation(BackgroundEvaluation):
    """Evaluation by the training ranks, with a replica."""

    def __init__(self, step: Step, metric: Metric, validation: Any) -> None:
        super().__init__(step, metric, validation)
        if step.cfg.shard == "weights" and step.mesh["replicate"].size > 1:
            fault = "train.evaluate is background, but step.shard is weights, so that no rank has a full model"
            raise ConfigError(f"{fault}; set mesh.evaluate, step.shard=optimizer or train.evaluate=wait")
        if step.mesh["pipeline"].size > 1:
            raise ConfigError("train.evaluate is background, but a pipeline has one schedule: set mesh.evaluate, or wait")
        self.model = step.mesh.background_copy(step.model).requires_grad_(False)
        self.axis, self.everyone = step.mesh.background_axis("replicate"), step.mesh.background_axis("peers")

    @torch.no_grad()
    def _evaluate(self, weights: dict[str, Tensor]) -> TimedMetrics:
        began = time.perf_counter()
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        values = compute_metrics(self.step, SingleStage(self.model), self.metric, self.validation, self.axis, torch.device("cpu"))
        return values, time.perf_counter() - began

    def _agree_count(self, count: int) -> int:
        return int(all_reduce_min(torch.tensor(count), self.everyone).item())


class DedicatedRanksEvaluation(BackgroundEvaluation):
    """Evaluation by dedicated ranks, which receive the weights from the first replica (see ``serve_evaluations``)."""

    def _evaluate(self, weights: dict[str, Tensor]) -> TimedMetrics:
        link = self.step.mesh.link
        result: TimedMetrics = ({}, 0.0)
        if link.size > 1:  # ranks of other replicas get the result from the first replica in _take
            packed = torch.cat([t.cpu().contiguous().flatten().view(torch.uint8) for t in weights.values()])
            broadcast_object({"weights": [tensor.dtype for tensor in weights.values()]}, link)
            torch_dist.broadcast(packed, group=link.group, group_src=0)
            result = broadcast_object(result, link, source=1)
        return result

    def _agree_count(self, count: int) -> int:
        return broadcast_object(count, self.step.mesh.peers)

    def _take(self, count: int) -> list[Evaluation]:
        with pause_watchdog():
            taken = super()._take(count)
        return broadcast_object(taken, self.step.mesh.peers) if taken else []  # only the first replica has results

    def close(self, reason: str) -> None:
        for _, future in self._futures:  # their results are dropped, but they end before the end is sent
            future.exception()
        if self.step.mesh.link.size > 1:
            broadcast_object({"end": reason}, self.step.mesh.link)


def choose_evaluation(
    step: Step, metric: Metric | None, validation: Any, mode: Literal["wait", "background"],
) -> InlineEvaluation | None:  # fmt: skip
    """Return the evaluation that the settings select. Raises ConfigError if they contradict each other."""
    if metric is None:
        if step.mesh.sizes["evaluate"]:
            raise ConfigError(f"mesh.evaluate is {step.mesh.sizes['evaluate']}, but nothing is evaluated; set it to 0")
        return None
    if step.mesh.sizes["evaluate"]:
        if mode == "background":
            raise ConfigError("train.evaluate is background, but mesh.evaluate dedicates ranks to it; keep one of them")
        return DedicatedRanksEvaluation(step, metric, validation)
    return (TrainingRanksEvaluation if mode == "background" else InlineEvaluation)(step, metric, validation)


def serve_evaluations(step: Step, metric: Metric, validation: Any) -> str:
    """Evaluate weights as they arrive, on the ranks of ``mesh.evaluate``, until training ends. Return the reason of its end."""
    mesh: Mesh = step.mesh
    state = list(step.model.state_dict().values())
    header: dict[str, Any] = {}
    while True:
        with pause_watchdog():
            header = broadcast_object(header, mesh.link)
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
        broadcast_object((values, time.perf_counter() - began), mesh.link, source=1)
