"""Steps of an app on paper, what they take on a machine, and what a whole training takes."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcai import config
from hpcai.cli.plan.workload import Published, find
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.nn.deferred import deferred
from hpcai.plan import machines
from hpcai.plan.loader import room, waits
from hpcai.plan.machines import Machine
from hpcai.plan.paper import Event, Paper, Record, Send, on_paper
from hpcai.plan.price import Price, price
from hpcai.train import Step

Words = Sequence[str]
_FULL = 0.92  # of a GPU's memory that tensors may take: fragments, graphs and libraries take the rest
_WARM, _STEPS = 20, 100  # of the loader that are simulated: at the start nothing is ready yet
_FEW, _MORE = 2, 4  # layers of which steps of deep models are recorded
_COPIES = 16  # of the job on paper: what concerns all of them concerns all of a larger job
# A divided optimizer sends what an all-reduce does.
_PLAIN = (
    "step.capture=none", "step.compile=none", "step.compile_cache=null", "step.shard=none", "step.shard_within=null",
    "start.weights=null", "start.sha256=null",
)  # fmt: skip
# Their tables are computed, which nothing on paper can be, and what they keep is what these keep.
_KEEPS_LIKE = {"lamb": "adamw", "lars": "sgd"}


class UnfitError(ConfigError):
    """A job that cannot be, of an app that can."""


class Fit(NamedTuple):
    """A mean step of one process, the most bytes of its tensors, and the words that these need."""

    step: Price
    peak: float
    lean: Words


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
        self.yaml = yaml or Path(inspect.getfile(type(self.workload))).parent / "configs" / self.workload.yaml
        self._recorded: dict[Any, list[tuple[float, Record]]] = {}

    def settings(self, *words: str) -> Any:
        subject = self.workload.subject
        keys = {word: word.partition("=")[0] for word in _PLAIN}
        plain = [word for word, key in keys.items() if _has(subject.published, key) and key not in self.workload.keeps]
        return subject.known(config.load(subject.published, self.yaml, [*self.words, *words, *plain]))

    def recorded(self, ways: int, copies: int, each: int, words: Words) -> list[tuple[float, Record]]:
        """The kinds of step, by how much each weighs, of a process of ``copies``, each of ``ways``, with ``each`` samples."""
        key = ways, copies, each, tuple(words)
        if key not in self._recorded:
            self._recorded[key] = [(weight, self._on_paper(*key, turn)) for turn, weight in self.workload.turns.items()]
        return self._recorded[key]

    def _on_paper(self, ways: int, copies: int, each: int, words: Words, turn: Words) -> Record:
        load, cut = self.workload, self.workload.cut
        if ways > 1 and cut is None:
            raise ConfigError(f"samples of {self.name} are planned whole; plan them in one way")
        cfg = self.settings(f"data.batch={copies * each}", *words, *turn)
        optimizer = _KEEPS_LIKE.get(cfg.step.optimizer, cfg.step.optimizer)
        with on_paper(copies * ways, self.kernels) as paper:
            mesh = Mesh({"replicate": copies, **({cut: ways} if cut else {})}, copies * ways)
            with deferred(0):
                model = load.build(cfg, mesh)
            real = load.batch(cfg, mesh, each)
            with paper.sizes():
                settings = cfg.step.model_copy(update={"optimizer": optimizer})
                step = Step(paper.fill(model), load.subject.loss, settings, mesh, counts=load.subject.counted)
                batch = paper.fake(real)
                with paper.recording() as record:
                    step._gradients(batch)
                    _update(paper, step)
        return record

    def step(self, ways: int, copies: int, each: int, on: Machine, words: Words = ()) -> Fit:
        """The mean step of ``copies``, as large as it may be."""
        depth = self.workload.depth
        layers = 0 if depth is None else attrgetter(depth)(self.settings(*words))
        if depth is None or layers <= _MORE:
            return self._step(ways, copies, each, on, words)
        few, more = (self._step(ways, copies, each, on, (*words, f"{depth}={n}")) for n in (_FEW, _MORE))
        times = (layers - _FEW) / (_MORE - _FEW)
        return Fit(few.step + (more.step + few.step.times(-1)).times(times), few.peak + times * (more.peak - few.peak), words)

    def _step(self, ways: int, copies: int, each: int, on: Machine, words: Words) -> Fit:
        at_once = next(n for n in range(min(each, self.workload.most), 0, -1) if each % n == 0)
        few, found, peak = min(copies, _COPIES), Price(0, 0, 0, 0, 0, 0, 0), 0.0
        for weight, record in self.recorded(ways, few, at_once, words):
            found += price(_spread(record.events, ways, few, copies), on).times(weight * each / at_once)
            peak = max(peak, record.peak)
        return Fit(found, peak, words)

    def fitting(self, ways: int, copies: int, each: int, on: Machine, words: Words = ()) -> Fit:
        """``step`` with the first of ``Workload.lean`` that the memory of ``on`` holds. Raises UnfitError where none does."""
        for lean in self.workload.lean:
            found = self.step(ways, copies, each, on, (*words, *lean))
            if found.peak <= _FULL * on.room:
                return found._replace(lean=lean)
        raise UnfitError(
            f"{found.peak / 1e9:.3g} GB of tensors do not fit the {on.room / 1e9:.3g} GB of {on.name}; cut samples further"
        )

    def job(self, gpus: int, ways: int, batch: int, on: Machine, evaluating: int = 0, words: Words = ()) -> Job:
        """A training on ``gpus``, and ``evaluating`` more that only evaluate (0: all of them do, and nobody trains meanwhile)."""
        copies = gpus // ways
        if gpus % ways or batch % copies:
            raise UnfitError(f"{gpus} GPUs cut {ways} ways are {gpus / ways:g} copies, which do not divide a batch of {batch}")
        fit = self.fitting(ways, copies, batch // copies, on, words)
        loader = self._loader(copies, ways, batch // copies, fit.step.seconds)
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
            return self.fitting(1, 1, 1, on, words).step.seconds
        except UnfitError:
            return fit.step.seconds * gpus / batch

    def _loader(self, copies: int, ways: int, each: int, step: float) -> float:
        prepare, workers = self.workload.preparation, self.workload.workers
        if prepare is None:
            return 0.0
        seconds = prepare(np.random.default_rng(0), (copies, (_WARM + _STEPS) * each))
        return float(waits(seconds, step, workers, room(workers, each, 0, 1), "ready", batch=each, makers=ways)[_WARM:].mean())

    def jobs(self, gpus: int, ways: Sequence[int], on: Machine, evaluating: int = 0) -> list[Job]:
        """What can be done with ``gpus``, the fastest first: each way of cutting, at batches whose way to the target is known."""
        low, high = min(self.workload.samples), max(self.workload.samples)
        found = []
        for cut in ways:
            copies = gpus // cut
            each = {-(-low // copies), high // copies, *(2**n for n in range(high.bit_length()))} if copies else set()
            for n in sorted(n for n in each if low <= n * copies <= high):
                try:
                    found.append(self.job(copies * cut, cut, n * copies, on, evaluating))
                except UnfitError:
                    continue
        return sorted(found, key=lambda job: job.minutes)

    @cached_property
    def slower(self) -> float:
        """How much longer the kernels of the first published step took than the machine's rates allow."""
        first = self.workload.published[0]
        copies = first.gpus // first.ways
        return self._slower(first.value, first.ways, copies, first.batch // copies, machines.find(first.machine), first.words)

    def measured(self, seconds: float, on: Machine) -> float:
        """The same of a step of one sample on one GPU, which took ``seconds``."""
        return self._slower(seconds, 1, 1, 1, on)

    def _slower(self, seconds: float, ways: int, copies: int, each: int, on: Machine, words: Words = ()) -> float:
        low, high = 1.0, 64.0
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            found = self.fitting(ways, copies, each, replace(on, slower=middle), words).step.seconds
            low, high = (middle, high) if found < seconds else (low, middle)
        return low

    def planned(self, point: Published, slower: float) -> float:
        """What ``Published.value`` should have been."""
        on = machines.find(point.machine, slower=slower)
        found = self.job(point.gpus, point.ways, point.batch, on, point.evaluating, point.words)
        return found.seconds if point.what == "step" else found.minutes


def _has(schema: Any, key: str) -> bool:
    section, _, name = key.partition(".")
    return section in schema.model_fields and name in schema.model_fields[section].annotation.model_fields


def _update(paper: Paper, step: Step) -> None:
    """Clipping and update: gradients are read twice, all else is read and written."""
    for state in step.optimizer.states:
        gradient = state.row.gradient()
        rest = [state.weights, state.low, state.average, *state.moments.values()]
        paper.ran("update", 2 * sum(x.nbytes for x in rest if x is not None) + 2 * (0 if gradient is None else gradient.nbytes))


def _spread(events: Sequence[Event], ways: int, few: int, copies: int) -> list[Event]:
    """The events of a job of ``few`` copies as those of one of ``copies``: a group of all of them is one of all."""

    @cache
    def all_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if few == copies or ranks[-1] < ways * (few - 1):
            return ranks
        return tuple(copy * ways + rank for copy in range(copies) for rank in ranks if rank < ways)

    return [event._replace(ranks=all_of(event.ranks)) if isinstance(event, Send) else event for event in events]
