"""How long steps wait for their samples, computed from what each takes: the queue of ``hpcai.data.Loader`` without its data."""

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np


def simulate_waits(
    preparation: np.ndarray, step: float, workers: int, capacity: int, order: Literal["strict", "ready"], *, batch: int = 1,
    epoch: int | None = None, ranks: int = 1,
) -> np.ndarray:  # fmt: skip
    """Seconds that each step waits for its samples, which take ``preparation`` seconds each, in their order.   [N] -> [N / batch]

    Each of ``workers`` begins the next sample when it is free, while fewer than ``ahead`` are under way or wait to be taken. A
    batch is taken from the moment on when the one before was handed out: in strict order once its own samples are ready, in ready
    order once any ``batch`` samples of the epoch are, the lowest first. ``epoch`` counts batches, None for all: a sample comes in
    its epoch in ready order too, and those of the next one are prepared meanwhile. ``makers`` processes hold a copy of the model
    together and make its samples in turn (``data.scatter``), each with its own workers.

    With a row for each copy of the model a step begins when all copies have their samples: the seconds that all wait.
    [copies, N] -> [N / batch]
    """
    rows = np.atleast_2d(np.asarray(preparation, float))
    steps = rows.shape[1] // batch
    epoch = epoch or max(steps, 1)
    # Sample `place` of batch `number` is made by process (number + place) % makers, as hpcai.data.dealt has it.
    source = (np.arange(steps * batch) // batch % epoch + np.arange(steps * batch) % batch) % ranks
    own_samples = [np.flatnonzero(source == m) for m in range(ranks)]
    copies = [[_PreparingRank(row[some].tolist(), workers, capacity, order == "strict") for some in own_samples] for row in rows]
    counts = np.stack([(source == m).reshape(steps, batch).sum(1) for m in range(ranks)], 1)  # [steps, makers]
    ends = counts.cumsum(0)[np.minimum((np.arange(steps) // epoch + 1) * epoch, steps) - 1]
    waits, requested, begun = np.empty(steps), 0.0, [0.0] * len(copies)
    for k, (each, last) in enumerate(zip(counts.tolist(), ends.tolist())):
        for c, every in enumerate(copies):
            taken = (one.take(begun[c], count, end) for one, count, end in zip(every, each, last) if count)
            begun[c] = max(requested, *taken)
        waits[k] = max(begun) - requested
        requested = max(begun) + step
    return waits


class _PreparingRank:
    """A process that prepares samples 0, 1, ... of its own: when each worker is at which, and what is ready."""

    def __init__(self, seconds: Sequence[float], workers: int, capacity: int, strict: bool) -> None:
        self.seconds, self.idle, self.capacity, self.strict = seconds, workers, capacity, strict
        self.next = self.taken = 0
        self.busy: list[tuple[float, int]] = []
        self.ready: list[int] = []
        self._begin(0.0)

    def take(self, now: float, count: int, end: int) -> float:
        """When ``count`` samples below ``end`` are taken that are wanted from ``now`` on."""
        while self.busy and self.busy[0][0] <= now:
            self._finish()
        while (samples := self._available(count, end)) is None:
            now = self._finish()
        for _ in samples:
            heapq.heappop(self.ready)
        self.taken += count
        self.capacity += count
        self._begin(now)
        return now

    def _available(self, count: int, end: int) -> list[int] | None:
        samples = heapq.nsmallest(count, self.ready)
        highest = self.taken + count if self.strict else end
        return samples if len(samples) == count and samples[-1] < highest else None

    def _finish(self) -> float:
        now, number = heapq.heappop(self.busy)
        heapq.heappush(self.ready, number)
        self.idle += 1
        self._begin(now)
        return now

    def _begin(self, now: float) -> None:
        while self.idle and self.capacity > 0 and self.next < len(self.seconds):
            heapq.heappush(self.busy, (now + self.seconds[self.next], self.next))
            self.next, self.idle, self.capacity = self.next + 1, self.idle - 1, self.capacity - 1


def queue_capacity(workers: int, part: int, prefetch: float, sample: float) -> int:
    """Samples that a process holds or prepares at a time (``ahead``): ``part`` of them are its share of a batch, and as many as
    ``prefetch`` bytes hold of ``sample`` bytes, but no fewer than keep all workers busy and two batches coming."""
    return max(2 * part + workers, int(prefetch // sample))


def heavy_tail(
    random: np.random.Generator, count: int | tuple[int, ...], body: float = 0.1, sigma: float = 0.5, share: float = 0.03,
    tail: tuple[float, float] = (1.0, 10.0),
) -> np.ndarray:  # fmt: skip
    """Seconds that samples take to prepare: log-normal about the median ``body``, but a ``share`` of them anything within ``tail``,
    in no order.   [count]

    Those of OpenFold's features: 26 to 32 ms (NVIDIA) and 40 to 100 ms (HPE) until the next batch with many workers, while a few
    percent of the chains, such as those with large alignments, take seconds (logs of MLPerf HPC v3.0, and the loader of its
    OpenFold, github.com/mlcommons/hpc_results_v3.0).
    """
    seconds = body * np.exp(sigma * random.standard_normal(count))
    return np.where(random.random(count) < share, random.uniform(*tail, count), seconds)
