"""Simulation of the prefetch queue of ``hpcai.data.Loader``: the time that steps wait for samples."""

import heapq
from collections.abc import Sequence

import numpy as np


def simulate_waits(
    preparation: np.ndarray, step: float, workers: int, capacity: int, *, batch: int = 1, ranks: int = 1,
) -> np.ndarray:  # fmt: skip
    """Return the seconds that each step of ``step`` seconds waits for its samples, which take ``preparation`` seconds each.

    A batch is requested when the previous one is delivered, and takes any ``batch`` samples that are ready (``data.order: ready``).
    A step starts when all replicas have their samples.

    Args:
        workers: Each starts the next sample when it is idle and fewer than ``capacity`` samples are running or ready.
        ranks: Ranks of a model replica that prepare its samples in turn (``data.scatter``), each with its own workers.

    Shape: preparation [N] or [replicas, N] -> [N / batch]
    """
    rows = np.atleast_2d(np.asarray(preparation, float))
    steps = rows.shape[1] // batch
    # Sample `slot` of batch `number` is prepared by rank (number + slot) % ranks, as in hpcai.data.scatter.
    source = (np.arange(steps)[:, None] + np.arange(batch)) % ranks  # [steps, batch]
    samples = [np.flatnonzero(source == m) for m in range(ranks)]
    replicas = [[_Rank(row[own].tolist(), workers, capacity) for own in samples] for row in rows]
    counts = np.stack([(source == m).sum(1) for m in range(ranks)], 1)  # [steps, ranks]
    waits, requested, begun = np.empty(steps), 0.0, [0.0] * len(replicas)
    for k, each in enumerate(counts.tolist()):
        for c, replica in enumerate(replicas):
            begun[c] = max(requested, *(rank.take(begun[c], count) for rank, count in zip(replica, each) if count))
        waits[k] = max(begun) - requested
        requested = max(begun) + step
    return waits


class _Rank:
    """A rank that prepares its samples in order: the ends of those that are prepared, and the number of ready ones."""

    def __init__(self, seconds: Sequence[float], workers: int, capacity: int) -> None:
        self.seconds, self.idle, self.capacity = seconds, workers, capacity
        self.next = self.ready = 0
        self.busy: list[float] = []
        self._begin(0.0)

    def take(self, now: float, count: int) -> float:
        """Return the time at which ``count`` samples, requested at ``now``, are ready."""
        while self.busy and self.busy[0] <= now:
            self._finish()
        while self.ready < count:
            now = self._finish()
        self.ready -= count
        self.capacity += count
        self._begin(now)
        return now

    def _finish(self) -> float:
        now = heapq.heappop(self.busy)
        self.ready += 1
        self.idle += 1
        self._begin(now)
        return now

    def _begin(self, now: float) -> None:
        while self.idle and self.capacity > 0 and self.next < len(self.seconds):
            heapq.heappush(self.busy, now + self.seconds[self.next])
            self.next, self.idle, self.capacity = self.next + 1, self.idle - 1, self.capacity - 1


def heavy_tail(random: np.random.Generator, count: int | tuple[int, ...]) -> np.ndarray:
    """Return random preparation times in seconds: log-normal with median 0.1, and for a fraction of 0.03 uniform from 1 to 10.
    [count]

    The times of OpenFold's features: 26 to 32 ms (NVIDIA) and 40 to 100 ms (HPE) per batch with many workers, but seconds for a few
    percent of the chains, such as those with large alignments (logs of MLPerf HPC v3.0, and the loader of its OpenFold,
    github.com/mlcommons/hpc_results_v3.0).
    """
    seconds = 0.1 * np.exp(0.5 * random.standard_normal(count))
    return np.where(random.random(count) < 0.03, random.uniform(1.0, 10.0, count), seconds)
