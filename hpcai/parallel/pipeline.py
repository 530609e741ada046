"""A model whose blocks lie on several ranks, one behind another: micro-batches pass through them as torch's schedules say.

GPipe: Huang et al., NeurIPS 2019; 1F1B and its interleaved form: Narayanan et al., "Efficient large-scale language model training on
GPU clusters", SC21; breadth first: Lamy-Poirier, MLSys 2023; zero bubble: Qi et al., ICLR 2024. The model stays one class with the
names that it has on one process: what a rank does not hold is replaced by modules that pass the hidden state on.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.collect import agree
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.parallel.rows import set_apart

Schedule = Literal["gpipe", "1f1b", "zero-bubble", "zero-bubble-v"]
Values = dict[str, Any]  # of each name a tensor [], or a pair of tensors [] of which the second may be a float
Measure = Callable[[Any, Any], tuple[Tensor, Values]]
Around = Callable[[], AbstractContextManager[Any]]

_SCHEDULES = {  # with one stage on a rank, and with several
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"), "1f1b": ("Schedule1F1B", "ScheduleInterleaved1F1B"),
    "zero-bubble": ("ScheduleInterleavedZeroBubble",) * 2, "zero-bubble-v": ("", "ScheduleZBVZeroBubble"),
}  # fmt: skip
_KEPT = 4  # shapes of micro-batches whose schedules keep their buffers


class Passed(nn.Identity):
    """In place of a module that another stage holds: gives its first argument back."""

    def forward(self, hidden: Any, *others: Any, **words: Any) -> Any:
        return hidden


class Pipeline:
    """The stages of ``model`` along the axis ``pipeline`` of ``mesh``; ``model`` is cut in place.

    Its forward pass is a chain: modules ``first``, the list ``blocks``, modules ``last``, each called with what the one before
    returned, which between stages is one tensor. On every stage but the first one that tensor takes the place of the first argument
    of the model's call; all ranks of a copy get the same batch, and so have the other arguments themselves. What is in none of these
    modules is on all stages; its gradients, and those of a weight that several stages share, are added over the stages that hold it.

    ``per_rank`` stages are on each rank, one for every turn around the axis (``zero-bubble-v``: there and back). ``sizes``: the
    blocks of each stage; by default as even as can be, the last stage and then the first one having the fewest. The rank of the
    last stage, ``is_last``, is where losses and metrics are computed. Raises ConfigError for what cannot be divided like this.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, blocks: str = "blocks", first: Sequence[str] = ("embedding",),
        last: Sequence[str] = ("norm", "head"), schedule: Schedule = "1f1b", per_rank: int = 1, sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.axis, self.device, self.kind = model, mesh["pipeline"], mesh.device, schedule
        found = dict(model.named_modules(remove_duplicate=False))
        if unknown := [name for name in (blocks, *first, *last) if name not in found]:
            raise ConfigError(f"pipeline: {type(model).__name__} has no module {unknown[0]!r}; it has {', '.join(found)[2:200]}")
        if not _SCHEDULES[schedule][per_rank > 1] or (schedule == "zero-bubble-v" and per_rank != 2):
            raise ConfigError(f"pipeline: {schedule} needs 2 stages per rank, not {per_rank}; set per_rank to 2")
        numbers = [name for name, _ in found[blocks].named_children()]
        self.stages = per_rank * self.axis.size if self.axis.size > 1 else 1
        sizes = _sizes(sizes, len(numbers), self.stages, bool(first), bool(last))
        ends = [0, *accumulate(sizes)]
        self._units = [[f"{blocks}.{number}" for number in numbers[a:b]] for a, b in zip(ends, ends[1:])]
        self._units[0][:0], self._units[-1][len(self._units[-1]) :] = first, last
        self.rank_of = [self._rank_of(stage) for stage in range(self.stages)]
        self.is_last = self.rank_of[-1] == self.axis.rank
        if self.stages > 1:
            self._cut(mesh)
        self._modules: dict[int, nn.Module] = {}  # by stage, those of this rank
        self._known: dict[Any, list[_Kind]] = {}  # what each stage sends, by what the model is called with
        self._schedules: dict[Any, Any] = {}
        self._values: list[_Value] = []
        self._sent: Any = None  # by forward, and under way
        self._step = _Step()

    def _rank_of(self, stage: int) -> int:
        turn, rank = divmod(stage, self.axis.size)
        return self.axis.size - 1 - rank if self.kind == "zero-bubble-v" and turn % 2 else rank

    def _cut(self, mesh: Mesh) -> None:
        """Leave of the model what this rank holds, and of other stages the names of the weights that it shares with them."""
        stage_of = {unit: stage for stage, units in enumerate(self._units) for unit in units}
        holders: dict[Tensor, set[int]] = {}
        every = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)]
        for name, tensor in every:
            units = [unit for unit in stage_of if name.startswith(f"{unit}.")]
            ranks = {self.rank_of[stage_of[unit]] for unit in units} or set(range(self.axis.size))
            holders.setdefault(tensor, set()).update(ranks)
        held = {tensor for tensor, ranks in holders.items() if self.axis.rank in ranks}
        for unit, stage in stage_of.items():
            if self.rank_of[stage] != self.axis.rank:
                parent, _, name = unit.rpartition(".")
                self.model.get_submodule(parent)._modules[name] = _names(self.model.get_submodule(unit), held) or Passed()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            ranks = sorted(holders[tensor])
            everywhere = len(ranks) == self.axis.size
            if not everywhere:
                set_apart(tensor, self.axis)
            if len(ranks) > 1 and isinstance(tensor, nn.Parameter):
                shared = self.axis if everywhere else mesh.some("pipeline", ranks)
                tensor.sum_axes = (*getattr(tensor, "sum_axes", ()), shared)  # type: ignore[attr-defined]

    # ---- training

    def backward(self, measure: Measure, parts: Sequence[Any], around: Around) -> list[Values]:
        """Add the gradients of what ``measure(model, part)`` gives first, over all micro-batches ``parts``, to those of the
        parameters -> what it gives besides, detached, for each part, on all stages.

        ``measure`` is a pure function that calls its model once. Every stage calls it up to there, the last one through to its
        end, within ``around()``. Raises ConfigError where it does otherwise, or where parts are too few or have several shapes.
        """
        if self.stages == 1:
            return [_alone(measure, self.model, part, around) for part in parts]
        calls = [self._call(measure, part, around) for part in parts]
        shapes = {_shapes(call) for call in calls}
        if len(shapes) > 1:
            raise ConfigError(f"a pipeline needs micro-batches of one shape, but the model is called with {len(shapes)} in one step")
        if self.kind.startswith("zero") and any(tensor.requires_grad for tensor in _tensors((calls[0].args[1:], calls[0].words))):
            raise ConfigError(
                f"{_name(measure)} gives the model more arguments than the first that depend on weights, whose gradients "
                f"{self.kind} cannot find by themselves; choose the schedule 1f1b or gpipe"
            )
        key = len(parts), *shapes
        if key not in self._schedules:
            kinds = self._learned(measure, parts[0], calls[0], around)
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._scheduled(len(parts), kinds)
        self._wait()
        self._step = _Step(measure, parts, calls, around, [{} for _ in parts])
        numbers = torch.arange(len(parts))  # torch cuts them into micro-batches, in place of those
        self._schedules[key].step(number=numbers, target=numbers)
        every, self._step = self._step.values, _Step()
        return self._told(every)

    def _call(self, function: Callable[..., Any], part: Any, around: Around) -> "_Call":
        """What ``function`` calls its model with."""

        def caught(*args: Any, **words: Any) -> Any:
            raise _Called(_Call(args, words))

        try:
            with around():
                function(_StandIn(self.model, caught), part)
        except _Called as found:
            if not found.call.args:
                raise ConfigError(f"{_name(function)} gives the model no positional argument; a pipeline needs one") from None
            return found.call
        raise ConfigError(f"{_name(function)} never calls the model; a pipeline needs a function that calls it once")

    def _last(self, function: Callable[..., Any], part: Any, output: Any) -> Any:
        """What ``function`` makes of the model's ``output``."""
        calls = 0

        def given(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigError(f"{_name(function)} calls the model more than once; a pipeline needs one call")
            return output

        return function(_StandIn(self.model, given), part)

    def _module(self, stage: int) -> nn.Module:
        """The model as it is on one of this rank's stages: the same parameters, without those of its other stages."""
        if stage not in self._modules:
            others = {unit for other, units in enumerate(self._units) if other != stage for unit in units}
            self._modules[stage] = _without(self.model, others)
        return self._modules[stage]

    def _run(self, stage: int, call: "_Call", hidden: Any, around: Around) -> Any:
        with around():
            output = self._module(stage)(hidden if stage else call.args[0], *call.args[1:], **call.words)
        if stage == self.stages - 1:
            return output
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"stage {stage} of {self.stages} of a pipeline gives a {type(output).__name__}; stages send one tensor each: cut the "
                "model elsewhere"
            )
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()

    def _micro(self, stage: int, number: int, hidden: Any) -> Tensor:
        """One stage on one micro-batch; the last one gives the scalar whose gradient is wanted.   [1]"""
        step = self._step
        output = self._run(stage, step.calls[number], hidden, step.around)
        if stage < self.stages - 1:
            return output
        with step.around():
            scalar, step.values[number] = self._last(step.measure, step.parts[number], output)
        return torch.stack((scalar,))  # not a view, which torch could not detach in place

    def _scheduled(self, parts: int, kinds: list["_Kind"]) -> Any:
        """torch's schedule of ``parts`` micro-batches, for whose stages ``kinds`` says what each sends."""
        from torch.distributed import pipelining

        several = self.stages > self.axis.size
        name = _SCHEDULES[self.kind][several]
        stages = [
            pipelining.PipelineStage(
                _Stage(self, stage), stage, self.stages, self.device, group=self.axis.group,
                input_args=(kinds[stage - 1].example(),) if stage else (), output_args=(kinds[stage].example(),),
            )
            for stage, rank in enumerate(self.rank_of) if rank == self.axis.rank
        ]  # fmt: skip
        try:
            made: Any = getattr(pipelining, name)
            one = issubclass(made, pipelining.schedules.PipelineScheduleSingle)
            return made(stages[0] if one else stages, parts, loss_fn=_given, scale_grads=False)
        except ValueError as error:
            raise ConfigError(
                f"step.accumulate is {parts}, which {name} cannot do with {self.stages} stages on {self.axis.size} ranks ({error}); "
                f"set it to a multiple of {self.stages}"
            ) from None

    # ---- evaluation

    @torch.no_grad()
    def forward(self, function: Callable[[Any, Any], Any], batch: Any, around: Around) -> Any:
        """What ``function(model, batch)`` returns, on the ranks of the last stage, and None on the others, which go on meanwhile."""
        if self.stages == 1:
            with around():
                return function(self.model, batch)
        call = self._call(function, batch, around)
        key = _shapes(call)
        kinds = self._known.get(key, [])
        output = self._through(call, around, kinds)
        self._known[key] = kinds
        if self.is_last:
            with around():
                return self._last(function, batch, output)
        return None

    def _through(self, call: "_Call", around: Around, kinds: list["_Kind"]) -> Any:
        """The model's output, on the last stage. Where ``kinds`` is empty, what each stage sends is agreed on the way."""
        new, hidden = not kinds, None
        for stage, rank in enumerate(self.rank_of):
            if rank == self.axis.rank:
                if stage and self.rank_of[stage - 1] != rank:
                    hidden = torch.empty(kinds[stage - 1].size, dtype=kinds[stage - 1].dtype, device=self.device)
                    torch_dist.recv(hidden, group=self.axis.group, group_src=self.rank_of[stage - 1])
                hidden = self._run(stage, call, hidden, around)
            if stage < self.stages - 1:
                if new:
                    own = _Kind(tuple(hidden.shape), hidden.dtype) if rank == self.axis.rank else None
                    kinds.append(agree(own, self.axis, rank))
                if rank == self.axis.rank and self.rank_of[stage + 1] != rank:
                    self._wait()
                    to = self.rank_of[stage + 1]
                    self._sent = torch_dist.isend(hidden, group=self.axis.group, group_dst=to), hidden
        return hidden if self.is_last else None

    def _wait(self) -> None:
        """Until the next stage has what ``forward`` sent last."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    # ---- what all stages know

    @torch.no_grad()
    def _learned(self, measure: Measure, part: Any, call: "_Call", around: Around) -> list["_Kind"]:
        """What each stage sends, and the last one gives, for micro-batches like ``part``: by one forward pass that leaves no trace."""
        kinds: list[_Kind] = []
        found: Any = None
        with _untouched(self.model, self.device):
            output = self._through(call, around, kinds)
            if self.is_last:
                try:
                    with around():
                        scalar, values = self._last(measure, part, output)
                    found = _Kind((1,), scalar.dtype), [_Value.of(name, value) for name, value in values.items()]
                except ConfigError as error:
                    found = str(error)
        found = agree(found, self.axis, self.rank_of[-1])
        if isinstance(found, str):
            raise ConfigError(found)
        self._values = self._values or found[1]
        return [*kinds, found[0]]

    def _told(self, every: list[Values]) -> list[Values]:
        """``every`` of the last stage, on all of them, in one message."""
        if self.is_last:
            if any([_Value.of(*each) for each in values.items()] != self._values for values in every):
                raise ConfigError(f"a pipeline needs a loss that gives the same names in every step; at first it gave {self._values}")
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
        self.module, self._act = pipeline._module(stage), partial(pipeline._micro, stage)

    def forward(self, *hidden: Tensor, number: Tensor) -> Tensor:
        return self._act(int(number), hidden[0] if hidden else None)


@dataclass
class _Call:
    args: tuple[Any, ...]
    words: dict[str, Any]


@dataclass
class _Step:
    """The micro-batches under way, which stages look up by number."""

    measure: Any = None
    parts: Sequence[Any] = ()
    calls: Sequence[_Call] = ()
    around: Any = None
    values: list[Values] = field(default_factory=list)


@dataclass
class _Kind:
    """What a stage sends."""

    size: tuple[int, ...]
    dtype: torch.dtype

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


class _Called(BaseException):
    """Ends a function where it calls its model, also one that catches every Exception."""

    def __init__(self, call: _Call) -> None:
        self.call = call


class _StandIn:
    """A model whose call is another; all else is its own."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._call(*args, **words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _alone(measure: Measure, model: nn.Module, part: Any, around: Around) -> Values:
    with around():
        scalar, values = measure(model, part)
    scalar.backward()
    return values


def _given(output: Tensor, number: Tensor) -> Tensor:
    return output


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _sizes(sizes: Sequence[int] | None, blocks: int, stages: int, first: bool, last: bool) -> list[int]:
    """Blocks of each stage."""
    if sizes is None:
        fullest = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0))
        sizes = [blocks // stages + (fullest.index(stage) < blocks % stages) for stage in range(stages)]
    least = [0 if (stage == 0 and first) or (stage == stages - 1 and last) else 1 for stage in range(stages)]
    if len(sizes) != stages or sum(sizes) != blocks or any(n < m for n, m in zip(sizes, least)):
        raise ConfigError(
            f"pipeline: {blocks} blocks cannot be divided among {stages} stages as {list(sizes)}; expected {stages} sizes that add up "
            f"to {blocks}, none of them 0 where a stage holds nothing else: choose fewer stages (mesh.pipeline) or other sizes"
        )
    return list(sizes)


def _names(module: nn.Module, held: Collection[Tensor]) -> nn.Module | None:
    """The names that ``held`` has within ``module``, with nothing else, or None where it has none."""
    found = nn.Module()
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor in held:
            setattr(found, name, tensor) if isinstance(tensor, nn.Parameter) else found.register_buffer(name, tensor)
    for name, child in module.named_children():
        if (inner := _names(child, held)) is not None:
            found.add_module(name, inner)
    return found if any(True for _ in (*found.parameters(), *found.buffers())) else None


def _without(module: nn.Module, units: Collection[str]) -> nn.Module:
    """``module`` with the same submodules and parameters, but for ``units`` of it, which pass on what they are given."""
    twin = object.__new__(type(module))
    twin.__dict__ = module.__dict__ | {"_modules": dict(module._modules)}
    for name, child in module._modules.items():
        inner = [unit.removeprefix(f"{name}.") for unit in units if unit.startswith(f"{name}.")]
        if name in units:
            twin._modules[name] = Passed()
        elif inner and child is not None:
            twin._modules[name] = _without(child, inner)
    return twin


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, tuple, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(value)


def _shapes(tree: Any) -> Any:
    """What distinguishes one call of a model from another."""
    if isinstance(tree, _Call):
        return _shapes(tree.args), _shapes(tree.words)
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, dict):
        return tuple((name, _shapes(value)) for name, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return tuple(_shapes(value) for value in tree)
    return tree if isinstance(tree, (int, float, str, type(None))) else type(tree)


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, forward passes leave buffers and random numbers as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type if device.type != "cpu" else "cuda"):
        yield
    for buffer, value in kept:
        buffer.data.copy_(value)  # which does not tell autograd, for which it is what it was
