"""DimeNet++ weights in and out of files. Nothing is unpickled but tensors."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.dimenet.config import DimeNetConfig
from hpcai.models.dimenet.model import DimeNet
from hpcai.nn import weights

_MODEL = "dimenet"


def save_weights(model: DimeNet, path: str | Path, given: Mapping[str, Tensor] | None = None) -> None:
    """Weights and settings in one safetensors file; ``given``: others than the model's own."""
    weights.write(path, _MODEL, model.cfg, given or model.state_dict())


def load_weights(path: str | Path, cfg: DimeNetConfig | None = None) -> DimeNet:
    """A model in evaluation mode from a file of weights, told apart by what the file is:

    - safetensors: ours (settings travel inside) or a plain state dict;
    - a torch state dict (``.pt``): ours or that of the MLPerf HPC reference and of fairchem, with or without ``module.`` (twice)
      before the names, alone or under ``state_dict``, ``model_state_dict`` or ``model``; or PyTorch Geometric's, whose output
      blocks have no bias in ``lin_up``.

    ``cfg`` gives what such files do not say (cutoff, neighbours, angles, units); widths are read off the weights and must agree
    with it. Without it such a model has the benchmark's detached angles. Raises CheckpointError for a file that is none of these or
    does not fit.
    """
    path = Path(path)
    state, found = weights.read(path, _MODEL, DimeNetConfig)
    state = {name.removeprefix("module."): value for name, value in state.items()}
    if found is None:
        shape = _shape(state, path)
        found = cfg or DimeNetConfig(angles="detached")
        for asked, value in shape.items():
            if cfg is not None and getattr(cfg, asked) != value:
                raise CheckpointError(f"{path}: the weights have {asked} {value}, the settings {getattr(cfg, asked)}; load without")
        found = found.model_copy(update=shape)
    elif cfg is not None and cfg != found:
        raise CheckpointError(f"{path}: holds its own settings, and other ones are given; load without settings")
    model = DimeNet(found)
    for name, value in model.state_dict().items():
        if name.endswith("lin_up.bias") and name not in state:
            state[name] = value.new_zeros(value.shape)
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        raise CheckpointError(f"{path}: not the weights of a DimeNet++: {problem}") from problem
    return model.eval()


def _shape(state: Mapping[str, Tensor], path: Path) -> dict[str, int]:
    def count(start: str, end: str) -> int:
        return sum(name.startswith(start) and name.endswith(end) for name in state)

    try:
        first = "interaction_blocks.0."
        basis, table = state[f"{first}lin_sbf1.weight"].shape
        radial = len(state["rbf.freq"])
        return {
            "hidden": state["emb.emb.weight"].shape[1], "elements": len(state["emb.emb.weight"]), "radial": radial, "basis": basis,
            "spherical": table // radial, "output": len(state["output_blocks.0.lin_up.weight"]),
            "interaction": len(state[f"{first}lin_down.weight"]), "blocks": count("interaction_blocks.", ".lin_up.weight"),
            "before_skip": count(f"{first}layers_before_skip.", "lin1.weight"),
            "after_skip": count(f"{first}layers_after_skip.", "lin1.weight"),
            "output_layers": count("output_blocks.0.lins.", "weight"),
        }  # fmt: skip
    except (KeyError, ValueError) as problem:
        known = ", ".join(list(state)[:6])
        raise CheckpointError(
            f"{path}: no tensor {problem}; expected the names of the reference (rbf.freq, emb.emb.weight, ...), found {known}"
        ) from problem
