"""Every sample comes once an epoch, in an order that does not depend on the number of processes, whichever is late and wherever
a run was killed."""

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
from hpcai.errors import ConfigError, DataError
from tests.replica_mesh import replica_mesh


class Pair(NamedTuple):
    x: Any
    y: Any


class Numbers:
    """Sample i is the number i; some are slow, some cannot be read."""

    def __init__(self, count: int, broken: tuple[int, ...] = (), slow: dict[int, float] | None = None) -> None:
        self.count, self.broken, self.slow = count, broken, slow or {}

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        if index in self.broken:
            raise DataError(f"number {index} is broken")
        if index in self.slow:
            time.sleep(self.slow[index])
        return {"x": np.array(index), "more": [Pair(np.full((2, 3), index + epoch, np.float32), np.arange(3) == index)]}

    def describe(self, index: int) -> str:
        return f"number {index}"


def loader_of(count: int, batch: int, rank: int = 0, size: int = 1, source: Any = None, **words: Any) -> Loader:
    return Loader(source or Numbers(count), batch, replica_mesh(rank, size), name="train", **words)


def read(loader: Loader, epoch: int = 0, first: int = 0) -> list[list[int]]:
    with loader:
        return [batch["x"].tolist() for batch in loader.epoch(epoch, first)]


@given(st.integers(8, 60), st.sampled_from([1, 2, 4]), st.integers(0, 3))
@settings(max_examples=20)
def test_the_global_batch_is_the_same_on_any_number_of_processes(count: int, size: int, epoch: int) -> None:
    alone = read(loader_of(count, 8, seed=5), epoch)
    ranks = [read(loader_of(count, 8, r, size, seed=5), epoch) for r in range(size)]
    assert [sum(parts, []) for parts in zip(*ranks)] == alone
    assert all(len(part) == 8 // size for rank in ranks for part in rank)
    assert len(alone) == count // 8 and len({x for b in alone for x in b}) == len(alone) * 8


@given(st.integers(4, 40), st.sampled_from([1, 2, 3, 4]), st.sampled_from(["strict", "ready"]))
@settings(max_examples=20)
def test_evaluation_delivers_every_sample_once(count: int, size: int, order: str) -> None:
    loaders = [loader_of(count, 6, r, size, shuffle=False, last_batch="keep", order=order) for r in range(size)]
    assert loaders[0].samples == count
    assert sorted(x for loader in loaders for batch in read(loader) for x in batch) == list(range(count))


@given(st.integers(1, 40), st.sampled_from([1, 2, 4]))
@settings(max_examples=20)
def test_padding_fills_the_last_batch_with_the_first_samples(count: int, size: int) -> None:
    if count < size:
        return
    batches = [read(loader_of(count, 8, r, size, last_batch="pad", seed=3)) for r in range(size)]
    row = [x for parts in zip(*batches) for part in parts for x in part]
    assert all(len(part) == 8 // size for rank in batches for part in rank)
    assert sorted(row[:count]) == list(range(count))
    assert row[count:] == (row[:count] * 8)[: -(-count // 8) * 8 - count]


def test_an_epoch_can_begin_in_the_middle_also_with_another_batch() -> None:
    def row(batch: int, epoch: int, first: int = 0) -> list[int]:
        return sum(read(loader_of(50, batch, seed=1), epoch, first), [])

    whole = row(8, 2)
    assert row(8, 2, 16) == whole[16:]
    assert row(4, 2, 16)[:32] == whole[16:48]
    assert row(8, 3) != whole and row(8, 2) == whole


def test_batches_are_stacked_in_the_shape_that_samples_have() -> None:
    for batch in (1, 2):
        with loader_of(4, batch, shuffle=False) as loader:
            first = next(iter(loader.epoch(3)))
        pair = first["more"][0]
        assert isinstance(pair, Pair) and pair.x.shape == (batch, 2, 3) and pair.x.dtype == torch.float32
        assert pair.x[-1, 0, 0] == batch - 1 + 3 and pair.y.dtype == torch.bool and first["x"].shape == (batch,)


def test_a_source_may_have_its_own_collate() -> None:
    class Graphs(Numbers):
        def collate(self, samples: list[Any]) -> Any:
            return torch.tensor([int(sample["x"]) for sample in samples]), len(samples)

    with loader_of(6, 3, source=Graphs(6), shuffle=False) as loader:
        assert [(x.tolist(), n) for x, n in loader.epoch(0)] == [([0, 1, 2], 3), ([3, 4, 5], 3)]


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_batches_keep_their_content_when_memory_is_reused(order: str) -> None:
    with loader_of(64, 4, order=order, workers=4) as loader:
        kept = [(batch["x"].tolist(), batch) for epoch in range(3) for batch in loader.epoch(epoch, more=epoch < 2)]
    for number, (x, batch) in enumerate(kept):
        assert batch["x"].tolist() == x and batch["more"][0].x[:, 1, 2].tolist() == [i + number // 16 for i in x]


@pytest.mark.parametrize(
    "count, batch, size, words, text",
    [
        (100, 6, 4, {}, "a batch of 6 samples does not divide by 4 replicas x 1 micro-batches; give a multiple of 4"),
        (100, 6, 1, {"accumulate": 4}, "1 replicas x 4 micro-batches"),
        (5, 8, 1, {}, "5 samples are fewer than one batch of 8"),
        (3, 8, 4, {"last_batch": "keep"}, "3 samples for 4 replicas"),
        (3, 8, 4, {"last_batch": "pad"}, "3 samples for 4 replicas"),
        (0, 8, 1, {"last_batch": "keep"}, "there is no sample"),
    ],
)
def test_indivisible_batches_raise_at_construction(count: int, batch: int, size: int, words: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        loader_of(count, batch, 0, size, **words)


# ---- late samples


def test_a_straggler_delays_no_other_sample_and_is_delivered_in_its_epoch() -> None:
    slow = {5: 0.5}
    with loader_of(400, 4, source=Numbers(400, slow=slow), shuffle=False, order="ready") as loader:
        began, seen, passed = time.perf_counter(), [], 0.0
        for batch in loader.epoch(0):
            seen.append(batch["x"].tolist())
            passed = passed or (time.perf_counter() - began if len(seen) == 20 else 0.0)
            time.sleep(0.01)
    assert passed < 0.45, "twenty batches came before the late one was ready"
    row = sum(seen, [])
    assert sorted(row) == list(range(400)) and row.index(5) > 80
    assert set(row[:5]) < set(range(12)), "the lowest ready positions come first"
    assert all(b == sorted(b) for b in seen)


def test_strict_order_waits_for_a_straggler() -> None:
    with loader_of(40, 4, source=Numbers(40, slow={5: 0.2}), shuffle=False) as loader:
        assert sum((b["x"].tolist() for b in loader.epoch(0)), []) == list(range(40)) and loader.deferred() == []


def test_describe_names_the_delivered_samples() -> None:
    with loader_of(40, 4, source=Numbers(40, slow={1: 0.3}), shuffle=False, order="ready") as loader:
        epoch = loader.epoch(0)
        got = [next(epoch)["x"].tolist() for _ in range(3)]
        assert 1 not in got[0] + got[1]
        assert [loader.describe(0, 4 * k) for k in range(3)] == [", ".join(f"number {i}" for i in part) for part in got]
        assert loader.deferred() == [1]


@given(
    count=st.integers(20, 90), batch=st.sampled_from([4, 8, 12]), last=st.sampled_from(["drop", "pad", "keep"]),
    sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25)
def test_exactly_once_under_random_stops_on_random_numbers_of_processes(
    count: int, batch: int, last: str, sizes: list[int], seed: int
) -> None:
    """Each leg runs some batches on some processes, in ready order with late samples, and is then killed between two steps."""
    generator = np.random.default_rng(seed)
    slow = {int(i): 0.004 for i in generator.integers(0, count, 4)}
    first, late, seen = 0, [], []
    for leg, size in enumerate([*sizes, 2]):
        words: dict[str, Any] = {"last_batch": last, "order": "ready", "seed": seed, "prefetch": 1 << 14}
        loaders = [loader_of(count, batch, r, size, source=Numbers(count, slow=slow), **words) for r in range(size)]
        samples = loaders[0].samples
        left = -(-(samples - first) // batch)
        take = left if leg == len(sizes) else int(generator.integers(0, left + 1))
        epochs = [loader.epoch(1, first, late) for loader in loaders]
        plans = [_EpochPlan(loader, 1, first, tuple(late)) for loader in loaders]
        numbers = [[n for n, _ in plan.local_batches()] for plan in plans]
        for k in range(take):
            for r in range(size):
                if k in numbers[r]:  # otherwise its part of a small last batch is empty
                    seen += next(epochs[r])["x"].tolist()
        began = [loader._plan for loader in loaders if loader._plan is not None]
        for loader, epoch in zip(loaders, epochs):
            epoch.close()
            loader.close()
        if take:
            for loader, plan in zip(loaders, plans):
                loader._plan = loader._plan or plan
            highest = max(plan.highest for plan in began)
            late = sorted(p for loader in loaders for p in (loader._plan or plans[0]).undelivered_below(highest))
            first = min(first + take * batch, samples)
        if first >= samples:
            break
    order = loaders[0]._epoch_order(1)
    expected = [int(order[p % count]) for p in range(samples)]
    assert sorted(seen) == sorted(expected) and late == []


# ---- faults


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_a_broken_sample_ends_the_epoch_and_no_thread_stays(order: str) -> None:
    before = threading.active_count()
    loader = loader_of(14, 2, source=Numbers(14, broken=(13,)), shuffle=False, order=order)
    seen = []
    with pytest.raises(DataError, match="train, rank 0, sample 13: number 13 is broken"):
        for batch in loader.epoch(0):
            seen += batch["x"].tolist()
    assert len(seen) == len(set(seen)) <= 12 and 13 not in seen
    assert order == "ready" or seen == list(range(len(seen)))
    epoch = loader.epoch(0)
    loader.source.broken = ()
    next(epoch)
    epoch.close()
    loader.close()
    assert threading.active_count() == before


def test_other_exceptions_of_the_source_name_the_sample_too() -> None:
    class Odd(Numbers):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            raise ZeroDivisionError("of mine")

    with loader_of(4, 2, source=Odd(4)) as loader, pytest.raises(DataError, match=r"sample \d.*ZeroDivisionError: of mine"):
        next(loader.epoch(0))


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_bad_samples_are_replaced_counted_and_reported(order: str, caplog: pytest.LogCaptureFixture) -> None:
    words: dict[str, Any] = {"on_bad_sample": "skip", "order": order, "seed": 2}
    with loader_of(16, 4, source=Numbers(16, broken=(3, 7)), **words) as loader:
        row = sum((b["x"].tolist() for b in loader.epoch(0)), [])
        news = loader.news()
        assert loader.news() == []
    place = {int(x): i for i, x in enumerate(loader._epoch_order(0))}
    assert len(row) == 16 and set(row) == set(range(16)) - {3, 7}
    assert sorted((s.index, s.replacement) for s in loader.skipped if s.index in (3, 7)) == [
        (i, int(loader._epoch_order(0)[(place[i] + 1) % 16])) for i in (3, 7)
    ]
    assert any("sample 3 of epoch 0 is skipped" in text and "number 3 is broken" in text for text in news)
    assert news[-1] == f"train: {len(loader.skipped)} samples skipped so far"
    assert sum("skipped" in record.message for record in caplog.records) == len(loader.skipped)


def test_a_bad_sample_is_named_once_however_often_it_is_drawn() -> None:
    class Drawn(Numbers):
        def describe(self, index: int) -> str:
            return f"row {index % 8}"

    with loader_of(16, 4, source=Drawn(16, broken=(3, 11)), on_bad_sample="skip", shuffle=False) as loader:
        news = [list(loader.epoch(epoch)) and loader.news() for epoch in range(2)]
    assert news[0] == ["train: sample 3 of epoch 0 is skipped (4 in its place): row 3: number 3 is broken",
                       "train: 2 samples skipped so far"]  # fmt: skip
    assert news[1] == ["train: 4 samples skipped so far"]


def test_a_resumed_epoch_skips_the_same_samples() -> None:
    words: dict[str, Any] = {"on_bad_sample": "skip", "seed": 2}
    whole, rest = (loader_of(16, 4, source=Numbers(16, broken=(3, 4, 7)), **words) for _ in range(2))
    with whole, rest:
        every = [b["x"].tolist() for b in whole.epoch(1)]
        assert [b["x"].tolist() for b in rest.epoch(1, 8)] == every[2:] and len(whole.skipped) >= 3


@pytest.mark.parametrize("problem", [ValueError("of mine"), MemoryError("full"), ConfigError("no gemmi")], ids=str)
def test_any_exception_of_a_sample_is_skipped_but_not_errors_of_the_process(problem: Exception) -> None:
    class Odd(Numbers):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            if index == 5:
                raise problem
            return super().sample(index, epoch)

    with loader_of(8, 2, source=Odd(8), shuffle=False, on_bad_sample="skip") as loader:
        if type(problem) is ValueError:
            assert [b["x"].tolist() for b in loader.epoch(0)] == [[0, 1], [2, 3], [4, 6], [6, 7]]
            assert "ValueError: of mine" in loader.news()[0]
        else:
            with pytest.raises((DataError, ConfigError), match=str(problem)):
                list(loader.epoch(0))


def test_evaluation_stops_at_a_bad_sample() -> None:
    source = Numbers(10, broken=(4,))
    with loader_of(10, 4, source=source, shuffle=False, last_batch="keep", on_bad_sample="skip", workers=1) as loader:
        with pytest.raises(DataError, match="number 4 is broken"):
            list(loader.epoch(0))
        assert loader.skipped == [] and loader.news() == []


def test_skipping_ends_after_too_many_bad_samples() -> None:
    with (
        loader_of(40, 4, source=Numbers(40, broken=tuple(range(40))), on_bad_sample="skip") as loader,
        pytest.raises(DataError, match="10 samples in a row could not be used"),
    ):
        next(loader.epoch(0))


def test_a_source_that_hangs_is_named() -> None:
    with (
        loader_of(8, 2, source=Numbers(8, slow={1: 3.0}), shuffle=False, patience=0.3) as loader,
        pytest.raises(DataError, match="no sample has become ready for 0 s; workers are at index 1 for"),
    ):
        next(loader.epoch(0))


# ---- the budget


class Big(Numbers):
    begun = 0

    def sample(self, index: int, epoch: int) -> Any:
        Big.begun += 1
        time.sleep(0.002)
        return np.zeros(1 << 20, np.uint8)


@pytest.mark.parametrize("order", ["strict", "ready"])
@pytest.mark.parametrize("budget, most", [(10 << 20, 10), (1 << 10, 6)])
def test_no_more_than_the_budget_is_prepared(order: str, budget: int, most: int) -> None:
    """The least that is always allowed is two batches, and one sample for each worker."""
    Big.begun = 0
    with loader_of(100, 2, source=Big(100), workers=2, prefetch=budget, order=order) as loader:
        epoch = loader.epoch(0)
        for got in range(1, 8):
            next(epoch)
            time.sleep(0.06 if got < 3 else 0)
            assert Big.begun <= 2 * got + 2 + most, "delivered, put together ahead, and held"
        time.sleep(0.2)
        assert Big.begun >= 2 * got + most - 1
        epoch.close()


def test_the_next_epoch_is_prefetched_before_the_last_samples_are_ready() -> None:
    class Told(Numbers):
        asked: list[tuple[int, int]] = []

        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            self.asked.append((epoch, index))
            return super().sample(index, epoch)

    with loader_of(8, 4, source=Told(8, slow={7: 0.3}), shuffle=False) as loader:
        assert [b["x"].tolist() for b in loader.epoch(0, more=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert len([e for e, _ in Told.asked if e == 1]) >= 4
        assert [b["x"].tolist() for b in loader.epoch(1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(Told.asked) == [(e, i) for e in (0, 1) for i in range(8)], "and nothing is prepared twice"
    with loader_of(8, 4, shuffle=False) as loader:
        list(loader.epoch(0, more=True))
        assert len(list(loader.epoch(5))) == 2, "another epoch than the one prepared"


def test_samples_of_the_next_epoch_wait_for_the_end_of_this_one() -> None:
    with loader_of(8, 4, source=Numbers(8, slow={7: 0.2}), shuffle=False, order="ready", workers=4) as loader:
        for epoch in range(3):
            got = [(b["x"].tolist(), b["more"][0].x[:, 0, 0].tolist()) for b in loader.epoch(epoch, more=epoch < 2)]
            assert sorted(x for part, _ in got for x in part) == list(range(8))
            assert all(tags == [x + epoch for x in part] for part, tags in got), "each as it is in its own epoch"


def test_worker_processes_give_the_same_batches() -> None:
    threads = read(loader_of(24, 4, seed=1))
    assert read(loader_of(24, 4, seed=1, processes=True)) == threads


def test_threads_set_the_gpu_before_they_pin_or_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first GPU of the node, where every process would open a context."""
    taken, seen = threading.local(), dict[str, Any]()

    class Told(Numbers):
        def sample(self, index: int, epoch: int) -> Any:
            seen[threading.current_thread().name] = getattr(taken, "device", None)
            return torch.tensor(index)

        def collate(self, samples: list[Any]) -> Any:
            seen[threading.current_thread().name] = getattr(taken, "device", None)
            return torch.stack(samples)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(taken, "device", device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    mesh = replica_mesh(0, 1)
    mesh.device = torch.device("cuda", 3)
    with Loader(Told(8), 2, mesh, name="train") as loader:
        assert len(list(loader.epoch(0))) == 4
    assert len(seen) >= 2 and set(seen.values()) == {mesh.device}
