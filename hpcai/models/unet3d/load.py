"""3D U-Net weights in and out of files. Nothing is unpickled but tensors."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.unet3d.config import UNet3DConfig
from hpcai.models.unet3d.model import UNet3D
from hpcai.nn import weights

_MODEL = "unet3d"
_REFERENCE = "best_model_state_dict"  # where the reference's checkpoints keep the weights


def save_weights(model: UNet3D, path: str | Path, given: Mapping[str, Tensor] | None = None) -> None:
    """Weights and settings in one safetensors file; ``given``: others than the model's own."""
    weights.write(path, _MODEL, model.cfg, given or model.state_dict())


def load_weights(path: str | Path, cfg: UNet3DConfig | None = None) -> UNet3D:
    """A model in evaluation mode from a file of weights, told apart by what the file is:

    - safetensors: ours (settings travel inside) or a plain state dict;
    - a torch state dict (``.pt``): ours or that of the MLPerf reference, with or without ``module.`` before the names, alone or
    under
      ``best_model_state_dict``, ``state_dict``, ``model_state_dict`` or ``model``.

    ``cfg`` gives what such files do not say (names of the classes, window, spacing); widths are read off the weights and must agree
    with it. Raises CheckpointError for a file that is none of these or does not fit.
    """
    path = Path(path)
    state, found = weights.read(path, _MODEL, UNet3DConfig, (_REFERENCE,))
    shape = _shape(state, path)
    for asked, value in shape.items():
        given = None if cfg is None else len(cfg.classes) if asked == "outputs" else getattr(cfg, asked)
        if given is not None and given != value:
            raise CheckpointError(f"{path}: the weights have {asked} {value}, the settings {given}; load without settings")
    if found is None:
        found = cfg or _config(shape)
    model = UNet3D(found)
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        raise CheckpointError(f"{path}: not the weights of a 3D U-Net: {problem}") from problem
    return model.eval()


def _config(shape: Mapping[str, object]) -> UNet3DConfig:
    outputs, usual = shape["outputs"], UNet3DConfig().classes
    assert isinstance(outputs, int)
    classes = usual if outputs == len(usual) else ("background", *(f"class_{k}" for k in range(1, outputs)))
    return UNet3DConfig.model_validate({"channels": shape["channels"], "filters": shape["filters"], "classes": classes})


def _shape(state: Mapping[str, Tensor], path: Path) -> dict[str, object]:
    try:
        first = state["input_block.conv1.0.weight"]
        levels = sum(name.startswith("downsample.") and name.endswith("conv1.0.weight") for name in state)
        widths = [first.shape[0]] + [state[f"downsample.{i}.conv1.0.weight"].shape[0] for i in range(levels)]
        return {"channels": first.shape[1], "filters": tuple(widths), "outputs": state["output.conv.weight"].shape[0]}
    except KeyError as problem:
        known = ", ".join(list(state)[:6])
        raise CheckpointError(
            f"{path}: no tensor {problem}; expected the names input_block.conv1.0.weight, ..., output.conv.weight, found {known}"
        ) from problem
