"""A model whose blocks lie on several ranks, one behind another: micro-batches pass through them as torch's schedules say.

GPipe: Huang et al., NeurIPS 2019; with several stages on a rank, breadth first: Lamy-Poirier, MLSys 2023. 1F1B and its interleaved
form: Narayanan et al., SC21. Zero bubble and its V form, for two stages on a rank: Qi et al., ICLR 2024.
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
from hpcai.parallel.calls import Around, Call, after, call_of
from hpcai.parallel.stages import Stages

Schedule = Literal["gpipe", "1f1b", "zero-bubble", "zero-bubble-v"]
Values = dict[str, Any]  # of each name a tensor [], or a pair of tensors [] of which the second may be a float
Measure = Callable[[Any, Any], tuple[Tensor, Values]]

_SCHEDULES = {  # with one stage on a rank, and with several
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"), "1f1b": ("Schedule1F1B", "ScheduleInterleaved1F1B"),
    "zero-bubble": ("ScheduleInterleavedZeroBubble",) * 2, "zero-bubble-v": ("", "ScheduleZBVZeroBubble"),
}  # fmt: skip
_PASS = re.compile(r"(\d+)([FBIW])(\d+)")  # as torch writes it: 2F0
_KEPT = 4  # shapes of micro-batches whose schedules keep their buffers


class Pipeline:
    """``Stages`` of ``model`` along the axis ``pipeline`` of ``mesh``, which work on micro-batches as ``schedule`` says.

    The model's forward pass is a chain: ``first``, ``blocks``, ``last``, each called with what the one before returned, which
    between stages is one tensor; what it does between them it does on every stage. On all stages but the first that tensor takes
    the place of the first argument of the model's call. All ranks of a copy get the same batch, and so find the other arguments
    themselves. ``source``: the rank that has the last stage, where losses and metrics are computed. Raises ConfigError for what
    cannot be divided like this. Along an axis of size 1 nothing is cut, and a step goes through the model as a whole.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, blocks: str = "blocks", first: Sequence[str] = ("embedding",),
        last: Sequence[str] = ("norm", "head"), schedule: Schedule = "1f1b", per_rank: int = 1, sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        if per_rank != 2 and schedule == "zero-bubble-v":
            raise ConfigError(f"pipeline: {schedule} has 2 stages on each rank, not {per_rank}; set per_rank to 2")
        self.model, self.axis, self.device, self.schedule = model, mesh["pipeline"], mesh.device, schedule
        self.stages = Stages(model, mesh, blocks, first, last, per_rank, schedule == "zero-bubble-v", sizes)
        self.rank_of, self.count = self.stages.rank_of, len(self.stages.rank_of)
        self.source = self.rank_of[-1]
        self.is_last = self.source == self.axis.rank
        self._known: dict[Any, list[_Kind]] = {}  # what each stage sends, by what the model is called with
        self._schedules: dict[Any, Any] = {}
        self._values: list[_Value] = []
        self._sent: Any = None  # what forward sent last, and the tensor
        self._step = _Step()

    # ---- training

    def backward(self, measure: Measure, parts: Sequence[Any], around: Around) -> list[Values]:
        """Add the gradients of what ``measure(model, part)`` gives first, over all micro-batches ``parts``, to those of the
        parameters -> what it gives besides, detached, for each part, on all stages.

        ``measure`` is a pure function that calls its model once. Every stage calls it up to there, the last one through to its
        end, within ``around()``. Raises ConfigError where it does otherwise, or where parts are too few or have several shapes.
        """
        calls = [call_of(measure, self.model, part, around) for part in parts]
        if len(shapes := {call.shapes for call in calls}) > 1:
            raise ConfigError(f"a pipeline needs micro-batches of one shape; in one step the model is called with {len(shapes)}")
        if self.schedule.startswith("zero") and calls[0].depends:
            raise ConfigError(
                f"the loss gives the model other arguments than the first that depend on weights, whose gradients {self.schedule} "
                "cannot find apart from those of the hidden state; choose the schedule 1f1b or gpipe"
            )
        key = len(parts), *shapes
        if key not in self._schedules:
            kinds = self._learned(measure, parts[0], calls[0], around)
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._scheduled(len(parts), kinds)
        self._step = _Step(measure, parts, calls, around, [{} for _ in parts])
        numbers = torch.arange(len(parts))  # torch cuts them into micro-batches, in place of those
        self._schedules[key].step(number=numbers, target=numbers)
        every, self._step = self._step.values, _Step()
        return self._told(every)

    def alone(self, measure: Measure, part: Any, around: Around) -> Callable[[int, Any], Tensor]:
        """``part`` without a schedule: what each of this rank's stages makes of a hidden state (the first: of none)."""
        self._step = _Step(measure, [part], [call_of(measure, self.model, part, around)], around, [{}])
        return lambda stage, hidden: self._micro(stage, 0, hidden)

    def order(self, parts: int) -> list[list[tuple[str, int, int]]]:
        """What each rank does with ``parts`` micro-batches, one after another: a pass, its stage, its micro-batch. Passes are F
        (forward) and B (backward), or I and W (gradients of inputs and of weights apart). Raises ConfigError as ``backward``."""
        made = self._scheduled(parts, [_Kind((1,), torch.float32)] * self.count)
        if self.schedule == "gpipe" and self.count == self.axis.size:  # torch's orders of these two are drawings
            return [[(kind, rank, n) for kind in "FB" for n in range(parts)] for rank in range(self.count)]
        if self.schedule == "1f1b" and self.count == self.axis.size:
            ahead = [min(self.count - 1 - rank, parts) for rank in range(self.count)]
            return [
                [("F", rank, n) for n in range(first)]
                + [(kind, rank, n + first * (kind == "F")) for n in range(parts - first) for kind in "FB"]
                + [("B", rank, n) for n in range(parts - first, parts)]
                for rank, first in enumerate(ahead)
            ]
        every = [[_PASS.fullmatch(str(one)) for one in made.pipeline_order[rank]] for rank in range(self.axis.size)]
        return [[(one[2], int(one[1]), int(one[3])) for one in own if one] for own in every]

    def _run(self, stage: int, call: Call, hidden: Any, around: Around) -> Any:
        with around():
            output = self.stages.module(stage)(hidden if stage else call.args[0], *call.args[1:], **call.words)
        if stage == self.count - 1 or not isinstance(output, Tensor):
            return output
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()

    def _micro(self, stage: int, number: int, hidden: Any) -> Tensor:
        """One stage on one micro-batch; the last one gives the scalar whose gradient is wanted.   [1]"""
        step = self._step
        call = step.calls[number]
        if call.depends and stage != self.stages.own[0]:  # each stage passes backward through a graph of its own
            call = call_of(step.measure, self.model, step.parts[number], step.around)
        output = self._run(stage, call, hidden, step.around)
        if stage < self.count - 1:
            return output
        scalar, step.values[number] = after(step.measure, self.model, step.parts[number], step.around, output)
        return torch.stack((scalar,))  # not a view, which torch could not detach in place

    def _scheduled(self, parts: int, kinds: list["_Kind"]) -> Any:
        """torch's schedule of ``parts`` micro-batches, for whose stages ``kinds`` says what each sends."""
        from torch.distributed import fsdp, pipelining

        if self.schedule.startswith("zero") and isinstance(self.model, fsdp.FSDPModule):
            raise ConfigError(
                f"step.shard is weights, but {self.schedule} needs weights after the backward pass that gives them back; set "
                "step.shard=optimizer, or choose the schedule 1f1b or gpipe"
            )
        name = _SCHEDULES[self.schedule][self.count > self.axis.size]
        stages = [
            pipelining.PipelineStage(
                _Stage(self, stage), stage, self.count, self.device, group=self.axis.group,
                input_args=(kinds[stage - 1].example(),) if stage else (), output_args=(kinds[stage].example(),),
            )
            for stage in self.stages.own
        ]  # fmt: skip
        for each in stages:
            _skip_sends_to_self(each)
        try:
            made: Any = getattr(pipelining, name)
            one = issubclass(made, pipelining.schedules.PipelineScheduleSingle)
            return made(stages[0] if one else stages, parts, loss_fn=_given, scale_grads=False)
        except ValueError as error:
            raise ConfigError(
                f"step.accumulate is {parts}, which {name} cannot do with {self.count} stages on {self.axis.size} ranks ({error}); "
                f"set it to a multiple of {self.axis.size}"
            ) from None

    # ---- evaluation

    @torch.no_grad()
    def forward(self, function: Callable[[Any, Any], Any], batch: Any, around: Around) -> Any:
        """What ``function(model, batch)`` returns, without gradients, on ranks of the last stage; None on others, which go on
        meanwhile. ``function`` calls its model once, and is else as ``measure``."""
        call = call_of(function, self.model, batch, around)
        output = self._through(call, around, self._known.setdefault(call.shapes, []))
        if self.is_last:
            return after(function, self.model, batch, around, output)
        return None

    def _through(self, call: Call, around: Around, kinds: list["_Kind"]) -> Any:
        """The model's output, on the last stage. Where ``kinds`` is empty, what each stage sends is agreed on the way."""
        new, hidden = not kinds, torch.empty(0)
        for stage, rank in enumerate(self.rank_of):
            if rank == self.axis.rank:
                if stage and self.rank_of[stage - 1] != rank:
                    hidden = torch.empty(kinds[stage - 1].size, dtype=kinds[stage - 1].dtype, device=self.device)
                    torch_dist.recv(hidden, group=self.axis.group, group_src=self.rank_of[stage - 1])
                hidden = self._run(stage, call, hidden, around)
            if stage < self.count - 1:
                if new:
                    found = broadcast_object(_Kind.of(hidden), self.axis, rank)
                    if isinstance(found, str):
                        raise ConfigError(f"stage {stage} of a pipeline gives a {found}, but one tensor can be sent: cut elsewhere")
                    kinds.append(found)
                if rank == self.axis.rank and self.rank_of[stage + 1] != rank:
                    if self._sent is not None:
                        self._sent[0].wait()
                    work: Any = torch_dist.isend(hidden, group=self.axis.group, group_dst=self.rank_of[stage + 1])
                    self._sent = work, hidden  # which has to stay until then
        return hidden if self.is_last else None

    # ---- what all stages know

    @torch.no_grad()
    def _learned(self, measure: Measure, part: Any, call: Call, around: Around) -> list["_Kind"]:
        """What each stage sends, and the last one gives, for micro-batches like ``part``: found by one forward pass, which leaves
        no trace. Names and types of values are those of the first."""
        kinds: list[_Kind] = []
        found: Any = None
        with _untouched(self.model, self.device):
            output = self._through(call, around, kinds)
            if self.is_last:
                try:
                    scalar, values = after(measure, self.model, part, around, output)
                    found = _Kind((1,), scalar.dtype), [_Value.of(name, value) for name, value in values.items()]
                except ConfigError as error:
                    found = str(error)
        found = broadcast_object(found, self.axis, self.rank_of[-1])
        if isinstance(found, str):
            raise ConfigError(found)
        if not self._values:
            self._values = found[1]
        return [*kinds, found[0]]

    @torch.no_grad()
    def _told(self, every: list[Values]) -> list[Values]:
        """``every`` of the last stage, on all of them, in one message."""
        if self.is_last:
            if any([_Value.of(*each) for each in values.items()] != self._values for values in every):
                names = ", ".join(value.name for value in self._values)
                raise ConfigError(f"a pipeline needs a loss that gives the same values in every step, at first {names}")
            numbers = [number for values in every for value in values.values() for number in _flat(value)]
            table = torch.stack([torch.zeros((), dtype=torch.float64, device=self.device).add_(number) for number in numbers])
        else:
            table = torch.empty(len(every) * sum(len(v.dtypes) for v in self._values), dtype=torch.float64, device=self.device)
        torch_dist.broadcast(table, group=self.axis.group, group_src=self.rank_of[-1])
        if self.is_last:
            return every
        rows = iter(table)
        return [{value.name: value.made(rows) for value in self._values} for _ in every]


class _Stage(nn.Module):
    """What torch's schedules call: with the hidden state, but for the first stage, and the number of the micro-batch.   [1]"""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self._act = partial(pipeline._micro, stage)
        # No submodule: torch would gather and give back the weights of one that is fully sharded, which does so by itself.
        self.parameters = pipeline.stages.module(stage).parameters  # type: ignore[method-assign]

    def forward(self, *hidden: Tensor, number: Tensor) -> Tensor:
        return self._act(int(number), hidden[0] if hidden else None)


@dataclass
class _Step:
    """The micro-batches under way, which stages look up by number."""

    measure: Any = None
    parts: Sequence[Any] = ()
    calls: Sequence[Call] = ()
    around: Any = None
    values: list[Values] = field(default_factory=list)


@dataclass
class _Kind:
    """What a stage sends."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, output: Any) -> "_Kind | str":
        return cls(tuple(output.shape), output.dtype) if isinstance(output, Tensor) else type(output).__name__

    def example(self) -> Tensor:
        """A tensor without numbers."""
        return torch.empty(self.size, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point)


@dataclass
class _Value:
    """A value that a loss gives: the types of its one or two numbers (None: a float)."""

    name: str
    dtypes: tuple[torch.dtype | None, ...]
    pair: bool

    @classmethod
    def of(cls, name: str, value: Any) -> "_Value":
        dtypes = tuple(number.dtype if isinstance(number, Tensor) else None for number in _flat(value))
        return cls(name, dtypes, isinstance(value, tuple))

    def made(self, numbers: Iterator[Tensor]) -> Any:
        found = tuple(next(numbers).to(dtype or torch.float64) for dtype in self.dtypes)
        return found if self.pair else found[0]


def _given(output: Tensor, number: Tensor) -> Tensor:
    return output


def _skip_sends_to_self(stage: Any) -> None:
    """Before its first step a stage of torch < 2.13 sends to each neighbour, also to one on its own rank, which gloo cannot."""
    if first := getattr(stage, "_get_init_p2p_neighbors_ops", None):
        stage._get_init_p2p_neighbors_ops = lambda: [op for op in first() if op.group_peer != stage.group_rank]


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, forward passes leave buffers and random numbers as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in kept:
        buffer.data.copy_(value)  # which does not tell autograd, for which it is what it was
