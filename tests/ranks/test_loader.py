"""Ranks that hold one sample together get the same samples, each only its part, or made by one of them; late ones are known to all;
no rank hangs."""

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


def delivered(
    mesh: Mesh, order: str, stop: int, first: int, late: list[int], once: bool = False
) -> tuple[int, list[list[int]], list[int]]:
    slow = set(np.random.default_rng(mesh.rank).integers(0, 48, 6).tolist())  # other samples on each rank

    class Slow(IndexSource):
        replicated = True

        def sample(self, index: int, epoch: int) -> np.ndarray:
            if index in slow:
                time.sleep(0.05)
            return np.array(index)

    with Loader(Slow(48), 8, mesh, name="t", order=order, seed=4, scatter=once) as loader:  # type: ignore[arg-type]
        row, epoch = [], loader.epoch(0, first, late)
        for _ in range(stop):
            row.append(next(epoch).tolist())
        epoch.close()
        return mesh["replicate"].rank, row, loader.deferred()


@pytest.mark.parametrize(
    "axes, once", [(axes, once) for axes in MESHES for once in (False, True) if not once or set(axes) != {"replicate"}], ids=str
)
@pytest.mark.parametrize("order", ["strict", "ready"])
def test_ranks_of_one_copy_agree_and_a_resumed_epoch_is_whole(axes: dict[str, int], once: bool, order: str) -> None:
    before = on_ranks(axes, delivered, order, 3, 0, [], once)
    late = before[0][2]
    assert all(part[2] == late for part in before), "every rank knows all late positions"
    after = on_ranks({"replicate": 2}, delivered, order, 3, 24, late)
    seen: list[int] = []
    for results in (before, after):
        rows: dict[int, Any] = {}
        for copy, row, _ in results:
            assert rows.setdefault(copy, row) == row, "ranks of one copy get the same samples in the same order"
        seen += [x for row in rows.values() for batch in row for x in batch]
    assert sorted(seen) == list(range(48))
    if order == "strict":
        alone = on_ranks({"replicate": 1}, delivered, order, 3, 0, [])[0][1]
        parts = {copy: row for copy, row, _ in before}
        assert [sum((parts[c][k] for c in sorted(parts)), []) for k in range(3)] == alone


# ---- a part of each sample


def volumes(folder: Path, rows: int = 6, edge: int = 64) -> Path:
    folder.mkdir()
    with h5py.File(folder / "v.h5", "w", alignment_threshold=1, alignment_interval=4096) as file:
        file["counts"] = np.random.default_rng(0).integers(0, 99, (rows, edge, edge, edge, 4), np.int16)
        file["target"] = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    return folder


def parts(mesh: Mesh, folder: Path) -> tuple[list[Any], int]:
    class Parts:
        def __init__(self) -> None:
            fields = {"counts": ("int16", (64, 64, 64, 4)), "target": ("float32", (3,))}
            self.rows = Rows(folder, fields, reader=Reader("direct"))
            self.where = {"counts": SpatialPartition.from_axes({"depth": mesh["depth"]}, 3).local_slices((64, 64, 64))}

        def __len__(self) -> int:
            return len(self.rows)

        def sample(self, index: int, epoch: int) -> Any:
            return self.rows.read(index, self.where)

        def describe(self, index: int) -> str:
            return self.rows.describe(index)

    source = Parts()
    with Loader(source, 1, mesh, name="t", seed=2) as loader:
        found = [(batch["counts"].numpy().copy(), batch["target"].tolist()) for batch in loader.epoch(0)]
        return found, source.rows.reader.transferred


def test_ranks_that_cut_a_sample_read_their_part_only(tmp_path: Path) -> None:
    folder = volumes(tmp_path / "train")
    whole, read_whole = on_ranks({}, parts, folder)[0]
    assert len(whole) == 6
    for size in (2, 4):
        ranks = on_ranks({"depth": size}, parts, folder)
        for k, (counts, target) in enumerate(whole):
            assert np.array_equal(np.concatenate([rank[0][k][0] for rank in ranks], axis=1), counts)
            assert all(rank[0][k][1] == target for rank in ranks)
        total = sum(rank[1] for rank in ranks)
        assert read_whole <= total <= 1.05 * read_whole, f"{size} ranks read {total:,} bytes, one reads {read_whole:,}"


# ---- faults reach every rank


# ---- made once


class Pair(NamedTuple):
    x: Any
    y: Any


class Mixed(IndexSource):
    """Samples of every kind, of which some have other sizes, and some another tree; notes what it makes, and where."""

    replicated = True

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        super().__init__(count)
        self.broken, self.made = broken, list[int]()

    def sample(self, index: int, epoch: int) -> Any:
        if index in self.broken:
            raise DataError(f"number {index} is broken")
        self.made.append(index)
        rng = np.random.default_rng([index, epoch])
        sizes = rng.integers(2, 5, 3)
        sample = {
            "turned": rng.random(sizes).transpose(1, 2, 0), "tensor": torch.arange(index).to(torch.bfloat16), "none": None,
            "channels": torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last) * index, "text": "a", "empty": np.ones((0, 3)),
            "pair": [Pair(float(index), index), (True, np.float32(index), np.array(index, ">i2"))],
        }  # fmt: skip
        return sample | ({"more": np.array(["x", "yz"])} if index % 3 == 0 else {})

    def collate(self, samples: list[Any]) -> Any:
        return samples


def same(found: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return list(found) == list(right) and all(same(found[name], right[name]) for name in right)
    if isinstance(right, list | tuple):
        return type(found) is type(right) and len(found) == len(right) and all(map(same, found, right))
    if isinstance(right, torch.Tensor):
        return found.dtype == right.dtype and found.stride() == right.stride() and torch.equal(found, right)
    if isinstance(right, np.ndarray):
        return found.dtype == right.dtype and np.array_equal(found, right) and (found.strides == right.strides or not right.size)
    return type(found) is type(right) and found == right


def made_once(mesh: Mesh, order: str) -> tuple[bool, list[int], list[int]]:
    """Whether samples are what this rank would make of them; what it made, and what was delivered to it."""
    source, right = Mixed(24), Mixed(24)
    with Loader(source, 4, mesh, name="t", seed=3, scatter="auto", order=order) as loader:  # type: ignore[arg-type]
        alike, seen = True, []
        for epoch in range(2):
            for number, batch in enumerate(loader.epoch(epoch, more=epoch == 0)):
                indices = [index for index, _ in loader.batch_samples(epoch, 4 * number)]
                alike &= all(same(found, right.sample(index, epoch)) for found, index in zip(batch, indices, strict=True))
                seen += indices
        return alike, source.made, seen


@pytest.mark.parametrize("order", ["strict", "ready"])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_each_sample_is_made_by_one_rank_of_its_copy_and_comes_to_all_as_it_is(axes: dict[str, int], order: str) -> None:
    found = on_ranks(axes, made_once, order)
    assert all(alike for alike, _, _ in found)
    assert sorted(sum((made for _, made, _ in found), [])) == sorted(2 * list(range(24))), "each once in each of two epochs"
    assert {len(made) for _, made, _ in found} == {48 // len(found)}, "the work is dealt evenly"
    size = len(found) // axes.get("replicate", 1)
    for first in range(0, len(found), size):
        assert all(seen == found[first][2] for _, _, seen in found[first : first + size])
    if order == "strict":
        copies = [seen for _, _, seen in found[::size]]
        each = 4 // len(copies)
        row = [index for k in range(12) for seen in copies for index in seen[each * k : each * (k + 1)]]
        assert row == made_once(Mesh({}), order)[2]


def skipping(mesh: Mesh) -> tuple[list[list[int]], list[str], list[str]]:
    words: dict[str, Any] = {"shuffle": False, "on_bad_sample": "skip", "scatter": True}
    with Loader(Mixed(12, broken=(3, 6)), 4, mesh, name="t", **words) as loader:
        batches = [[sample["pair"][0].y for sample in batch] for batch in loader.epoch(0)]
        return batches, loader.news(), loader.news()


def test_a_bad_sample_is_skipped_by_all_ranks_of_a_copy_and_told_by_all() -> None:
    for batches, news, again in on_ranks({"tensor": 2}, skipping):
        assert batches == [[0, 1, 2, 4], [4, 5, 7, 7], [8, 9, 10, 11]] and not again
        assert [text.split(" of epoch")[0] for text in sorted(news)] == [
            "t: 2 samples skipped so far", "t: sample 3", "t: sample 6"
        ]  # fmt: skip


def stopping(mesh: Mesh, broken: int, order: str) -> tuple[str, float]:
    began = time.monotonic()
    with Loader(Mixed(16, broken=(broken,)), 4, mesh, name="t", shuffle=False, order=order, scatter=True) as loader:  # type: ignore[arg-type]
        try:
            for _ in loader.epoch(0):
                pass
        except DataError as problem:
            return str(problem), time.monotonic() - began
    return "all was delivered", 0.0


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_a_bad_sample_ends_all_ranks_of_its_copy_and_names_the_one_that_met_it(order: str) -> None:
    found = on_ranks({"tensor": 4}, stopping, 6, order, timeout=20)
    texts = [text for text, _ in found]
    met = "t, rank 3, sample 6: number 6 is broken"
    assert texts == [f"rank 3 has no sample to send: {met}"] * 3 + [met]
    assert max(after for _, after in found) < 5


def leaving(mesh: Mesh) -> list[int]:
    """Each rank leaves an epoch at once, while another makes the next samples, and goes on with the next."""

    class Late(Mixed):
        def sample(self, index: int, epoch: int) -> Any:
            time.sleep(0.02 * (mesh.rank + index % 3))
            return super().sample(index, epoch)

    with Loader(Late(16), 2, mesh, name="t", shuffle=False, scatter=True) as loader:
        for _ in loader.epoch(0):
            break
        return [sample["pair"][0].y for batch in loader.epoch(1) for sample in batch]


def test_an_epoch_can_be_left_and_another_begun() -> None:
    assert on_ranks({"tensor": 2}, leaving) == [list(range(16))] * 2
