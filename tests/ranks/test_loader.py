"""Ranks of one replica get the same samples: each rank reads its shard, or one rank prepares the sample for all. Late samples are
deferred on all ranks, and no rank hangs."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch

from hpcai.data import Loader, Reader, Rows
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.parallel.spatial import SpatialPartition
from tests.index_source import IndexSource
from tests.ranks.launch import on_ranks

MESHES = (
    {"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"depth": 2}, {"replicate": 2, "depth": 2}, {"axial": 2, "depth": 2},
)  # fmt: skip


def deliver_batches(
    mesh: Mesh, order: str, stop: int, first: int, deferred: list[int], scatter: bool = False
) -> tuple[int, list[list[int]], list[int]]:
    slow = set(np.random.default_rng(mesh.rank).integers(0, 48, 6).tolist())  # other samples on each rank

    class Slow(IndexSource):
        replicated = True

        def sample(self, index: int, epoch: int) -> np.ndarray:
            if index in slow:
                time.sleep(0.05)
            return np.array(index)

    with Loader(Slow(48), 8, mesh, name="t", order=order, seed=4, scatter=scatter) as loader:  # type: ignore[arg-type]
        epoch = loader.epoch(0, first, deferred)
        batches = [next(epoch).tolist() for _ in range(stop)]
        epoch.close()
        return mesh["replicate"].rank, batches, loader.deferred()


@pytest.mark.parametrize(
    "axes, scatter", [(axes, on) for axes in MESHES for on in (False, True) if not on or set(axes) != {"replicate"}], ids=str
)
@pytest.mark.parametrize("order", ["strict", "ready"])
def test_ranks_of_one_replica_agree_and_a_resumed_epoch_is_complete(axes: dict[str, int], scatter: bool, order: str) -> None:
    before = on_ranks(axes, deliver_batches, order, 3, 0, [], scatter)
    deferred = before[0][2]
    assert all(part[2] == deferred for part in before), "deferred positions are equal on all ranks"
    after = on_ranks({"replicate": 2}, deliver_batches, order, 3, 24, deferred)
    samples: list[int] = []
    for results in (before, after):
        by_replica: dict[int, Any] = {}
        for replica, batches, _ in results:
            assert by_replica.setdefault(replica, batches) == batches, "ranks of one replica get the same samples in the same order"
        samples += [x for batches in by_replica.values() for indices in batches for x in indices]
    assert sorted(samples) == list(range(48))
    if order == "strict":
        single = on_ranks({"replicate": 1}, deliver_batches, order, 3, 0, [])[0][1]
        before_by_replica = {replica: batches for replica, batches, _ in before}
        assert [sum((before_by_replica[r][k] for r in sorted(before_by_replica)), []) for k in range(3)] == single


# ---- a shard of each sample


def write_volumes(folder: Path, rows: int = 6, edge: int = 64) -> Path:
    folder.mkdir()
    with h5py.File(folder / "v.h5", "w", alignment_threshold=1, alignment_interval=4096) as file:
        file["counts"] = np.random.default_rng(0).integers(0, 99, (rows, edge, edge, edge, 4), np.int16)
        file["target"] = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    return folder


def read_shards(mesh: Mesh, folder: Path) -> tuple[list[Any], int]:
    class ShardSource:
        def __init__(self) -> None:
            fields = {"counts": ("int16", (64, 64, 64, 4)), "target": ("float32", (3,))}
            self.rows = Rows(folder, fields, reader=Reader("direct"))
            self.slices = {"counts": SpatialPartition.from_axes({"depth": mesh["depth"]}, 3).local_slices((64, 64, 64))}

        def __len__(self) -> int:
            return len(self.rows)

        def sample(self, index: int, epoch: int) -> Any:
            return self.rows.read(index, self.slices)

        def describe(self, index: int) -> str:
            return self.rows.describe(index)

    source = ShardSource()
    with Loader(source, 1, mesh, name="t", seed=2) as loader:
        batches = [(batch["counts"].numpy().copy(), batch["target"].tolist()) for batch in loader.epoch(0)]
        return batches, source.rows.reader.transferred


def test_ranks_of_a_sharded_sample_read_only_their_shard(tmp_path: Path) -> None:
    folder = write_volumes(tmp_path / "train")
    full, full_bytes = on_ranks({}, read_shards, folder)[0]
    assert len(full) == 6
    for size in (2, 4):
        ranks = on_ranks({"depth": size}, read_shards, folder)
        for k, (counts, target) in enumerate(full):
            assert np.array_equal(np.concatenate([rank[0][k][0] for rank in ranks], axis=1), counts)
            assert all(rank[0][k][1] == target for rank in ranks)
        total = sum(rank[1] for rank in ranks)
        assert full_bytes <= total <= 1.05 * full_bytes, f"{size} ranks read {total:,} bytes, one reads {full_bytes:,}"


# ---- samples prepared by one rank


class Pair(NamedTuple):
    x: Any
    y: Any


class Mixed(IndexSource):
    """Samples with every type of leaf, some with other sizes or another tree; records the samples that it prepares."""

    replicated = True

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        super().__init__(count)
        self.broken, self.prepared = broken, list[int]()

    def sample(self, index: int, epoch: int) -> Any:
        if index in self.broken:
            raise DataError(f"number {index} is broken")
        self.prepared.append(index)
        rng = np.random.default_rng([index, epoch])
        sizes = rng.integers(2, 5, 3)
        sample = {
            "transposed": rng.random(sizes).transpose(1, 2, 0), "tensor": torch.arange(index).to(torch.bfloat16), "none": None,
            "channels": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last) * index, "text": "a", "empty": np.ones((0, 3)),
            "pair": [Pair(float(index), index), (True, np.float32(index), np.array(index, ">i2"))],
        }  # fmt: skip
        return sample | ({"extra": np.array(["x", "yz"])} if index % 3 == 0 else {})

    def collate(self, samples: list[Any]) -> Any:
        return samples


def is_same(x: Any, y: Any) -> bool:
    if isinstance(y, dict):
        return list(x) == list(y) and all(is_same(x[name], y[name]) for name in y)
    if isinstance(y, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(is_same, x, y))
    if isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)
    if isinstance(y, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y) and (x.strides == y.strides or not y.size)
    return type(x) is type(y) and x == y


def prepare_and_deliver(mesh: Mesh, order: str) -> tuple[bool, list[int], list[int]]:
    """Return whether samples equal those of this rank's own source, the samples it prepared, and those delivered to it."""
    source, reference = Mixed(24), Mixed(24)
    with Loader(source, 4, mesh, name="t", seed=3, scatter="auto", order=order) as loader:  # type: ignore[arg-type]
        equal, delivered = True, []
        for epoch in range(2):
            for number, batch in enumerate(loader.epoch(epoch, more=epoch == 0)):
                indices = [index for index, _ in loader.batch_samples(epoch, 4 * number)]
                equal &= all(is_same(sample, reference.sample(index, epoch)) for sample, index in zip(batch, indices, strict=True))
                delivered += indices
        return equal, source.prepared, delivered


@pytest.mark.parametrize("order", ["strict", "ready"])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_each_sample_is_prepared_by_one_rank_of_its_replica_and_delivered_to_all(axes: dict[str, int], order: str) -> None:
    results = on_ranks(axes, prepare_and_deliver, order)
    assert all(equal for equal, _, _ in results)
    assert sorted(sum((prepared for _, prepared, _ in results), [])) == sorted(2 * list(range(24))), "once in each of two epochs"
    assert {len(prepared) for _, prepared, _ in results} == {48 // len(results)}, "the work is distributed evenly"
    size = len(results) // axes.get("replicate", 1)
    for first in range(0, len(results), size):
        assert all(delivered == results[first][2] for _, _, delivered in results[first : first + size])
    if order == "strict":
        replicas = [delivered for _, _, delivered in results[::size]]
        count = 4 // len(replicas)
        expected = [index for k in range(12) for delivered in replicas for index in delivered[count * k : count * (k + 1)]]
        assert expected == prepare_and_deliver(Mesh({}), order)[2]


def skip_bad_samples(mesh: Mesh) -> tuple[list[list[int]], list[str], list[str]]:
    kwargs: dict[str, Any] = {"shuffle": False, "on_bad_sample": "skip", "scatter": True}
    with Loader(Mixed(12, broken=(3, 6)), 4, mesh, name="t", **kwargs) as loader:
        batches = [[sample["pair"][0].y for sample in batch] for batch in loader.epoch(0)]
        return batches, loader.news(), loader.news()


def test_a_bad_sample_is_skipped_and_reported_by_all_ranks_of_a_replica() -> None:
    for batches, news, second_news in on_ranks({"tensor": 2}, skip_bad_samples):
        assert batches == [[0, 1, 2, 4], [4, 5, 7, 7], [8, 9, 10, 11]] and not second_news
        assert [text.split(" of epoch")[0] for text in sorted(news)] == [
            "t: 2 samples skipped so far", "t: sample 3", "t: sample 6"
        ]  # fmt: skip


def stop_at_bad_sample(mesh: Mesh, broken: int, order: str) -> tuple[str, float]:
    start = time.monotonic()
    with Loader(Mixed(16, broken=(broken,)), 4, mesh, name="t", shuffle=False, order=order, scatter=True) as loader:  # type: ignore[arg-type]
        try:
            for _ in loader.epoch(0):
                pass
        except DataError as problem:
            return str(problem), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_a_bad_sample_ends_all_ranks_of_its_replica_and_names_its_rank(order: str) -> None:
    results = on_ranks({"tensor": 4}, stop_at_bad_sample, 6, order, timeout=20)
    texts = [text for text, _ in results]
    error = "t, rank 3, sample 6: number 6 is broken"
    assert texts == [f"rank 3 has no sample to send: {error}"] * 3 + [error]
    assert max(seconds for _, seconds in results) < 5


def leave_epoch(mesh: Mesh) -> list[int]:
    """Leave an epoch after its first batch, while other samples are prepared, and read the next epoch."""

    class Late(Mixed):
        def sample(self, index: int, epoch: int) -> Any:
            time.sleep(0.02 * (mesh.rank + index % 3))
            return super().sample(index, epoch)

    with Loader(Late(16), 2, mesh, name="t", shuffle=False, scatter=True) as loader:
        for _ in loader.epoch(0):
            break
        return [sample["pair"][0].y for batch in loader.epoch(1) for sample in batch]


def test_an_epoch_can_be_left_and_another_begun() -> None:
    assert on_ranks({"tensor": 2}, leave_epoch) == [list(range(16))] * 2
