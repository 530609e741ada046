"""CosmoFlow weights in and out of files. Nothing is unpickled but tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.cosmoflow.config import CosmoFlowConfig
from hpcai.models.cosmoflow.model import CosmoFlow
from hpcai.nn import weights

_MODEL = "cosmoflow"


def save_weights(model: CosmoFlow, path: str | Path, given: Mapping[str, Tensor] | None = None) -> None:
    """Weights and settings in one safetensors file; ``given``: others than the model's own."""
    weights.write(path, _MODEL, model.cfg, given or model.state_dict())


def load_weights(path: str | Path, cfg: CosmoFlowConfig | None = None) -> CosmoFlow:
    """A model in evaluation mode from a file of weights, told apart by what the file is:

    - safetensors: ours (settings travel inside) or a plain state dict;
    - a torch state dict (``.pt``): ours or the PyTorch submissions' to MLPerf HPC, with or without ``module.`` before the names,
      alone or under ``state_dict``, ``model_state_dict`` or ``model``;
    - Keras weights (``.h5``) of the MLPerf HPC reference.

    ``cfg`` gives what such files do not say (names and ranges of the parameters); the shape is read off the weights and must
    agree with it. Raises CheckpointError for a file that is none of these or does not fit.
    """
    path = Path(path)
    state, found = _read(path)
    shape = _shape(state, path)
    if found is None:
        names = _names(shape["outputs"])
        base = cfg or CosmoFlowConfig(parameters=names, units=_units(names))
        found = base.model_copy(update={key: shape[key] for key in ("channels", "filters", "blocks")})
        if base.edge != shape["edge"] or cfg is None:
            found = found.model_copy(update={"size": shape["edge"] << shape["blocks"]})
    for asked in ("channels", "filters", "blocks", "edge"):
        if cfg is not None and getattr(cfg, asked) != shape[asked]:
            raise CheckpointError(
                f"{path}: the weights have {asked} {shape[asked]}, the settings {getattr(cfg, asked)}; load without settings"
            )
    model = CosmoFlow(found)
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        raise CheckpointError(f"{path}: not the weights of a CosmoFlow: {problem}") from problem
    return model.eval()


def from_keras(weights: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """State dict from Keras weights in layer order: kernel, bias of each convolution, then of each dense layer.

    Convolution kernels are [D, H, W, in, out] and become [out, in, D, H, W]; dense ones [in, out] become [out, in].
    """
    state: dict[str, Tensor] = {}
    convs = [i for i in range(0, len(weights), 2) if weights[i].ndim == 5]
    for n, i in enumerate(convs):
        state[f"conv_seq.{n}.conv.weight"] = torch.from_numpy(np.ascontiguousarray(weights[i].transpose(4, 3, 0, 1, 2)))
        state[f"conv_seq.{n}.conv.bias"] = torch.from_numpy(np.array(weights[i + 1]))
    for name, i in zip(("dense1", "dense2", "output"), range(2 * len(convs), len(weights), 2)):
        state[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(weights[i].T))
        state[f"{name}.bias"] = torch.from_numpy(np.array(weights[i + 1]))
    return state


def _read(path: Path) -> tuple[dict[str, Tensor], CosmoFlowConfig | None]:
    if not _is_hdf5(path):
        return weights.read(path, _MODEL, CosmoFlowConfig)
    try:
        return from_keras(_keras_arrays(path)), None
    except CheckpointError:
        raise
    except Exception as problem:  # h5py has errors of its own for a damaged file
        raise CheckpointError(f"{path}: not Keras weights, or damaged: {problem}") from problem


def _is_hdf5(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x89HDF"


def _keras_arrays(path: Path) -> list[np.ndarray]:
    """Arrays of ``conv3d``, ``conv3d_1``, ..., ``dense``, ... in order, from either layout of Keras's HDF5 files."""
    import h5py

    layers: dict[tuple[str, int], dict[str, np.ndarray]] = {}

    def visit(name: str, item: Any) -> None:
        parts = name.split("/")
        layer = next((part for part in parts if part.split("_")[0] in ("conv3d", "dense")), None)
        if not isinstance(item, h5py.Dataset) or layer is None or "optimizer" in parts[0]:
            return
        kind, _, number = layer.partition("_")
        what = {"0": "kernel", "1": "bias"}.get(parts[-1], parts[-1].split(":")[0])
        layers.setdefault((kind, int(number or 0)), {})[what] = item[()]

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    if not layers:
        raise CheckpointError(f"{path}: no layer named conv3d or dense; expected Keras weights of CosmoFlow")
    return [layers[key][what] for key in sorted(layers) for what in ("kernel", "bias")]


def _shape(state: Mapping[str, Tensor], path: Path) -> dict[str, int]:
    try:
        blocks = sum(name.endswith(".conv.weight") for name in state)
        first, last = state["conv_seq.0.conv.weight"], state[f"conv_seq.{blocks - 1}.conv.weight"]
        edge = round((state["dense1.weight"].shape[1] / last.shape[0]) ** (1 / 3))
        outputs = state["output.weight"].shape[0]
    except (KeyError, ZeroDivisionError) as problem:
        known = ", ".join(list(state)[:6])
        raise CheckpointError(
            f"{path}: no tensor {problem}; expected the names conv_seq.0.conv.weight, dense1.weight, ..., found {known}"
        ) from problem
    return {"channels": first.shape[1], "filters": first.shape[0], "blocks": blocks, "edge": edge, "outputs": outputs}


def _names(outputs: int) -> tuple[str, ...]:
    usual = CosmoFlowConfig().parameters
    return usual if outputs == len(usual) else tuple(f"parameter_{i}" for i in range(outputs))


def _units(names: tuple[str, ...]) -> tuple[str, ...]:
    usual = CosmoFlowConfig()
    return usual.units if names == usual.parameters else ("",) * len(names)
