"""Load 3D U-Net weights, also in the formats of other codes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.models.unet3d.config import UNet3DConfig
from hpcai.models.unet3d.model import UNet3D
from hpcai.nn import weights


def load_weights(path: str | Path, cfg: UNet3DConfig | None = None) -> UNet3D:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``) of hpcai or the MLPerf reference, alone or within a checkpoint.

    ``cfg`` gives the settings that such files lack (names of the classes, window, spacing); widths are inferred from the weights
    and must agree with it. Raises CheckpointError if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "unet3d", UNet3DConfig)
    with weights.check_names(path, state, "input_block.conv1.0.weight, ..., output.conv.weight"):
        sizes = _infer_sizes(state)
    if cfg is not None:
        weights.check_sizes(path, sizes, {"channels": cfg.channels, "filters": cfg.filters, "outputs": len(cfg.classes)})
    return weights.load_into(UNet3D(saved_cfg or cfg or _default_config(**sizes)), state, path)


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    first = state["input_block.conv1.0.weight"]
    levels = sum(name.startswith("downsample.") and name.endswith("conv1.0.weight") for name in state)
    widths = len(first), *(len(state[f"downsample.{i}.conv1.0.weight"]) for i in range(levels))
    return {"channels": first.shape[1], "filters": widths, "outputs": len(state["output.conv.weight"])}


def _default_config(channels: int, filters: tuple[int, ...], outputs: int) -> UNet3DConfig:
    """Return settings for weights without any: the classes of the benchmark if their number agrees."""
    default = UNet3DConfig().classes
    classes = default if outputs == len(default) else ("background", *(f"class_{k}" for k in range(1, outputs)))
    return UNet3DConfig(channels=channels, filters=filters, classes=classes)
