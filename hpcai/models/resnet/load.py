"""Load ResNet weights, also those of torchvision and timm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.models.resnet.config import ResNetConfig
from hpcai.models.resnet.model import ResNet
from hpcai.nn import weights

FORMS = ("torchvision",)  # its names, which timm has too, are ours


def load_weights(path: str | Path, cfg: ResNetConfig | None = None) -> ResNet:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict, as those of timm;
    - a torch state dict (``.pt``, ``.pth``) of hpcai, torchvision or timm, alone or within a checkpoint. Those with names of
      torchvision: ResNet-18 to -152, ResNeXt and Wide ResNet.

    ``cfg`` gives the settings that such files lack (names of the classes, sizes and normalisation of images); sizes of the network
    are inferred from the weights and must agree with it. Raises CheckpointError if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "resnet", ResNetConfig)
    with weights.check_names(path, state, "of torchvision (conv1.weight, layer1.0.conv1.weight, fc.weight)"):
        sizes = _infer_sizes(state)
        outputs = len(state["fc.weight"])
    if cfg is not None:
        weights.check_sizes(path, {**sizes, "classes": outputs}, {**cfg.model_dump(), "classes": cfg.outputs})
    if saved_cfg is None:
        saved_cfg = (cfg or ResNetConfig(num_classes=outputs)).model_copy(update=sizes)
    return weights.load_into(ResNet(saved_cfg), state, path)


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    counts = [sum(name.startswith(f"layer{stage}.") and name.endswith(".conv1.weight") for name in state) for stage in range(1, 5)]
    base, inner = len(state["conv1.weight"]), state["layer1.0.conv2.weight"]
    block = "bottleneck" if "layer1.0.conv3.weight" in state else "basic"
    groups = len(inner) // inner.shape[1] if block == "bottleneck" else 1
    width = 64 * inner.shape[1] // base if block == "bottleneck" else 64
    return {"block": block, "layers": tuple(counts), "base_width": base, "groups": groups, "width_per_group": width}
