"""Samplers: deterministic orders, the specified frequency of every sample, and balanced work of replicas."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data.sampler import Balanced, Blend, Endless, Grouped, InOrder, Sampler, Sharded, Shuffled, Weighted, split_range
from hpcai.errors import DataError


@given(st.integers(0, 200), st.integers(1, 9))
def test_ranges_cover_all_and_differ_by_one(count: int, size: int) -> None:
    parts = [split_range(count, rank, size) for rank in range(size)]
    assert np.concatenate(parts).tolist() == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def new_samplers(count: int, batch: int, seed: int) -> list[Sampler]:
    costs = np.random.default_rng(seed).pareto(1.5, count)
    return [
        InOrder(count), Shuffled(count, seed), Endless(count, 2 * batch, seed), Weighted(costs, 3 * batch, seed),
        Sharded(np.arange(count) % 4, batch, seed), Balanced(costs, seed), Balanced(costs, seed, equal=False),
        Grouped(np.zeros(count), batch, seed=seed),
    ]  # fmt: skip


@given(st.integers(16, 90), st.sampled_from([8, 16]), st.integers(0, 99), st.integers(0, 3), st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=30)
def test_every_sample_of_a_batch_is_assigned_to_one_replica(count: int, batch: int, seed: int, epoch: int, size: int) -> None:
    for sampler, other in zip(new_samplers(count, batch, seed), new_samplers(count, batch, seed)):
        order = sampler.order(epoch)
        assert len(order) == sampler.samples and ((order >= 0) & (order < count)).all()
        assert np.array_equal(order, other.order(epoch)), "the same in every process"
        for first in range(0, len(order), batch):
            indices = order[first : first + batch]
            parts = [sampler.assign(indices, rank, size) for rank in range(size)]
            assert sorted(np.concatenate(parts)) == list(range(len(indices)))
            if getattr(sampler, "equal", True):
                assert [len(part) for part in parts] == [len(split_range(len(indices), rank, size)) for rank in range(size)]


@given(st.integers(1, 60), st.integers(0, 9))
def test_a_shuffled_epoch_has_every_sample_once_and_differs_from_the_last(count: int, seed: int) -> None:
    assert sorted(Shuffled(count, seed).order(3)) == list(range(count))
    if count > 20:
        orders = {tuple(Shuffled(count, s).order(e)) for s in (seed, seed + 1) for e in range(3)}
        assert len(orders) == 6


@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 9))
@settings(max_examples=30)
def test_an_endless_sequence_is_continuous_over_epochs(count: int, samples: int, seed: int) -> None:
    sequence = np.concatenate([Endless(count, samples, seed).order(epoch) for epoch in range(6)])
    for first in range(0, len(sequence) - count + 1, count):
        assert sorted(sequence[first : first + count]) == list(range(count)), "passes are complete, also across epochs"
    expected = Endless(count, 6 * samples, seed).order(0)
    assert np.array_equal(sequence, expected)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4), st.integers(40, 200), st.integers(0, 9))
@settings(max_examples=30)
def test_a_blend_has_each_dataset_in_proportion_in_full_passes(datasets: list[tuple[int, int]], samples: int, seed: int) -> None:
    counts, weights = zip(*datasets)
    offsets, epochs = np.cumsum([0, *counts]), 5
    blend = Blend(counts, weights, samples, seed)
    orders = [blend.order(epoch) for epoch in range(epochs)]
    assert all(len(order) == samples for order in orders)
    sequence = np.concatenate(orders)
    for number, (count, weight) in enumerate(datasets):
        indices = sequence[(sequence >= offsets[number]) & (sequence < offsets[number + 1])] - offsets[number]
        assert abs(len(indices) - epochs * samples * weight / sum(weights)) <= 1
        frequencies = np.bincount(indices, minlength=count)
        assert frequencies.max() - frequencies.min() <= 1, "no sample repeats before all others of its dataset"
    assert np.array_equal(blend.order(3), orders[3])
    with pytest.raises(DataError, match="has none of the set of weight 1"):
        Blend([5, 5], [1, 1000], 100)


@given(st.lists(st.integers(8, 40), min_size=2, max_size=5), st.sampled_from([2, 4, 16]), st.integers(0, 9), st.booleans())
@settings(max_examples=30)
def test_every_batch_is_of_one_group_and_no_sample_is_left_out(counts: list[int], batch: int, seed: int, halves: bool) -> None:
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    sampler = Grouped(groups, batch, 16 if halves else None, seed)
    sequence = np.concatenate([sampler.order(epoch) for epoch in range(12)])
    assert sampler.samples == (16 if halves else len(groups) // batch * batch) == len(sequence) // 12
    assert (np.ptp(groups[sequence].reshape(-1, batch), 1) == 0).all()
    for group, count in enumerate(counts):
        drawn = sequence[groups[sequence] == group]
        bound = count + len(counts) * batch  # the last pass over all groups is cut off at a random batch
        assert abs(len(drawn) - len(sequence) * count / len(groups)) <= bound, "in proportion to the group"
        assert np.ptp(np.bincount(drawn, minlength=len(groups))[groups == group]) <= 1, "passes are complete, also across epochs"
    with pytest.raises(DataError, match="samples of 2 groups: its size changed within an epoch"):
        sampler.assign(np.array([np.flatnonzero(groups == group)[0] for group in (0, 1)]), 0, 1)
    with pytest.raises(DataError, match="8 samples do not fill one batch of 9"):
        Grouped(np.zeros(8), 9)


def test_weighted_draws_follow_the_weights() -> None:
    frequencies = np.bincount(Weighted([1, 0, 3, 0], 40_000, 1).order(0), minlength=4) / 40_000
    assert frequencies[1] == frequencies[3] == 0 and frequencies[0] == pytest.approx(0.25, abs=0.01)
    assert Weighted([0.1] * 10 + [0], 1)._ends[9] == 1.0, "despite rounding"
    for weights in ([], [0, 0], [1, -1], [np.nan], [[1.0]]):
        with pytest.raises(DataError, match="weights must be"):
            Weighted(weights, 3)
    with pytest.raises(DataError, match="at least 1"):
        Endless(0, 3)


@given(st.integers(1, 4), st.integers(8, 70), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=30)
def test_each_replica_reads_the_shard_on_its_disk(shards: int, count: int, seed: int, epoch: int) -> None:
    batch = 4 * shards
    shard = np.random.default_rng(seed).permutation(np.arange(count) % shards)
    sampler = Sharded(shard, batch, seed)
    order = sampler.order(epoch)
    assert len(order) == (count // shards) * shards and len(set(order)) == len(order)
    for size in (shards, 2 * shards):
        for first in range(0, len(order) - batch + 1, batch):
            indices = np.random.default_rng(first).permutation(order[first : first + batch])
            for rank in range(size):
                assert set(shard[indices[sampler.assign(indices, rank, size)]]) == {rank * shards // size}
    delivered = {i for e in range(30) for i in sampler.order(e)}
    assert len(delivered) >= min(count, len(order) + 1) - (shards == 1 and 0), "samples dropped by one epoch are in another"


def test_impossible_sharding_raises() -> None:
    with pytest.raises(DataError, match="a batch of 6 samples does not divide by 4 shards"):
        Sharded([0, 1, 2, 3], 6)
    with pytest.raises(DataError, match="shard 1 of 3 holds no sample"):
        Sharded([0, 2, 2, 0], 3)


def imbalance(sampler: Any, costs: np.ndarray, batch: int, size: int) -> float:
    """Return the mean over steps of the maximum work of a replica divided by the mean."""
    order = sampler.order(0)
    ratios = []
    for first in range(0, len(order) - batch + 1, batch):
        indices = order[first : first + batch]
        work = [costs[indices[sampler.assign(indices, rank, size)]].sum() for rank in range(size)]
        ratios.append(max(work) * size / sum(work))
    return float(np.mean(ratios))


def test_balanced_replicas_have_equal_work_in_each_step() -> None:
    costs = np.random.default_rng(0).lognormal(0, 0.8, 4096)
    shuffled = imbalance(Shuffled(4096), costs, 128, 16)
    balanced, unequal = (imbalance(Balanced(costs, equal=equal), costs, 128, 16) for equal in (True, False))
    assert shuffled > 1.4 and balanced < 1.08 and unequal < 1.08, (shuffled, balanced, unequal)
    with pytest.raises(DataError, match="costs must be"):
        Balanced([1, -2])
