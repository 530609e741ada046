"""The data loader: prefetched batches on the device, in an order that does not depend on the number of ranks.

An epoch has positions 0 ... M - 1, which the sampler maps to samples. Each batch has B positions, assigned to the replicas of the
model. In ``strict`` order batch k has positions kB ... kB + B - 1. In ``ready`` order each replica takes its lowest positions
whose samples are ready, so that a straggler does not delay the others: it is deferred to a later batch of the same epoch. In both
orders each position is delivered once per epoch. The state of a run is the number of samples delivered and the list of deferred
positions, from which any other number of ranks can resume.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as torch_dist

from hpcai.data.collate import Collator, Prepared, set_device, tree_bytes
from hpcai.data.direct import MemoryPool
from hpcai.data.prefetch import PrefetchQueue, Ready, Task
from hpcai.data.sampler import Grouped, InOrder, LargestFirst, Sampler, Shuffled
from hpcai.data.scatter import ScatteredLoader
from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Axis, Mesh
from hpcai.dist.watchdog import waiting_at
from hpcai.errors import DataError, HpcaiError

logger = logging.getLogger(__name__)


class Source(Protocol):
    """A map-style dataset. ``sample`` is called from several threads, or in several processes.

    Optional members: ``collate(samples) -> batch`` of CPU tensors, instead of stacking; ``identity``, a string that is equal for
    equal datasets; ``changes_since(seconds)``, a message on data that was written after a time; ``replicated``,
    True if all ranks of a model replica prepare the same sample, none a shard of it; ``close()``.
    """

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Any:
        """Return arrays, numbers or tensors in tuples, named tuples or dicts: a pure function of ``index`` and ``epoch``."""

    def describe(self, index: int) -> str:
        """Return the location of a sample, for messages."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A bad sample, and the one that was delivered in its place."""

    epoch: int
    index: int
    replacement: int
    reason: str

    def __str__(self) -> str:
        return f"sample {self.index} of epoch {self.epoch} is skipped ({self.replacement} in its place)"


class Loader(AbstractContextManager["Loader"]):
    """Loads batches of ``source`` for one rank of the mesh. The ranks of a model replica (all axes but ``replicate``) construct it
    together, and get the same samples in the same order.

    Args:
        batch: Samples of a batch over all replicas, so that the same settings train alike on any number of ranks.
        last_batch: ``drop`` leaves out samples that do not fill a batch (others in every epoch), ``pad`` repeats the first samples
            of the epoch, ``keep`` (for evaluation) delivers each sample once, in local batches of uneven sizes.
        workers: Threads, or with ``processes`` worker processes, that prefetch samples, up to ``prefetch`` bytes.
        on_bad_sample: ``stop`` raises; ``skip`` delivers the next good sample of the order, and lists it in ``skipped``. With
            ``last_batch="keep"`` a bad sample always raises: a metric must cover all samples.
        batch_transform: Applied to ``(batch, step)``, with the batch on the device; ``step`` counts over all epochs, from 0.
        scatter: Prepare each sample on one rank of a replica and scatter it to the others; ``auto``: for a ``replicated`` source.

    Raises DataError if the batch size is no multiple of replicas and micro-batches.
    """

    def __init__(
        self, source: Source, batch: int, mesh: Mesh, *, name: str, sampler: Sampler | None = None, seed: int = 0,
        shuffle: bool = True, last_batch: Literal["drop", "pad", "keep"] = "drop", accumulate: int = 1, workers: int = 2,
        processes: bool = False, prefetch: int = 1 << 30, order: Literal["strict", "ready"] = "strict",
        on_bad_sample: Literal["stop", "skip"] = "stop", patience: float = 600.0,
        batch_transform: Callable[[Any, int], Any] | None = None, scatter: bool | Literal["auto"] = False,
    ) -> None:  # fmt: skip
        self.source, self.batch_size, self.name, self.device = source, batch, name, mesh.device
        self.replicas, self.order, self.last_batch = mesh["replicate"], order, last_batch
        self.sampler = sampler or (Shuffled(len(source), seed) if shuffle else InOrder(len(source)))
        self.skipped: list[Skipped] = []
        self._reported, self._reported_names = 0, set[str]()
        self._rank, self._workers, self._prefetch = mesh.rank, workers, prefetch
        self._patience, self._batch_transform = patience, batch_transform
        self._on_bad_sample = "stop" if last_batch == "keep" else on_bad_sample
        replicated = getattr(source, "replicated", False)
        self._scatters = mesh.model_parallel.size > 1 and (replicated if scatter == "auto" else scatter)
        if self._scatters and not replicated:
            raise DataError(
                f"{name}: data.scatter, but a {type(source).__name__} is not `replicated`: each of "
                f"{mesh.model_parallel.size} ranks of a model replica may prepare its own shard; set data.scatter to false"
            )
        self._validate(batch, accumulate, mesh)
        self._epoch_order: Callable[[int], np.ndarray] = lru_cache(2)(self.sampler.order)
        self._reporting_axis = mesh.peers if self._scatters else self.replicas
        gpu = mesh.device if mesh.device.type == "cuda" else None
        self._scatter = ScatteredLoader(mesh.new_background_axis("model_parallel"), mesh.rank, gpu) if self._scatters else None
        needs_channel = order == "ready" and mesh.model_parallel.size > 1 and not self._scatters
        self._channel = mesh.new_background_axis("model_parallel") if needs_channel else None
        self._collator = Collator(mesh.device, name, getattr(source, "collate", None))
        self._next_epoch: _ActiveEpoch | None = None
        self._plan: _EpochPlan | None = None
        self._history: deque[tuple[int, int, list[int]]] = deque(maxlen=4096)
        self._worker_processes: list[Any] = []
        if processes:
            from hpcai.data.workers import Worker

            memory = MemoryPool(pin=gpu)
            self._worker_processes = [Worker(source, name, number, memory) for number in range(workers)]

    def _validate(self, batch: int, accumulate: int, mesh: Mesh) -> None:
        name, replicas, samples = self.name, self.replicas.size, self.sampler.samples
        divisor = replicas * accumulate
        if self.last_batch != "keep" and batch % divisor:
            fault = f"{name}: a batch of {batch} samples does not divide by {replicas} replicas x {accumulate} micro-batches"
            raise DataError(f"{fault}; give a multiple of {divisor}")
        if not len(self.source) or not samples:
            raise DataError(f"{name}: there is no sample; make some data first")
        if self.last_batch == "drop" and samples < batch:
            raise DataError(f"{name}: {samples} samples are fewer than one batch of {batch}; make more data or lower the batch")
        if samples < replicas and not isinstance(self.sampler, LargestFirst):
            raise DataError(f"{name}: {samples} samples for {replicas} replicas; make more data or start fewer ranks")
        if self.order == "ready" and isinstance(self.sampler, Grouped):
            raise DataError(f"{name}: order is ready, but each batch has samples of one group; set data.order to strict")
        if self._on_bad_sample == "skip" and mesh.model_parallel.size > 1 and not self._scatters:
            raise DataError(
                f"{name}: on_bad_sample=skip, but each of {mesh.model_parallel.size} ranks of a model replica prepares the sample; "
                "set it to stop, or data.scatter to true if the source is replicated"
            )
        if self._scatters:
            logger.info("%s: each sample is prepared on one of %d ranks and scattered on", name, mesh.model_parallel.size)
        extra = samples % batch
        if extra and self.last_batch == "drop":
            logger.info("%s: %d samples in batches of %d: each epoch leaves out %d, others each time", name, samples, batch, extra)
        if extra and self.last_batch == "pad":
            logger.info("%s: %d samples in batches of %d: each epoch repeats %d", name, samples, batch, batch - extra)

    # ---- properties of an epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.sampler.samples // self.batch_size if self.last_batch == "drop" else -(-self.sampler.samples // self.batch_size)

    @property
    def samples(self) -> int:
        """The number of samples that an epoch delivers, over all ranks."""
        return self.sampler.samples if self.last_batch == "keep" else len(self) * self.batch_size

    @property
    def dataset_size(self) -> int:
        """The number of samples of the source."""
        return len(self.source)

    @property
    def identity(self) -> str:
        """A string that identifies the dataset, or an empty one if the source has none."""
        return str(getattr(self.source, "identity", ""))

    def changes_since(self, seconds: float) -> str:
        """Describe data that was written after a time, in seconds since the epoch; an empty string if there is none."""
        return str(self.source.changes_since(seconds)) if hasattr(self.source, "changes_since") else ""

    def indices(self, epoch: int, first: int) -> np.ndarray:
        """Return the indices of the local batch at position ``first`` of ``epoch``, in strict order."""
        positions = np.arange(first, min(first + self.batch_size, self.samples))
        return self._index_at(epoch, positions)[self._assigned(epoch, positions)]

    def describe(self, epoch: int, first: int) -> str:
        """Return the locations of the samples of the local batch after ``first`` samples of ``epoch``."""
        names = [name for _, name in self.batch_samples(epoch, first)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def batch_samples(self, epoch: int, first: int) -> list[tuple[int, str]]:
        """Return index and location of each sample of the same local batch, in strict order if it was not delivered yet."""
        indices = next((i for e, f, i in self._history if (e, f) == (epoch, first)), None)
        return [(int(i), self.source.describe(int(i))) for i in (self.indices(epoch, first) if indices is None else indices)]

    def _index_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self._epoch_order(epoch)[positions % self.sampler.samples]

    def _assigned(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.sampler.assign(self._index_at(epoch, positions), self.replicas.rank, self.replicas.size)

    # ---- an epoch

    def epoch(self, epoch: int, first: int = 0, deferred: Sequence[int] = (), more: bool = False) -> Iterator[Any]:
        """Iterate over the batches of ``epoch``, after ``first`` delivered samples and with the positions ``deferred`` left.

        Empty local batches (of a small last batch) are left out. ``more``: Prefetch the next epoch at the end of this one.
        """
        plan = _EpochPlan(self, epoch, first, tuple(deferred))
        active, self._next_epoch = self._next_epoch, None  # started at the end of the previous epoch, or now
        if active is not None and not (plan.is_full and plan.epoch == active.plan.epoch):
            active.close()
            active = None
        if active is None:
            per_rank = -(-self.batch_size // self._reporting_axis.size)
            queue = PrefetchQueue(
                self._prepare, name=self.name, workers=self._workers, budget=self._prefetch,
                min_samples=2 * per_rank + self._workers, patience=self._patience,
            )  # fmt: skip
            active = self._new_epoch(plan, queue)
        self._plan = active.plan
        following = self._new_epoch(_EpochPlan(self, epoch + 1, 0, ()), active.queue) if more else None
        batches = self._batches(active, following)
        if self._batch_transform is not None:
            batches = map(self._batch_transform, batches, itertools.count(epoch * len(self) + first // self.batch_size))
        try:
            yield from batches
        except BaseException:  # also if the consumer stops early
            active.close()
            if following is not None:
                following.close()
            raise
        self._next_epoch = following
        if following is None:
            active.close()

    def deferred(self) -> list[int]:
        """Return the undelivered positions below the highest delivered one of any replica. A collective call."""
        if self.order == "strict" or self._plan is None:
            return []
        highest = max(all_gather_object(self._plan.highest, self.replicas))
        return sorted(p for part in all_gather_object(self._plan.undelivered_below(highest), self.replicas) for p in part)

    def news(self) -> list[str]:
        """Return messages about samples skipped on any rank since the last call, one per sample, and counts. A collective call."""
        if self._on_bad_sample == "stop":
            return []
        new, self._reported = self.skipped[self._reported :], len(self.skipped)
        texts = [(self.source.describe(s.index), f"{self.name}: {s}: {s.reason}") for s in new]
        parts = all_gather_object((texts, len(self.skipped)), self._reporting_axis)
        messages = {name: text for part, _ in reversed(parts) for name, text in reversed(part) if name not in self._reported_names}
        self._reported_names |= messages.keys()
        count = f"{self.name}: {sum(count for _, count in parts)} samples skipped so far"
        return [*reversed(messages.values()), count] if any(part for part, _ in parts) else []

    def close(self) -> None:
        """Stop workers and processes, and close the source if it has ``close``."""
        if self._next_epoch is not None:
            self._next_epoch.close()
            self._next_epoch = None
        for process in self._worker_processes:
            process.close()
        self._collator.close()
        if hasattr(self.source, "close"):
            self.source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- iteration

    def _new_epoch(self, plan: "_EpochPlan", queue: PrefetchQueue) -> "_ActiveEpoch":
        return _ActiveEpoch(plan, queue)

    def _batches(self, active: "_ActiveEpoch", following: "_ActiveEpoch | None") -> Iterator[Any]:
        plan = active.plan
        if active.pending_batch is None:
            self._submit_next(active)
        while active.pending_batch is not None:
            with waiting_at(f"a batch of {self.name}", is_work=True):
                (number, tasks), prepared = active.pending_batch.result()
            # The next batch is collated during the computation of this one.
            self._submit_next(active)
            if active.pending_batch is None and following is not None:
                self._submit_next(following)
            batch = self._collator.wait(prepared)
            plan.record(number, tasks)
            if batch is not None:
                yield batch
            del batch, prepared

    def _submit_next(self, active: "_ActiveEpoch") -> None:
        item, active.pending_batch = next(active.remaining, None), None
        if item is not None:
            active.pending_batch = self._collator.submit(partial(self._take, active.queue, active.plan, *item))

    def _take(self, queue: PrefetchQueue, plan: "_EpochPlan", number: int, positions: np.ndarray) -> "tuple[_Tasks, list[Any]]":
        """Return (number, tasks) and samples of the next local batch, as soon as they are ready."""
        samples: list[Ready] | None
        if self._scatter is not None:
            samples = self._scatter.take(queue, plan.tasks_at(positions), number, plan.task_at if self.order == "ready" else None)
        elif self.order == "strict":
            samples = queue.take(plan.epoch, len(positions), positions.tolist())
        elif self._channel is None:
            samples = queue.take(plan.epoch, len(positions))
        else:
            samples = _take_as_first(self._channel, queue, plan.epoch, len(positions))
        assert samples is not None
        return (number, [ready.task for ready in samples]), [ready.sample for ready in samples]

    def _prepare(self, task: Task, worker: int) -> tuple[Any, int]:
        index, attempt = task.index, 0
        set_device(self._collator.device)
        while True:
            attempt += 1
            try:
                sample = (self._worker_processes[worker] if self._worker_processes else self.source).sample(index, task.epoch)
                return sample, tree_bytes(sample)
            except Exception as problem:
                if isinstance(problem, HpcaiError | MemoryError) and not isinstance(problem, DataError):
                    raise  # not caused by the sample
                message = f"{self.name}, rank {self._rank}, sample {index}: {self._reason(problem, index)}"
                if self._on_bad_sample == "stop":
                    raise DataError(message) from problem
                if attempt == _MAX_ATTEMPTS:
                    raise DataError(f"{message}; {_MAX_ATTEMPTS} samples in a row could not be used") from problem
                order = np.roll(self._epoch_order(task.epoch), -task.position)
                if isinstance(self.sampler, Grouped):  # a batch has samples of one group
                    order = order[self.sampler.group_of[order] == self.sampler.group_of[task.index]]
                replacement = int(order[attempt % len(order)])
                self.skipped.append(Skipped(task.epoch, index, replacement, self._reason(problem, index)))
                logger.warning("%s; skipped, %d in its place", message, replacement)
                index = replacement

    def _reason(self, problem: Exception, index: int) -> str:
        """Return why a sample is bad, with its location."""
        text = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
        location = self.source.describe(index)
        return text if location in text else f"{location}: {text}"


_MAX_ATTEMPTS = 10

_Tasks = tuple[int, list[Task]]  # the number of a batch, and its tasks


class _EpochPlan:
    """The remaining positions of an epoch, and those that this rank has delivered."""

    def __init__(self, loader: Loader, epoch: int, first: int, deferred: tuple[int, ...]) -> None:
        self.epoch, self.first, self._loader = epoch, first, loader
        self.is_full = first == 0 and not deferred
        self.highest = -1
        self._delivered: set[int] = set()
        self._positions = np.concatenate([np.array(sorted(deferred), int), np.arange(first + len(deferred), loader.samples)])

    def local_batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """Iterate over number and positions of the local part of each batch, in strict order."""
        size = self._loader.batch_size
        for number in range(-(-len(self._positions) // size)):
            positions = self._positions[number * size : (number + 1) * size]
            local = positions[self._loader._assigned(self.epoch, positions)]
            if len(local):
                yield number, local

    def tasks(self) -> Iterator[Task]:
        scatter = self._loader._scatter
        for number, positions in self.local_batches():
            yield from (t for slot, t in enumerate(self.tasks_at(positions)) if scatter is None or scatter.is_local(number, slot))

    def tasks_at(self, positions: np.ndarray) -> list[Task]:
        return [Task(self.epoch, p, i) for p, i in zip(positions.tolist(), self._loader._index_at(self.epoch, positions).tolist())]

    def task_at(self, position: int) -> Task:
        return self.tasks_at(np.array([position]))[0]

    def record(self, number: int, tasks: Sequence[Task]) -> None:
        first = self.first + number * self._loader.batch_size
        self._loader._history.append((self.epoch, first, [task.index for task in tasks]))
        positions = [task.position for task in tasks]
        self._delivered.update(positions)
        self.highest = max(self.highest, *positions)

    def undelivered_below(self, highest: int) -> list[int]:
        undelivered: list[int] = []
        for _, positions in self.local_batches():
            if positions.min() > highest:
                break
            undelivered += [p for p in positions.tolist() if p < highest and p not in self._delivered]
        return undelivered


class _ActiveEpoch:
    """A running epoch: its plan, the queue that prepares its samples, and the batch that is being collated."""

    def __init__(self, plan: _EpochPlan, queue: PrefetchQueue) -> None:
        self.plan, self.queue, self.remaining = plan, queue, plan.local_batches()
        self.pending_batch: Future[tuple[_Tasks, Prepared]] | None = None
        queue.feed(plan.tasks())

    def close(self) -> None:
        self.queue.close()


def _take_as_first(channel: Axis, queue: PrefetchQueue, epoch: int, count: int) -> list[Ready] | None:
    """Return samples in ready order on the ranks of a model replica: rank 0 chooses the next, and the others take the same.

    A thread calls the broadcasts. In the process group of the axis their order relative to the collectives of the loop could differ
    between ranks, hence the separate ``channel``.
    """
    positions = torch.full((count,), -1)
    samples = None
    try:
        if channel.rank == 0:
            samples = queue.take(epoch, count)
            positions = torch.tensor([ready.task.position for ready in samples or ()])
    finally:  # also after a failure: the other ranks are waiting
        torch_dist.broadcast(positions, group=channel.group, group_src=0)
    if channel.rank == 0:
        return samples
    if positions[0] < 0:
        raise DataError("rank 0 of this model replica has ended its epoch; see its message")
    return queue.take(epoch, count, positions.tolist())
