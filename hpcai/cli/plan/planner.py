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
from hpcai.cli.plan.workload import Published, find
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.nn.deferred import deferred
from hpcai.parallel.replicate import FEW
from hpcai.parallel.stages import evenly
from hpcai.plan import machines
from hpcai.plan.loader_queue import max_samples, simulate_waits
from hpcai.plan.machines import Machine
from hpcai.plan.step_trace import Event, StepTracer, Trace, Communication, traced_job
from hpcai.plan.cost import Cost, estimate_cost
from hpcai.plan.pipeline_schedule import SequentialStages, Pass, StageTrace, peak_memory, simulate_schedule
from hpcai.train import Step

Words = Sequence[str]
_FULL = 0.92  # of a GPU's memory that tensors may take: fragments, graphs and libraries take the rest
_WARM, _STEPS = 20, 100  # of the loader that are simulated: at the start nothing is ready yet
_FEW, _MORE = 2, 4  # layers of which steps of deep models are recorded
_COPIES = 8  # of the job on paper, which divide nothing: what concerns all of them concerns all of a larger job
# A divided optimizer sends what an all-reduce does.
_PLAIN = (
    "step.capture=none", "step.compile=none", "step.compile_cache=null", "step.shard=none", "step.shard_within=null",
    "start.weights=null", "start.sha256=null",
)  # fmt: skip
# Their tables are computed, which nothing on paper can be, and their moments are those of these.
_KEEPS_LIKE = {"lamb": "adamw", "lars": "sgd"}


class UnfitError(ConfigError):
    """A job that cannot be, of an app that can."""


class Fit(NamedTuple):
    """A mean step of one process, the most bytes of its tensors, and the words that these need."""

    step: Cost
    peak: float
    lean: Words
    held: float = 0.0
    """bytes of tensors between steps"""


class Recorded(NamedTuple):
    """A step of one process; where it has stages of a pipeline, what concerns all micro-batches together, and the stages."""

    record: Trace
    stages: list[StageTrace]
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

    def __init__(self, name: str, words: Words = (), yaml: str | Path | None = None, kernels: bool = True) -> None:
        self.name, self.workload, self.words, self.kernels = name, find(name), tuple(words), kernels
        self._yaml = Path(inspect.getfile(type(self.workload))).parent / "configs" / self.workload.yaml
        self.yaml = yaml or self._yaml
        self._sent: Any = None  # what a stage sends
        self._recorded: dict[Any, list[tuple[float, Recorded]]] = {}
        self._settings: dict[Words, Any] = {}
        self.workload.learn(self.settings())

    def settings(self, *words: str) -> Any:
        subject = self.workload.subject
        if words not in self._settings:
            keys = {word: word.partition("=")[0] for word in _PLAIN}
            plain = [word for word, key in keys.items() if _has(subject.published, key) and key not in self.workload.keeps]
            self._settings[words] = subject.known(config.load(subject.published, self.yaml, [*self.words, *words, *plain]))
        return self._settings[words]

    def axes(self, words: Words = ()) -> dict[str, int]:
        """Axes along which a sample is cut as the settings say, not as the plan tries."""
        others = {"replicate", "evaluate", self.workload.cut}
        return {name: size for name, size in self.settings(*words).mesh if name not in others and size > 1}

    def around(self, words: Words = ()) -> int:
        """Processes along these axes."""
        return math.prod(self.axes(words).values())

    def few(self, copies: int, words: Words) -> int:
        """Of how many copies the job is that stands for one of ``copies``."""
        return min(copies, _COPIES) if getattr(self.settings(*words).step, "shard", "none") == "none" else copies

    @property
    def ways(self) -> list[int]:
        """In which a sample is cut along the axis ``Workload.cut``, where nobody says how."""
        cut = self.workload.cut
        return [1] if cut is None else [getattr(self.settings().mesh, cut)] if self.axes() else [1, 2, 4, 8]

    def recorded(
        self, ways: int, copies: int, each: int, words: Words, place: int = 0, parts: int = 1,
    ) -> list[tuple[float, Recorded]]:  # fmt: skip
        """The kinds of step, by how much each weighs, of a process of ``copies``, each of ``ways``, with ``each`` samples; along
        the axis pipeline it is at ``place``, with ``parts`` times as many."""
        key = ways, copies, each, tuple(words), place, parts
        if key not in self._recorded:
            self._recorded[key] = [(weight, self._on_paper(*key, turn)) for turn, weight in self.workload.turns.items()]
        return self._recorded[key]

    def _on_paper(self, ways: int, copies: int, each: int, words: Words, place: int, parts: int, turn: Words) -> Recorded:
        load, cut = self.workload, self.workload.cut
        if ways > 1 and cut is None:
            raise ConfigError(f"samples of {self.name} are planned whole; plan them in one way")
        cfg = self.settings(f"data.batch={copies * each}", *words, *turn)
        optimizer = _KEEPS_LIKE.get(cfg.step.optimizer, cfg.step.optimizer)
        axes, within = self.axes(words), ways * self.around(words)
        world, rank = copies * within, place * within // axes.get("pipeline", 1)
        with traced_job(world, self.kernels, rank) as paper:
            mesh = Mesh({"replicate": copies, **axes, **({cut: ways} if cut else {})}, world, rank)
            with deferred(0):
                model = load.build(cfg, mesh)
                pipeline = load.act(cfg, model, mesh)
            real = load.batch(cfg, mesh, each)
            with paper.fake_tensors():
                settings = cfg.step.model_copy(update={"optimizer": optimizer, "accumulate": min(parts, 2)})
                act = SequentialStages(paper, pipeline, self._sent if place else None) if pipeline else None
                step = Step(paper.materialize(model), load.subject.loss, settings, mesh, counts=load.subject.counted, act=act)
                step.cfg = step.cfg.model_copy(update={"accumulate": 1})  # one is recorded, though sums are as of several
                directions = cfg.step.optimizer == "lamb" and [torch.zeros_like(state.weights) for state in step.optimizer.states]
                batch = paper.empty_like(real)
                _once(paper, step)
                with paper.record() as record:
                    step.sums.spread()
                    if act is not None:
                        step.sums.settle()
                    step._gradients(batch)
                    paper.once_per_step(lambda: _update(paper, step))()
            del directions  # which lamb keeps beside
            if act is None:
                return Recorded(record, [], [])
            self._sent = act.hidden
            try:
                return Recorded(record, act.stages, act.pipeline.order(parts))
            except ConfigError as error:
                raise UnfitError(str(error)) from None

    def step(self, ways: int, copies: int, each: int, on: Machine, words: Words = ()) -> Fit:
        """The mean step of ``copies``, as large as it may be."""
        if "pipeline" in self.axes(words):
            return self._in_stages(ways, copies, each, on, words)
        depth = self.workload.depth
        layers = 0 if depth is None else attrgetter(depth)(self.settings(*words))
        if depth is None or layers <= _MORE:
            return self._step(ways, copies, each, on, words)
        few, more = (self._step(ways, copies, each, on, (*words, f"{depth}={n}")) for n in (_FEW, _MORE))
        times = (layers - _FEW) / (_MORE - _FEW)
        held, peak = (a + times * (b - a) for a, b in ((few.held, more.held), (few.peak, more.peak)))
        return Fit(few.step + (more.step + few.step.scaled(-1)).scaled(times), peak, words, held)

    def _step(self, ways: int, copies: int, each: int, on: Machine, words: Words) -> Fit:
        at_once = next(n for n in range(min(each, self.workload.most), 0, -1) if each % n == 0)
        few, within = self.few(copies, words), ways * self.around(words)
        found, peak, held = Cost(0, 0, 0, 0, 0, 0, 0), 0.0, 0.0
        parts = 2 if each > at_once or copies > FEW else 1  # which make the sums of gradients wide, and are else the same
        for weight, (record, *_) in self.recorded(ways, few, at_once, words, parts=parts):
            whole, again = (estimate_cost(_spread(some, within, few, copies), on) for some in (record.events, record.repeated))
            found += (whole + again.scaled(each / at_once - 1)).scaled(weight)
            peak, held = max(peak, record.peak), max(held, record.before)
        return Fit(found, peak, words, held)

    def _in_stages(self, ways: int, copies: int, each: int, on: Machine, words: Words) -> Fit:
        """The mean step of stages of a pipeline, of the rank that is ready last, and the most bytes of any."""
        at_once = next(n for n in range(min(each, self.workload.most), 0, -1) if each % n == 0)
        found, peak, held = Cost(0, 0, 0, 0, 0, 0, 0), 0.0, 0.0
        for turn, weight in self.workload.turns.items():
            cost = _Stages(self, ways, copies, at_once, each // at_once, on, (*words, *turn))
            fit = cost.fit()
            found += fit.step.scaled(weight)
            peak, held = max(peak, fit.peak), max(held, fit.held)
        return Fit(found, peak, words, held)

    def fitting(self, ways: int, copies: int, each: int, on: Machine, words: Words = ()) -> Fit:
        """``step`` with the first of ``Workload.lean`` that the memory of ``on`` holds. Raises UnfitError where none does."""
        for lean in self.workload.lean:
            found = self.step(ways, copies, each, on, (*words, *lean))
            if found.peak <= _FULL * on.capacity:
                return found._replace(lean=lean)
            if found.held > _FULL * on.capacity:
                break
        raise UnfitError(
            f"{found.peak / 1e9:.3g} GB of tensors do not fit the {on.capacity / 1e9:.3g} GB of {on.name}; cut samples further"
        )

    def job(self, gpus: int, ways: int, batch: int, on: Machine, evaluating: int = 0, words: Words = ()) -> Job:
        """A training on ``gpus``, and ``evaluating`` more that only evaluate (0: all of them do, and nobody trains meanwhile)."""
        within = ways * self.around(words)
        copies = gpus // within
        if gpus % within or batch % copies:
            raise UnfitError(f"{gpus} GPUs cut {within} ways are {gpus / within:g} copies, which do not divide a batch of {batch}")
        fit = self.fitting(ways, copies, batch // copies, on, words)
        loader = self._loader(copies, within, batch // copies, fit.step.seconds)
        samples, known = self.workload.needs(batch), self.workload.evaluation
        steps = samples / batch
        alone = self._alone(gpus, batch, fit, on, words)
        score = known.samples * known.cost * alone / (evaluating or gpus)
        train, every = steps * (fit.step.seconds + loader), known.times(samples, batch) * score
        # Apart, the last one is waited for; one that takes longer than what it follows delays all others.
        more = max(every - train, 0.0) + score if evaluating else every
        return Job(gpus, ways, batch, fit, loader, steps, (train + more) / 60, more / 60)

    def _alone(self, gpus: int, batch: int, fit: Fit, on: Machine, words: Words) -> float:
        """Seconds of a sample on one GPU, or where that has no room for the model those of all GPUs together."""
        try:
            if self.axes(words):
                return fit.step.seconds * gpus / batch
            return self.fitting(1, 1, 1, on, words).step.seconds
        except UnfitError:
            return fit.step.seconds * gpus / batch

    def _loader(self, copies: int, ways: int, each: int, step: float) -> float:
        prepare, workers = self.workload.preparation, self.workload.workers
        if prepare is None:
            return 0.0
        seconds = prepare(np.random.default_rng(0), (copies, (_WARM + _STEPS) * each))
        return float(
            simulate_waits(seconds, step, workers, max_samples(workers, each, 0, 1), "ready", batch=each, ranks=ways)[_WARM:].mean()
        )

    def jobs(self, gpus: int, ways: Sequence[int], on: Machine, evaluating: int = 0) -> list[Job]:
        """What can be done with ``gpus``, the fastest first: each way of cutting, at batches whose way to the target is known."""
        low, high = min(self.workload.samples), max(self.workload.samples)
        found = []
        for cut in ways:
            copies = gpus // (cut * self.around())
            each = {-(-low // copies), high // copies, *(2**n for n in range(high.bit_length()))} if copies else set()
            for n in sorted(n for n in each if low <= n * copies <= high):
                try:
                    found.append(self.job(copies * cut * self.around(), cut, n * copies, on, evaluating))
                except UnfitError:
                    continue
        return sorted(found, key=lambda job: job.minutes)

    @cached_property
    def slower(self) -> float:
        """How much longer the kernels of the first published step took than the machine's rates allow."""
        first = self.workload.published[0]
        if self.axes() or self.yaml != self._yaml:
            return Planner(self.name, kernels=self.kernels).slower
        copies = first.gpus // (first.ways * self.around(first.words))
        return self._slower(
            first.value, first.ways, copies, first.batch // copies, machines.find_machine(first.machine), first.words
        )

    def measured(self, seconds: float, on: Machine) -> float:
        """The same of a step of one sample on one GPU, which took ``seconds``."""
        return self._slower(seconds, 1, 1, 1, on)

    def _slower(self, seconds: float, ways: int, copies: int, each: int, on: Machine, words: Words = ()) -> float:
        low, high = 1.0, 64.0
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            found = self.fitting(ways, copies, each, replace(on, slowdown=middle), words).step.seconds
            low, high = (middle, high) if found < seconds else (low, middle)
        return low

    def planned(self, point: Published, slower: float) -> float:
        """What ``Published.value`` should have been."""
        on = machines.find_machine(point.machine, slowdown=slower)
        found = self.job(point.gpus, point.ways, point.batch, on, point.evaluating, point.words)
        return found.seconds if point.what == "step" else found.minutes


class _Stages:
    """What the ranks along the axis pipeline do in a step of ``parts`` micro-batches, each of ``at_once`` samples.

    The first rank, the second and the last are recorded: those between are alike. Of deep models they are recorded with few layers
    in each stage.
    """

    def __init__(
        self, planner: Planner, ways: int, copies: int, at_once: int, parts: int, on: Machine, words: Words,
    ) -> None:  # fmt: skip
        self.on, self.parts, self.planner = on, parts, planner
        self.within, self.ranks = ways * planner.around(words), planner.axes(words)["pipeline"]
        cfg, depth = planner.settings(*words), planner.workload.depth
        self.count = planner.workload.stages(cfg)
        layers = 0 if depth is None else attrgetter(depth)(cfg)
        self.layers = evenly(layers, self.count)
        deep = layers > _MORE * self.count
        depths: list[Words] = [(f"{depth}={n * self.count}",) for n in (_FEW, _MORE)] if deep else [()]
        self.recorded = {
            place: [planner.recorded(ways, copies, at_once, (*words, *more), place, parts)[0][1] for more in depths]
            for place in sorted({0, 1, self.ranks - 1})
        }
        self.orders = self.recorded[0][0].orders
        self.own = [sorted({stage for _, stage, _ in order}) for order in self.orders]
        self.rank_of = [next(rank for rank, own in enumerate(self.own) if stage in own) for stage in range(self.count)]
        self.costs = {stage: self._stage(rank, self.own[rank].index(stage)) for stage, rank in enumerate(self.rank_of)}

    def _along(self, of: Callable[[Recorded], Sequence[float]], rank: int, layers: float) -> np.ndarray:
        """What ``of`` says of a process with so many layers in each stage."""
        every = [np.array(of(one)) for one in self.recorded[rank if rank in self.recorded else 1]]
        return every[0] if len(every) == 1 else every[0] + (every[1] - every[0]) * (layers - _FEW) / (_MORE - _FEW)

    def _stage(self, rank: int, place: int) -> "_Cost":
        def numbers(found: Recorded) -> list[float]:
            stage = found.stages[place]
            passes = [estimate_cost(record.events, self.on) for record in (stage.forward, stage.backward)]
            own = [record.peak - record.before for record in (stage.forward, stage.backward)]
            return [x for one in passes for x in vars(one).values()] + [
                *own, stage.saved_bytes, stage.gradient_bytes, stage.input_bytes, stage.output_bytes,
            ]  # fmt: skip

        every, size = self._along(numbers, rank, self.layers[self.own[rank][place]]).tolist(), len(fields(Cost))
        return _Cost(Cost(*every[:size]), Cost(*every[size : 2 * size]), tuple(every[2 * size : -2]), *every[-2:])

    def _rest(self, rank: int) -> tuple[Cost, float, float]:
        """What is done once in a step; bytes that are there between steps, and that this takes beside."""

        def numbers(found: Recorded) -> list[float]:
            record = found.record
            return [*vars(estimate_cost(record.events, self.on)).values(), record.before, record.peak - record.before]

        layers = np.mean([self.layers[stage] for stage in self.own[rank]])
        *every, held, more = self._along(numbers, rank, float(layers)).tolist()
        return Cost(*every), held, more

    def _took(self, kind: str, stage: int) -> Cost:
        """A pass. The two parts of a backward one take as long as each other."""
        cost = self.costs[stage]
        return cost.forward if kind == "F" else cost.backward.scaled(0.5 if kind in "IW" else 1.0)

    def _hop(self, begin: int, end: int) -> tuple[float, float]:
        """Seconds of a message from one stage to another, and its bytes."""
        ranks = [self.rank_of[stage] * self.within // self.ranks for stage in (begin, end)]
        return (0.0, 0.0) if ranks[0] == ranks[1] else self.on.communication_time("send", int(self.costs[0].sent), ranks)

    def fit(self) -> Fit:
        last, took = self.count - 1, cache(self._took)
        ready = simulate_schedule(self.orders, last, lambda kind, stage: took(kind, stage).seconds, lambda *of: self._hop(*of)[0])
        steps, peaks, holds = [], [], []
        for rank, (order, end) in enumerate(zip(self.orders, ready)):
            rest, held, more = self._rest(rank)
            step = rest
            for (kind, stage), times in Counter((kind, stage) for kind, stage, _ in order).items():
                step += took(kind, stage).scaled(times)
                other = stage + 1 if kind == "F" else stage - 1
                if 0 <= other <= last and kind != "W" and (bytes := self._hop(stage, other)[1]):
                    step = replace(step, sent=step.sent + times * bytes, messages=step.messages + times)
            seconds = end + rest.seconds
            steps.append(replace(step, seconds=seconds, idle=step.idle + seconds - step.seconds))
            buffers = self.parts * sum(self.costs[stage].given + self.costs[stage].sent for stage in self.own[rank])  # torch's
            peaks.append(
                held + buffers + max(more, peak_memory(order, {stage: self.costs[stage].bytes for stage in self.own[rank]}))
            )
            holds.append(held + buffers)
        return Fit(max(steps, key=attrgetter("seconds")), max(peaks), (), max(holds))


class _Cost(NamedTuple):
    """One micro-batch in a stage."""

    forward: Cost
    backward: Cost
    bytes: tuple[float, ...]
    """as ``hpcai.plan.pipeline_schedule.peak_memory`` has them"""
    given: float
    sent: float


def _has(schema: Any, key: str) -> bool:
    section, _, name = key.partition(".")
    return section in schema.model_fields and name in schema.model_fields[section].annotation.model_fields


def _update(paper: StepTracer, step: Step) -> None:
    """Clipping and update: gradients are read twice, all else is read and written."""
    for state in step.optimizer.states:
        gradient = state.row.gradient()
        rest = [state.weights, state.low, state.average, *state.moments.values()]
        paper.add_kernel(
            "update", 2 * sum(x.nbytes for x in rest if x is not None) + 2 * (0 if gradient is None else gradient.nbytes)
        )


def _once(paper: StepTracer, step: Step) -> None:
    """Sums of gradients, and what is before and after them, belong to a step and not to each of its micro-batches."""
    sums: Any = step.sums
    for owner, name in ((sums, "spread"), (sums, "zero"), (sums, "finish"), *((bucket, "launch") for bucket in sums.buckets)):
        setattr(owner, name, paper.once_per_step(getattr(owner, name)))


def _spread(events: Sequence[Event], ways: int, few: int, copies: int) -> list[Event]:
    """The events of a job of ``few`` copies as those of one of ``copies``: a group of all of them is one of all."""

    @cache
    def all_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if few == copies or ranks[-1] < ways * (few - 1):
            return ranks
        return tuple(copy * ways + rank for copy in range(copies) for rank in ranks if rank < ways)

    return [event._replace(ranks=all_of(event.ranks)) if isinstance(event, Communication) else event for event in events]
