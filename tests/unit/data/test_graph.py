"""Graphs on disk, and what a sampler of neighbours must satisfy (the seven points of MLPerf's rule)."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcai.data.graph import Graph, draw, renumber, sample_neighbors
from hpcai.errors import DataError
from tests.graphs import EDGES, REFERENCE, write_reference_graph

pytestmark = pytest.mark.usefixtures("no_leaks")
SEEDS = np.array([3, 0, 17, 41, 59, 8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference_graph(tmp_path_factory.mktemp("graph") / "g")


def pairs(edges: np.ndarray) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, np.asarray(edges).T.tolist()))


def global_edges(graph: Graph, part: Any, name: str, hop: int) -> Counter[tuple[int, ...]]:
    ends = zip(graph.relations[name], part.edges[name][hop])
    return pairs(np.stack([np.concatenate(part.nodes[kind])[numbers] for kind, numbers in ends]))


@pytest.mark.parametrize("mode", ["mapped", "memory"])
def test_a_sample_satisfies_the_rule(folder: Path, mode: Any) -> None:
    graph, fan_out = Graph(folder, mode), (4, 3, 2)
    part = sample_neighbors(graph, SEEDS, fan_out, np.random.default_rng(0))
    np.testing.assert_array_equal(part.nodes["paper"][0], SEEDS)
    for hops in part.nodes.values():
        assert len(hops) == 4 and len(ids := np.concatenate(hops)) == len(np.unique(ids))
        assert all((np.diff(hop) > 0).all() for hop in hops[1:])
    for name, (_, destination) in graph.relations.items():
        starts = np.cumsum([0, *map(len, part.nodes[destination])])
        for hop, limit in enumerate(fan_out):
            ends = part.edges[name][hop][1]
            assert (np.diff(ends) >= 0).all()
            new = np.arange(starts[hop], starts[hop + 1])  # only nodes that are new in the hop before, each once
            degree = np.bincount(EDGES[name][1], minlength=graph.nodes[destination])[part.nodes[destination][hop]]
            np.testing.assert_array_equal(ends, np.repeat(new, np.minimum(degree, limit)))
            assert global_edges(graph, part, name, hop) <= pairs(EDGES[name]), "edges of the graph, none more often than there"


def test_all_neighbours_are_the_full_graph(folder: Path) -> None:
    graph = Graph(folder)
    part = sample_neighbors(graph, np.arange(60), (-1,) * 8, np.random.default_rng(0))
    for name in graph.relations:
        reached = np.concatenate(part.nodes[graph.relations[name][1]])
        expected = pairs(EDGES[name][:, np.isin(EDGES[name][1], reached)])
        assert sum((global_edges(graph, part, name, hop) for hop in range(8)), Counter()) == expected


def test_equal_generators_give_equal_samples(folder: Path) -> None:
    graph = Graph(folder)
    first, again, other = (sample_neighbors(graph, SEEDS, (4, 3, 2), np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert str(first) == str(again) != str(other)


def test_draws_are_uniform_without_replacement() -> None:
    reference = REFERENCE["sampler_statistics"]
    degree, limit, trials = (reference[key] for key in ("degree", "fan_out", "trials"))

    def statistic(counts: np.ndarray) -> float:
        share = limit / degree
        return float(((counts - trials * share) ** 2).sum() / (trials * share * (1 - share)) * (degree - 1) / degree)

    for key in ("", "biased_"):
        assert statistic(np.array(reference[f"{key}counts"])) == pytest.approx(reference[f"{key}statistic"])
    counts, chosen = draw(np.full(trials, degree), limit, np.random.default_rng(5))
    chosen = chosen.reshape(trials, limit)
    assert (counts == limit).all() and all(len({*row}) == limit for row in chosen.tolist())
    assert statistic(np.bincount(chosen.ravel(), minlength=degree)) < reference["quantiles"]["0.9999"]
    both = np.zeros((degree, degree))
    np.add.at(both, (chosen[:, :, None], chosen[:, None]), 1)
    together = both[np.triu_indices(degree, 1)] / reference["expected_pair_count"]
    assert abs(together - 1).max() < 5 / np.sqrt(reference["expected_pair_count"])


def test_renumbering_is_that_of_sets() -> None:
    random = np.random.default_rng(0)
    known, ids = random.permutation(500)[:120], random.integers(0, 500, 700)
    new, numbers = renumber(known, ids)
    np.testing.assert_array_equal(new, np.setdiff1d(ids, known))
    np.testing.assert_array_equal(np.concatenate((known, new))[numbers], ids)


def overwrite(name: str, at: int, value: int, dtype: str = "<i8") -> Any:
    def change(folder: Path) -> None:
        np.memmap(folder / f"{name}.bin", dtype, "r+")[at] = value

    return change


def resize(name: str, change: int) -> Any:
    return lambda folder: (folder / f"{name}.bin").write_bytes((folder / f"{name}.bin").read_bytes()[:change])


def no_authors(folder: Path) -> None:
    header = json.loads((folder / "graph.json").read_text())
    header["nodes"]["author"] = 0
    (folder / "graph.json").write_text(json.dumps(header))


CITES = "edges/paper___cites___paper"


@pytest.mark.parametrize(
    ("change", "text", "late"),
    [
        (overwrite(f"{CITES}/indices", 7, 60, "<i4"), "indices.bin: entry 7 is 60, but there are 60 paper nodes", True),
        (overwrite(f"{CITES}/indices", 7, -2, "<i4"), "entry 7 is -2", True),
        (overwrite(f"{CITES}/indptr", 3, -5), "indptr.bin: does not ascend at 2", True),
        (overwrite(f"{CITES}/indptr", 60, 10), "runs from 0 to 10, expected 0 to 380", False),
        (resize(f"{CITES}/indptr", -3), "no multiple of a row of 8", False),
        (resize("features/fos", -96), "has 9 rows, graph.json has 11", False),
        (resize("labels", -4), "labels.bin: has 59 rows, graph.json has 60 rows", False),
        (overwrite("labels", 3, 6, "<i4"), "labels.bin: entry 3 is 6, but there are 6 classes", None),
        (overwrite("splits/train", 1, 0), "train.bin: names a node twice", None), (no_authors, "'author' has no node", False),
        (lambda folder: (folder / "labels.bin").unlink(), "labels.bin: cannot be opened", False),
        (lambda folder: (folder / "graph.json").write_text("{}"), "has no 'nodes'", False),
    ],
)  # fmt: skip
def test_damage_is_named(folder: Path, tmp_path: Path, change: Any, text: str, late: bool | None) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    with pytest.raises(DataError, match=text):
        Graph(copy, "memory")
    if late is None:  # neither opening nor sampling reads it
        return
    with pytest.raises(DataError, match=r"\.bin: has|ascend|graph.json" if late else text):
        sample_neighbors(Graph(copy), np.arange(60), (-1,), np.random.default_rng(0))
