"""Ranks that hold one sample together get the same samples, each only its part; late ones are known to all; no rank hangs."""

import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcai.data import Loader, Reader, Rows
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.parallel.spatial import Cut
from tests.numbers import Numbers
from tests.ranks.launch import on_ranks

MESHES = (
    {"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"depth": 2}, {"replicate": 2, "depth": 2}, {"axial": 2, "depth": 2},
)  # fmt: skip


def delivered(mesh: Mesh, order: str, stop: int, first: int, late: list[int]) -> tuple[int, list[list[int]], list[int]]:
    slow = set(np.random.default_rng(mesh.rank).integers(0, 48, 6).tolist())  # other samples on each rank

    class Slow(Numbers):
        def sample(self, index: int, epoch: int) -> np.ndarray:
            if index in slow:
                time.sleep(0.05)
            return np.array(index)

    with Loader(Slow(48), 8, mesh, name="t", order=order, seed=4) as loader:  # type: ignore[arg-type]
        row, epoch = [], loader.epoch(0, first, late)
        for _ in range(stop):
            row.append(next(epoch).tolist())
        epoch.close()
        return mesh["replicate"].rank, row, loader.late()


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("order", ["strict", "ready"])
def test_ranks_of_one_copy_agree_and_a_resumed_epoch_is_whole(axes: dict[str, int], order: str) -> None:
    before = on_ranks(axes, delivered, order, 3, 0, [])
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
            self.where = {"counts": Cut.over({"depth": mesh["depth"]}, 3).part((64, 64, 64))}

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


def refused(mesh: Mesh, folder: Path) -> str:
    try:
        Rows(folder, {"counts": ("int16", (64, 64, 64, 4))}, reader=Reader())
        Loader(Numbers(9), 1, mesh, name="t", on_bad_sample="skip")
    except DataError as problem:
        return str(problem)
    return ""


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    folder = volumes(tmp_path / "train", 2)
    assert "on_bad_sample=skip, but 2 processes hold a sample together" in on_ranks({"depth": 2}, refused, folder)[0]
    with h5py.File(folder / "v.h5", "a") as file:
        del file["counts"]
        file["counts"] = np.zeros((2, 64, 64, 64, 4), np.int16)[..., :3]
    text = on_ranks({"depth": 2}, refused, folder)[0]
    assert "dataset 'counts' is (2, 64, 64, 64, 3)" in text


# ---- faults reach every rank


def failing(mesh: Mesh, broken: int) -> str:
    class Broken(Numbers):
        def sample(self, index: int, epoch: int) -> np.ndarray:
            if index == broken:
                raise DataError(f"file 7 ends early, index {index}")
            return np.array(index)

    with Loader(Broken(16), 4, mesh, name="t", shuffle=False, order="ready") as loader:
        try:
            for _ in loader.epoch(0):
                pass
        except DataError as problem:
            return str(problem)
    return "all was delivered"


def test_the_rank_that_fails_says_so_itself() -> None:
    texts = on_ranks({"replicate": 2}, failing, 6)
    assert texts == ["all was delivered", "t, rank 1, sample 6: file 7 ends early, index 6"]
