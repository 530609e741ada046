"""Sub-graphs of papers as samples: pure functions of seed, epoch and index; their union and padding."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.data import Loader, Reader
from hpcai.data.graph import Graph
from hpcai.dist import single_process
from hpcai.errors import DataError
from hpcai.models.rgat import Batch, Features, Papers
from tests.graphs import write_reference_graph
from tests.reference_data import load_arrays


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return Graph(write_reference_graph(tmp_path_factory.mktemp("papers") / "g"))


def source(graph: Graph, split: str = "train", papers: int = 7, mode: Any = "mapped", **kwargs: Any) -> Papers:
    return Papers(graph, Features(graph, mode), split, papers, (4, 3, 2), **kwargs)


def test_samples_depend_on_seed_epoch_and_index_alone(graph: Graph) -> None:
    papers = source(graph)
    twin = pickle.loads(pickle.dumps(papers))  # noqa: S301
    keys = [(index, epoch) for epoch in (0, 1) for index in range(len(papers))]
    samples = {key: papers.sample(*key) for key in keys}
    assert len(papers) == 5 and all(str(twin.sample(*key)) == str(samples[key]) for key in reversed(keys))
    assert len({str(sample.nodes) for sample in samples.values()}) == 10
    orders = [np.concatenate([samples[index, epoch].nodes["paper"][0] for index in range(5)]) for epoch in (0, 1)]
    assert all(len(set(seeds)) == 35 and seeds.max() < 40 for seeds in orders) and str(orders[0]) != str(orders[1])
    assert str(source(graph, seed=1).sample(0, 0)) != str(samples[0, 0])
    twin.seeds = lambda index, epoch: np.arange(7)
    assert len({str(twin.subgraph(*key)) for key in keys}) == 10, "other neighbours of the same papers"
    held = source(graph, "validation", multiple=2)
    assert len(held) == 4 and str(held.sample(1, 0)) == str(held.sample(1, 5))
    seeds = [held.sample(index, 0).nodes["paper"][0].tolist() for index in range(4)]
    assert seeds == [[*range(40, 47)], [*range(47, 54)], [*range(54, 60)], [-1]]
    batch = held.collate([held.sample(3, 0)])
    assert batch.labels.tolist() == [-1] and not batch.features["paper"][0].any() and batch.papers.tolist() == [-1]


def check_batch(batch: Batch, graph: Graph, spare: int) -> dict[str, list[torch.Tensor]]:
    """Assert the form of a batch, and return its edges as features of source and destination, sorted, without padding."""
    arrays, edges = load_arrays("rgat/graph"), {}
    labels = arrays["labels"][batch.papers]
    np.testing.assert_array_equal(batch.labels, np.where(batch.papers < 0, -1, labels))
    expected = np.where((batch.papers < 0)[:, None], 0, arrays["x/paper"][batch.papers])
    np.testing.assert_array_equal(batch.features["paper"][0], expected)
    for name, hops in batch.edges.items():
        source, destination = (torch.cat(batch.features[kind]) for kind in graph.relations[name])
        starts = np.cumsum([0, *map(len, batch.features[graph.relations[name][1]])])
        real = []
        for hop, pair in enumerate(hops):
            assert (pair[1].diff() >= 0).all() and ((pair[1] >= starts[hop]) & (pair[1] < starts[hop + 1])).all()
            both = torch.cat((source[pair[0]], destination[pair[1]]), 1)
            padding = (source[pair[0]] == 0).all(1), (destination[pair[1]] == 0).all(1)
            assert torch.equal(*padding), "edges of padding join nodes of padding"
            real.append(both[~padding[0]])
        edges[name] = sorted(torch.cat(real).tolist())
    if spare:
        assert all(not hop[-1].any() for hops in batch.features.values() for hop in hops), "at least one node of padding"
    return edges


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_batch_is_the_union_of_its_samples_with_or_without_padding(graph: Graph, number: int) -> None:
    plain, padded = source(graph), source(graph, pad=number)
    singles = [check_batch(plain.collate([plain.sample(index, 0)]), graph, 0) for index in range(number)]
    union = {name: sorted(sum((part[name] for part in singles), [])) for name in singles[0]}
    batches = [each.collate([each.sample(index, 0) for index in range(number)]) for each in (plain, padded)]
    assert check_batch(batches[0], graph, 0) == union == check_batch(batches[1], graph, 1)
    papers = [batch.papers[batch.papers >= 0].tolist() for batch in batches]
    assert papers[0] == papers[1] and len(batches[1].papers) == 7 * number + 1
    if number > 1:
        with pytest.raises(DataError, match=f"1 sub-graphs in a local batch, but padding is for {number}"):
            padded.collate([padded.sample(0, 0)])


def test_padded_batches_have_few_shapes(graph: Graph) -> None:
    papers = source(graph, pad=1)
    shapes = {tuple(len(hop) for hops in papers.collate([papers.sample(i, e)]).features.values() for hop in hops)
              for i in range(5) for e in range(6)}  # fmt: skip
    assert 1 <= len(shapes) <= 3
    papers.smallest = tuple({name: np.maximum(x, 1) for name, x in group.items()}
                            for group in source(graph)._fit([papers.subgraph(0, 0)]))  # fmt: skip
    check_batch(papers.collate([papers.sample(0, 0)]), graph, 1)  # an exact fit has no room for padding


@pytest.mark.parametrize("processes", [False, True])
def test_direct_and_cached_features_equal_mapped_ones(graph: Graph, processes: bool, tmp_path: Path) -> None:
    batches = []
    with Reader("direct", threads=2) as reader:
        for features in (Features(graph), Features(graph, "direct", reader), Features(graph, "direct", reader, 20 * 48)):
            papers = Papers(graph, features, "train", 7, (4, 3, 2))
            with Loader(papers, 2, single_process(), name="t", processes=processes and features.cache > 0) as loader:
                batches.append(list(loader.epoch(0)))
        assert processes or 0.1 < features.hit_rate < 0.9
    assert str(batches[0]) == str(batches[1]) == str(batches[2]) and len(batches[0]) == 2


def test_other_splits_and_large_groups_are_refused(graph: Graph) -> None:
    with pytest.raises(DataError, match="no split 'test'; it has train, validation"):
        source(graph, "test")
    with pytest.raises(DataError, match="40 papers of train are no group of data.papers=41"):
        source(graph, papers=41)
