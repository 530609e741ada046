"""Samplers: the order of the samples of an epoch, and the assignment of each global batch to the replicas of the model.

Both are pure functions of seed, epoch and position; the order is the same on any number of ranks.   N samples, batches of B
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hpcai.errors import DataError


class Sampler(Protocol):
    samples: int
    """number of samples in an epoch"""

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample indices of an epoch.   [samples]"""

    def assign(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        """Return the positions within the batch ``indices`` of the samples of replica ``rank`` of ``size``: by default the
        contiguous part of it."""
        return split_range(len(indices), rank, size)


def split_range(count: int, rank: int, size: int) -> np.ndarray:
    """Return the contiguous part of 0 ... ``count`` - 1 of ``rank`` out of ``size``. Lengths differ by at most 1."""
    return np.arange(count * rank // size, count * (rank + 1) // size)


def _nonnegative(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any():
        raise DataError(f"{name} must be one-dimensional, finite and not negative")
    return array


def _assign_balanced(costs: np.ndarray, capacity: Sequence[int]) -> np.ndarray:
    """Return the owner of each item: by descending cost, the owner with the least load that has capacity left (longest processing
    time first, Graham 1969).   costs [N] -> [N]"""
    left, owner, loads = list(capacity), np.empty(len(costs), int), [(0.0, r) for r, items in enumerate(capacity) if items]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, r = loads[0]
        owner[item], left[r] = r, left[r] - 1
        if left[r]:
            heapq.heapreplace(loads, (load + float(costs[item]), r))
        else:
            heapq.heappop(loads)
    return owner


def _generator(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(seed)))


class InOrder(Sampler):
    """Sequential order, 0 ... N - 1, or the given indices, in every epoch."""

    def __init__(self, samples: int | np.ndarray) -> None:
        self._order = samples if isinstance(samples, np.ndarray) else np.arange(samples)
        self.samples = len(self._order)

    def order(self, epoch: int) -> np.ndarray:
        return self._order


class Shuffled(Sampler):
    """Every sample once per epoch, in a new random order."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed = samples, seed

    def order(self, epoch: int) -> np.ndarray:
        return _generator(self.seed, epoch).permutation(self.samples)


class Endless(Sampler):
    """An infinite sequence of shuffled passes over ``count`` samples, of which each epoch is the next ``samples``.

    If a pass is no multiple of the batch, nothing is dropped or repeated: the next pass starts within the batch.
    """

    def __init__(self, count: int, samples: int, seed: int = 0) -> None:
        if count < 1 or samples < 1:
            raise DataError(f"an epoch of {samples} out of {count} samples; both must be at least 1")
        self.count, self.samples, self.seed = count, samples, seed

    def order(self, epoch: int) -> np.ndarray:
        return _shuffled_passes(self.count, epoch * self.samples, (epoch + 1) * self.samples, self.seed)


def _shuffled_passes(count: int, first: int, end: int, *seed: int) -> np.ndarray:
    """Return elements ``first`` to ``end`` of an infinite sequence of shuffled passes over ``count`` samples."""
    passes = range(first // count, -(-end // count))
    sequence = np.concatenate([_generator(*seed, number).permutation(count) for number in passes])
    return sequence[first - passes.start * count :][: end - first]


class Grouped(Sampler):
    """Batches of B samples of one group each, such as images of one size: shuffled passes over each group, of which an epoch is the
    next ``samples`` (by default N), rounded down to batches.

    If a group is no multiple of the batch, nothing is dropped: its next pass starts within the batch, as in ``Endless``. The
    batches that one pass over all groups fills are in random order.   ``group_of``: the group of each sample [N]
    """

    def __init__(self, group_of: Sequence[int] | np.ndarray, batch: int, samples: int | None = None, seed: int = 0) -> None:
        self.group_of, self.batch, self.seed = np.asarray(group_of), batch, seed
        self.members = [np.flatnonzero(self.group_of == group) for group in np.unique(self.group_of)]
        self.samples = (len(self.group_of) if samples is None else samples) // batch * batch
        if not self.samples:
            raise DataError(f"{len(self.group_of)} samples do not fill one batch of {batch}; make more data or lower the batch")

    def order(self, epoch: int) -> np.ndarray:
        first, end = (e * self.samples // self.batch for e in (epoch, epoch + 1))
        number = first * self.batch // len(self.group_of)  # passes over all groups, which have at most ``first`` batches
        done, labels = self._batches(number), np.array([], int)  # batches of each group before, and the groups of those that follow
        start = int(done.sum())
        while start + len(labels) < end:
            label = np.repeat(np.arange(len(done)), self._batches(number + 1) - self._batches(number))
            labels, number = np.append(labels, _generator(self.seed, len(done), number).permutation(label)), number + 1
        done, labels = done + np.bincount(labels[: first - start], minlength=len(done)), labels[first - start : end - start]
        rows = np.empty((len(labels), self.batch), int)
        for group, members in enumerate(self.members):
            if count := int(np.count_nonzero(labels == group)):
                begin = self.batch * int(done[group])
                drawn = _shuffled_passes(len(members), begin, begin + self.batch * count, self.seed, group)
                rows[labels == group] = members[drawn].reshape(count, self.batch)
        return rows.ravel()

    def _batches(self, passes: int) -> np.ndarray:
        """Return the number of full batches of each group in the first ``passes`` passes."""
        return passes * np.array([len(members) for members in self.members]) // self.batch

    def assign(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        if len(groups := np.unique(self.group_of[indices])) > 1:
            raise DataError(f"a batch has samples of {len(groups)} groups: its size changed within an epoch; keep the former one")
        return split_range(len(indices), rank, size)


class GroupedInOrder(InOrder):
    """Every sample once, for evaluation, in batches of B samples of one group each. The last batch of a group is filled up with
    positions without a sample, -1, that no replica gets.   ``group_of``: the group of each sample [N]"""

    def __init__(self, group_of: Sequence[int] | np.ndarray, batch: int) -> None:
        parts = [np.flatnonzero(np.asarray(group_of) == group) for group in np.unique(group_of)]
        super().__init__(np.concatenate([np.pad(part, (0, -len(part) % batch), constant_values=-1) for part in parts]))

    def assign(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        filled = np.flatnonzero(indices >= 0)
        return filled[split_range(len(filled), rank, size)]


class Blend(Sampler):
    """A mixture of S concatenated datasets: shuffled passes over each, in proportion to ``weights``, ``samples`` per epoch.

    Rounding errors do not accumulate: after any number of epochs the count of each dataset differs from its share by at most one
    sample. Raises DataError if an epoch has no sample of one of the datasets.   counts and weights [S]
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], samples: int, seed: int = 0) -> None:
        self.counts, self.samples, self.seed = list(counts), samples, seed
        parts = _nonnegative("weights", weights)
        self._ends = np.cumsum(parts) / parts.sum()
        if min(counts) < 1 or parts.min() / parts.sum() * samples < 1:
            raise DataError(f"an epoch of {samples} samples has none of the set of weight {parts.min():g}; take longer epochs")

    def order(self, epoch: int) -> np.ndarray:
        first, end = (np.diff(np.floor(e * self.samples * self._ends + 0.5), prepend=0).astype(int) for e in (epoch, epoch + 1))
        offsets = np.cumsum([0, *self.counts])
        rows = [offsets[s] + _shuffled_passes(n, int(first[s]), int(end[s]), self.seed, s) for s, n in enumerate(self.counts)]
        return _generator(self.seed, len(self.counts), epoch).permutation(np.concatenate(rows))


class Weighted(Sampler):
    """``samples`` draws per epoch with replacement, with probabilities in proportion to ``weights`` [N].

    With ``numbered``, the k-th repetition of a sample in an epoch has its index plus kN, so that a source may augment it anew."""

    def __init__(self, weights: Sequence[float] | np.ndarray, samples: int, seed: int = 0, *, numbered: bool = False) -> None:
        weights = _nonnegative("weights", weights)
        if not weights.sum() > 0:
            raise DataError("weights must be more than 0 for some sample")
        self.samples, self.seed, self.numbered = samples, seed, numbered
        self._ends = np.cumsum(weights) / weights.sum()
        self._ends[np.flatnonzero(weights)[-1] :] = 1.0  # despite rounding, no draw exceeds the last index of nonzero weight

    def order(self, epoch: int) -> np.ndarray:
        drawn = np.searchsorted(self._ends, _generator(self.seed, epoch).random(self.samples), side="right")
        if self.numbered:
            order = np.argsort(drawn, kind="stable")
            sorted_ = drawn[order]
            # As often as each element occurs before its position.
            drawn[order] += len(self._ends) * (np.arange(len(drawn)) - np.searchsorted(sorted_, sorted_))
        return drawn


class Sharded:
    """Training from S shards on node-local disks: every batch has B / S samples of each shard.

    Replica r of R reads shard r * S // R. An epoch has as many samples of each shard as the smallest shard holds; those left out
    differ from epoch to epoch. Raises DataError if S does not divide B.   ``shard``: the shard of each sample [N]
    """

    def __init__(self, shard: Sequence[int] | np.ndarray, batch: int, seed: int = 0) -> None:
        self.shard, self.seed = np.asarray(shard), seed
        self.members = [np.flatnonzero(self.shard == s) for s in range(int(self.shard.max(initial=0)) + 1)]
        self.per_batch, remainder = divmod(batch, len(self.members))
        if remainder:
            raise DataError(f"a batch of {batch} samples does not divide by {len(self.members)} shards; give a multiple of them")
        if min(map(len, self.members)) < 1:
            raise DataError(f"shard {[len(m) for m in self.members].index(0)} of {len(self.members)} holds no sample")
        self.samples = min(map(len, self.members)) * len(self.members)

    def order(self, epoch: int) -> np.ndarray:
        per_shard = self.samples // len(self.members)
        rows = [_generator(self.seed, epoch, s).permutation(m)[:per_shard] for s, m in enumerate(self.members)]
        return np.concatenate([row[k : k + self.per_batch] for k in range(0, per_shard, self.per_batch) for row in rows])

    def assign(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        capacity = [len(split_range(len(indices), r, size)) for r in range(size)]
        owner = np.full(len(indices), -1)
        shards = self.shard[indices]
        for s in range(len(self.members)):
            ranks = [r for r in range(size) if r * len(self.members) // size == s or s * size // len(self.members) == r]
            unassigned = iter(np.flatnonzero(shards == s))
            for r in ranks:
                while capacity[r] and (slot := next(unassigned, None)) is not None:
                    owner[slot], capacity[r] = r, capacity[r] - 1
        # After a resume, or at the end of an epoch, a shard may have more samples than its replicas have capacity.
        for slot in np.flatnonzero(owner < 0):
            r = next(r for r in range(size) if capacity[r])
            owner[slot], capacity[r] = r, capacity[r] - 1
        return np.flatnonzero(owner == rank)


class LargestFirst:
    """Every sample once, for evaluation: by descending cost, each to the least loaded group of replicas.

    ``group`` adjacent replicas take the same samples. A batch has one sample for each group that is not finished.   ``costs`` [N]
    """

    def __init__(self, costs: Sequence[float] | np.ndarray, replicas: int, group: int = 1) -> None:
        costs = _nonnegative("costs", costs)
        self.samples, self.groups, self.group = len(costs), replicas // group, group
        self.owner = _assign_balanced(costs, [len(costs)] * self.groups)
        descending = np.argsort(-costs, kind="stable")
        queues = [descending[self.owner[descending] == group] for group in range(self.groups)]
        longest = max(map(len, queues))
        self._order = np.array([queue[k] for k in range(longest) for queue in queues if k < len(queue)], int)

    def order(self, epoch: int) -> np.ndarray:
        return self._order

    def assign(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        return np.flatnonzero(self.owner[indices] == rank // self.group)


class Balanced(Endless):
    """Load balancing: the samples of a batch are assigned to replicas so that sums of ``costs`` [N] are as even as possible.
    ``equal``: all replicas take equally many samples, so that shapes are constant; otherwise only costs count. ``samples`` of an
    epoch: by default N."""

    def __init__(
        self, costs: Sequence[float] | np.ndarray, seed: int = 0, *, equal: bool = True, samples: int | None = None
    ) -> None:
        self.costs, self.equal = _nonnegative("costs", costs), equal
        super().__init__(len(self.costs), samples or len(self.costs), seed)

    def assign(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        capacity = [len(split_range(len(indices), r, size)) if self.equal else len(indices) for r in range(size)]
        return np.flatnonzero(_assign_balanced(self.costs[indices], capacity) == rank)
