"""RetinaNet agrees with stored results of MLPerf's reference and pycocotools (tests/data/retinanet)."""

import gzip
import json
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    images = [255 * stored[f"image{i}"][None] for i in range(3)]
    x = torch.cat([F.interpolate(model.normalised(image.permute(0, 2, 3, 1)), model.cfg.size, mode="bilinear") for image in images])
    within, original = (torch.tensor(s) for s in ([model.cfg.size] * 3, [image.shape[2:] for image in images]))
    objects, labels = torch.zeros(3, 6, 4, dtype=torch.float64), torch.full((3, 6), -1)
    for i in range(3):
        ratio = (within[i].float() / original[i].float()).double().flip(0).repeat(2)
        count = len(stored[f"labels{i}"])
        objects[i, :count], labels[i, :count] = stored[f"boxes{i}"] * ratio, stored[f"labels{i}"].long()
    return Batch(x.permute(0, 2, 3, 1) / model.scale + model.mean, objects, labels, within, original, torch.arange(3))


def test_anchors() -> None:
    make = RetinaNet(RetinaNetConfig(layers=(1, 1, 1, 1), base_width=4, width_per_group=64)).anchors
    stored, cases = arrays("anchors"), load_json("retinanet/anchors")["cases"]
    for case in cases:
        size = case["height"], case["width"]
        levels = make(size)
        for level, expected in zip(levels, case["levels"], strict=True):
            assert list(level.shape[:2]) == expected["grid"]
            rows = level.view(-1, 4)
            assert [rows[i].tolist() for i in (0, 1, -1)] == [expected[name] for name in ("first", "second", "last")]
            assert rows.double().sum(0).tolist() == expected["sum"] and rows.double().abs().sum().item() == expected["abs_sum"]
        every = torch.cat([level.view(-1, 4) for level in levels])
        assert len(every) == case["total"]
        if (name := "{}x{}".format(*size)) in stored:
            np.testing.assert_array_equal(every.numpy(), stored[name])
    assert {(case["height"], case["total"]) for case in cases} >= {(800, 120_087)} and len(stored) == 2


def test_coding_and_overlap_of_boxes() -> None:
    stored = tensors("boxes")
    reference, anchors, codes = (stored[name] for name in ("reference", "anchors", "codes"))
    close = {"rtol": 1e-11, "atol": 1e-11}
    for name, weights in (("", None), ("_w10_5", torch.tensor([10.0, 10, 5, 5]).double())):
        torch.testing.assert_close(boxes.encode(reference, anchors, weights), stored[f"encode{name}_f64"], **close)
        torch.testing.assert_close(boxes.decode(codes, anchors, weights), stored[f"decode{name}_f64"], **close)
    torch.testing.assert_close(boxes.iou(reference, anchors), stored["iou_f64"], **close)
    clipped = boxes.clip_boxes(stored["decode_f64"], torch.tensor([[100, 150]]))
    torch.testing.assert_close(clipped, stored["clip_to_image_100x150"], **close)


def test_matching() -> None:
    stored = tensors("matcher")
    padding = torch.full((3, stored["iou"].shape[1]), 9.0).double()  # larger overlaps, which must not count
    for low_quality in (True, False):
        for name, overlap in (("", boxes.iou(stored["gt"], stored["anchors"])), ("hand_", stored["hand_iou"])):
            expected = stored[f"{name}matches_low_quality_{low_quality}"].long()
            assert boxes.match(overlap, None, low_quality=low_quality).equal(expected)
            padded = torch.cat((overlap, padding[:, : overlap.shape[1]]))
            assert boxes.match(padded, torch.arange(len(padded)) < len(overlap), low_quality=low_quality).equal(expected)
    assert boxes.match(padding, torch.zeros(3, dtype=torch.bool)).eq(-1).all() and boxes.match(padding[:0], None).eq(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_non_maximum_suppression(dtype: torch.dtype) -> None:
    stored = load_tensors("retinanet/nms", dtype)
    given, scores, labels, threshold = stored["boxes"], stored["scores"], stored["labels"], stored["threshold"].item()
    some = scores.masked_fill(torch.arange(len(scores)) > 99, -torch.inf)  # of a second image
    for name, own in (("keep", None), ("keep_batched", labels.expand(2, -1))):
        expected = stored[name].long()
        kept, others = boxes.nms(given.expand(2, -1, -1), torch.stack((scores, some)), own, threshold, 400)
        assert kept[: len(expected)].equal(expected) and kept[len(expected) :].eq(-1).all()
        first = boxes.nms(given[None, :100], scores[None, :100], None if own is None else own[:1, :100], threshold, 20)[0]
        assert first.equal(others[:20]) and others[others >= 0].max() < 100
    edge = boxes.nms(stored["edge_boxes"][None], stored["edge_scores"][None], None, threshold, 3)[0]
    assert edge.equal(stored["edge_keep"].long())


@pytest.mark.parametrize("name", load_json("retinanet/focal"))
def test_focal_loss(name: str) -> None:
    stored, case = tensors("focal"), load_json("retinanet/focal")[name]
    logits, labels = stored["logits"][..., None].requires_grad_(), torch.where(stored["targets"] > 0, 0, -1)
    loss = retinanet.focal_loss(logits, labels, case["alpha"], case["gamma"])
    loss.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(loss, stored[f"{name}/loss_f64"], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(logits.grad[..., 0], stored[f"{name}/grad_f64"], rtol=1e-11, atol=1e-13)
    single = retinanet.focal_loss(logits.detach().float(), labels, case["alpha"], case["gamma"])
    torch.testing.assert_close(single.double(), stored[f"{name}/loss_f64"], rtol=1e-6, atol=1e-6)


def test_losses_of_known_outputs() -> None:
    stored = tensors("loss")
    logits, codes = stored["cls_logits"].requires_grad_(), stored["bbox_regression"].requires_grad_()
    padded, labels = torch.zeros(2, 4, 4).double(), torch.full((2, 4), -1)
    padded[0, :3], labels[0, :3] = stored["boxes"], stored["labels"].long()
    classes, weight, target = objective.targets(stored["anchors"], padded, labels, stored["matched"].long())
    classification = (retinanet.focal_loss(logits, classes) * weight).sum()
    regression = ((codes - target).abs().sum(-1) * weight * (classes >= 0)).sum()
    assert classification.item() == pytest.approx(stored["classification"].item(), rel=1e-11)
    assert regression.item() == pytest.approx(stored["bbox_loss"].item(), rel=1e-11)
    (classification + regression).backward()
    for x, name in ((logits, "grad_cls_logits"), (codes, "grad_bbox_regression")):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, stored[name], rtol=1e-11, atol=1e-13)


def test_network_losses_and_gradients() -> None:
    model, stored, batch, case = load_model(), arrays("network"), make_batch(), load_json("retinanet/network")
    x = model.normalised(batch.image)
    expected = {name: value for name, value in stored.items() if "." in name}
    check_subsample(x, expected, "transformed_f64", 1e-11)
    with torch.no_grad():
        features, levels = model.backbone["fpn"](model.backbone["body"].features(x)[1:]), model(x)
    for own, known in zip(features, case["features"].values(), strict=True):
        assert [*own.shape] == known["shape"]
        assert (own.sum().item(), own.abs().sum().item()) == pytest.approx((known["sum"], known["abs_sum"]), rel=1e-9)
    for place, name in enumerate(("cls_logits_f64", "bbox_regression_f64")):
        check_subsample(torch.cat([level[place].flatten(1, 3) for level in levels], 1), expected, name, 1e-9)
    classes, weight, _ = objective.assign(model, batch)
    matched = torch.stack([torch.from_numpy(stored[f"matched{i}"]) for i in range(3)])
    assert (classes >= 0).equal(matched >= 0) and (weight == 0).equal(matched == -2)
    assert (classes >= 0).sum(1).tolist() == case["foreground"] and (weight == 0).sum(1).tolist() == case["ignored"]
    model.zero_grad()
    values = retinanet.loss(model, batch)
    for name in ("classification", "bbox_regression"):
        assert values[name].item() == pytest.approx(case[name], abs=1e-9)
    values["loss"].backward()
    gradients = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
    own = {n: value.item() for n, value in in_form(gradients, model.cfg, "mlperf").items()}
    assert own == pytest.approx(case["grad_l2"], rel=1e-8)


def test_detections() -> None:
    model, stored, batch = load_model(), tensors("network"), make_batch()
    for i, rows in enumerate(retinanet.detections(model, batch)["detections"]):
        torch.testing.assert_close(rows[:, :4], stored[f"det_boxes{i}_f64"], rtol=0, atol=1e-5)  # the scale is float32 there
        torch.testing.assert_close(rows[:, 4], stored[f"det_scores{i}_f64"], rtol=0, atol=1e-9)
        assert rows[:, 5].equal(stored[f"det_labels{i}"].double())


def test_names_and_sizes_are_those_of_mlperf() -> None:
    names = json.loads(gzip.decompress((FOLDER / "names_retinanet_800.json.gz").read_bytes()))
    with torch.device("meta"):
        model = RetinaNet()
    state = in_form(model.state_dict(), model.cfg, "mlperf")
    assert {name: list(value.shape) for name, value in state.items()} == dict(names["parameters"] + names["buffers"])
    assert sum(p.numel() for p in model.parameters()) == names["total"] == 37_060_652
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == names["trainable"] == 36_849_004
    frozen = in_form({n: p for n, p in model.named_parameters() if not p.requires_grad}, model.cfg, "mlperf")
    assert sorted(frozen) == sorted(names["frozen"])


def test_scores_are_those_of_pycocotools() -> None:
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is missing: pip install 'hpcai-suite[detection]'")
    case = load_json("retinanet/coco")
    rows = np.array([[d["image_id"], *d["bbox"], d["score"], d["category_id"]] for d in case["detections"]])
    scores = retinanet.evaluate(case["ground_truth"], rows)
    assert [scores[name] for name in retinanet.coco.STATS] == pytest.approx(case["stats"], abs=1e-9)  # type: ignore[attr-defined]
    for category, expected in case["per_category"].items():
        own = scores["per_category"][int(category)]
        assert own == pytest.approx({name: expected[name] for name in own}, abs=1e-9)
    assert retinanet.evaluate(case["ground_truth"], rows[:0])["ap"] == 0
