"""Rows of a sharded table equal those of the full one, on 1, 2, 4 ranks and 2 x 2, for any number of ids on each rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcai.data import Loader, Reader
from hpcai.data.graph import Graph
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError, DataError
from hpcai.models.rgat import FeatureLookup, Features, Papers
from hpcai.parallel.lookup import LookupPlan, check_shard_fits, rows_per_rank
from tests.graphs import write_reference_graph
from tests.ranks.launch import on_ranks

MESHES = ({"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2})


def look_up(mesh: Mesh, dtype: torch.dtype) -> bool:
    axis, table = mesh["replicate"], torch.arange(23 * 6).reshape(23, 3, 2).to(dtype)
    each = rows_per_rank(23, axis)
    shard = torch.cat((table, table.new_zeros(8, 3, 2)))[axis.rank * each : (axis.rank + 1) * each]
    equal = True
    for case in range(6):
        random = torch.Generator().manual_seed(10 * case + axis.rank)
        count = 0 if case == 0 or case == axis.rank else int(torch.randint(1, 40, (), generator=random))
        ids = torch.randint(-1, 23, (count,), generator=random)
        expected = torch.where(ids[:, None, None] < 0, 0, table[ids])
        equal &= torch.equal(LookupPlan(ids, 23, axis).gather(shard), expected)
    return equal


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_rows_equal_those_of_the_full_table(axes: dict[str, int]) -> None:
    for dtype in (torch.float64, torch.float16):
        assert all(on_ranks(axes, look_up, dtype))


def look_up_beyond(mesh: Mesh) -> str:
    with pytest.raises(DataError) as error:
        LookupPlan(torch.tensor([3, 23 if mesh.rank else 0]), 23, mesh["replicate"])
    return str(error.value)


def test_all_ranks_raise_if_one_asks_for_a_missing_row() -> None:
    message = "rank 1 of replicate looks up a row that is not among the 23 of the table"
    assert on_ranks({"replicate": 2}, look_up_beyond) == [message] * 2


def read_batches(mesh: Mesh, folder: Path, mode: Any, pad: int) -> list[str]:
    graph, axis = Graph(folder), mesh["replicate"]
    torch.set_printoptions(threshold=10**9)
    texts = []
    with Reader("direct", threads=2) as reader:
        lookup = FeatureLookup(graph, axis, mesh.device, reader, 1 << 20) if mode == "sharded" else None
        features = Features(graph, mode, reader)
        for split, kwargs in (("train", {}), ("validation", {"shuffle": False, "last_batch": "keep"})):
            papers = Papers(graph, features, split, 3, (4, 3, 2), multiple=4, pad=pad)
            with Loader(papers, 4, mesh, name="t", batch_transform=lookup, **kwargs) as loader:
                texts += [str(batch) for batch in loader.epoch(0)]
    return texts


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_features_equal_direct_and_mapped_ones(axes: dict[str, int], tmp_path: Path) -> None:
    folder, pad = write_reference_graph(tmp_path / "g"), 4 // axes["replicate"]
    sharded = on_ranks(axes, read_batches, folder, "sharded", pad)
    assert len(sharded[0]) == 5 and {len(texts) for texts in sharded} == {5}, "13 and 7 groups, 12 and 8 of them used"
    for mode in ("direct", "mapped"):
        assert sharded == on_ranks(axes, read_batches, folder, mode, pad)


def test_a_shard_that_does_not_fit_names_the_ranks_that_hold_it() -> None:
    axis = Axis("replicate", 4)
    check_shard_fits("f", 4 * 10**9, 10**9, axis, "x")
    with pytest.raises(ConfigError, match="f: a shard on each of 4 ranks has 2.5 GB, but 1.8 GB are available; 6 ranks or more"):
        check_shard_fits("f", 10**10, 18 * 10**8, axis, "set data.features=direct")
