"""Batches on the device, prepared ahead, in an order that any number of processes shares.

An epoch is a row of positions, 0 ... M - 1; the sampler says which sample stands at each. Batch k takes B of them, dealt to the
copies of the model. In ``strict`` order batch k takes positions kB ... kB + B - 1. In ``ready`` order each copy takes those of its
own positions that are ready, the lowest first, so that a sample which takes a hundred times as long holds up nobody: it comes
in a later batch of the same epoch. Either way each position is delivered once in an epoch; where a run stands is told by the
number of samples delivered and the positions that were passed over (``late``), and another number of processes can go on there.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as torch_dist

from hpcai.data.ahead import Ahead, Ready, Task
from hpcai.data.assemble import Assembler, Made, take_device, tree_bytes
from hpcai.data.dealt import Dealt
from hpcai.data.direct import Memory
from hpcai.data.sampler import InOrder, LargestFirst, Sampler, Shuffled
from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError, HpcaiError

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Samples by index. ``sample`` is called from several threads, or in several processes.

    A source may also have ``collate(samples) -> batch`` of CPU tensors, where stacking is not what its samples want, ``identity``
    (a text that is the same for the same data set), ``whole`` (True: all processes of a cut copy make the same of a sample, none a
    part of its own) and ``close()``.
    """

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Any:
        """Arrays, numbers or tensors in tuples, named tuples or dicts: a pure function of ``index`` and ``epoch``."""

    def describe(self, index: int) -> str:
        """Tell people where a sample lies."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be used, and what was delivered in its place."""

    epoch: int
    index: int
    instead: int
    reason: str


class Loader:
    """Batches of ``source`` for one process of the mesh.

    ``batch`` counts samples over all copies of the model: the same settings train the same way on any number of processes.
    Processes that hold one copy together (all axes but replicate) get the same samples, in the same order; with ``once`` each is
    made by one of them and sent to the others (``auto``: where the source says that it is ``whole``). ``last`` says what
    becomes of samples that do not fill the last batch: ``drop`` leaves them out (others in every epoch), ``pad`` repeats the
    first ones of the epoch, ``keep`` (for evaluation) takes each exactly once, in parts that may be uneven.

    ``workers`` threads, or ``processes``, prepare samples ahead, up to ``prefetch`` bytes. ``on_bad_sample``: ``stop`` raises;
    ``skip`` delivers the next good one of the order and counts it in ``skipped``; with ``keep`` a bad sample always raises,
    as a metric of the others would pass for one of all. ``then(batch, step)`` makes of a batch on the device what is delivered;
    ``step`` counts the batches over all epochs, from 0. All processes of a cut copy construct it together. Raises DataError when a
    batch does not divide.
    """

    def __init__(
        self, source: Source, batch: int, mesh: Mesh, *, name: str, sampler: Sampler | None = None, seed: int = 0,
        shuffle: bool = True, last: Literal["drop", "pad", "keep"] = "drop", accumulate: int = 1, workers: int = 2,
        processes: bool = False, prefetch: int = 1 << 30, order: Literal["strict", "ready"] = "strict",
        on_bad_sample: Literal["stop", "skip"] = "stop", patience: float = 600.0, then: Callable[[Any, int], Any] | None = None,
        once: bool | Literal["auto"] = False,
    ) -> None:  # fmt: skip
        self.source, self.size, self.name, self.device = source, batch, name, mesh.device
        self.copies, self.order, self.last = mesh["replicate"], order, last
        self.sampler = sampler or (Shuffled(len(source), seed) if shuffle else InOrder(len(source)))
        self.skipped: list[Skipped] = []
        self._told, self._named = 0, set[str]()
        self._rank, self._workers, self._prefetch = mesh.rank, workers, prefetch
        self._on_bad, self._patience, self._then = "stop" if last == "keep" else on_bad_sample, patience, then
        whole = getattr(source, "whole", False)
        self._once = mesh.model_parallel.size > 1 and (whole if once == "auto" else once)
        if self._once and not whole:
            raise DataError(
                f"{name}: data.once, but a {type(source).__name__} does not say that it is whole: {mesh.model_parallel.size} "
                "processes that hold a sample together may each make a part of their own of it; set data.once to false"
            )
        self._check(batch, accumulate, mesh)
        self._order: Callable[[int], np.ndarray] = lru_cache(2)(self.sampler.order)
        self._tellers = mesh.peers if self._once else self.copies
        gpu = mesh.device if mesh.device.type == "cuda" else None
        self._dealt = Dealt(mesh.new_background_axis("model_parallel"), mesh.rank, gpu) if self._once else None
        leads = order == "ready" and mesh.model_parallel.size > 1 and not self._once
        self._leader = _Leader(mesh.new_background_axis("model_parallel")) if leads else None
        self._assembler = Assembler(mesh.device, name, getattr(source, "collate", None))
        self._following: _Course | None = None
        self._plan: _Plan | None = None
        self._history: deque[tuple[int, int, list[int]]] = deque(maxlen=4096)
        self._processes: list[Any] = []
        if processes:
            from hpcai.data.processes import Worker

            memory = Memory(pin=gpu)
            self._processes = [Worker(source, name, number, memory) for number in range(workers)]

    def _check(self, batch: int, accumulate: int, mesh: Mesh) -> None:
        name, copies, samples = self.name, self.copies.size, self.sampler.samples
        parts = copies * accumulate
        if self.last != "keep" and batch % parts:
            raise DataError(
                f"{name}: a batch of {batch} samples does not divide by {copies} copies x {accumulate} micro-batches; "
                f"give a multiple of {parts}"
            )
        if not len(self.source) or not samples:
            raise DataError(f"{name}: there is no sample; make some data first")
        if self.last == "drop" and samples < batch:
            raise DataError(f"{name}: {samples} samples are fewer than one batch of {batch}; make more data or lower the batch")
        if samples < copies and not isinstance(self.sampler, LargestFirst):
            raise DataError(f"{name}: {samples} samples for {copies} processes; make more data or start fewer processes")
        if self._on_bad == "skip" and mesh.model_parallel.size > 1 and not self._once:
            raise DataError(
                f"{name}: on_bad_sample=skip, but {mesh.model_parallel.size} processes hold a sample together and each makes "
                "it; set it to stop, or data.once to true where the source is whole"
            )
        if self._once:
            logger.info("%s: each sample is prepared by one of %d ranks of a replica, and sent on", name, mesh.model_parallel.size)
        rest = samples % batch
        if rest and self.last == "drop":
            logger.info("%s: %d samples in batches of %d: each epoch leaves out %d, others each time", name, samples, batch, rest)
        if rest and self.last == "pad":
            logger.info("%s: %d samples in batches of %d: each epoch repeats %d", name, samples, batch, batch - rest)

    # ---- what an epoch is

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.sampler.samples // self.size if self.last == "drop" else -(-self.sampler.samples // self.size)

    @property
    def samples(self) -> int:
        """Samples that an epoch delivers, over all processes."""
        return self.sampler.samples if self.last == "keep" else len(self) * self.size

    @property
    def counted(self) -> int:
        """Samples of the source, from which those of an epoch are drawn."""
        return len(self.source)

    @property
    def identity(self) -> str:
        """What tells the data set from others, where the source knows that."""
        return str(getattr(self.source, "identity", ""))

    def indices(self, epoch: int, first: int) -> np.ndarray:
        """Samples that this process reads, in strict order, for the batch that begins at position ``first`` of ``epoch``."""
        positions = np.arange(first, min(first + self.size, self.samples))
        return self._at(epoch, positions)[self._deal(epoch, positions)]

    def describe(self, epoch: int, first: int) -> str:
        """Tell where the samples lie that this process got for the batch after ``first`` samples of ``epoch``."""
        names = [name for _, name in self.taken(epoch, first)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def taken(self, epoch: int, first: int) -> list[tuple[int, str]]:
        """Index and place of each sample of that batch; of one that was not read yet, in strict order."""
        indices = next((i for e, f, i in self._history if (e, f) == (epoch, first)), None)
        return [(int(i), self.source.describe(int(i))) for i in (self.indices(epoch, first) if indices is None else indices)]

    def _at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self._order(epoch)[positions % self.sampler.samples]

    def _deal(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.sampler.deal(self._at(epoch, positions), self.copies.rank, self.copies.size)

    # ---- an epoch

    def epoch(self, epoch: int, first: int = 0, late: Sequence[int] = (), more: bool = False) -> Iterator[Any]:
        """Batches of ``epoch``, after ``first`` samples were delivered and the positions ``late`` were passed over.

        A part without samples (of a small last batch) is left out. With ``more`` the first samples of the next epoch are
        prepared while the last ones of this are awaited.
        """
        course = self._begun(_Plan(self, epoch, first, tuple(late)))
        self._plan = course.plan
        following = self._course(_Plan(self, epoch + 1, 0, ()), course.ahead) if more else None
        batches = self._batches(course, following)
        if self._then is not None:
            batches = map(self._then, batches, itertools.count(epoch * len(self) + first // self.size))
        try:
            yield from batches
        except BaseException:  # also when the consumer has had enough
            course.close()
            if following is not None:
                following.close()
            raise
        self._following = following
        if following is None:
            course.close()

    def late(self) -> list[int]:
        """Positions that were passed over: those below the highest one delivered, on any copy, that were not delivered yet. All
        processes ask together."""
        if self.order == "strict" or self._plan is None:
            return []
        highest = max(all_gather_object(self._plan.highest, self.copies))
        return sorted(p for part in all_gather_object(self._plan.left_below(highest), self.copies) for p in part)

    def news(self) -> list[str]:
        """Texts about the samples that were skipped on any process since this was last asked: each sample is named once, each skip
        counted. All processes ask together."""
        if self._on_bad == "stop":
            return []
        new, self._told = self.skipped[self._told :], len(self.skipped)
        texts = [(self.source.describe(s.index), f"{self.name}: {_skipped(s)}: {s.reason}") for s in new]
        parts = all_gather_object((texts, len(self.skipped)), self._tellers)
        told = {place: text for part, _ in reversed(parts) for place, text in reversed(part) if place not in self._named}
        self._named |= told.keys()
        count = f"{self.name}: {sum(count for _, count in parts)} samples skipped so far"
        return [*reversed(told.values()), count] if any(part for part, _ in parts) else []

    def close(self) -> None:
        """End workers and processes, and the source where it wants that."""
        if self._following is not None:
            self._following.close()
            self._following = None
        for process in self._processes:
            process.close()
        self._assembler.close()
        if hasattr(self.source, "close"):
            self.source.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within an epoch

    def _begun(self, plan: "_Plan") -> "_Course":
        """The epoch, if it was begun at the end of the one before; otherwise its first samples are prepared from now on."""
        following, self._following = self._following, None
        if following is not None:
            if plan.is_whole and plan.epoch == following.plan.epoch:
                return following
            following.close()
        part = -(-self.size // self._tellers.size)
        ahead = Ahead(
            self._prepare, name=self.name, workers=self._workers, budget=self._prefetch, least=2 * part + self._workers,
            patience=self._patience,
        )  # fmt: skip
        return self._course(plan, ahead)

    def _course(self, plan: "_Plan", ahead: Ahead) -> "_Course":
        return _Course(plan, ahead)

    def _batches(self, course: "_Course", following: "_Course | None") -> Iterator[Any]:
        plan = course.plan
        if course.coming is None:
            self._put_together(course)
        while course.coming is not None:
            (number, found), made = course.coming.result()
            # The next batch is put together while this one is computed with.
            self._put_together(course)
            if course.coming is None and following is not None:
                self._put_together(following)
            batch = self._assembler.finish(made)
            plan.deliver(number, found)
            if batch is not None:
                yield batch
            del batch, made

    def _put_together(self, course: "_Course") -> None:
        part, course.coming = next(course.parts, None), None
        if part is not None:
            course.coming = self._assembler.begin(partial(self._taken, course.ahead, course.plan, *part))

    def _taken(self, ahead: Ahead, plan: "_Plan", number: int, part: np.ndarray) -> "tuple[_Found, list[Any]]":
        """Number, tasks and samples of the next batch, as soon as they are ready."""
        found: list[Ready] | None
        if self._dealt is not None:
            found = self._dealt.take(ahead, plan.tasks_at(part), number, plan.task_at if self.order == "ready" else None)
        elif self.order == "strict":
            found = ahead.take(plan.epoch, len(part), part.tolist())
        elif self._leader is None:
            found = ahead.take(plan.epoch, len(part))
        else:
            found = self._leader.take(ahead, plan.epoch, len(part))
        assert found is not None
        return (number, [ready.task for ready in found]), [ready.sample for ready in found]

    def _prepare(self, task: Task, worker: int) -> tuple[Any, int]:
        index, attempt = task.index, 0
        take_device(self._assembler.device)
        while True:
            attempt += 1
            try:
                sample = (self._processes[worker] if self._processes else self.source).sample(index, task.epoch)
                return sample, tree_bytes(sample)
            except Exception as problem:
                if isinstance(problem, HpcaiError | MemoryError) and not isinstance(problem, DataError):
                    raise  # of this process, not of the sample
                where = f"{self.name}, rank {self._rank}, sample {index}: {self._reason(problem, index)}"
                if self._on_bad == "stop":
                    raise DataError(where) from problem
                if attempt == _ATTEMPTS:
                    raise DataError(f"{where}; {_ATTEMPTS} samples in a row could not be used") from problem
                row = self._order(task.epoch)
                instead = int(row[(task.position + attempt) % len(row)])
                self.skipped.append(Skipped(task.epoch, index, instead, self._reason(problem, index)))
                logger.warning("%s; skipped, %d in its place", where, instead)
                index = instead

    def _reason(self, problem: Exception, index: int) -> str:
        """Why a sample cannot be used, with the place where it lies."""
        text = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
        place = self.source.describe(index)
        return text if place in text else f"{place}: {text}"


def _skipped(sample: Skipped) -> str:
    return f"sample {sample.index} of epoch {sample.epoch} is skipped ({sample.instead} in its place)"


_ATTEMPTS = 10

_Found = tuple[int, list[Task]]  # the number of a batch, and what is in it


class _Plan:
    """What is left of an epoch, and which of it this process takes and has delivered."""

    def __init__(self, loader: Loader, epoch: int, first: int, late: tuple[int, ...]) -> None:
        self.epoch, self.first, self._loader = epoch, first, loader
        self.is_whole = first == 0 and not late
        self.highest = -1
        self._delivered: set[int] = set()
        self._row = np.concatenate([np.array(sorted(late), int), np.arange(first + len(late), loader.samples)])

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Number and positions of this process' part of each batch, in strict order."""
        size = self._loader.size
        for number in range(-(-len(self._row) // size)):
            positions = self._row[number * size : (number + 1) * size]
            mine = positions[self._loader._deal(self.epoch, positions)]
            if len(mine):
                yield number, mine

    def tasks(self) -> Iterator[Task]:
        """What this process makes."""
        dealt = self._loader._dealt
        for number, part in self.parts():
            yield from (t for place, t in enumerate(self.tasks_at(part)) if dealt is None or dealt.makes(number, place))

    def tasks_at(self, positions: np.ndarray) -> list[Task]:
        return [Task(self.epoch, p, i) for p, i in zip(positions.tolist(), self._loader._at(self.epoch, positions).tolist())]

    def task_at(self, position: int) -> Task:
        return self.tasks_at(np.array([position]))[0]

    def deliver(self, number: int, tasks: Sequence[Task]) -> None:
        """Note which samples batch ``number`` holds."""
        first = self.first + number * self._loader.size
        self._loader._history.append((self.epoch, first, [task.index for task in tasks]))
        positions = [task.position for task in tasks]
        self._delivered.update(positions)
        self.highest = max(self.highest, *positions)

    def left_below(self, highest: int) -> list[int]:
        left: list[int] = []
        for _, part in self.parts():
            if part.min() > highest:
                break
            left += [p for p in part.tolist() if p < highest and p not in self._delivered]
        return left


class _Course:
    """An epoch on its way: what is left of it, the workers that prepare its samples, and the batch that is being put together."""

    def __init__(self, plan: _Plan, ahead: Ahead) -> None:
        self.plan, self.ahead, self.parts = plan, ahead, plan.parts()
        self.coming: Future[tuple[_Found, Made]] | None = None
        ahead.feed(plan.tasks())

    def close(self) -> None:
        self.ahead.close()


class _Leader:
    """In ready order the first process of a copy says which samples are next, and the others take the same."""

    def __init__(self, channel: Axis) -> None:
        # Broadcasts are made by a thread. In the group of the axis they could meet the loop's collectives in another order on each
        # process, so they have a channel of their own.
        self._channel, self._leads = channel, channel.rank == 0

    def take(self, ahead: Ahead, epoch: int, count: int) -> list[Ready] | None:
        chosen = torch.full((count,), -1)
        found = None
        try:
            if self._leads:
                found = ahead.take(epoch, count)
                chosen = torch.tensor([ready.task.position for ready in found or ()])
        finally:  # also when nothing comes any more: the others are waiting
            torch_dist.broadcast(chosen, group=self._channel.group, group_src=0)
        if self._leads:
            return found
        if chosen[0] < 0:
            raise DataError("the first process of this copy of the model has ended its epoch; see its message")
        return ahead.take(epoch, count, chosen.tolist())
