"""Files of weights, images of a user and scores of RetinaNet."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpcai.dist.mesh import Axis
from hpcai.errors import CheckpointError, DataError, MissingExtraError
from hpcai.models import retinanet
from hpcai.models.retinanet import RetinaNet, RetinaNetConfig, images, scoring
from hpcai.train.metrics import MetricSums

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
        Image.fromarray(IMAGE).save(file := io.BytesIO(), "PNG")
        results = retinanet.detect(model := RetinaNet(cfg), [IMAGE, IMAGE[:30], file.getvalue()])
        for objects, (height, width) in zip(results, ((70, 50), (30, 50), (70, 50))):
            box = objects["boxes"]
            assert len(box) == len(objects["classes"]) == 9 and (box >= 0).all() and (box <= [width, height] * 2).all()
            assert set(objects["classes"]) <= set(cfg.classes or "012") and (np.diff(objects["scores"]) <= 0).all()
        np.testing.assert_allclose(results[2]["boxes"], results[0]["boxes"], atol=1e-4)
        pixels = [images.resize(Image.fromarray(image), cfg) for image in (IMAGE, IMAGE[:30])]
        sizes = [image.shape[:2] for image in pixels]
        assert sizes == ([(64, 96)] * 2 if cfg is TINY else [(56, 40), (36, 60)])
        x = images.pad(pixels)
        assert x.shape[1:3] == (64, 96) if cfg is TINY else (64, 64) and not x[0, 56:].any()
    padded = torch.full((1, 64, 64, 3), 7, dtype=torch.uint8)
    assert model.normalised(padded, torch.tensor(sizes[:1]))[0].ne(0).any(0).nonzero().amax(0).tolist() == [55, 39]
    with pytest.raises(DataError, match=r"image 1: float64 \[70, 50, 3\], expected uint8"):
        retinanet.detect(model, [IMAGE, IMAGE / 255])


def write_truth(path: Path) -> Path:
    boxes = [[1, 2, 30, 20], [40, 5, 12, 20]]
    objects = [{"id": i, "bbox": box, "area": 240, "image_id": 7, "category_id": 5, "iscrowd": 0} for i, box in enumerate(boxes, 1)]
    shape = {"height": 40, "width": 60}
    content = {"images": [{"id": 3, **shape}, {"id": 7, **shape}], "annotations": objects}
    path.write_text(json.dumps({**content, "categories": [{"id": 5, "name": "big b"}, {"id": 2, "name": "a"}]}))
    return path


def test_scores_of_all_batches_are_computed_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is missing: pip install 'hpcai-suite[detection]'")
    rows = torch.full((2, 3, 6), -1.0)
    rows[1, :2] = torch.tensor([[1, 2, 31, 22, 0.9, 1], [40, 5, 52, 25, 0.8, 1]])
    monkeypatch.setattr(scoring, "detections", lambda model, batch: {"detections": rows[batch.id // 4].double()})
    with retinanet.Scoring(write_truth(tmp_path / "a.json"), cores=[min(os.sched_getaffinity(0))]) as score:
        for ids, expected in (([3, 7], 1.0), ([3, 7, 7], 0.0)):
            sums = MetricSums()
            for number in ids:
                sums.add(score(None, SimpleNamespace(id=torch.tensor([number]))), 1)
            values = sums.reduce(Axis("alone"), torch.device("cpu"))
            assert (values["ap"], values["ap50_big_b"], values["ap50_a"]) == pytest.approx((expected, expected, -1))
        sums.add(score(None, SimpleNamespace(id=torch.tensor([5]))), 1)
        with pytest.raises(DataError, match="lacks an image of the validation split"):
            sums.reduce(Axis("alone"), torch.device("cpu"))
    for text, message in (("{}", "categories"), (None, "No such file")):
        (path := tmp_path / "b.json").write_text(text) if text else path.unlink()
        with pytest.raises(DataError, match=message):
            retinanet.Scoring(path)
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(MissingExtraError, match=r"hpcai-suite\[detection\]"):
        retinanet.Scoring(tmp_path / "a.json")
