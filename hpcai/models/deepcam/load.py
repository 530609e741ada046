"""DeepCAM weights from files of ours and of other codes."""

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
    """A model in evaluation mode from a file of weights, told apart by what the file is:

    - safetensors: ours (settings travel inside) or a plain state dict;
    - a torch state dict (``.pt``, ``.cpt``): ours or the MLPerf HPC reference's, or NVIDIA's submissions' (with or without fused
      rectifiers and batch-norm groups), whose decoder sees the first block before its rectifier (``skip``: "before"); alone or
      within a checkpoint.

    ``cfg`` gives what such files do not say (names, units and ranges of the variables, which skip); the shape is read off the
    weights and must agree with it. Raises CheckpointError for a file that is none of these or does not fit.
    """
    path = Path(path)
    state, found = weights.load_state(path, "deepcam", DeepCamConfig)
    with weights.check_names(path, state, "of the reference (xception_features.conv1.weight)"):
        sizes = _sizes(state)
    if found is None:
        found = (cfg or _named(sizes)).model_copy(update={name: sizes[name] for name in ("divide", "middle")})
    asked = cfg or found
    told = {"variables": len(asked.variables), "classes": len(asked.classes), "divide": asked.divide, "middle": asked.middle}
    weights.check_sizes(path, sizes, told)
    with torch.device("meta"):
        names = list(DeepCam(found).state_dict())
    if set(state) != set(names):
        state = _renamed(state, names, path)
        if cfg is None:
            found = found.model_copy(update={"skip": "before"})
    return weights.load_into(DeepCam(found), state, path)


def _renamed(state: Mapping[str, Tensor], names: list[str], path: Path) -> dict[str, Tensor]:
    """NVIDIA's weights under our names. They have the same tensors in the same order; those of a batch-norm group twice."""
    once = [tensor for name, tensor in state.items() if ".run_handle." not in name]
    if len(once) != len(names):
        missing, unknown = sorted(set(names) - set(state)), sorted(set(state) - set(names))
        raise CheckpointError(
            f"{path}: {len(once)} tensors, expected {len(names)} in the order of the MLPerf HPC codes; "
            f"without {', '.join(missing[:3]) or 'nothing'}, and with {', '.join(unknown[:3]) or 'nothing'} that is not known"
        )
    return dict(zip(names, once))


def _sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    first, last = state["xception_features.conv1.weight"], state["upsample.last_deconv.0.weight"]
    blocks = {name.split(".")[1] for name in state if name.startswith("xception_features.block")}
    return {
        "variables": first.shape[1], "classes": last.shape[1], "divide": 32 // max(len(first), 1), "middle": len(blocks) - 4,
    }  # fmt: skip


def _named(sizes: Mapping[str, int]) -> DeepCamConfig:
    """Settings for weights that come without: the benchmark's names where their numbers agree."""
    known: dict[str, Any] = {}
    variables, classes = sizes["variables"], sizes["classes"]
    if variables != len(VARIABLES):
        known |= {"variables": tuple(f"variable_{i}" for i in range(variables)), "units": ("",) * variables}
    if classes != len(CLASSES):
        known |= {"classes": tuple(f"class_{i}" for i in range(classes)), "frequencies": None}
    return DeepCamConfig(**known)
