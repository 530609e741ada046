"""Graphs of papers: conversion of IGB-Heterogeneous by MLPerf's rules, simulated communities."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep import igb
from hpcai.data.graph import Graph
from tests.data_prep.prep_contract import check_error, read_json, runner

run = runner(igb)
NODES = {"paper": 400, "author": 150, "institute": 9}
RELATIONS = {"paper__cites__paper": 900, "paper__written_by__author": 800, "author__affiliated_to__institute": 200}


def write_source(root: Path, raw: bool = False) -> dict[str, np.ndarray]:
    """Write a small IGBH, or one of raw files as of the large sizes, and return its arrays."""
    random, arrays = np.random.default_rng(0), dict[str, np.ndarray]()
    for kind, count in NODES.items():
        arrays[f"{kind}/node_feat"] = random.normal(size=(count, 8)).astype(np.float32)
    for name, count in RELATIONS.items():
        ends = [random.integers(0, NODES[kind], count) for kind in name.split("__")[::2]]
        arrays[f"{name}/edge_index"] = np.stack(ends, 1).astype(np.int32)
    arrays["paper__cites__paper/edge_index"][:5] = 7  # self-loops
    arrays["paper/node_label_2K"] = random.integers(0, 2983, 400).astype(np.float32)
    for name, array in arrays.items():
        (path := root / f"processed/{name}.npy").parent.mkdir(parents=True, exist_ok=True)
        array.tofile(path) if raw and not name.endswith("edge_index") else np.save(path, array)
    return arrays


@pytest.mark.parametrize("raw", [False, True])
def test_conversion_equals_a_plain_reference(tmp_path: Path, raw: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arrays = write_source(tmp_path / "in", raw)
    monkeypatch.setattr(igb, "CHUNK", 64)
    assert run("convert", tmp_path / "in", tmp_path / "out", "--width", 8) == 0
    assert "next: " in capsys.readouterr().out
    graph = Graph(tmp_path / "out", "memory")
    assert graph.nodes == NODES and graph.target == "paper" and graph.classes == 2983 and len(graph.relations) == 5
    for name in RELATIONS:
        source, relation, destination = name.split("__")
        ends = arrays[f"{name}/edge_index"].T.astype(int)
        expected = {f"{source}___{relation}___{destination}": ends, f"{destination}___rev_{relation}___{source}": ends[::-1]}
        if source == destination:
            kept = np.concatenate((ends[:, ends[0] != ends[1]], np.tile(np.arange(400), (2, 1))), 1)
            expected = {name.replace("__", "___"): np.concatenate((kept[::-1], kept), 1)}
        for key, (first, last) in expected.items():
            order = np.argsort(last, kind="stable")
            np.testing.assert_array_equal(graph.indices[key], first[order])
            np.testing.assert_array_equal(np.diff(graph.indptr[key]), np.bincount(last, minlength=NODES[graph.relations[key][1]]))
    for kind in NODES:
        np.testing.assert_array_equal(graph.features(kind), arrays[f"{kind}/node_feat"].astype(np.float16))
    np.testing.assert_array_equal(graph.labels, arrays["paper/node_label_2K"].astype(int))
    torch.manual_seed(42)
    order = torch.randperm(400).numpy()
    assert [*map(len, graph.splits.values())] == [240, 2] and np.array_equal(np.concatenate([*graph.splits.values()]), order[:242])


def change(name: str, value: float, dtype: Any = None) -> Any:
    def damage(root: Path) -> None:
        array = np.load(path := root / f"processed/{name}.npy")
        array[3] = value
        np.save(path, array if dtype is None else array.astype(dtype))

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (change("paper__written_by__author/edge_index", 150), "destinations 0 to 150, but there are 150"),
        (change("author/node_feat", 1e6), "author: row 3 of features is not finite as float16"),
        (change("paper__cites__paper/edge_index", 0, float), "expected integers [E, 2]"),
        (lambda root: np.save(root / "processed/institute/node_feat.npy", np.zeros((9, 7))), "features (9, 7), expected [N, 8]"),
        (lambda root: (root / "processed/paper/node_feat.npy").write_bytes(b"x" * 9), "cannot be read as rows of 1024"),
        (lambda root: (root / "processed/paper__cites__paper/edge_index.npy").unlink(), "holds no paper__cites__paper/edge_index"),
    ],
)  # fmt: skip
def test_bad_sources_are_refused(tmp_path: Path, capsys: Any, damage: Any, text: str) -> None:
    write_source(tmp_path / "in")
    damage(tmp_path / "in")
    assert run("convert", tmp_path / "in", tmp_path / "out") == 2 and not (tmp_path / "out/graph.json").exists()
    check_error(capsys, text)


def test_a_stopped_conversion_writes_missing_files_only(tmp_path: Path, capsys: Any) -> None:
    write_source(tmp_path / "in")
    out = tmp_path / "out"
    assert run("convert", tmp_path / "in", out) == 0
    content = {path: path.read_bytes() for path in out.rglob("*.bin")}
    kept, lost = out / "features/paper.bin", out / "edges/paper___cites___paper/indptr.bin"
    changed = kept.stat().st_mtime_ns
    lost.unlink()
    (out / "graph.json").unlink()
    assert run("convert", tmp_path / "in", out) == 0 and kept.stat().st_mtime_ns == changed
    assert {path: path.read_bytes() for path in out.rglob("*.bin")} == content
    assert run("convert", tmp_path / "in", out, "--dtype", "float32") == 2
    check_error(capsys, "was made with dtype float16 (now float32); choose a new folder")


def nearest_centre(features: np.ndarray, labels: np.ndarray, train: np.ndarray, held: np.ndarray) -> float:
    centres = np.stack([features[train][labels[train] == k].mean(0) for k in range(labels.max() + 1)])
    return float((((features[held, None] - centres) ** 2).sum(2).argmin(1) == labels[held]).mean())


def test_communities_are_in_the_graph_more_than_in_the_features(tmp_path: Path, capsys: Any) -> None:
    assert run("simulate", tmp_path / "out", "--papers", 4000) == 0
    output = capsys.readouterr().out
    graph, truth = Graph(tmp_path / "out"), np.load(tmp_path / "out/truth.npz")
    assert float(output.split("homophily ")[1][:4]) > 0.7
    labels, (train, held) = np.array(graph.labels), graph.splits.values()
    assert np.array_equal(labels[labels >= 0], truth["community"][labels >= 0]) and 0.15 < (labels < 0).mean() < 0.25
    assert truth["year"][train].max() < truth["year"][held].min(), "validation has later years"
    assert ((truth["share"] > 0) & (truth["second"] == truth["community"])).sum() == 0 < (truth["share"] > 0).mean() < 0.3
    features, cites = np.asarray(graph.features("paper"), float), "paper___cites___paper"
    means = np.add.reduceat(features[graph.indices[cites]], graph.indptr[cites][:-1]) / np.diff(graph.indptr[cites])[:, None]
    alone, cited = (nearest_centre(x, labels, train, held) for x in (features, means))
    assert 1.5 / 12 < alone < cited - 0.1, f"{alone:.2f} by features, {cited:.2f} by those of cited papers"
    assert run("check", tmp_path / "out") == 0 and capsys.readouterr().out == output[: output.index("next: ")]


def test_classes_of_crystals_follow_from_elements_and_prototype(tmp_path: Path, capsys: Any) -> None:
    assert run("simulate", tmp_path / "out", "--kind", "materials", "--papers", 500) == 0
    graph = Graph(tmp_path / "out")
    degrees = [np.diff(graph.indptr[name]) for name in ("element___rev_has___crystal", "prototype___rev_is___crystal")]
    assert graph.target == "crystal" and len(graph.header["names"]) == 9 and [{*x.tolist()} for x in degrees] == [{2}, {1}]
    prototype, bonds = graph.indices["prototype___rev_is___crystal"], np.load(tmp_path / "out/truth.npz")["difference"]
    table = read_json(Path(igb.__file__).with_suffix(".json"))["prototypes"].values()
    expected = 3 * np.digitize(bonds, (0.7, 1.7)) + np.digitize([number for number, _ in table], (5, 7))[prototype]
    np.testing.assert_array_equal(expected[graph.labels >= 0], graph.labels[graph.labels >= 0])


def test_too_few_papers_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert run("simulate", tmp_path / "out", "--papers", 1) == 2 and not (tmp_path / "out").exists()
    check_error(capsys, "--papers 1: a split has none with a label")
