"""Load DeepCAM weights, also in the formats of other codes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.deepcam.config import CLASSES, VARIABLES, DeepCamConfig
from hpcai.models.deepcam.model import DeepCam
from hpcai.nn import weights


def load_weights(path: str | Path, cfg: DeepCamConfig | None = None) -> DeepCam:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``, ``.cpt``) of hpcai, the MLPerf HPC reference or NVIDIA's submissions (with or without fused ReLU
      and batch-norm groups), whose decoder reads the first block before its ReLU (``skip``: "before"); alone or within a
      checkpoint.

    ``cfg`` gives the settings that such files lack (names, units and ranges of the variables, which skip); sizes are inferred from
    the weights and must agree with it. Raises CheckpointError if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "deepcam", DeepCamConfig)
    with weights.check_names(path, state, "of the reference (xception_features.conv1.weight)"):
        sizes = _infer_sizes(state)
    if saved_cfg is None:
        saved_cfg = (cfg or _default_config(sizes)).model_copy(update={name: sizes[name] for name in ("divide", "middle")})
    base = cfg or saved_cfg
    expected = {"variables": len(base.variables), "classes": len(base.classes), "divide": base.divide, "middle": base.middle}
    weights.check_sizes(path, sizes, expected)
    with torch.device("meta"):
        names = list(DeepCam(saved_cfg).state_dict())
    if set(state) != set(names):
        # NVIDIA's weights are the same tensors in the same order; those of a batch-norm group occur twice.
        tensors = [tensor for name, tensor in state.items() if ".run_handle." not in name]
        if len(tensors) != len(names):
            missing, unknown = sorted(set(names) - set(state)), sorted(set(state) - set(names))
            fault = f"{path}: {len(tensors)} tensors, expected {len(names)} in the order of the MLPerf HPC codes"
            others = f"without {', '.join(missing[:3]) or 'nothing'}, and with {', '.join(unknown[:3]) or 'nothing'} unexpected"
            raise CheckpointError(f"{fault}; {others}")
        state = dict(zip(names, tensors))
        if cfg is None:
            saved_cfg = saved_cfg.model_copy(update={"skip": "before"})
    return weights.load_into(DeepCam(saved_cfg), state, path)


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    first, last = state["xception_features.conv1.weight"], state["upsample.last_deconv.0.weight"]
    blocks = {name.split(".")[1] for name in state if name.startswith("xception_features.block")}
    return {
        "variables": first.shape[1], "classes": last.shape[1], "divide": 32 // max(len(first), 1), "middle": len(blocks) - 4,
    }  # fmt: skip


def _default_config(sizes: Mapping[str, int]) -> DeepCamConfig:
    """Return settings for weights without any: the names of the benchmark if their numbers agree."""
    kwargs: dict[str, Any] = {}
    variables, classes = sizes["variables"], sizes["classes"]
    if variables != len(VARIABLES):
        kwargs |= {"variables": tuple(f"variable_{i}" for i in range(variables)), "units": ("",) * variables}
    if classes != len(CLASSES):
        kwargs |= {"classes": tuple(f"class_{i}" for i in range(classes)), "frequencies": None}
    return DeepCamConfig(**kwargs)
