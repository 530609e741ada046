"""The RetinaNet app from its command line: on one process, on ranks, resumed, with each reader, and with bad input."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.retinanet import picture
from apps.retinanet.data import FIELDS, Images
from apps.retinanet.settings import Config
from hpcai.cli.report.theme import LIGHT
from hpcai.data import Rows
from hpcai.models.retinanet import RetinaNet, RetinaNetConfig, detect, evaluate
from hpcai.settings import ScheduleConfig
from hpcai.train.schedule import make_lr_schedule
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import blank_first_image
from tests.apps.small_apps import RETINANET as APP
from tests.reference_data import load_json

pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is missing: pip install 'hpcai-suite[detection]'")


def damage_data(data: Path, kind: str) -> None:
    if kind == "truth":
        (data / "validation/annotations.json").unlink()
    elif kind == "image":
        blank_first_image(data)


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert cfg.train.better == "higher"
        if name != "small":  # the published settings of the benchmark
            assert cfg.model == RetinaNetConfig() and cfg.step.optimizer == "adam" and cfg.train.target == 0.34


def test_the_learning_rate_is_that_of_mlperf() -> None:
    for case in load_json("retinanet/lr_schedule"):
        start = case["warmup_factor"] * case["base_lr"]
        schedule = ScheduleConfig(unit="steps", warmup=case["warmup_iterations"], start=start)
        lr_at = make_lr_schedule(schedule, case["base_lr"], 4572, 99999)
        assert [lr_at(step) for step in case["steps"]] == pytest.approx(case["lr"], rel=1e-9)


def test_boxes_move_with_their_pixels(data: Path) -> None:
    """Each box of a sample encloses the same pixels as that of the file, in all 8 symmetries, and crowds are left out."""
    rows = Rows(data / "train", FIELDS)
    samples = Images(rows, Config.model_validate({"model": {"size": (64, 64)}, "data": {"rotate90": True}}), True)
    samples = pickle.loads(pickle.dumps(samples))  # as with data.processes  # noqa: S301
    mirrors = set()
    for epoch in range(24):
        sample, values = samples.sample(0, epoch), rows.read(0)
        mirrors.add(mirror := samples.mirror(0, epoch))
        plain = Images(rows, samples.cfg, False).sample(0, 0)
        for box, own, label in zip(plain.boxes.astype(int), sample.boxes.astype(int), values["labels"]):
            pixels = plain.image[box[1] : box[3], box[0] : box[2]][:: -1 if mirror[1] else 1, :: -1 if mirror[0] else 1]
            pixels = pixels.swapaxes(0, 1) if mirror[2] else pixels
            np.testing.assert_array_equal(sample.image[own[1] : own[3], own[0] : own[2]], pixels, err_msg=str(mirror))
            assert label in sample.labels
    assert len(mirrors) == 8 and len(plain.labels) > 1
    wide = Images(rows, Config.model_validate({"model": {"size": (32, 128)}}), False)
    np.testing.assert_allclose(wide.sample(0, 0).boxes, plain.boxes * [2, 0.5, 2, 0.5])
    values = {**rows.read(0), "crowd": np.arange(len(plain.labels)) == 0}
    np.testing.assert_array_equal(wide.transform(values, 0, 0).labels, plain.labels[1:])
    batch = wide.collate([wide.sample(n, 0) for n in range(3)])
    counts = [int(rows.read(n)["objects"]) for n in range(3)]
    assert batch.boxes.shape == (3, 8, 4) and (batch.labels >= 0).sum(1).tolist() == counts
    padded = Config.model_validate({"model": {"resize": "shorter", "shorter": 40, "longer": 90}, "data": {"objects": 30}})
    batch = (samples := Images(rows, padded, False)).collate([samples.sample(n, 0) for n in range(2)])
    assert batch.image.shape == (2, 64, 64, 3) and batch.within.tolist() == [[40, 40]] * 2 and not batch.image[:, 40:].any()
    assert batch.boxes.shape == (2, 30, 4) and batch.original.tolist() == [[64, 64]] * 2


def test_the_saved_network_finds_what_the_run_found(data: Path) -> None:
    run = APP.cached_run(data)
    content = np.load(run / "objects.npz", allow_pickle=False)
    model = RetinaNet.load(run / "model.safetensors")
    assert content["image"].shape == (4, 64, 64, 3) and content["classes"].tolist() == list(model.cfg.classes)
    objects = detect(model, [content["image"][0], Rows(data / "validation", FIELDS).read(1)["image"].tobytes()])
    assert len(content["detected"]) > 20 and len(content["true"])
    for number, detected in zip(content["id"], objects):
        own = content["detected"][content["detected"][:, 0] == number]
        np.testing.assert_allclose(own[:, 1:5], detected["boxes"], atol=1e-2)
        np.testing.assert_allclose(own[:, 5], detected["scores"], atol=1e-5)


def test_the_picture_has_the_scores_of_coco(tmp_path: Path) -> None:
    case = load_json("retinanet/coco")
    truth, ids = case["ground_truth"], [image["id"] for image in case["ground_truth"]["images"]]
    truth["annotations"] = [each for each in truth["annotations"] if not each["iscrowd"]]
    rows = np.array([[d["image_id"], *d["bbox"], d["score"], d["category_id"]] for d in case["detections"]])
    true = np.array([[a["image_id"], *a["bbox"], a["category_id"] - 1] for a in truth["annotations"]])
    detected = rows - [0, 0, 0, 0, 0, 0, 1]
    for values in (true, detected):
        values[:, 3:5] += values[:, 1:3]
    common = {"classes": [*"abcdef"], "image": np.zeros((len(ids), 8, 8, 3), np.uint8), "id": ids}
    np.savez(tmp_path / picture.FILE, **common, true=true, detected=detected)
    results, scores = picture.read(tmp_path / picture.FILE), evaluate(truth, rows)["per_category"]
    expected = {key - 1: values["ap50"] for key, values in scores.items() if values["ap50"] >= 0}
    assert {k: curve.mean() for k, curve in results.curves.items()} == pytest.approx(expected, abs=1e-3)
    assert len(picture.draw(results, LIGHT)) == 3 and len(picture.table(results).rows) == len(expected)
    assert 0 < results.chosen < len(detected) and f"{np.mean([*expected.values()]):.2g}" in picture.finding(results).sentence
    np.savez(tmp_path / picture.FILE, **common, true=true, detected=np.zeros((0, 7)))
    results = picture.read(tmp_path / picture.FILE)
    assert picture.finding(results).sentence.startswith("0 % of the objects") and len(picture.draw(results, LIGHT)) == 3
