"""DeepCAM weights in and out of files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.deepcam.config import CLASSES, UNITS, VARIABLES, DeepCamConfig
from hpcai.models.deepcam.model import DeepCam
from hpcai.nn import weights

_MODEL = "deepcam"


def save_weights(model: DeepCam, path: str | Path, given: Mapping[str, Tensor] | None = None) -> None:
    """Weights and settings in one safetensors file; ``given``: others than the model's own."""
    weights.write(path, _MODEL, model.cfg, given or model.state_dict())


def load_weights(path: str | Path, cfg: DeepCamConfig | None = None) -> DeepCam:
    """A model in evaluation mode from a file of weights, told apart by what the file is:

    - safetensors: ours (settings travel inside) or a plain state dict;
    - a torch state dict (``.pt``, ``.cpt``): ours or the MLPerf HPC reference's, or NVIDIA's submissions' (with or without fused
      rectifiers and batch-norm groups), whose decoder sees the first block before its rectifier (``skip``: "before"); with or
      without ``module.`` before the names, alone or under ``model``.

    ``cfg`` gives what such files do not say (names, units and ranges of the variables, which skip); the shape is read off the
    weights and must agree with it. Raises CheckpointError for a file that is none of these or does not fit.
    """
    path = Path(path)
    state, found = weights.read(path, _MODEL, DeepCamConfig)
    shape = _shape(state, path)
    if found is None:
        found = (cfg or _named(shape)).model_copy(update={name: shape[name] for name in ("divide", "middle")})
    asked = cfg or found
    for name, value in (("variables", len(asked.variables)), ("classes", len(asked.classes)), ("divide", asked.divide),
                        ("middle", asked.middle)):  # fmt: skip
        if value != shape[name]:
            raise CheckpointError(f"{path}: the weights have {name} {shape[name]}, the settings {value}; load without settings")
    with torch.device("meta"):
        names = list(DeepCam(found).state_dict())
    if set(state) != set(names):
        state = _renamed(state, names, path)
        if cfg is None:
            found = found.model_copy(update={"skip": "before"})
    model = DeepCam(found)
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        raise CheckpointError(f"{path}: not the weights of a DeepCAM: {problem}") from problem
    return model.eval()


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


def _shape(state: Mapping[str, Tensor], path: Path) -> dict[str, int]:
    try:
        first, last = state["xception_features.conv1.weight"], state["upsample.last_deconv.0.weight"]
    except KeyError as problem:
        known = ", ".join(list(state)[:6])
        raise CheckpointError(
            f"{path}: no tensor {problem}; expected the names of the reference (xception_features.conv1.weight), found {known}"
        ) from problem
    blocks = {name.split(".")[1] for name in state if name.startswith("xception_features.block")}
    return {
        "variables": first.shape[1], "classes": last.shape[1], "divide": 32 // max(first.shape[0], 1), "middle": len(blocks) - 4,
    }  # fmt: skip


def _named(shape: Mapping[str, int]) -> DeepCamConfig:
    """Settings for weights that come without: the benchmark's names where their numbers agree."""
    known: dict[str, Any] = {}
    if shape["variables"] != len(VARIABLES):
        known |= {"variables": tuple(f"variable_{i}" for i in range(shape["variables"])), "units": ("",) * shape["variables"]}
    else:
        known |= {"variables": VARIABLES, "units": UNITS}
    if shape["classes"] != len(CLASSES):
        known |= {"classes": tuple(f"class_{i}" for i in range(shape["classes"])), "frequencies": None}
    return DeepCamConfig(**known)
