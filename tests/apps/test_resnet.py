"""The ResNet app from its command line: on one process, on ranks, resumed, with each reader, and with bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.resnet import picture
from hpcai.cli.report.theme import LIGHT
from hpcai.data import Rows
from hpcai.data.images import FIELDS
from hpcai.errors import DataError
from hpcai.models.resnet import ResNet, classify
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import blank_first_image
from tests.apps.small_apps import RESNET as APP


def damage_data(data: Path, kind: str) -> None:
    if kind == "names":
        (index := data / "train/index.json").write_text(index.read_text().replace('"classes"', '"kinds"'))
    elif kind == "image":
        blank_first_image(data)


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert cfg.train.better == "higher"
        if name != "small":  # the published settings of the benchmark
            assert cfg.step.optimizer == "lars" and cfg.train.target == 0.759 and cfg.data.scale == (0.05, 1.0)
            assert cfg.step.schedule.floor * cfg.step.lr == pytest.approx(1e-4)


def test_classes_are_those_of_the_data_and_of_the_saved_weights(data: Path) -> None:
    run = APP.cached_run(data)
    content = np.load(run / "classes.npz", allow_pickle=False)
    model = ResNet.load(run / "model.safetensors")
    rows = Rows(data / "validation", FIELDS)
    assert content["image"].shape == (4, 32, 32, 3) and content["classes"].tolist() == list(model.cfg.classes)
    assert len(model.cfg.classes) > 5 and content["true"].tolist() == [int(rows.read(n)["label"]) for n in range(4)]
    by_name = classify(model, [rows.read(0)["image"].tobytes(), content["image"][1]])
    for probabilities, logits in zip(by_name, content["logits"]):
        values = np.exp(logits - logits.max())
        expected = dict(zip(content["classes"].tolist(), values / values.sum()))
        assert list(probabilities) == sorted(expected, key=lambda name: -expected[name])
        assert probabilities == pytest.approx(expected, rel=1e-3)
    with pytest.raises(DataError, match=r"image 0: float64 \[4, 4\], expected uint8"):
        classify(model, [np.zeros((4, 4))])
    with pytest.raises(DataError, match="image 0: cannot be read as an image"):
        classify(model, [b"no image"])


def test_the_picture_of_a_network_that_is_too_sure(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    logits = 2 * random.standard_normal((800, 3))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    true = np.array([random.choice(3, p=p) for p in chances])
    images = random.integers(0, 256, (800, 8, 8, 3), np.uint8)
    np.savez(tmp_path / picture.FILE, classes=["a", "b", "c"], image=images, true=true, logits=3 * logits)
    results = picture.read(tmp_path / picture.FILE)
    before, after = results.errors()
    assert results.temperature == pytest.approx(3, rel=0.15) and 2 * after < before
    assert f"{100 * results.accuracy():.0f} % of unseen images" in picture.finding(results).sentence
    assert len(picture.draw(results, LIGHT)) == 3
    table = picture.table(results)
    recalls = [float(row[2]) for row in table.rows]
    assert recalls == sorted(recalls) and recalls[0] == pytest.approx(
        min((results.predicted[true == k] == k).mean() for k in range(3)), abs=1e-3
    )
