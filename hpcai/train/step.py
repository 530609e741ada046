"""One optimizer step: forward and backward over its micro-batches, gradient sums, clipping, guard, update.

Nothing in a step reads a number from the device: the host runs ahead, and a guard on the device keeps a NaN out of the weights.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpcai import startup
from hpcai.dist.collectives import gather_distinct, all_gather_object, all_reduce_min, all_reduce_
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError, DivergedError
from hpcai.nn.deferred import make, tell_names
from hpcai.parallel.rows import Row, total
from hpcai.settings import StepConfig
from hpcai.train import rng
from hpcai.train.agreement import NEVER, Agreement
from hpcai.train.average import Average
from hpcai.train.capture import Capture, Graph
from hpcai.train.choices import chosen, gradient_sums, narrow_products, tune
from hpcai.train.compiling import Compiled
from hpcai.train.measure import Value, finishes
from hpcai.train.optim import Optimizer
from hpcai.train.profile import span

Loss = Callable[..., dict[str, Value]]


class Act(Protocol):
    """What goes forward and backward through ``model``: ``Whole``, or a schedule of stages where no process has the whole model
    (``hpcai.parallel.pipeline.Pipeline``)."""

    model: nn.Module
    source: int
    """the rank along the axis pipeline that has the outputs"""

    def backward(self, measure: Callable[[Any, Any], Any], parts: Sequence[Any], around: Callable[[], Any]) -> list[Any]: ...

    def forward(self, function: Callable[[Any, Any], Any], batch: Any, around: Callable[[], Any]) -> Any: ...


class Step:
    """``step(batch, lr)`` -> what the loss measured on this process's part of the batch, as device tensors.

    ``loss(model, batch)`` is pure and returns ``{"loss": mean over the batch, name: ...}``; a batch is a tensor, tuple, named
    tuple or dict whose tensors share their first dim: the samples of this process. The gradient is that of the mean over the
    global batch: over micro-batches and copies of the model. Where these count unlike numbers of tokens, atoms or pixels, the loss
    is a pair (sum, count). Where it is several such means together, ``counts(batch)`` [K] says what each divides by, and
    ``loss(model, batch, counts=...)`` [K] is told what all micro-batches and copies count on average.
    ``act`` goes forward and backward in place of the model (``Whole``): a schedule of pipeline stages. ``graph`` makes what records
    a captured step (a CUDA Graph). ``notes`` says what ``auto`` settings became. Random numbers of a step (dropout) follow from the
    seed that torch had when this was made, from the copy of the model and from the number of the step alone.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, cfg: StepConfig, mesh: Mesh, *, counts: Callable[[Any], Tensor] | None = None,
        act: Act | None = None, graph: Callable[[], Graph] | None = None,
    ) -> None:  # fmt: skip
        startup.begin("network")
        tries = cfg.capture == "auto"
        self.cfg, self.notes = chosen(cfg, mesh, graph is not None)
        self.notes += tune(cfg, mesh.device)
        cfg, self.loss, self.counts, self.mesh = self.cfg, loss, counts, mesh
        self._seed = torch.initial_seed()
        self.model, dtype = model, torch.float64 if cfg.precision == "fp64" else None
        if cfg.shard == "weights" and mesh["replicate"].size > 1 and any(p.is_meta for p in model.parameters()):
            tell_names(model.to(dtype) if dtype else model)  # no process makes it whole
        else:
            make(model, mesh.device, dtype=dtype)
        self.notes += narrow_products(self.model, cfg, mesh.device)
        self._compiled = Compiled(self.model, cfg, mesh) if cfg.compile != "none" else None
        self.notes += [self._compiled.note] if self._compiled else []
        self.sums = gradient_sums(self.model, mesh, cfg)
        self.optimizer = Optimizer(self.sums.rows, cfg)
        kinds: dict[Any, list[Row]] = {}
        for row in self.sums.rows:
            kinds.setdefault((row.others, row.counts), []).append(row)
        self._alike = list(kinds.values())  # rows whose other parts lie along the same axes
        self.average = Average(self.model, self.optimizer, self.sums, cfg)
        self.agreement = Agreement(self.sums, self.optimizer, mesh)
        each = cfg.clip_per == "sample"
        if each and mesh.model_parallel.size > 1:
            raise ConfigError(f"step.clip_per is sample, but {mesh.model_parallel.size} processes share a sample; set it to batch")
        stages = mesh["pipeline"].size
        if stages > 1 and act is None:
            raise ConfigError(f"mesh.pipeline is {stages}, but the step has no schedule of stages; give act=Pipeline(model, mesh)")
        self.act: Act = act if act is not None and stages > 1 else Whole(self.model, self.sums)
        self.forward_backward: Callable[[nn.Module, Any], dict[str, Value]] = self._each if each else self._forward_backward
        self._share = 1.0 / (cfg.accumulate * mesh["replicate"].size)
        self._count = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._first_bad = torch.full((2,), NEVER, dtype=torch.int64, device=mesh.device)  # by gradient, by own loss
        self._steps = 0
        self._capture: Capture | None = None
        if cfg.capture != "none":
            inside = self._iterate if cfg.capture == "whole" else self._gradients
            self._capture = Capture(inside, cfg.capture_shapes, graph, traced=cfg.compile == "none", tries=tries)

    def __call__(self, batch: Any, lr: float | None = None) -> dict[str, Value]:
        startup.begin("first step")
        self.optimizer.set_rate(self.cfg.lr if lr is None else lr)
        rng.seed_step(self._seed, self.mesh["replicate"].rank, self._steps)
        with span("step"):
            values = (self._capture or self._gradients)(batch)
            if self._capture is None or self.cfg.capture == "forward":
                self._update(values)
        self._steps += 1
        return values

    @property
    def count(self) -> int:
        """Steps made."""
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
        with span("gradients"):
            self.sums.zero()
            values = self.forward_backward(self.model, batch)
        with span("sums"):
            self.sums.finish()
        return values

    def _forward_backward(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        parts, words = split(batch, self.cfg.accumulate), {}
        if self.counts is not None:
            counted = torch.stack([self.counts(part) for part in parts]).sum(0)
            words = {"counts": all_reduce_(counted, self.mesh["replicate"]) * self._share}

        def measure(model: nn.Module, part: Any) -> tuple[Tensor, dict[str, Value]]:
            values = self.loss(model, part, **words)
            head = _loss_in(values)
            told = {name: _detach(value) for name, value in values.items()}
            return head[0] if isinstance(head, tuple) else head * self._share, told

        self.sums.last = False  # which one is the last, the act may know
        return _mean(self.act.backward(measure, parts, self.autocast))

    def _each(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """``_forward_backward`` for micro-batches of one sample, whose gradients are clipped before they are added."""
        assert self.cfg.clip is not None
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        every: list[dict[str, Value]] = []
        added: list[Tensor] = []
        for part in split(batch, self.cfg.accumulate):
            if (count := samples_in(part)) != 1:
                raise ConfigError(
                    f"step.clip_per is sample, but a micro-batch has {count}; set step.accumulate to the samples of a copy, "
                    f"{self.cfg.accumulate * count}"
                )
            with self.autocast():
                values = self.loss(model, part)
            head = _loss_in(values)
            values["loss"] = mean = head[0] / head[1] if isinstance(head, tuple) else head
            gradients = torch.autograd.grad(mean, parameters, allow_unused=True, materialize_grads=True)
            wide = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
            norm = torch.stack(torch._foreach_norm(wide, 2, dtype=self.optimizer.lr.dtype)).square().sum().sqrt()
            clipped = torch._foreach_mul(wide, self._share * (self.cfg.clip / (norm + 1e-6)).clamp(max=1.0))
            added = list(torch._foreach_add(added, clipped) if added else clipped)
            every.append({name: _detach(value) for name, value in values.items()})
        _Give.apply(added, *parameters).backward()
        return _mean(every)

    @torch.no_grad()
    def _update(self, values: dict[str, Value]) -> None:
        norm, scale, own = self._norm(), None, _loss_in(values)
        if isinstance(own, tuple):  # a sum: its gradient is divided by what was counted everywhere
            own, count = own
            count = count.to(norm, copy=True) if isinstance(count, Tensor) else norm.new_full((), count)
            scale = 1.0 / all_reduce_(count, self.mesh["replicate"]).clamp(min=torch.finfo(norm.dtype).tiny)
            norm = norm * scale
        if self.cfg.clip is not None:
            clip = (self.cfg.clip / (norm + 1e-6)).clamp(max=1.0)
            scale = clip if scale is None else scale * clip
        # Gradients are summed over the copies, so a NaN anywhere reaches all of them in the same step. From then on the weights
        # stay those of the last good step.
        bad = ~torch.stack((norm.isfinite(), own.isfinite().reshape(())))
        self._first_bad.copy_(torch.minimum(self._first_bad, torch.where(bad, self._count, NEVER)))
        skip = (self._first_bad[0] < NEVER).float()
        with span("update"):
            self.optimizer.step(scale, skip)
            self.sums.spread()
        self.average.update()
        self._count += 1

    def _norm(self) -> Tensor:
        """L2 norm of the whole gradient, over all parts of it."""
        squares = []
        for rows in self._alike:
            found = [gradient for row in rows if (gradient := row.gradient()) is not None]
            norms = torch._foreach_norm(found, 2, dtype=self.optimizer.lr.dtype) if found else [torch.zeros_like(self.optimizer.lr)]
            squares.append((rows[0], torch.stack(norms).square().sum()))
        return total(squares).sqrt()

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the weights that are evaluated (the average, where there is one), whole, under the names of the model."""
        with self.average.applied():
            # A DTensor is told by what it can do: importing its class takes 4,000 file operations.
            state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in self.model.state_dict().items()}
            return {name: tensor.detach().clone() for name, tensor in state.items()}

    @property
    def compiled(self) -> float:
        """Seconds that torch.compile has taken so far."""
        return self._compiled.seconds if self._compiled else 0.0

    def news(self) -> list[str]:
        """What there is to tell of the steps since the last call, on any process. All processes ask together."""
        told = self._compiled.news() if self._compiled else []
        if self._capture is None:
            return told
        made, self._capture.made = self._capture.made, []
        told += made
        if not self._capture.tries:
            return told
        own, self._capture.news = self._capture.news, []
        every = gather_distinct(own, self.mesh.peers)
        alike = len(every) == 1
        return every[0] + told if alike else [f"rank {n}: {text}" for n, texts in every.items() for text in texts] + told

    def first_bad(self, compare: bool = False) -> Tensor:
        """On the device, the least on any process: 0-based step with the first loss or gradient that is not finite, and, with
        ``compare``, the number of the first parameter that is not the same where it should be; otherwise huge numbers.   [2]"""
        unlike = self.agreement.first_unlike() if compare else torch.full_like(self._count, NEVER)
        return all_reduce_min(torch.stack((self._first_bad.amin(), unlike)), self.mesh.peers)

    def check(self, samples: Callable[[int], str] | None = None, first: int | None = None) -> None:
        """Raise DivergedError on every process when a loss or a gradient was not finite. Reads the device: between steps only.

        ``samples(step)`` names what this process read for a step; ``first`` is what ``first_bad`` gave, where it has been read.
        """
        first = int(self.first_bad()[0].item()) if first is None else first
        if first == NEVER:
            return
        bad, own = self._first_bad.tolist()
        seen = all_gather_object((bad, own, samples(own) if samples and own == first else ""), self.mesh.peers)
        ranks = [(rank, s[2]) for rank, s in enumerate(seen) if s[1] == first]
        what = "the loss" if ranks else "the gradient"
        where = " and ".join(f"rank {rank}" + (f" ({text})" if text else "") for rank, text in ranks) or "all ranks"
        skipped = any(s[0] == first for s in seen)
        kept = f"weights stay those of step {first}" if skipped else "its gradient is, and changed the weights"
        raise DivergedError(
            f"step {first + 1}: {what} is not finite on {where}; {kept} and nothing was saved since; "
            f"look at these samples, or lower step.lr (now {self.cfg.lr:g}), lengthen step.schedule.warmup or set step.clip",
            first + 1,
        )


class Whole:
    """What goes forward and backward through a model that one process calls as a whole. A schedule of stages has the same methods.

    ``around()`` is a context in which the model computes (autocast).
    """

    def __init__(self, model: nn.Module, sums: Any = None) -> None:
        self.model, self.sums, self.source = model, sums, 0

    def backward(
        self, measure: Callable[[nn.Module, Any], tuple[Tensor, dict[str, Value]]], parts: Sequence[Any], around: Callable[[], Any],
    ) -> list[dict[str, Value]]:  # fmt: skip
        """Leave the gradient of what ``measure(model, part)`` gives first, over all parts -> what it gives second, of each."""
        every: list[dict[str, Value]] = []
        for part in parts:
            self.sums.last = part is parts[-1]
            with around():
                scalar, values = measure(self.model, part)
            scalar.backward()
            every.append(values)
        return every

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any, around: Callable[[], Any]) -> Any:
        """``function(model, batch)``, or None on processes that do not have the outputs of the model."""
        with around():
            return function(self.model, batch)


class _Give(torch.autograd.Function):
    """A zero whose gradients are ``given``: they reach the hooks of parameters as if a backward pass had found them."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.given = given
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.given)


class MicroBatches(tuple):
    """A batch that comes as its micro-batches, for samples that cannot be cut along a first dim."""


def split(batch: Any, parts: int) -> list[Any]:
    """``parts`` equal pieces of every tensor of ``batch`` along its first dim. Raises DataError when they are not equal."""
    if isinstance(batch, MicroBatches):
        if len(batch) != parts:
            raise DataError(f"a batch comes as {len(batch)} micro-batches, step.accumulate is {parts}; give it as many")
        return list(batch)
    if parts == 1 or batch is None:  # what a batch may have, and this one has not
        return [batch] * parts
    if isinstance(batch, Tensor):
        if len(batch) % parts:
            raise DataError(
                f"a batch of {len(batch)} samples per process does not split into {parts} micro-batches (step.accumulate)"
            )
        return list(batch.chunk(parts))
    if isinstance(batch, dict):
        columns = {key: split(value, parts) for key, value in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(parts)]
    if isinstance(batch, (tuple, list)):
        rows = zip(*(split(value, parts) for value in batch))
        return [type(batch)(*row) if hasattr(batch, "_fields") else type(batch)(row) for row in rows]
    raise DataError(f"a batch holds a {type(batch).__name__}; expected tensors in tuples, named tuples or dicts")


def samples_in(batch: Any) -> int:
    """Number of samples of a batch: the first dim of its first tensor."""
    if isinstance(batch, MicroBatches):
        return sum(map(samples_in, batch))
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def _loss_in(values: dict[str, Value]) -> Value:
    head = values.get("loss")
    if not isinstance(head[0] if isinstance(head, tuple) else head, Tensor):
        found = f", 'loss' as a {type(head).__name__}" if "loss" in values else ""
        raise ConfigError(
            f"the loss function returned {sorted(values)}{found}; expected a scalar tensor named 'loss' among them, or (sum, count)"
        )
    if wrong := sorted(name for name, value in values.items() if finishes(value)):
        raise ConfigError(
            f"the loss function returned {', '.join(wrong)} as (sums, finish), which an evaluation can report, but no step; "
            "return a mean or (sum, count), or move it to the metric"
        )
    return head  # type: ignore[return-value]


def _detach(value: Value) -> Value:
    return (value[0].detach(), value[1]) if isinstance(value, tuple) else value.detach()


def _mean(every: list[dict[str, Value]]) -> dict[str, Value]:
    """What equal micro-batches measured together: the mean of means, the sum of pairs."""
    if len(every) == 1:
        return every[0]
    merged: dict[str, Value] = {}
    for name in every[0]:
        column = [values[name] for values in every]
        if isinstance(column[0], tuple):
            merged[name] = (sum(c[0] for c in column), sum(c[1] for c in column))  # type: ignore[assignment]
        else:
            merged[name] = torch.stack(column).mean(0)  # type: ignore[arg-type]
    return merged
