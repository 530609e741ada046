"""Pipeline parallelism: the blocks of a model are split into stages on several ranks, run by torch's schedules of micro-batches.

GPipe: Huang et al., NeurIPS 2019; with several stages per rank, breadth first: Lamy-Poirier, MLSys 2023. 1F1B and interleaved 1F1B:
Narayanan et al., SC21. Zero bubble and ZB-V, for two stages per rank: Qi et al., ICLR 2024.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.collectives import broadcast_object
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.parallel.model_call import ContextFactory, ModelCall, NoCallError, capture_call, resume_after
from hpcai.parallel.pipeline_stages import Stages

Schedule = Literal["gpipe", "1f1b", "zero-bubble", "zero-bubble-v"]
Values = dict[str, Any]  # name -> a tensor [], or a pair of tensors [], the second of which may be a float
LossFunction = Callable[[Any, Any], tuple[Tensor, Values]]

_SCHEDULES = {  # with one stage per rank, and with several
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"), "1f1b": ("Schedule1F1B", "ScheduleInterleaved1F1B"),
    "zero-bubble": ("ScheduleInterleavedZeroBubble",) * 2, "zero-bubble-v": ("", "ScheduleZBVZeroBubble"),
}  # fmt: skip
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # torch's format, such as 2F0
_MAX_SCHEDULES = 4  # schedules that are cached, with their buffers, by shape of micro-batches


class Pipeline:
    """Runs ``Stages`` of ``model`` along the mesh axis ``pipeline``, by a schedule over micro-batches.

    The forward pass must be a chain of ``first``, ``blocks`` and ``last``, each called with the output of the one before; code
    between them runs on every stage. One tensor is sent between stages, and replaces the first argument of the model's call there.
    All ranks of a replica get the same batch, and compute the other arguments themselves. Losses and metrics are computed on rank
    ``source``, which has the last stage. Along an axis of size 1 nothing is split. Raises ConfigError if the model cannot be split.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, blocks: str = "blocks", first: Sequence[str] = ("embedding",),
        last: Sequence[str] = ("norm", "head"), schedule: Schedule = "1f1b", per_rank: int = 1, sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        if per_rank != 2 and schedule == "zero-bubble-v":
            raise ConfigError(f"pipeline: {schedule} needs 2 stages per rank, not {per_rank}; set per_rank to 2")
        self.model, self.axis, self.device, self.schedule = model, mesh["pipeline"], mesh.device, schedule
        self.stages = Stages(model, mesh, blocks, first, last, per_rank, schedule == "zero-bubble-v", sizes)
        self.rank_of, self.count = self.stages.rank_of, len(self.stages.rank_of)
        self.source = self.rank_of[-1]
        self.is_last = self.source == self.axis.rank
        self._output_specs: dict[Any, list[_TensorSpec]] = {}  # by shapes of the call
        self._schedules: dict[Any, Any] = {}
        self._value_specs: list[_ValueSpec] = []
        self._pending_send: Any = None  # the last send of forward, and its tensor
        self._step = _Step()

    # ---- training

    def backward(self, loss_fn: LossFunction, microbatches: Sequence[Any], context: ContextFactory) -> list[Values]:
        """Accumulate gradients of the first output of ``loss_fn(model, microbatch)`` over all micro-batches, and return its second
        output, detached, for each, on all stages.

        ``loss_fn`` is pure and calls its model once. Every stage runs it under ``context()`` up to that call, the last stage to its
        end. Raises ConfigError if it does not, or if there are too few micro-batches or several shapes.
        """
        calls = [capture_call(loss_fn, self.model, part, context) for part in microbatches]
        if len(shapes := {call.shapes for call in calls}) > 1:
            raise ConfigError(f"a pipeline needs micro-batches of one shape, but a step calls the model with {len(shapes)}")
        if self.schedule.startswith("zero") and calls[0].has_grad_args:
            raise ConfigError(
                "the loss calls the model with an argument other than the first that requires gradients, which "
                f"{self.schedule} cannot compute apart from those of the hidden state; choose the schedule 1f1b or gpipe"
            )
        key = len(microbatches), *shapes
        if key not in self._schedules:
            specs = self._trace_specs(loss_fn, microbatches[0], calls[0], context)
            while len(self._schedules) >= _MAX_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._build_schedule(len(microbatches), specs)
        self._step = _Step(loss_fn, microbatches, calls, context, [{} for _ in microbatches])
        numbers = torch.arange(len(microbatches))  # torch splits these indices in place of the micro-batches
        self._schedules[key].step(number=numbers, target=numbers)
        values, self._step = self._step.values, _Step()
        return self._broadcast_values(values)

    def stage_runner(self, loss_fn: LossFunction, microbatch: Any, context: ContextFactory) -> Callable[[int, Any], Tensor]:
        """Return a function that runs one of this rank's stages on a hidden state (the first: None), without a schedule."""
        self._step = _Step(loss_fn, [microbatch], [capture_call(loss_fn, self.model, microbatch, context)], context, [{}])
        return lambda stage, hidden: self._run_microbatch(stage, 0, hidden)

    def order(self, microbatches: int) -> list[list[tuple[str, int, int]]]:
        """Return the actions (kind, stage, micro-batch) of each rank in order. Kinds are F (forward), B (backward), I (gradients of
        inputs) and W (gradients of weights). Raises ConfigError as ``backward`` does."""
        schedule = self._build_schedule(microbatches, [_TensorSpec((1,), torch.float32)] * self.count)
        if self.schedule == "gpipe" and self.count == self.axis.size:  # torch has no list of actions for these two
            return [[(kind, rank, n) for kind in "FB" for n in range(microbatches)] for rank in range(self.count)]
        if self.schedule == "1f1b" and self.count == self.axis.size:
            warmup = [min(self.count - 1 - rank, microbatches) for rank in range(self.count)]
            return [
                [("F", rank, n) for n in range(first)]
                + [(kind, rank, n + first * (kind == "F")) for n in range(microbatches - first) for kind in "FB"]
                + [("B", rank, n) for n in range(microbatches - first, microbatches)]
                for rank, first in enumerate(warmup)
            ]
        actions = [[_ACTION.fullmatch(str(action)) for action in schedule.pipeline_order[rank]] for rank in range(self.axis.size)]
        return [[(match[2], int(match[1]), int(match[3])) for match in matches if match] for matches in actions]

    def _run_stage(self, stage: int, call: ModelCall, hidden: Any, context: ContextFactory) -> Any:
        with context():
            output = self.stages.module(stage)(hidden if stage else call.args[0], *call.args[1:], **call.kwargs)
        if stage == self.count - 1 or not isinstance(output, Tensor):
            return output
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()

    def _run_microbatch(self, stage: int, number: int, hidden: Any) -> Tensor:
        """Run one stage on one micro-batch; the last stage returns the loss [1]."""
        step = self._step
        call = step.calls[number]
        if call.has_grad_args and stage != self.stages.local_stages[0]:  # each stage needs its own graph
            call = capture_call(step.loss_fn, self.model, step.microbatches[number], step.context)
        output = self._run_stage(stage, call, hidden, step.context)
        if stage < self.count - 1:
            return output
        scalar, step.values[number] = resume_after(step.loss_fn, self.model, step.microbatches[number], step.context, output)
        return torch.stack((scalar,))  # not a view, which torch could not detach in place

    def _build_schedule(self, microbatches: int, specs: list["_TensorSpec"]) -> Any:
        """Construct torch's schedule for stages whose outputs have these specs."""
        from torch.distributed import fsdp, pipelining

        if self.schedule.startswith("zero") and isinstance(self.model, fsdp.FSDPModule):
            fault = f"step.shard is weights, but {self.schedule} needs weights after the backward pass that frees them"
            raise ConfigError(f"{fault}; set step.shard=optimizer, or choose the schedule 1f1b or gpipe")
        name = _SCHEDULES[self.schedule][self.count > self.axis.size]
        stages = [
            pipelining.PipelineStage(
                _Stage(self, stage), stage, self.count, self.device, group=self.axis.group,
                input_args=(specs[stage - 1].empty(),) if stage else (), output_args=(specs[stage].empty(),),
            )
            for stage in self.stages.local_stages
        ]  # fmt: skip
        for stage in stages:
            _skip_sends_to_self(stage)
        try:
            schedule_class: Any = getattr(pipelining, name)
            is_single = issubclass(schedule_class, pipelining.schedules.PipelineScheduleSingle)
            return schedule_class(stages[0] if is_single else stages, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False)
        except ValueError as error:
            raise ConfigError(
                f"step.accumulate is {microbatches}, which {name} does not support with {self.count} stages on "
                f"{self.axis.size} ranks ({error}); set it to a multiple of {self.axis.size}"
            ) from None

    # ---- evaluation

    @torch.no_grad()
    def forward(self, function: Callable[[Any, Any], Any], batch: Any, context: ContextFactory) -> Any:
        """Return ``function(model, batch)`` without gradients on the last stage, and None on others, which do not wait for it.
        ``function`` must be pure and call its model once; the result of one that does not call it is returned on all stages."""
        try:
            call = capture_call(function, self.model, batch, context)
        except NoCallError as finished:
            return finished.result
        output = self._forward_stages(call, context, self._output_specs.setdefault(call.shapes, []))
        if self.is_last:
            return resume_after(function, self.model, batch, context, output)
        return None

    def _forward_stages(self, call: ModelCall, context: ContextFactory, specs: list["_TensorSpec"]) -> Any:
        """Return the model's output on the last stage. Empty ``specs`` are filled: each stage broadcasts the spec of its output."""
        is_first_call, hidden = not specs, torch.empty(0)
        for stage, rank in enumerate(self.rank_of):
            if rank == self.axis.rank:
                if stage and self.rank_of[stage - 1] != rank:
                    hidden = torch.empty(specs[stage - 1].shape, dtype=specs[stage - 1].dtype, device=self.device)
                    torch_dist.recv(hidden, group=self.axis.group, group_src=self.rank_of[stage - 1])
                hidden = self._run_stage(stage, call, hidden, context)
            if stage < self.count - 1:
                if is_first_call:
                    spec = broadcast_object(_TensorSpec.of(hidden), self.axis, rank)
                    if isinstance(spec, str):
                        raise ConfigError(f"stage {stage} of a pipeline returns a {spec}, expected one tensor: split elsewhere")
                    specs.append(spec)
                if rank == self.axis.rank and self.rank_of[stage + 1] != rank:
                    if self._pending_send is not None:
                        self._pending_send[0].wait()
                    work: Any = torch_dist.isend(hidden, group=self.axis.group, group_dst=self.rank_of[stage + 1])
                    self._pending_send = work, hidden  # the tensor must live as long
        return hidden if self.is_last else None

    # ---- values that all stages need

    @torch.no_grad()
    def _trace_specs(self, loss_fn: LossFunction, microbatch: Any, call: ModelCall, context: ContextFactory) -> list["_TensorSpec"]:
        """Return the specs of all stage outputs, by one forward pass without side effects. The first call also sets names and
        dtypes of the values that the loss returns."""
        specs: list[_TensorSpec] = []
        result: Any = None
        with _preserve_state(self.model, self.device):
            output = self._forward_stages(call, context, specs)
            if self.is_last:
                try:
                    scalar, values = resume_after(loss_fn, self.model, microbatch, context, output)
                    result = _TensorSpec((1,), scalar.dtype), [_ValueSpec.of(name, value) for name, value in values.items()]
                except ConfigError as error:
                    result = str(error)
        result = broadcast_object(result, self.axis, self.rank_of[-1])
        if isinstance(result, str):
            raise ConfigError(result)
        if not self._value_specs:
            self._value_specs = result[1]
        return [*specs, result[0]]

    @torch.no_grad()
    def _broadcast_values(self, values: list[Values]) -> list[Values]:
        """Broadcast the values of the last stage to all stages, in one collective."""
        if self.is_last:
            if any([_ValueSpec.of(*item) for item in entry.items()] != self._value_specs for entry in values):
                names = ", ".join(spec.name for spec in self._value_specs)
                raise ConfigError(f"a pipeline needs a loss that returns the same values in every step; the first returned {names}")
            numbers = [number for entry in values for value in entry.values() for number in _as_tuple(value)]
            table = torch.stack([torch.zeros((), dtype=torch.float64, device=self.device).add_(number) for number in numbers])
        else:
            size = len(values) * sum(len(spec.dtypes) for spec in self._value_specs)
            table = torch.empty(size, dtype=torch.float64, device=self.device)
        torch_dist.broadcast(table, group=self.axis.group, group_src=self.rank_of[-1])
        if self.is_last:
            return values
        rows = iter(table)
        return [{spec.name: spec.take(rows) for spec in self._value_specs} for _ in values]


class _Stage(nn.Module):
    """The module that torch's schedules call with the hidden state, except on the first stage, and the micro-batch index [1]."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self._run_microbatch = partial(pipeline._run_microbatch, stage)
        # No submodule: torch would gather and free the weights of one that is fully sharded, which does so itself.
        self.parameters = pipeline.stages.module(stage).parameters  # type: ignore[method-assign]

    def forward(self, *hidden: Tensor, number: Tensor) -> Tensor:
        return self._run_microbatch(int(number), hidden[0] if hidden else None)


@dataclass
class _Step:
    """The current micro-batches, which stages look up by index."""

    loss_fn: Any = None
    microbatches: Sequence[Any] = ()
    calls: Sequence[ModelCall] = ()
    context: Any = None
    values: list[Values] = field(default_factory=list)


@dataclass
class _TensorSpec:
    """Shape and dtype of the output of a stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, output: Any) -> "_TensorSpec | str":
        return cls(tuple(output.shape), output.dtype) if isinstance(output, Tensor) else type(output).__name__

    def empty(self) -> Tensor:
        """Return a meta tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point)


@dataclass
class _ValueSpec:
    """A value that a loss returns: the dtypes of its one or two elements (None: a float)."""

    name: str
    dtypes: tuple[torch.dtype | None, ...]
    is_pair: bool

    @classmethod
    def of(cls, name: str, value: Any) -> "_ValueSpec":
        dtypes = tuple(number.dtype if isinstance(number, Tensor) else None for number in _as_tuple(value))
        return cls(name, dtypes, isinstance(value, tuple))

    def take(self, numbers: Iterator[Tensor]) -> Any:
        value = tuple(next(numbers).to(dtype or torch.float64) for dtype in self.dtypes)
        return value if self.is_pair else value[0]


def _skip_sends_to_self(stage: Any) -> None:
    """Remove sends to the own rank, which gloo cannot do: a stage of torch < 2.13 sends to each neighbour before its first step."""
    if first := getattr(stage, "_get_init_p2p_neighbors_ops", None):
        stage._get_init_p2p_neighbors_ops = lambda: [op for op in first() if op.group_peer != stage.group_rank]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@contextmanager
def _preserve_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: restore buffers and random state afterwards."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in saved:
        buffer.data.copy_(value)  # .data: autograd need not see that it changed and was restored
