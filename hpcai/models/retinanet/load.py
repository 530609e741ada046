"""Load RetinaNet weights, also those of torchvision and MLPerf."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.config import Settings
from hpcai.errors import CheckpointError
from hpcai.models.retinanet.config import RetinaNetConfig
from hpcai.models.retinanet.model import RetinaNet
from hpcai.nn import weights

FORMS = "torchvision", "mlperf"


def load_weights(path: str | Path, cfg: RetinaNetConfig | None = None) -> RetinaNet:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``, ``.pth``) of hpcai, torchvision (``retinanet_resnet50_fpn`` and ``_v2``) or MLPerf's reference,
      alone or within a checkpoint. COCO_V1 of torchvision needs ``norm_eps`` 0.

    ``cfg`` gives the settings that such files lack (names of the classes, anchors, sizes of images); sizes of the network are
    inferred from the weights and must agree with it. With ``norm`` "frozen" batch norms become frozen ones. Raises CheckpointError
    if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "retinanet", RetinaNetConfig)
    state = {_torchvision_name(name): tensor for name, tensor in state.items()}
    with weights.check_names(path, state, "of torchvision (backbone.body.conv1.weight, head.regression_head.bbox_reg.weight)"):
        sizes = _infer_sizes(state)
    base = cfg or saved_cfg
    if base is not None:
        expected = {**base.model_dump(), "num_classes": base.outputs, "anchors_per_cell": base.anchors_per_cell}
        if base.norm == "frozen":
            sizes["norm"], state = "frozen", {n: t for n, t in state.items() if not n.endswith(".num_batches_tracked")}
        if base.head_norm_groups and sizes["head_norm_groups"]:
            sizes["head_norm_groups"] = base.head_norm_groups  # the weights have no number
        weights.check_sizes(path, sizes, expected)
    elif sizes["anchors_per_cell"] != 9:
        raise CheckpointError(f"{path}: {sizes['anchors_per_cell']} anchors per cell, expected 9; give settings with aspect_ratios")
    del sizes["anchors_per_cell"]
    return weights.load_into(RetinaNet(saved_cfg or cfg or RetinaNetConfig(**sizes)), state, path)


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    body, head = "backbone.body.", "head.classification_head."
    counts = [sum(n.startswith(f"{body}layer{stage}.") and n.endswith(".conv1.weight") for n in state) for stage in range(1, 5)]
    base, inner = len(state[f"{body}conv1.weight"]), state[f"{body}layer1.0.conv2.weight"]
    anchors, channels = len(state["head.regression_head.bbox_reg.weight"]) // 4, len(state["backbone.fpn.layer_blocks.0.0.weight"])
    return {
        "layers": tuple(counts), "base_width": base, "groups": len(inner) // inner.shape[1],
        "width_per_group": 64 * inner.shape[1] // base, "fpn_channels": channels, "anchors_per_cell": anchors,
        "norm": "batch" if f"{body}bn1.num_batches_tracked" in state else "frozen",
        "p6": "p5" if state["backbone.fpn.extra_blocks.p6.weight"].shape[1] == channels else "c5",
        "head_norm_groups": 32 if f"{head}conv.0.1.weight" in state else 0,
        "num_classes": len(state[f"{head}cls_logits.weight"]) // anchors,
    }  # fmt: skip


def load_backbone(model: RetinaNet, path: str | Path) -> RetinaNet:
    """Load the body of ``model`` from the weights of a classifier, ResNet or ResNeXt (torchvision, timm, hpcai), and return it.
    Raises CheckpointError if they do not fit."""
    state, omitted = weights.load_state(Path(path), "resnet", _ClassifierConfig)[0], ["fc.*"]
    if model.cfg.norm == "frozen":
        omitted.append("*.num_batches_tracked")
    state = {name: tensor for name, tensor in state.items() if not any(fnmatch(name, pattern) for pattern in omitted)}
    body = weights.load_into(model.backbone["body"], state, Path(path)).train(model.training)
    for parameter in body.parameters():
        del parameter.origin  # its names there are others
    return model


class _ClassifierConfig(Settings, extra="ignore"):
    """Settings of a classifier, which are not those of this network."""


def _torchvision_name(name: str) -> str:
    """Return the name of a weight in torchvision since 0.14 for one of MLPerf, or of torchvision before."""
    name = re.sub(r"((?:inner|layer)_blocks\.\d+)\.(weight|bias)$", r"\1.0.\2", name)
    return re.sub(r"_head\.conv\.(\d+)\.(weight|bias)$", lambda m: f"_head.conv.{int(m[1]) // 2}.0.{m[2]}", name)


def in_form(state: Mapping[str, Tensor], cfg: RetinaNetConfig, form: str) -> dict[str, Tensor]:
    """Return the weights in the format of another code. Raises CheckpointError for group norms in MLPerf's."""
    if form == "torchvision":
        return dict(state)
    if cfg.head_norm_groups:
        raise CheckpointError("MLPerf's heads have no group norms; save the form torchvision")
    shorter = {re.sub(r"(_blocks\.\d+)\.0\.", r"\1.", name): tensor for name, tensor in state.items()}
    return {re.sub(r"_head\.conv\.(\d+)\.0", lambda m: f"_head.conv.{2 * int(m[1])}", n): t for n, t in shorter.items()}
