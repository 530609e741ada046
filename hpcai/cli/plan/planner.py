"""Steps of an app on paper, what they take on a machine, and what a whole training takes."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcai import config
from hpcai.cli.plan.training import Published, find_training
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.nn.deferred import deferred
from hpcai.parallel.replicate import FEW
from hpcai.parallel.stages import evenly
from hpcai.plan import machines
from hpcai.plan.loader import room, waits
from hpcai.plan.machines import Machine
from hpcai.plan.paper import Event, Paper, Record, Send, on_paper
from hpcai.plan.price import Price, price
from hpcai.plan.stages import OneByOne, Pass, Stage, most, passes
from hpcai.train import Step

Overrides = Sequence[str]
_USABLE_MEMORY = 0.92  # of a GPU's memory that tensors may take: fragments, graphs and libraries take the rest
_LOADER_WARMUP, _LOADER_STEPS = 20, 100  # of the loader that are simulated: at the start nothing is ready yet
_FEW_LAYERS, _MORE_LAYERS = 2, 4  # layers of which steps of deep models are recorded
_MAX_REPLICAS = 8  # of the job on paper, which divide nothing: what concerns all of them concerns all of a larger job
# A divided optimizer sends what an all-reduce does.
_BASE_OVERRIDES = (
    "step.capture=none", "step.compile=none", "step.compile_cache=null", "step.shard=none", "step.shard_within=null",
    "start.weights=null", "start.sha256=null",
)  # fmt: skip
# Their tables are computed, which nothing on paper can be, and their moments are those of these.
_SAME_MOMENTS = {"lamb": "adamw", "lars": "sgd"}


class InfeasibleError(ConfigError):
    """A job that cannot be, of an app that can."""


class Fit(NamedTuple):
    """A mean step of one process, the most bytes of its tensors, and the words that these need."""

    step: Price
    peak: float
    memory_savings: Overrides
    held: float = 0.0
    """bytes of tensors between steps"""


class Recorded(NamedTuple):
    """A step of one process; where it has stages of a pipeline, what concerns all micro-batches together, and the stages."""

    record: Record
    stages: list[Stage]
    orders: list[list[Pass]]
    """what each rank along the axis pipeline does"""


@dataclass(frozen=True)
class Job:
    """GPUs, how they are used, and what that gives."""

    gpus: int
    ways: int
    batch: int
    fit: Fit
    loader: float
    """seconds that a step waits for samples"""
    steps: float
    """to the target"""
    minutes: float
    evaluation: float
    """minutes in which no step is made, for evaluation is not done"""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.fit.step.seconds + self.loader


class Planner:
    """Plans an app, with other settings in ``words`` and ``yaml``. Steps are recorded once for each way of cutting them.

    ``kernels``: those of a GPU, not the operations of a CPU.
    """

    def __init__(self, name: str, words: Overrides = (), yaml: str | Path | None = None, kernels: bool = True) -> None:
        self.name, self.training, self.overrides, self.kernels = name, find_training(name), tuple(words), kernels
        self._default_yaml = Path(inspect.getfile(type(self.training))).parent / "configs" / self.training.yaml
        self.yaml = yaml or self._default_yaml
        self._stage_output: Any = None  # what a stage sends
        self._recorded: dict[Any, list[tuple[float, Recorded]]] = {}
        self._settings: dict[Overrides, Any] = {}
        self.training.read_settings(self.settings())

    def settings(self, *words: str) -> Any:
        subject = self.training.workload
        if words not in self._settings:
            keys = {word: word.partition("=")[0] for word in _BASE_OVERRIDES}
            plain = [word for word, key in keys.items() if _has_setting(subject.published_settings, key) and key not in self.training.fixed_settings]
            self._settings[words] = subject.complete_settings(config.load(subject.published_settings, self.yaml, [*self.overrides, *words, *plain]))
        return self._settings[words]

    def fixed_axes(self, words: Overrides = ()) -> dict[str, int]:
        """Axes along which a sample is cut as the settings say, not as the plan tries."""
        others = {"replicate", "evaluate", self.training.split_axis}
        return {name: size for name, size in self.settings(*words).mesh if name not in others and size > 1}

    def fixed_processes(self, words: Overrides = ()) -> int:
        """Processes along these axes."""
        return math.prod(self.fixed_axes(words).values())

    def recorded_replicas(self, copies: int, words: Overrides) -> int:
        """Of how many copies the job is that stands for one of ``copies``."""
        return min(copies, _MAX_REPLICAS) if getattr(self.settings(*words).step, "shard", "none") == "none" else copies

    @property
    def ways(self) -> list[int]:
        """In which a sample is cut along the axis ``Workload.cut``, where nobody says how."""
        cut = self.training.split_axis
        return [1] if cut is None else [getattr(self.settings().mesh, cut)] if self.fixed_axes() else [1, 2, 4, 8]

    def record_steps(
        self, ways: int, copies: int, each: int, words: Overrides, place: int = 0, parts: int = 1,
    ) -> list[tuple[float, Recorded]]:  # fmt: skip
        """The kinds of step, by how much each weighs, of a process of ``copies``, each of ``ways``, with ``each`` samples; along
        the axis pipeline it is at ``place``, with ``parts`` times as many."""
        key = ways, copies, each, tuple(words), place, parts
        if key not in self._recorded:
            self._recorded[key] = [(weight, self._record(*key, turn)) for turn, weight in self.training.step_variants.items()]
        return self._recorded[key]

    def _record(self, ways: int, copies: int, each: int, words: Overrides, place: int, parts: int, turn: Overrides) -> Recorded:
        load, cut = self.training, self.training.split_axis
        if ways > 1 and cut is None:
            raise ConfigError(f"samples of {self.name} are planned whole; plan them in one way")
        cfg = self.settings(f"data.batch={copies * each}", *words, *turn)
        optimizer = _SAME_MOMENTS.get(cfg.step.optimizer, cfg.step.optimizer)
        axes, within = self.fixed_axes(words), ways * self.fixed_processes(words)
        world, rank = copies * within, place * within // axes.get("pipeline", 1)
        with on_paper(world, self.kernels, rank) as paper:
            mesh = Mesh({"replicate": copies, **axes, **({cut: ways} if cut else {})}, world, rank)
            with deferred(0):
                model = load.build(cfg, mesh)
                pipeline = load.pipeline(cfg, model, mesh)
            real = load.random_batch(cfg, mesh, each)
            with paper.sizes():
                settings = cfg.step.model_copy(update={"optimizer": optimizer, "accumulate": min(parts, 2)})
                act = OneByOne(paper, pipeline, self._stage_output if place else None) if pipeline else None
                step = Step(paper.fill(model), load.workload.loss, settings, mesh, counts=load.workload.counts, act=act)
                step.cfg = step.cfg.model_copy(update={"accumulate": 1})  # one is recorded, though sums are as of several
                directions = cfg.step.optimizer == "lamb" and [torch.zeros_like(state.weights) for state in step.optimizer.states]
                batch = paper.fake(real)
                _record_once(paper, step)
                with paper.recording() as record:
                    step.sums.spread()
                    if act is not None:
                        step.sums.settle()
                    step._gradients(batch)
                    paper.once(lambda: _record_update(paper, step))()
            del directions  # which lamb keeps beside
            if act is None:
                return Recorded(record, [], [])
            self._stage_output = act.sent
            try:
                return Recorded(record, act.stages, act.pipeline.order(parts))
            except ConfigError as error:
                raise InfeasibleError(str(error)) from None

    def mean_step(self, ways: int, copies: int, each: int, on: Machine, words: Overrides = ()) -> Fit:
        """The mean step of ``copies``, as large as it may be."""
        if "pipeline" in self.fixed_axes(words):
            return self._pipeline_step(ways, copies, each, on, words)
        depth = self.training.depth
        layers = 0 if depth is None else attrgetter(depth)(self.settings(*words))
        if depth is None or layers <= _MORE_LAYERS:
            return self._mean_step(ways, copies, each, on, words)
        few, more = (self._mean_step(ways, copies, each, on, (*words, f"{depth}={n}")) for n in (_FEW_LAYERS, _MORE_LAYERS))
        times = (layers - _FEW_LAYERS) / (_MORE_LAYERS - _FEW_LAYERS)
        held, peak = (a + times * (b - a) for a, b in ((few.held, more.held), (few.peak, more.peak)))
        return Fit(few.step + (more.step + few.step.times(-1)).times(times), peak, words, held)

    def _mean_step(self, ways: int, copies: int, each: int, on: Machine, words: Overrides) -> Fit:
        at_once = next(n for n in range(min(each, self.training.max_samples), 0, -1) if each % n == 0)
        few, within = self.recorded_replicas(copies, words), ways * self.fixed_processes(words)
        found, peak, held = Price(0, 0, 0, 0, 0, 0, 0), 0.0, 0.0
        parts = 2 if each > at_once or copies > FEW else 1  # which make the sums of gradients wide, and are else the same
        for weight, (record, *_) in self.record_steps(ways, few, at_once, words, parts=parts):
            whole, again = (price(_scale_events(some, within, few, copies), on) for some in (record.events, record.again))
            found += (whole + again.times(each / at_once - 1)).times(weight)
            peak, held = max(peak, record.peak), max(held, record.before)
        return Fit(found, peak, words, held)

    def _pipeline_step(self, ways: int, copies: int, each: int, on: Machine, words: Overrides) -> Fit:
        """The mean step of stages of a pipeline, of the rank that is ready last, and the most bytes of any."""
        at_once = next(n for n in range(min(each, self.training.max_samples), 0, -1) if each % n == 0)
        found, peak, held = Price(0, 0, 0, 0, 0, 0, 0), 0.0, 0.0
        for turn, weight in self.training.step_variants.items():
            cost = _PipelineStep(self, ways, copies, at_once, each // at_once, on, (*words, *turn))
            fit = cost.fit()
            found += fit.step.times(weight)
            peak, held = max(peak, fit.peak), max(held, fit.held)
        return Fit(found, peak, words, held)

    def fit_memory(self, ways: int, copies: int, each: int, on: Machine, words: Overrides = ()) -> Fit:
        """``step`` with the first of ``Workload.lean`` that the memory of ``on`` holds. Raises UnfitError where none does."""
        for lean in self.training.memory_savings:
            found = self.mean_step(ways, copies, each, on, (*words, *lean))
            if found.peak <= _USABLE_MEMORY * on.room:
                return found._replace(memory_savings=lean)
            if found.held > _USABLE_MEMORY * on.room:
                break
        raise InfeasibleError(
            f"{found.peak / 1e9:.3g} GB of tensors do not fit the {on.room / 1e9:.3g} GB of {on.name}; cut samples further"
        )

    def plan_job(self, gpus: int, ways: int, batch: int, on: Machine, evaluating: int = 0, words: Overrides = ()) -> Job:
        """A training on ``gpus``, and ``evaluating`` more that only evaluate (0: all of them do, and nobody trains meanwhile)."""
        within = ways * self.fixed_processes(words)
        copies = gpus // within
        if gpus % within or batch % copies:
            raise InfeasibleError(f"{gpus} GPUs cut {within} ways are {gpus / within:g} copies, which do not divide a batch of {batch}")
        fit = self.fit_memory(ways, copies, batch // copies, on, words)
        loader = self._loader_seconds(copies, within, batch // copies, fit.step.seconds)
        samples, known = self.training.samples_needed(batch), self.training.evaluation
        steps = samples / batch
        alone = self._single_gpu_seconds(gpus, batch, fit, on, words)
        score = known.samples * known.cost * alone / (evaluating or gpus)
        train, every = steps * (fit.step.seconds + loader), known.count(samples, batch) * score
        # Apart, the last one is waited for; one that takes longer than what it follows delays all others.
        more = max(every - train, 0.0) + score if evaluating else every
        return Job(gpus, ways, batch, fit, loader, steps, (train + more) / 60, more / 60)

    def _single_gpu_seconds(self, gpus: int, batch: int, fit: Fit, on: Machine, words: Overrides) -> float:
        """Seconds of a sample on one GPU, or where that has no room for the model those of all GPUs together."""
        try:
            if self.fixed_axes(words):
                return fit.step.seconds * gpus / batch
            return self.fit_memory(1, 1, 1, on, words).step.seconds
        except InfeasibleError:
            return fit.step.seconds * gpus / batch

    def _loader_seconds(self, copies: int, ways: int, each: int, step: float) -> float:
        prepare, workers = self.training.preparation_seconds, self.training.workers
        if prepare is None:
            return 0.0
        seconds = prepare(np.random.default_rng(0), (copies, (_LOADER_WARMUP + _LOADER_STEPS) * each))
        return float(waits(seconds, step, workers, room(workers, each, 0, 1), "ready", batch=each, makers=ways)[_LOADER_WARMUP:].mean())

    def plan_jobs(self, gpus: int, ways: Sequence[int], on: Machine, evaluating: int = 0) -> list[Job]:
        """What can be done with ``gpus``, the fastest first: each way of cutting, at batches whose way to the target is known."""
        low, high = min(self.training.samples), max(self.training.samples)
        found = []
        for cut in ways:
            copies = gpus // (cut * self.fixed_processes())
            each = {-(-low // copies), high // copies, *(2**n for n in range(high.bit_length()))} if copies else set()
            for n in sorted(n for n in each if low <= n * copies <= high):
                try:
                    found.append(self.plan_job(copies * cut * self.fixed_processes(), cut, n * copies, on, evaluating))
                except InfeasibleError:
                    continue
        return sorted(found, key=lambda job: job.minutes)

    @cached_property
    def slowdown(self) -> float:
        """How much longer the kernels of the first published step took than the machine's rates allow."""
        first = self.training.published[0]
        if self.fixed_axes() or self.yaml != self._default_yaml:
            return Planner(self.name, kernels=self.kernels).slowdown
        copies = first.gpus // (first.ways * self.fixed_processes(first.overrides))
        return self._find_slowdown(first.value, first.ways, copies, first.batch // copies, machines.find(first.machine), first.overrides)

    def slowdown_of_step(self, seconds: float, on: Machine) -> float:
        """The same of a step of one sample on one GPU, which took ``seconds``."""
        return self._find_slowdown(seconds, 1, 1, 1, on)

    def _find_slowdown(self, seconds: float, ways: int, copies: int, each: int, on: Machine, words: Overrides = ()) -> float:
        low, high = 1.0, 64.0
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            found = self.fit_memory(ways, copies, each, replace(on, slower=middle), words).step.seconds
            low, high = (middle, high) if found < seconds else (low, middle)
        return low

    def predict(self, point: Published, slower: float) -> float:
        """What ``Published.value`` should have been."""
        on = machines.find(point.machine, slower=slower)
        found = self.plan_job(point.gpus, point.ways, point.batch, on, point.evaluating, point.overrides)
        return found.seconds if point.kind == "step" else found.minutes


class _PipelineStep:
    """What the ranks along the axis pipeline do in a step of ``parts`` micro-batches, each of ``at_once`` samples.

    The first rank, the second and the last are recorded: those between are alike. Of deep models they are recorded with few layers
    in each stage.
    """

    def __init__(
        self, planner: Planner, ways: int, copies: int, at_once: int, parts: int, on: Machine, words: Overrides,
    ) -> None:  # fmt: skip
        self.machine, self.micro_batches, self.planner = on, parts, planner
        self.within, self.ranks = ways * planner.fixed_processes(words), planner.fixed_axes(words)["pipeline"]
        cfg, depth = planner.settings(*words), planner.training.depth
        self.stage_count = planner.training.stage_count(cfg)
        layers = 0 if depth is None else attrgetter(depth)(cfg)
        self.layers = evenly(layers, self.stage_count)
        deep = layers > _MORE_LAYERS * self.stage_count
        depths: list[Overrides] = [(f"{depth}={n * self.stage_count}",) for n in (_FEW_LAYERS, _MORE_LAYERS)] if deep else [()]
        self.recorded = {
            place: [planner.record_steps(ways, copies, at_once, (*words, *more), place, parts)[0][1] for more in depths]
            for place in sorted({0, 1, self.ranks - 1})
        }
        self.orders = self.recorded[0][0].orders
        self.stages_of = [sorted({stage for _, stage, _ in order}) for order in self.orders]
        self.rank_of = [next(rank for rank, own in enumerate(self.stages_of) if stage in own) for stage in range(self.stage_count)]
        self.costs = {stage: self._stage_cost(rank, self.stages_of[rank].index(stage)) for stage, rank in enumerate(self.rank_of)}

    def _interpolate(self, of: Callable[[Recorded], Sequence[float]], rank: int, layers: float) -> np.ndarray:
        """What ``of`` says of a process with so many layers in each stage."""
        every = [np.array(of(one)) for one in self.recorded[rank if rank in self.recorded else 1]]
        return every[0] if len(every) == 1 else every[0] + (every[1] - every[0]) * (layers - _FEW_LAYERS) / (_MORE_LAYERS - _FEW_LAYERS)

    def _stage_cost(self, rank: int, place: int) -> "_StageCost":
        def numbers(found: Recorded) -> list[float]:
            stage = found.stages[place]
            passes = [price(record.events, self.machine) for record in (stage.forward, stage.backward)]
            own = [record.peak - record.before for record in (stage.forward, stage.backward)]
            return [x for one in passes for x in vars(one).values()] + [*own, stage.kept, stage.stays, stage.given, stage.sent]

        every, size = self._interpolate(numbers, rank, self.layers[self.stages_of[rank][place]]).tolist(), len(fields(Price))
        return _StageCost(Price(*every[:size]), Price(*every[size : 2 * size]), tuple(every[2 * size : -2]), *every[-2:])

    def _step_cost(self, rank: int) -> tuple[Price, float, float]:
        """What is done once in a step; bytes that are there between steps, and that this takes beside."""

        def numbers(found: Recorded) -> list[float]:
            record = found.record
            return [*vars(price(record.events, self.machine)).values(), record.before, record.peak - record.before]

        layers = np.mean([self.layers[stage] for stage in self.stages_of[rank]])
        *every, held, more = self._interpolate(numbers, rank, float(layers)).tolist()
        return Price(*every), held, more

    def _pass_cost(self, kind: str, stage: int) -> Price:
        """A pass. The two parts of a backward one take as long as each other."""
        cost = self.costs[stage]
        return cost.forward if kind == "F" else cost.backward.times(0.5 if kind in "IW" else 1.0)

    def _transfer(self, begin: int, end: int) -> tuple[float, float]:
        """Seconds of a message from one stage to another, and its bytes."""
        ranks = [self.rank_of[stage] * self.within // self.ranks for stage in (begin, end)]
        return (0.0, 0.0) if ranks[0] == ranks[1] else self.machine.message("send", int(self.costs[0].sent), ranks)

    def fit(self) -> Fit:
        last, took = self.stage_count - 1, cache(self._pass_cost)
        ready = passes(self.orders, last, lambda kind, stage: took(kind, stage).seconds, lambda *of: self._transfer(*of)[0])
        steps, peaks, holds = [], [], []
        for rank, (order, end) in enumerate(zip(self.orders, ready)):
            rest, held, more = self._step_cost(rank)
            step = rest
            for (kind, stage), times in Counter((kind, stage) for kind, stage, _ in order).items():
                step += took(kind, stage).times(times)
                other = stage + 1 if kind == "F" else stage - 1
                if 0 <= other <= last and kind != "W" and (bytes := self._transfer(stage, other)[1]):
                    step = replace(step, sent=step.sent + times * bytes, messages=step.messages + times)
            seconds = end + rest.seconds
            steps.append(replace(step, seconds=seconds, idle=step.idle + seconds - step.seconds))
            buffers = self.micro_batches * sum(self.costs[stage].given + self.costs[stage].sent for stage in self.stages_of[rank])  # torch's
            peaks.append(held + buffers + max(more, most(order, {stage: self.costs[stage].bytes for stage in self.stages_of[rank]})))
            holds.append(held + buffers)
        return Fit(max(steps, key=attrgetter("seconds")), max(peaks), (), max(holds))


class _StageCost(NamedTuple):
    """One micro-batch in a stage."""

    forward: Price
    backward: Price
    bytes: tuple[float, ...]
    """as ``hpcai.plan.stages.most`` has them"""
    given: float
    sent: float


def _has_setting(schema: Any, key: str) -> bool:
    section, _, name = key.partition(".")
    return section in schema.model_fields and name in schema.model_fields[section].annotation.model_fields


def _record_update(paper: Paper, step: Step) -> None:
    """Clipping and update: gradients are read twice, all else is read and written."""
    for state in step.optimizer.states:
        gradient = state.row.gradient()
        rest = [state.weights, state.low, state.average, *state.moments.values()]
        paper.ran("update", 2 * sum(x.nbytes for x in rest if x is not None) + 2 * (0 if gradient is None else gradient.nbytes))


def _record_once(paper: Paper, step: Step) -> None:
    """Sums of gradients, and what is before and after them, belong to a step and not to each of its micro-batches."""
    sums: Any = step.sums
    for owner, name in ((sums, "spread"), (sums, "zero"), (sums, "finish"), *((bucket, "launch") for bucket in sums.buckets)):
        setattr(owner, name, paper.once(getattr(owner, name)))


def _scale_events(events: Sequence[Event], ways: int, few: int, copies: int) -> list[Event]:
    """The events of a job of ``few`` copies as those of one of ``copies``: a group of all of them is one of all."""

    @cache
    def all_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if few == copies or ranks[-1] < ways * (few - 1):
            return ranks
        return tuple(copy * ways + rank for copy in range(copies) for rank in ranks if rank < ways)

    return [event._replace(ranks=all_of(event.ranks)) if isinstance(event, Send) else event for event in events]
