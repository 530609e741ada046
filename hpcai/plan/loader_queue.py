"""Simulation of the prefetch queue of ``hpcai.data.Loader``: the time that steps wait for samples."""

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np


def simulate_waits(
    preparation: np.ndarray, step: float, workers: int, capacity: int, order: Literal["strict", "ready"], *, batch: int = 1,
    epoch: int | None = None, ranks: int = 1,
) -> np.ndarray:  # fmt: skip
    """Return the seconds that each step of ``step`` seconds waits for its samples, which take ``preparation`` seconds each.

    A batch is requested when the previous one is delivered. It is ready in strict order if all its samples are, and in ready order
    if any ``batch`` samples of the epoch are, the lowest first. A step starts when all replicas have their samples.

    Args:
        workers: Each starts the next sample when it is idle and fewer than ``capacity`` samples are running or ready.
        epoch: Batches of an epoch, None for all. Samples are delivered within their epoch, and those of the next are prefetched.
        ranks: Ranks of a model replica that prepare its samples in turn (``data.scatter``), each with its own workers.

    Shape: preparation [N] or [replicas, N] -> [N / batch]
    """
    rows = np.atleast_2d(np.asarray(preparation, float))
    steps = rows.shape[1] // batch
    epoch = epoch or max(steps, 1)
    # Sample `slot` of batch `number` is prepared by rank (number + slot) % ranks, as in hpcai.data.scatter.
    source = (np.arange(steps * batch) // batch % epoch + np.arange(steps * batch) % batch) % ranks
    indices = [np.flatnonzero(source == m) for m in range(ranks)]
    replicas = [[_Rank(row[samples].tolist(), workers, capacity, order == "strict") for samples in indices] for row in rows]
    counts = np.stack([(source == m).reshape(steps, batch).sum(1) for m in range(ranks)], 1)  # [steps, ranks]
    ends = counts.cumsum(0)[np.minimum((np.arange(steps) // epoch + 1) * epoch, steps) - 1]
    waits, requested, begun = np.empty(steps), 0.0, [0.0] * len(replicas)
    for k, (each, last) in enumerate(zip(counts.tolist(), ends.tolist())):
        for c, replica in enumerate(replicas):
            times = (rank.take(begun[c], count, end) for rank, count, end in zip(replica, each, last) if count)
            begun[c] = max(requested, *times)
        waits[k] = max(begun) - requested
        requested = max(begun) + step
    return waits


class _Rank:
    """A rank that prepares its samples 0, 1, ... in order: the end of each running sample, and the ready samples."""

    def __init__(self, seconds: Sequence[float], workers: int, capacity: int, strict: bool) -> None:
        self.seconds, self.idle, self.capacity, self.strict = seconds, workers, capacity, strict
        self.next = self.taken = 0
        self.busy: list[tuple[float, int]] = []
        self.ready: list[int] = []
        self._begin(0.0)

    def take(self, now: float, count: int, end: int) -> float:
        """Return the time at which ``count`` samples below ``end``, requested at ``now``, are ready."""
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


def max_samples(workers: int, part: int, prefetch: float, sample: float) -> int:
    """Return the samples of ``sample`` bytes that a rank holds or prepares within ``prefetch`` bytes, at least two local batches of
    ``part`` samples and one for each worker."""
    return max(2 * part + workers, int(prefetch // sample))


def heavy_tail(random: np.random.Generator, count: int | tuple[int, ...]) -> np.ndarray:
    """Return random preparation times in seconds: log-normal with median 0.1, and for a fraction of 0.03 uniform from 1 to 10.
    [count]

    The times of OpenFold's features: 26 to 32 ms (NVIDIA) and 40 to 100 ms (HPE) per batch with many workers, but seconds for a few
    percent of the chains, such as those with large alignments (logs of MLPerf HPC v3.0, and the loader of its OpenFold,
    github.com/mlcommons/hpc_results_v3.0).
    """
    seconds = 0.1 * np.exp(0.5 * random.standard_normal(count))
    return np.where(random.random(count) < 0.03, random.uniform(1.0, 10.0, count), seconds)
