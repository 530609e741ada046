"""Files of weights, images of a user, annotations and background scores of RetinaNet."""

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpcai.errors import CheckpointError, DataError
from hpcai.models import retinanet
from hpcai.models.retinanet import RetinaNet, RetinaNetConfig

TINY = RetinaNetConfig(
    layers=(1, 1, 1, 1), base_width=4, groups=2, width_per_group=32, fpn_channels=8, num_classes=3, size=(64, 96), detections=9,
    score_threshold=0.005,
)  # fmt: skip
SIZES = "layers", "base_width", "groups", "width_per_group", "fpn_channels", "num_classes", "p6", "norm"
IMAGE = np.random.default_rng(0).integers(0, 256, (70, 50, 3), np.uint8)


@pytest.mark.parametrize("change", [{}, {"p6": "c5", "norm": "batch"}], ids=str)
def test_weights_in_the_formats_of_other_codes(change: dict[str, Any], tmp_path: Path) -> None:
    model = RetinaNet(TINY.model_copy(update=change)).eval()
    x = torch.rand(1, 3, 64, 32)
    for form in ("hpcai", "torchvision", "mlperf"):
        model.save(path := tmp_path / form, form=form)
        loaded = RetinaNet.load(path)
        assert {name: getattr(loaded.cfg, name) for name in SIZES} == {name: getattr(model.cfg, name) for name in SIZES}
        for level, expected in zip(loaded(x), model(x)):
            assert all(map(torch.equal, level, expected))
    if change:  # the batch norms of a file become frozen ones
        frozen = RetinaNet.load(tmp_path / "torchvision", TINY.model_copy(update={"p6": "c5"}))
        torch.testing.assert_close(frozen(x)[0][0], model(x)[0][0])
    names = torch.load(tmp_path / "mlperf")
    assert "head.classification_head.conv.6.bias" in names and "backbone.fpn.inner_blocks.0.weight" in names
    with pytest.raises(CheckpointError, match="the weights have num_classes 3, the settings 4"):
        RetinaNet.load(tmp_path / "torchvision", model.cfg.model_copy(update={"num_classes": 4}))


def test_group_norms_and_the_weights_of_a_classifier(tmp_path: Path) -> None:
    model = RetinaNet(TINY.model_copy(update={"fpn_channels": 32, "head_norm_groups": 32, "trainable_layers": 5}))
    model.save(tmp_path / "v2.pth", form="torchvision")
    assert RetinaNet.load(tmp_path / "v2.pth").cfg.head_norm_groups == 32
    with pytest.raises(CheckpointError, match="no group norms"):
        model.save(tmp_path / "no.pth", form="mlperf")
    state = {name: torch.full_like(value, 0.5) for name, value in model.backbone["body"].state_dict().items()}
    torch.save(state | {"fc.weight": torch.ones(2), "bn1.num_batches_tracked": torch.tensor(0)}, tmp_path / "classifier.pth")
    body = retinanet.load_backbone(model, tmp_path / "classifier.pth").backbone["body"]
    assert all(value.eq(0.5).all() for value in body.state_dict().values()) and model.training
    assert not hasattr(body.conv1.weight, "origin")


def test_objects_of_images_of_any_size() -> None:
    torch.manual_seed(0)
    for cfg in (TINY, TINY.model_copy(update={"resize": "shorter", "shorter": 40, "longer": 60, "classes": ("a", "b", "c")})):
        results = (model := RetinaNet(cfg)).detect([IMAGE, IMAGE[:30], Image.fromarray(IMAGE)])
        for objects, (height, width) in zip(results, ((70, 50), (30, 50), (70, 50))):
            box = objects["boxes"]
            assert len(box) == len(objects["classes"]) == 9 and (box >= 0).all() and (box <= [width, height] * 2).all()
            assert set(objects["classes"]) <= set(cfg.classes or "012") and (np.diff(objects["scores"]) <= 0).all()
        np.testing.assert_allclose(results[2]["boxes"], results[0]["boxes"], atol=1e-4)
        x, within, _ = model.resized([IMAGE, IMAGE[:30]], torch.float32)
        assert within.tolist() == ([[64, 96]] * 2 if cfg is TINY else [[56, 40], [36, 60]])
        assert x.shape[2:] == (64, 96) if cfg is TINY else (64, 64) and x[0, :, 56:].eq(0).all()
    padded = torch.full((1, 64, 64, 3), 7, dtype=torch.uint8)
    assert model.normalised(padded, within[:1])[0].ne(0).any(0).nonzero().amax(0).tolist() == [55, 39]
    with pytest.raises(DataError, match=r"image 1: float64 \[70, 50, 3\], expected uint8"):
        model.detect([IMAGE, IMAGE / 255])


def annotations(*boxes: list[float], **fields: Any) -> dict[str, Any]:
    known = {"image_id": 7, "category_id": 5, "iscrowd": 0}
    objects = [{"id": i, "bbox": box, "area": box[2] * box[3], **known, **fields} for i, box in enumerate(boxes, 1)]
    image, categories = {"id": 7, "height": 40, "width": 60}, [{"id": 5, "name": "b"}, {"id": 2, "name": "a"}]
    return {"images": [{**image, "id": 3}, image], "categories": categories, "annotations": objects}


def test_annotations_are_clipped_skipped_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    bad = [70.0, 0, 9, 9], [3.0, 3, 0, 9], [9.0, 9, -4, 9]
    path.write_text(json.dumps(annotations([1, 2, 3, 4], [50, -5, 20, 20], *bad)))
    known = retinanet.read_annotations(path)
    assert known.categories == {2: "a", 5: "b"} and dict(known.counts) == {"used": 2, "clipped": 1, "crowd": 0, "bad": 3}
    assert known.boxes[1].tolist() == [[1, 2, 4, 6], [50, 0, 60, 15]] and known.labels[1].tolist() == [1, 1]
    assert known.boxes[0].shape == (0, 4) and known.boxes[0].dtype == np.float32
    with pytest.raises(DataError, match=r"annotation 3: bbox \[70.0, 0, 9, 9\] has no area in its image, 60 x 40"):
        retinanet.read_annotations(path, bad="error")
    wrong: Any = {"image_id is 8, expected one of the 2 ids": {"image_id": 8}, "not enough values": {"bbox": [1, 2, 3]},
                  "finite": {"bbox": [1, 2, float("nan"), 3]}, "unhashable": {"category_id": []}}  # fmt: skip
    for message, fields in wrong.items():
        path.write_text(json.dumps(annotations([1, 2, 3, 4], **fields)))
        with pytest.raises(DataError, match=message):
            retinanet.read_annotations(path)


def test_scores_in_the_background(tmp_path: Path) -> None:
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is missing: pip install 'hpcai-suite[detection]'")
    truth, output = tmp_path / "a.json", tmp_path / "results.json"
    truth.write_text(json.dumps(annotations([1, 2, 30, 20], [40, 5, 12, 20])))
    detected = np.full((1, 3, 6), -1.0)
    detected[0, :2] = [1, 2, 31, 22, 0.9, 1], [40, 5, 52, 25, 0.8, 1]
    rows = retinanet.results(np.array([7]), detected, (2, 5))
    retinanet.write_results(output, rows)
    assert json.loads(output.read_text())[1] == {"image_id": 7, "category_id": 5, "bbox": [40, 5, 12, 20], "score": 0.8}
    with closing(retinanet.BackgroundScoring(truth, cores=[min(os.sched_getaffinity(0))])) as scoring:
        scoring.submit("first", rows)
        scoring.submit("second", rows[1:])
        polled = scoring.poll()  # at once
        polled += scoring.poll(wait=True)
        assert [tag for tag, _ in polled] == ["first", "second"] and scoring.poll() == []
        assert polled[0][1]["ap"] == pytest.approx(1) and polled[1][1]["ap"] == pytest.approx(0.5, abs=0.01)
        scoring.submit("third", rows)
        scoring.submit("fourth", rows + [1, 0, 0, 0, 0, 0, 0])
        assert [tag for tag, _ in scoring.poll(wait=True)] == ["third"]
        with pytest.raises(DataError, match="detections of image 8"):
            scoring.poll(wait=True)
