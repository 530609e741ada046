"""One optimizer step: forward and backward over its micro-batches, gradient reduction, clipping, guard, update.

No step reads a value from the device: the host runs ahead, and a guard on the device keeps NaN out of the weights.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpcai import startup
from hpcai.dist.collectives import all_gather_object, all_reduce_, all_reduce_min, gather_distinct
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError, DivergedError
from hpcai.nn.deferred_init import keep_attributes, materialize, record_names
from hpcai.nn.moe import Router, update_biases
from hpcai.parallel.sharding import FlatParameter, global_sum
from hpcai.settings import StepConfig
from hpcai.train import rng
from hpcai.train.auto_settings import build_reducer, enable_float8, resolve_auto, set_backend_flags
from hpcai.train.capture import Capture, Graph
from hpcai.train.compiling import CompiledModel
from hpcai.train.metrics import Value, has_finish
from hpcai.train.optim import Optimizer
from hpcai.train.profile import span
from hpcai.train.replica_check import NEVER, ReplicaCheck
from hpcai.train.step_clock import StepClock
from hpcai.train.weight_averaging import WeightAverage

if TYPE_CHECKING:
    from hpcai.parallel.pipeline import Pipeline

Loss = Callable[..., dict[str, Value]]


class Step:
    """An optimizer step. ``step(batch, lr)`` returns the values of the loss function on this rank's part of the batch, as device
    tensors.

    The gradient is that of the mean over the global batch: over micro-batches and replicas. If these have unequal numbers of
    tokens, atoms or pixels, the loss is a pair (sum, count). If it combines several such means, ``counts(batch)`` [K] returns
    their denominators, and ``loss(model, batch, counts=...)`` [K] receives their mean over all micro-batches and replicas. Random
    numbers of a step (dropout) depend only on torch's seed at construction, on the replica and on the number of the step.
    ``messages``: the values of ``auto`` settings.

    Args:
        loss: A pure function ``loss(model, batch)`` that returns ``{"loss": mean over the batch, name: ...}``. A batch is a tensor,
            tuple, named tuple or dict of tensors [samples of this rank, ...].
        pipeline: A schedule of pipeline stages, in place of ``SingleStage``.
        graph: Constructs the graph that records a captured step, in place of a CUDA graph.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, cfg: StepConfig, mesh: Mesh, *, counts: Callable[[Any], Tensor] | None = None,
        pipeline: "Pipeline | None" = None, graph: Callable[[], Graph] | None = None,
    ) -> None:  # fmt: skip
        startup.begin("network")
        fallback = cfg.capture == "auto"
        self.cfg, self.messages = resolve_auto(cfg, mesh, graph is not None)
        self.messages += set_backend_flags(cfg, mesh.device)
        cfg, self.loss, self.counts, self.mesh = self.cfg, loss, counts, mesh
        self.clock = StepClock(mesh.device)
        self._seed = torch.initial_seed()
        self.model, dtype = model, torch.float64 if cfg.precision == "fp64" else None
        if cfg.shard == "weights" and mesh["replicate"].size > 1 and any(p.is_meta for p in model.parameters()):
            with keep_attributes(model):
                record_names(model.to(dtype) if dtype else model)  # no rank materializes the full model
        else:
            materialize(model, mesh.device, dtype=dtype)
        self.messages += enable_float8(self.model, cfg, mesh.device)
        self._compiled = CompiledModel(self.model, cfg, mesh) if cfg.compile != "none" else None
        self.messages += [self._compiled.message] if self._compiled else []
        self.reducer = build_reducer(self.model, mesh, cfg)
        self.optimizer = Optimizer(self.reducer.flat_parameters, cfg)
        groups: dict[Any, list[FlatParameter]] = {}
        for row in self.reducer.flat_parameters:
            groups.setdefault((row.partition_axes, row.is_counted), []).append(row)
        self._norm_groups = list(groups.values())  # flat parameters that are sharded along the same axes
        self.average = WeightAverage(self.model, self.optimizer, self.reducer, cfg)
        self.replica_check = ReplicaCheck(self.reducer, self.optimizer, mesh)
        self.self_updating: list[Any] = [part for part in model.modules() if hasattr(part, "update_")]  # such as embedding tables
        unsupported = {"shard=weights": cfg.shard == "weights", "capture=forward": cfg.capture == "forward",
                       "clip": cfg.clip is not None, "ema_decay": cfg.ema_decay is not None}  # fmt: skip
        if self.self_updating and (names := [name for name, is_set in unsupported.items() if is_set]):
            kind = type(self.self_updating[0]).__name__
            raise ConfigError(f"step.{names[0]} does not work with {kind}, which updates itself in the step; leave it out")
        self._balanced = [part for part in model.modules() if isinstance(part, Router) and part.bias_update_rate]
        each = cfg.clip_per == "sample"
        if each and mesh.model_parallel.size > 1:
            ranks = mesh.model_parallel.size
            raise ConfigError(f"step.clip_per is sample, but a sample is sharded over {ranks} ranks; set it to batch")
        stages = mesh["pipeline"].size
        if stages > 1 and pipeline is None:
            raise ConfigError(f"mesh.pipeline is {stages}, but the step has no pipeline; give pipeline=Pipeline(model, mesh)")
        self.pipeline = pipeline if pipeline is not None and stages > 1 else SingleStage(self.model, self.reducer)
        self._passes = ("pipeline", "pipeline") if self.pipeline is pipeline else ("forward", "backward")
        self.forward_backward: Callable[[nn.Module, Any], dict[str, Value]] = self._per_sample if each else self._forward_backward
        self._weight = 1.0 / (cfg.accumulate * mesh["replicate"].size)
        self._count = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._first_nonfinite = torch.full((2,), NEVER, dtype=torch.int64, device=mesh.device)  # gradient, own loss
        self._steps = 0
        self._capture: Capture | None = None
        if cfg.capture != "none":
            function = self._iterate if cfg.capture == "whole" else self._gradients
            self._capture = Capture(function, cfg.capture_shapes, graph, traced=cfg.compile == "none", fallback=fallback)

    def __call__(self, batch: Any, lr: float | None = None) -> dict[str, Value]:
        startup.begin("first step")
        self.optimizer.lr.fill_(self.cfg.lr if lr is None else lr)
        rng.seed_step(self._seed, self.mesh["replicate"].rank, self._steps)
        with span("step"):
            if self._capture is not None:
                self.clock.begin("graph")
            values = (self._capture or self._gradients)(batch)
            if self._capture is None or self.cfg.capture == "forward":
                self._update(values)
        self.clock.begin("other")
        self._steps += 1
        return values

    @property
    def count(self) -> int:
        """Number of steps."""
        return self._steps

    @count.setter
    def count(self, value: int) -> None:
        self._steps = value
        self._count.fill_(value)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=self.cfg.precision in ("bf16", "bf16-params"))

    def _iterate(self, batch: Any) -> dict[str, Value]:
        values = self._gradients(batch)
        self._update(values)
        return values

    def _gradients(self, batch: Any) -> dict[str, Value]:
        self.clock.begin(self._passes[0])
        with span("gradients"):
            self.reducer.zero_grad()
            values = self.forward_backward(self.model, batch)
        self.clock.begin("reduce")
        with span("sums"):
            self.reducer.reduce()
        return values

    def _forward_backward(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        parts, kwargs = split(batch, self.cfg.accumulate), {}
        if self.counts is not None:
            counted = torch.stack([self.counts(part) for part in parts]).sum(0)
            kwargs = {"counts": all_reduce_(counted, self.mesh["replicate"]) * self._weight}

        def measure(model: nn.Module, part: Any) -> tuple[Tensor, dict[str, Value]]:
            self.clock.begin(self._passes[0])
            values = self.loss(model, part, **kwargs)
            loss = _get_loss(values)
            detached = {name: _detach(value) for name, value in values.items()}
            self.clock.begin(self._passes[1])
            return loss[0] if isinstance(loss, tuple) else loss * self._weight, detached

        self.reducer.is_last_backward = False  # the schedule may set it for the last micro-batch
        return _combine_micro_batches(self.pipeline.backward(measure, parts, self.autocast))

    def _per_sample(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """Like ``_forward_backward``, for micro-batches of one sample, whose gradients are clipped before they are added."""
        assert self.cfg.clip is not None
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        values_of_parts: list[dict[str, Value]] = []
        summed: list[Tensor] = []
        for part in split(batch, self.cfg.accumulate):
            if (count := samples_in(part)) != 1:
                advice = f"set step.accumulate to the samples of a replica, {self.cfg.accumulate * count}"
                raise ConfigError(f"step.clip_per is sample, but a micro-batch has {count}; {advice}")
            self.clock.begin("forward")
            with self.autocast():
                values = self.loss(model, part)
            self.clock.begin("backward")
            loss = _get_loss(values)
            values["loss"] = mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            gradients = torch.autograd.grad(mean, parameters, allow_unused=True, materialize_grads=True)
            wide = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
            norm = torch.stack(torch._foreach_norm(wide, 2, dtype=self.optimizer.lr.dtype)).square().sum().sqrt()
            clipped = torch._foreach_mul(wide, self._weight * (self.cfg.clip / (norm + 1e-6)).clamp(max=1.0))
            summed = list(torch._foreach_add(summed, clipped) if summed else clipped)
            values_of_parts.append({name: _detach(value) for name, value in values.items()})
        _InjectGradients.apply(summed, *parameters).backward()
        return _combine_micro_batches(values_of_parts)

    @torch.no_grad()
    def _update(self, values: dict[str, Value]) -> None:
        self.clock.begin("update")
        norm, scale, loss = self._norm(), None, _get_loss(values)
        if isinstance(loss, tuple):  # a sum: its gradient is divided by the global count
            loss, count = loss
            count = count.to(norm, copy=True) if isinstance(count, Tensor) else norm.new_full((), count)
            scale = 1.0 / all_reduce_(count, self.mesh["replicate"]).clamp(min=torch.finfo(norm.dtype).tiny)
            norm = norm * scale
        if self.cfg.clip is not None:
            clip = (self.cfg.clip / (norm + 1e-6)).clamp(max=1.0)
            scale = clip if scale is None else scale * clip
        # Gradients are summed over replicas, so NaN reaches all of them in the same step. From then on the weights stay those of
        # the last good step.
        bad = ~torch.stack((norm.isfinite(), loss.isfinite().reshape(())))
        self._first_nonfinite.copy_(torch.minimum(self._first_nonfinite, torch.where(bad, self._count, NEVER)))
        skip = (self._first_nonfinite[0] < NEVER).float()
        with span("update"):
            self.optimizer.step(scale, skip)
            self.reducer.all_gather_parameters()
        for part in self.self_updating:
            part.update_(self.optimizer.lr, scale, skip)
        update_biases(self._balanced)
        self.average.update()
        self._count += 1

    def _norm(self) -> Tensor:
        """Return the L2 norm of the full gradient, over all its shards."""
        squares = []
        for rows in self._norm_groups:
            grads = [gradient for row in rows if (gradient := row.gradient()) is not None]
            norms = torch._foreach_norm(grads, 2, dtype=self.optimizer.lr.dtype) if grads else [torch.zeros_like(self.optimizer.lr)]
            squares.append((rows[0], torch.stack(norms).square().sum()))
        return global_sum(squares).sqrt()

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the weights to evaluate (the average, if there is one), unsharded, under the names of the model."""
        with self.average.applied():
            # A DTensor is recognized by its method: importing its class takes 4,000 file operations.
            state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in self.model.state_dict().items()}
            return {name: tensor.detach().clone() for name, tensor in state.items()}

    @property
    def compiled(self) -> float:
        """Seconds of torch.compile so far."""
        return float(self._compiled.counts.read()["seconds"]) if self._compiled else 0.0

    def news(self) -> list[str]:
        """Return messages about the steps since the last call, of any rank. All ranks call this together."""
        messages = self._compiled.news() if self._compiled else []
        if self._capture is None:
            return messages
        recorded, self._capture.recorded_messages = self._capture.recorded_messages, []
        messages += recorded
        if not self._capture.fallback:
            return messages
        fallbacks, self._capture.fallback_messages = self._capture.fallback_messages, []
        by_rank = gather_distinct(fallbacks, self.mesh.peers)
        same = len(by_rank) == 1
        return by_rank[0] + messages if same else [f"rank {n}: {text}" for n, texts in by_rank.items() for text in texts] + messages

    def first_failures(self, compare: bool = False) -> Tensor:
        """Return minima over all ranks, on the device: the 0-based step of the first non-finite loss or gradient, and, with
        ``compare``, the index of the first divergent parameter. ``NEVER`` if there is none.   [2]"""
        divergent = self.replica_check.first_divergent_parameter() if compare else torch.full_like(self._count, NEVER)
        return all_reduce_min(torch.stack((self._first_nonfinite.amin(), divergent)), self.mesh.peers)

    def check(self, samples: Callable[[int], str] | None = None, first: int | None = None) -> None:
        """Raise DivergedError on all ranks if a loss or a gradient was not finite. It reads the device: call it between steps only.
        ``samples(step)`` describes the samples of this rank in a step; ``first`` is the first value of ``first_failures``, if it is
        on the host."""
        first = int(self.first_failures()[0].item()) if first is None else first
        if first == NEVER:
            return
        gradient, loss = self._first_nonfinite.tolist()
        reports = all_gather_object((gradient, loss, samples(loss) if samples and loss == first else ""), self.mesh.peers)
        ranks = [(rank, s[2]) for rank, s in enumerate(reports) if s[1] == first]
        source = "the loss" if ranks else "the gradient"
        ranks_text = " and ".join(f"rank {rank}" + (f" ({text})" if text else "") for rank, text in ranks) or "all ranks"
        skipped = any(s[0] == first for s in reports)
        consequence = f"weights stay those of step {first}" if skipped else "its gradient is finite and changed the weights"
        raise DivergedError(
            f"step {first + 1}: {source} is not finite on {ranks_text}; {consequence} and nothing was saved since; "
            f"look at these samples, or lower step.lr (now {self.cfg.lr:g}), lengthen step.schedule.warmup or set step.clip",
            first + 1,
        )


class SingleStage:
    """Forward and backward passes through a full model. The schedule of a pipeline, in which no rank has the full model, has the
    same methods. ``autocast()`` returns a context manager for computations of the model. ``source``: The rank along the pipeline
    axis that has the outputs."""

    def __init__(self, model: nn.Module, reducer: Any = None) -> None:
        self.model, self.reducer, self.source = model, reducer, 0

    def backward(
        self, measure: Callable[[nn.Module, Any], tuple[Tensor, dict[str, Value]]], parts: Sequence[Any],
        autocast: Callable[[], Any],
    ) -> list[dict[str, Value]]:  # fmt: skip
        """Accumulate the gradient of the first result of ``measure(model, part)`` over all parts. Return the second results."""
        values_of_parts: list[dict[str, Value]] = []
        for part in parts:
            self.reducer.is_last_backward = part is parts[-1]
            with autocast():
                scalar, values = measure(self.model, part)
            scalar.backward()
            values_of_parts.append(values)
        return values_of_parts

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any, autocast: Callable[[], Any]) -> Any:
        """Return ``function(model, batch)``, or None on ranks that do not have the outputs of the model."""
        with autocast():
            return function(self.model, batch)


class _InjectGradients(torch.autograd.Function):
    """A zero with given gradients: they reach the hooks of parameters as gradients of a backward pass do."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.gradients)


class MicroBatches(tuple):
    """A batch that consists of micro-batches, for samples that cannot be split along a first dim."""


def split(batch: Any, count: int) -> list[Any]:
    """Split every tensor of ``batch`` along its first dim into ``count`` equal parts. Raises DataError if they would be unequal."""
    if isinstance(batch, MicroBatches):
        if len(batch) != count:
            raise DataError(f"a batch has {len(batch)} micro-batches, but step.accumulate is {count}; the numbers must be equal")
        return list(batch)
    if count == 1 or batch is None:  # an optional entry that this batch lacks
        return [batch] * count
    if isinstance(batch, Tensor):
        if len(batch) % count:
            raise DataError(f"a batch of {len(batch)} samples per rank does not split into {count} micro-batches (step.accumulate)")
        return list(batch.chunk(count))
    if isinstance(batch, dict):
        columns = {key: split(value, count) for key, value in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if isinstance(batch, (tuple, list)):
        rows = zip(*(split(value, count) for value in batch))
        return [type(batch)(*row) if hasattr(batch, "_fields") else type(batch)(row) for row in rows]
    raise DataError(f"a batch holds a {type(batch).__name__}; expected tensors in tuples, named tuples or dicts")


def samples_in(batch: Any) -> int:
    """Return the number of samples of a batch: the first dim of its first tensor."""
    if isinstance(batch, MicroBatches):
        return sum(map(samples_in, batch))
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def _get_loss(values: dict[str, Value]) -> Value:
    loss = values.get("loss")
    if not isinstance(loss[0] if isinstance(loss, tuple) else loss, Tensor):
        kind = f", 'loss' as a {type(loss).__name__}" if "loss" in values else ""
        expected = "a scalar tensor named 'loss' among them, or (sum, count)"
        raise ConfigError(f"the loss function returned {sorted(values)}{kind}; expected {expected}")
    if wrong := sorted(name for name, value in values.items() if has_finish(value)):
        fault = f"the loss function returned {', '.join(wrong)} as (sums, finish), which an evaluation can report, but no step"
        raise ConfigError(f"{fault}; return a mean or (sum, count), or move it to the metric")
    return loss  # type: ignore[return-value]


def _detach(value: Value) -> Value:
    return (value[0].detach(), value[1]) if isinstance(value, tuple) else value.detach()


def _combine_micro_batches(values_of_parts: list[dict[str, Value]]) -> dict[str, Value]:
    """Combine the values of equal micro-batches: the mean of means, the sum of pairs."""
    if len(values_of_parts) == 1:
        return values_of_parts[0]
    merged: dict[str, Value] = {}
    for name in values_of_parts[0]:
        column = [values[name] for values in values_of_parts]
        if isinstance(column[0], tuple):
            merged[name] = (sum(c[0] for c in column), sum(c[1] for c in column))  # type: ignore[assignment]
        else:
            merged[name] = torch.stack(column).mean(0)  # type: ignore[arg-type]
    return merged
