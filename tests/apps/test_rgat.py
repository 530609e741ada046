"""The R-GAT app from its command line: on one process, on ranks, resumed, with each way to read features, and with bad input."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from apps.rgat import data as app_data
from apps.rgat import picture
from hpcai import config
from hpcai.cli.report.theme import LIGHT
from hpcai.data.graph import Graph
from hpcai.models.rgat import RGAT, Features
from tests.apps.app_contract import AppContract
from tests.apps.small_apps import RGAT as APP


def damage_data(data: Path, kind: str) -> None:
    indices = data / "edges/paper___cites___paper/indices.bin"
    if kind == "size":
        indices.write_bytes(indices.read_bytes()[:-4])
    elif kind == "edge":
        np.memmap(indices, "<i4", "r+")[:] = 999
    elif kind == "header":
        (data / "graph.json").write_text("{")


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert cfg.train.better == "higher" and cfg.train.metric == "accuracy"
        if name != "small":  # the published settings of the benchmark
            assert cfg.step.optimizer == "adam" and cfg.train.target == 0.72 and cfg.data.fan_out == (15, 10, 5)
            assert abs(cfg.data.epoch / 94_605_581 - 0.05) < 0.0002 and cfg.data.epoch % cfg.data.batch == 0


def test_predictions_cover_the_first_validation_papers_once(data: Path) -> None:
    run, graph = APP.cached_run(data), Graph(data)
    content = np.load(run / "papers.npz", allow_pickle=False)
    expected = graph.splits["validation"][:29]
    assert content["paper"].tolist() == expected.tolist() and content["true"].tolist() == graph.labels[expected].tolist()
    model = RGAT.load(run / "model.safetensors")
    assert content["logits"].shape == (len(expected), 3) and content["classes"].tolist() == list(model.cfg.names)
    assert set(model.cfg.relation_names) == set(graph.relations) and model.cfg.inputs == 8


def test_epochs_shorter_than_a_pass_cover_all_papers(data: Path) -> None:
    cfg = config.load(APP.settings, APP.small_config, APP.overrides(data, data)[1:])
    graph = Graph(data)
    source = app_data.PaperGroups(graph, Features(graph), "train", cfg)
    sampler = app_data.Consecutive(12)
    numbers = [int(n) for epoch in range(2 * len(source)) for n in sampler.order(epoch)]
    assert numbers == [*range(24 * len(source))]
    first, second = ([source.sample(n, 7).nodes["paper"][0] for n in range(k * len(source), (k + 1) * len(source))] for k in (0, 1))
    assert len(np.unique(np.concatenate(first))) == 2 * len(source) and not np.array_equal(first, second)
    again = pickle.loads(pickle.dumps(source))  # noqa: S301
    assert (again.sample(5, 0).nodes["paper"][0] == source.sample(5, 0).nodes["paper"][0]).all()


def test_the_picture_finds_planted_crossings(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    community, year = random.integers(0, 4, 1000), np.sort(random.integers(0, 6, 1000))
    second, share = community ^ 1, np.where(random.random(1000) < 0.3, 0.4, 0)
    logits = 6 * np.eye(4)[community] + (share > 0)[:, None] * 5 * np.eye(4)[second] + 0.1 * random.standard_normal((1000, 4))
    held = np.flatnonzero(year > 3)
    truth: Any = {"truth_year": year, "truth_community": community, "truth_second": second, "truth_share": share}
    kept: Any = {"classes": list("abcd"), "paper": held, "true": np.where(held % 9, community[held], -1), "logits": logits[held]}
    np.savez(tmp_path / picture.FILE, **kept, **truth)
    results = picture.read(tmp_path / picture.FILE)
    assert len(results.true) == (held % 9 > 0).sum() and results.correlation() > 0.99
    assert "of the 20% least certain ones 100% lie between two communities" in picture.finding(results).sentence
    assert len(picture.draw(results, LIGHT)) == 4 and len(picture.table(results).rows) == 4
    np.savez(tmp_path / picture.FILE, **kept)
    plain = picture.read(tmp_path / picture.FILE)
    assert len(picture.draw(plain, LIGHT)) == 1 and "crossing" not in picture.caption(plain) + picture.finding(plain).sentence
