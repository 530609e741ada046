"""Every sample once, in an order that does not depend on the number of processes."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcai.data import Loader
from hpcai.data.sampler import order, share
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError


class Numbers:
    """Sample i is the number i."""

    def __init__(self, count: int, broken: int = -1) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        if self.broken in indices:
            raise DataError("sample 13 is broken")
        return {"x": torch.as_tensor(indices)}

    def describe(self, index: int) -> str:
        return f"number {index}"


def mesh_of(rank: int, size: int) -> Mesh:
    mesh = Mesh({})
    mesh._axes["replicate"] = Axis("replicate", size, rank)
    return mesh


def read(loader: Loader, epoch: int = 0, first: int = 0) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader.epoch(epoch, first)]


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_cover_and_differ_by_one(count: int, size: int) -> None:
    parts = [share(np.arange(count), rank, size) for rank in range(size)]
    assert np.concatenate(parts).tolist() == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(8, 60), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_the_global_batch_is_the_same_on_any_number_of_processes(count: int, size: int, epoch: int) -> None:
    alone = read(Loader(Numbers(count), 8, mesh_of(0, 1), name="train", seed=5), epoch)
    ranks = [read(Loader(Numbers(count), 8, mesh_of(r, size), name="train", seed=5), epoch) for r in range(size)]
    assert [sum(parts, []) for parts in zip(*ranks)] == alone
    assert all(len(part) == 8 // size for rank in ranks for part in rank)
    assert len(alone) == count // 8 and len({x for b in alone for x in b}) == len(alone) * 8


@given(st.integers(4, 40), st.sampled_from([1, 2, 3, 4]))
def test_evaluation_delivers_every_sample_once(count: int, size: int) -> None:
    loaders = [Loader(Numbers(count), 6, mesh_of(r, size), name="v", shuffle=False, whole=False) for r in range(size)]
    assert sorted(x for loader in loaders for batch in read(loader) for x in batch) == list(range(count))
    assert loaders[0].samples == count


def test_an_epoch_can_begin_in_the_middle_also_with_another_batch() -> None:
    loader = Loader(Numbers(50), 8, mesh_of(0, 1), name="train", seed=1)
    whole = sum(read(loader, 2), [])
    assert sum(read(loader, 2, 16), []) == whole[16:]
    other = Loader(Numbers(50), 4, mesh_of(0, 1), name="train", seed=1)
    assert sum(read(other, 2, 16), [])[:32] == whole[16:48]
    assert read(loader, 3) != read(loader, 2) and read(loader, 2) == read(loader, 2)
    assert not np.array_equal(order(50, 1, 0, True), order(50, 2, 0, True))


@pytest.mark.parametrize(
    "count, batch, size, words, text",
    [
        (100, 6, 4, {}, "a batch of 6 samples does not divide by 4 copies x 1 micro-batches; give a multiple of 4"),
        (100, 6, 1, {"accumulate": 4}, "1 copies x 4 micro-batches"),
        (5, 8, 1, {}, "5 samples are fewer than one batch of 8"),
        (3, 8, 4, {"whole": False}, "3 samples for 4 processes"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_once(count: int, batch: int, size: int, words: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Loader(Numbers(count), batch, mesh_of(0, size), name="train", **words)


def test_a_broken_sample_is_raised_where_it_is_needed_and_no_thread_stays() -> None:
    before = threading.active_count()
    loader = Loader(Numbers(14, broken=13), 2, mesh_of(0, 1), name="train", shuffle=False)
    seen = []
    with pytest.raises(DataError, match="sample 13 is broken"):
        for batch in loader.epoch(0):
            seen += batch["x"].tolist()
    assert seen == list(range(12))
    epoch = loader.epoch(0)
    next(epoch)
    epoch.close()
    assert threading.active_count() == before
    assert loader.describe(0, 0) == "number 0, number 1"
