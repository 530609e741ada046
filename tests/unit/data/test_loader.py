"""Loader: each sample once an epoch, in an order independent of the number of processes; stragglers, resumption, bad samples."""

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data import Loader
from hpcai.data.loader import _EpochPlan
from hpcai.data.sampler import Grouped, GroupedInOrder
from hpcai.errors import ConfigError, DataError
from tests.index_source import IndexSource
from tests.reference_data import load_json
from tests.replica_mesh import replica_mesh


class Pair(NamedTuple):
    x: Any
    y: Any


class Numbers:
    """Sample i is the number i. Samples in ``broken`` cannot be read; ``slow`` maps indices to seconds of delay."""

    def __init__(self, count: int, broken: tuple[int, ...] = (), slow: dict[int, float] | None = None) -> None:
        self.count, self.broken, self.slow = count, broken, slow or {}

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        if index in self.broken:
            raise DataError(f"number {index} is broken")
        if index in self.slow:
            time.sleep(self.slow[index])
        return {"x": np.array(index), "pairs": [Pair(np.full((2, 3), index + epoch, np.float32), np.arange(3) == index)]}

    def describe(self, index: int) -> str:
        return f"number {index}"


def new_loader(count: int, batch: int, rank: int = 0, size: int = 1, source: Any = None, **kwargs: Any) -> Loader:
    return Loader(source or Numbers(count), batch, replica_mesh(rank, size), name="train", **kwargs)


def read_epoch(loader: Loader, epoch: int = 0, first: int = 0) -> list[list[int]]:
    with loader:
        return [batch["x"].tolist() for batch in loader.epoch(epoch, first)]


@given(st.integers(8, 60), st.sampled_from([1, 2, 4]), st.integers(0, 3))
@settings(max_examples=20)
def test_the_global_batch_is_the_same_on_any_number_of_processes(count: int, size: int, epoch: int) -> None:
    expected = read_epoch(new_loader(count, 8, seed=5), epoch)
    ranks = [read_epoch(new_loader(count, 8, r, size, seed=5), epoch) for r in range(size)]
    assert [sum(parts, []) for parts in zip(*ranks)] == expected
    assert all(len(part) == 8 // size for rank in ranks for part in rank)
    assert len(expected) == count // 8 and len({x for b in expected for x in b}) == len(expected) * 8


@given(st.integers(4, 40), st.sampled_from([1, 2, 3, 4]), st.sampled_from(["strict", "ready"]))
@settings(max_examples=20)
def test_evaluation_delivers_every_sample_once(count: int, size: int, order: str) -> None:
    loaders = [new_loader(count, 6, r, size, shuffle=False, last_batch="keep", order=order) for r in range(size)]
    assert loaders[0].samples == count
    assert sorted(x for loader in loaders for batch in read_epoch(loader) for x in batch) == list(range(count))


@given(st.integers(1, 40), st.sampled_from([1, 2, 4]))
@settings(max_examples=20)
def test_padding_fills_the_last_batch_with_the_first_samples(count: int, size: int) -> None:
    if count < size:
        return
    batches = [read_epoch(new_loader(count, 8, r, size, last_batch="pad", seed=3)) for r in range(size)]
    sequence = [x for parts in zip(*batches) for part in parts for x in part]
    assert all(len(part) == 8 // size for rank in batches for part in rank)
    assert sorted(sequence[:count]) == list(range(count))
    assert sequence[count:] == (sequence[:count] * 8)[: -(-count // 8) * 8 - count]


def test_an_epoch_can_start_in_the_middle_also_with_another_batch_size() -> None:
    def sequence(batch: int, epoch: int, first: int = 0) -> list[int]:
        return sum(read_epoch(new_loader(50, batch, seed=1), epoch, first), [])

    full = sequence(8, 2)
    assert sequence(8, 2, 16) == full[16:]
    assert sequence(4, 2, 16)[:32] == full[16:48]
    assert sequence(8, 3) != full and sequence(8, 2) == full


def test_batches_have_the_structure_of_samples() -> None:
    for batch in (1, 2):
        with new_loader(4, batch, shuffle=False) as loader:
            first = next(iter(loader.epoch(3)))
        pair = first["pairs"][0]
        assert isinstance(pair, Pair) and pair.x.shape == (batch, 2, 3) and pair.x.dtype == torch.float32
        assert pair.x[-1, 0, 0] == batch - 1 + 3 and pair.y.dtype == torch.bool and first["x"].shape == (batch,)


def test_a_source_may_have_its_own_collate() -> None:
    class Graphs(Numbers):
        def collate(self, samples: list[Any]) -> Any:
            return torch.tensor([int(sample["x"]) for sample in samples]), len(samples)

    with new_loader(6, 3, source=Graphs(6), shuffle=False) as loader:
        assert [(x.tolist(), n) for x, n in loader.epoch(0)] == [([0, 1, 2], 3), ([3, 4, 5], 3)]


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_batches_keep_their_content_when_memory_is_reused(order: str) -> None:
    with new_loader(64, 4, order=order, workers=4) as loader:
        batches = [(batch["x"].tolist(), batch) for epoch in range(3) for batch in loader.epoch(epoch, more=epoch < 2)]
    for number, (x, batch) in enumerate(batches):
        assert batch["x"].tolist() == x and batch["pairs"][0].x[:, 1, 2].tolist() == [i + number // 16 for i in x]


@pytest.mark.parametrize(("count", "batch", "size", "kwargs", "message"), load_json("refused/batches"))
def test_indivisible_batches_raise_at_construction(count: int, batch: int, size: int, kwargs: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        new_loader(count, batch, 0, size, **kwargs)


# ---- stragglers


def test_a_straggler_delays_no_other_sample_and_is_delivered_in_its_epoch() -> None:
    slow = {5: 0.5}
    with new_loader(400, 4, source=Numbers(400, slow=slow), shuffle=False, order="ready") as loader:
        start, batches, elapsed = time.perf_counter(), [], 0.0
        for batch in loader.epoch(0):
            batches.append(batch["x"].tolist())
            elapsed = elapsed or (time.perf_counter() - start if len(batches) == 20 else 0.0)
            time.sleep(0.01)
    assert elapsed < 0.45, "twenty batches are delivered before the straggler is ready"
    sequence = sum(batches, [])
    assert sorted(sequence) == list(range(400)) and sequence.index(5) > 80
    assert set(sequence[:5]) < set(range(12)), "the lowest ready positions come first"
    assert all(b == sorted(b) for b in batches)


def test_strict_order_waits_for_a_straggler() -> None:
    with new_loader(40, 4, source=Numbers(40, slow={5: 0.2}), shuffle=False) as loader:
        assert sum((b["x"].tolist() for b in loader.epoch(0)), []) == list(range(40)) and loader.deferred() == []


def test_describe_names_the_delivered_samples() -> None:
    with new_loader(40, 4, source=Numbers(40, slow={1: 0.3}), shuffle=False, order="ready") as loader:
        epoch = loader.epoch(0)
        batches = [next(epoch)["x"].tolist() for _ in range(3)]
        assert 1 not in batches[0] + batches[1]
        assert [loader.describe(0, 4 * k) for k in range(3)] == [", ".join(f"number {i}" for i in part) for part in batches]
        assert loader.deferred() == [1]


@given(
    count=st.integers(20, 90), batch=st.sampled_from([4, 8, 12]), last_batch=st.sampled_from(["drop", "pad", "keep"]),
    sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25)
def test_exactly_once_under_random_stops_on_random_numbers_of_processes(
    count: int, batch: int, last_batch: str, sizes: list[int], seed: int
) -> None:
    """Each leg delivers some batches on some processes, in ready order with stragglers, and ends between two steps."""
    generator = np.random.default_rng(seed)
    slow = {int(i): 0.004 for i in generator.integers(0, count, 4)}
    first, deferred, delivered = 0, [], []
    for leg, size in enumerate([*sizes, 2]):
        kwargs: dict[str, Any] = {"last_batch": last_batch, "order": "ready", "seed": seed, "prefetch": 1 << 14}
        loaders = [new_loader(count, batch, r, size, source=Numbers(count, slow=slow), **kwargs) for r in range(size)]
        samples = loaders[0].samples
        remaining = -(-(samples - first) // batch)
        take = remaining if leg == len(sizes) else int(generator.integers(0, remaining + 1))
        epochs = [loader.epoch(1, first, deferred) for loader in loaders]
        plans = [_EpochPlan(loader, 1, first, tuple(deferred)) for loader in loaders]
        local_numbers = [[n for n, _ in plan.local_batches()] for plan in plans]
        for k in range(take):
            for r in range(size):
                if k in local_numbers[r]:  # otherwise its shard of a small last batch is empty
                    delivered += next(epochs[r])["x"].tolist()
        active_plans = [loader._plan for loader in loaders if loader._plan is not None]
        for loader, epoch in zip(loaders, epochs):
            epoch.close()
            loader.close()
        if take:
            for loader, plan in zip(loaders, plans):
                loader._plan = loader._plan or plan
            highest = max(plan.highest for plan in active_plans)
            deferred = sorted(p for loader in loaders for p in (loader._plan or plans[0]).undelivered_below(highest))
            first = min(first + take * batch, samples)
        if first >= samples:
            break
    order = loaders[0]._epoch_order(1)
    expected = [int(order[p % count]) for p in range(samples)]
    assert sorted(delivered) == sorted(expected) and deferred == []


# ---- errors


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_a_broken_sample_ends_the_epoch_and_all_threads(order: str) -> None:
    before = threading.active_count()
    loader = new_loader(14, 2, source=Numbers(14, broken=(13,)), shuffle=False, order=order)
    delivered = []
    with pytest.raises(DataError, match="train, rank 0, sample 13: number 13 is broken"):
        for batch in loader.epoch(0):
            delivered += batch["x"].tolist()
    assert len(delivered) == len(set(delivered)) <= 12 and 13 not in delivered
    assert order == "ready" or delivered == list(range(len(delivered)))
    epoch = loader.epoch(0)
    loader.source.broken = ()
    next(epoch)
    epoch.close()
    loader.close()
    assert threading.active_count() == before


def test_other_exceptions_of_the_source_name_the_sample_too() -> None:
    class Failing(Numbers):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            raise ZeroDivisionError("in sample")

    with new_loader(4, 2, source=Failing(4)) as loader, pytest.raises(DataError, match=r"sample \d.*ZeroDivisionError: in sample"):
        next(loader.epoch(0))


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_bad_samples_are_replaced_counted_and_reported(order: str, caplog: pytest.LogCaptureFixture) -> None:
    kwargs: dict[str, Any] = {"on_bad_sample": "skip", "order": order, "seed": 2}
    with new_loader(16, 4, source=Numbers(16, broken=(3, 7)), **kwargs) as loader:
        sequence = sum((b["x"].tolist() for b in loader.epoch(0)), [])
        news = loader.news()
        assert loader.news() == []
    positions = {int(x): i for i, x in enumerate(loader._epoch_order(0))}
    assert len(sequence) == 16 and set(sequence) == set(range(16)) - {3, 7}
    assert sorted((s.index, s.replacement) for s in loader.skipped if s.index in (3, 7)) == [
        (i, int(loader._epoch_order(0)[(positions[i] + 1) % 16])) for i in (3, 7)
    ]
    assert any("sample 3 of epoch 0 is skipped" in text and "number 3 is broken" in text for text in news)
    assert news[-1] == f"train: {len(loader.skipped)} samples skipped so far"
    assert sum("skipped" in record.message for record in caplog.records) == len(loader.skipped)


def test_a_bad_sample_is_named_only_once() -> None:
    class Repeating(Numbers):
        def describe(self, index: int) -> str:
            return f"row {index % 8}"

    with new_loader(16, 4, source=Repeating(16, broken=(3, 11)), on_bad_sample="skip", shuffle=False) as loader:
        news = [list(loader.epoch(epoch)) and loader.news() for epoch in range(2)]
    assert news[0] == ["train: sample 3 of epoch 0 is skipped (4 in its place): row 3: number 3 is broken",
                       "train: 2 samples skipped so far"]  # fmt: skip
    assert news[1] == ["train: 4 samples skipped so far"]


def test_a_resumed_epoch_skips_the_same_samples() -> None:
    kwargs: dict[str, Any] = {"on_bad_sample": "skip", "seed": 2}
    full, resumed = (new_loader(16, 4, source=Numbers(16, broken=(3, 4, 7)), **kwargs) for _ in range(2))
    with full, resumed:
        batches = [b["x"].tolist() for b in full.epoch(1)]
        assert [b["x"].tolist() for b in resumed.epoch(1, 8)] == batches[2:] and len(full.skipped) >= 3


@pytest.mark.parametrize("problem", [ValueError("in sample"), MemoryError("full"), ConfigError("no gemmi")], ids=str)
def test_any_exception_of_a_sample_is_skipped_but_not_errors_of_the_process(problem: Exception) -> None:
    class Failing(Numbers):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            if index == 5:
                raise problem
            return super().sample(index, epoch)

    with new_loader(8, 2, source=Failing(8), shuffle=False, on_bad_sample="skip") as loader:
        if type(problem) is ValueError:
            assert [b["x"].tolist() for b in loader.epoch(0)] == [[0, 1], [2, 3], [4, 6], [6, 7]]
            assert "ValueError: in sample" in loader.news()[0]
        else:
            with pytest.raises((DataError, ConfigError), match=str(problem)):
                list(loader.epoch(0))


def test_a_bad_sample_is_replaced_by_one_of_its_group() -> None:
    source = Numbers(16, broken=(3, 8))
    with new_loader(16, 4, source=source, sampler=Grouped(np.arange(16) % 2, 4), on_bad_sample="skip") as loader:
        assert all(len({*(b["x"] % 2).tolist()}) == 1 for epoch in range(4) for b in loader.epoch(epoch))
        assert len(loader.skipped) == 8


@pytest.mark.parametrize("size", [1, 2, 4])
def test_evaluation_takes_each_sample_of_each_group_once(size: int) -> None:
    kwargs: dict[str, Any] = {"sampler": GroupedInOrder(np.arange(19) % 3 % 2, 4), "last_batch": "keep"}
    batches = [each for rank in range(size) for each in read_epoch(new_loader(19, 4, rank, size, **kwargs))]
    assert sorted(number for batch in batches for number in batch) == list(range(19))
    assert all(len({number % 3 % 2 for number in batch}) == 1 for batch in batches)


def test_evaluation_stops_at_a_bad_sample() -> None:
    source = Numbers(10, broken=(4,))
    with new_loader(10, 4, source=source, shuffle=False, last_batch="keep", on_bad_sample="skip", workers=1) as loader:
        with pytest.raises(DataError, match="number 4 is broken"):
            list(loader.epoch(0))
        assert loader.skipped == [] and loader.news() == []


def test_skipping_ends_after_too_many_bad_samples() -> None:
    with (
        new_loader(40, 4, source=Numbers(40, broken=tuple(range(40))), on_bad_sample="skip") as loader,
        pytest.raises(DataError, match="10 samples in a row could not be used"),
    ):
        next(loader.epoch(0))


def test_a_source_that_hangs_is_named() -> None:
    with (
        new_loader(8, 2, source=Numbers(8, slow={1: 1.2}), shuffle=False, patience=0.3) as loader,
        pytest.raises(DataError, match="no sample has become ready for 0 s; workers are at index 1 for"),
    ):
        next(loader.epoch(0))


# ---- prefetching


class Big(Numbers):
    started = 0

    def sample(self, index: int, epoch: int) -> Any:
        Big.started += 1
        time.sleep(0.002)
        return np.zeros(1 << 20, np.uint8)


@pytest.mark.parametrize("order", ["strict", "ready"])
@pytest.mark.parametrize("budget, limit", [(10 << 20, 10), (1 << 10, 6)])
def test_no_more_than_the_budget_is_prepared(order: str, budget: int, limit: int) -> None:
    """The minimum is two batches, and one sample for each worker."""
    Big.started = 0
    with new_loader(100, 2, source=Big(100), workers=2, prefetch=budget, order=order) as loader:
        epoch = loader.epoch(0)
        for delivered in range(1, 8):
            next(epoch)
            time.sleep(0.06 if delivered < 3 else 0)
            assert Big.started <= 2 * delivered + 2 + limit, "delivered, collated ahead, and prefetched"
        time.sleep(0.2)
        assert Big.started >= 2 * delivered + limit - 1
        epoch.close()


def test_the_next_epoch_is_prefetched_before_the_last_samples_are_ready() -> None:
    class Recording(Numbers):
        requests: list[tuple[int, int]] = []

        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            self.requests.append((epoch, index))
            return super().sample(index, epoch)

    with new_loader(8, 4, source=Recording(8, slow={7: 0.3}), shuffle=False) as loader:
        assert [b["x"].tolist() for b in loader.epoch(0, more=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert len([e for e, _ in Recording.requests if e == 1]) >= 4
        assert [b["x"].tolist() for b in loader.epoch(1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(Recording.requests) == [(e, i) for e in (0, 1) for i in range(8)], "no sample is prepared twice"
    with new_loader(8, 4, shuffle=False) as loader:
        list(loader.epoch(0, more=True))
        assert len(list(loader.epoch(5))) == 2, "an epoch other than the prefetched one"


def test_samples_of_the_next_epoch_wait_for_the_end_of_this_one() -> None:
    with new_loader(8, 4, source=Numbers(8, slow={7: 0.2}), shuffle=False, order="ready", workers=4) as loader:
        for epoch in range(3):
            batches = [(b["x"].tolist(), b["pairs"][0].x[:, 0, 0].tolist()) for b in loader.epoch(epoch, more=epoch < 2)]
            assert sorted(x for part, _ in batches for x in part) == list(range(8))
            assert all(tags == [x + epoch for x in part] for part, tags in batches), "each sample is of its own epoch"


def test_worker_processes_give_the_same_batches() -> None:
    expected = read_epoch(new_loader(24, 4, seed=1))
    with new_loader(24, 4, source=IndexSource(24), seed=1, processes=True) as loader:  # which imports no torch
        assert [batch.tolist() for batch in loader.epoch(0)] == expected


def test_threads_set_the_gpu_before_they_pin_or_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the first GPU of the node, on which every process would create a context."""
    current, devices = threading.local(), dict[str, Any]()

    class Recording(Numbers):
        def sample(self, index: int, epoch: int) -> Any:
            devices[threading.current_thread().name] = getattr(current, "device", None)
            return torch.tensor(index)

        def collate(self, samples: list[Any]) -> Any:
            devices[threading.current_thread().name] = getattr(current, "device", None)
            return torch.stack(samples)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    mesh = replica_mesh(0, 1)
    mesh.device = torch.device("cuda", 3)
    with Loader(Recording(8), 2, mesh, name="train") as loader:
        assert len(list(loader.epoch(0))) == 4
    assert len(devices) >= 2 and set(devices.values()) == {mesh.device}
