"""Load CosmoFlow weights, also in the formats of other codes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.cosmoflow.config import CosmoFlowConfig
from hpcai.models.cosmoflow.model import CosmoFlow
from hpcai.nn import weights


def load_weights(path: str | Path, cfg: CosmoFlowConfig | None = None) -> CosmoFlow:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``) of hpcai or of the PyTorch submissions to MLPerf HPC, alone or within a checkpoint;
    - Keras weights (``.h5``) of the MLPerf HPC reference.

    ``cfg`` gives the settings that such files lack (names and ranges of the parameters); sizes are inferred from the weights and
    must agree with it. Raises CheckpointError if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = _read(path)
    with weights.check_names(path, state, "conv_seq.0.conv.weight, dense1.weight, ..."):
        sizes, outputs = _infer_sizes(state), len(state["output.weight"])
    if cfg is not None:
        weights.check_sizes(path, sizes, {name: getattr(cfg, name) for name in sizes})
    if saved_cfg is None:
        edge = sizes.pop("edge")
        saved_cfg = (cfg or _default_config(outputs)).model_copy(update=sizes)
        if saved_cfg.edge != edge or cfg is None:
            saved_cfg = saved_cfg.model_copy(update={"size": edge << sizes["blocks"]})
    return weights.load_into(CosmoFlow(saved_cfg), state, path)


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    blocks = sum(name.endswith(".conv.weight") for name in state)
    filters, channels = state["conv_seq.0.conv.weight"].shape[:2]
    cells = state["dense1.weight"].shape[1] / len(state[f"conv_seq.{blocks - 1}.conv.weight"])
    return {"channels": channels, "filters": filters, "blocks": blocks, "edge": round(cells ** (1 / 3))}


def _default_config(outputs: int) -> CosmoFlowConfig:
    """Return settings for weights without any: the parameters of the benchmark if their number agrees."""
    default = CosmoFlowConfig()
    if outputs == len(default.parameters):
        return default
    return CosmoFlowConfig(parameters=tuple(f"parameter_{i}" for i in range(outputs)), units=("",) * outputs)


def from_keras(weights: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Convert Keras weights in layer order (kernel and bias of each convolution, then of each dense layer) to a state dict.

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
    if not h5py.is_hdf5(path):
        return weights.load_state(path, "cosmoflow", CosmoFlowConfig)
    try:
        return from_keras(_keras_arrays(path)), None
    except CheckpointError:
        raise
    except Exception as problem:  # h5py raises many types of errors for a damaged file
        raise CheckpointError(f"{path}: not Keras weights, or damaged: {problem}") from problem


def _keras_arrays(path: Path) -> list[np.ndarray]:
    """Return the arrays of ``conv3d``, ``conv3d_1``, ..., ``dense``, ... in order, from either layout of Keras's HDF5 files."""
    layers: dict[tuple[str, int], dict[str, np.ndarray]] = {}

    def visit(name: str, item: Any) -> None:
        parts = name.split("/")
        layer = next((part for part in parts if part.split("_")[0] in ("conv3d", "dense")), None)
        if not isinstance(item, h5py.Dataset) or layer is None or "optimizer" in parts[0]:
            return
        kind, _, number = layer.partition("_")
        parameter = {"0": "kernel", "1": "bias"}.get(parts[-1], parts[-1].split(":")[0])
        layers.setdefault((kind, int(number or 0)), {})[parameter] = item[()]

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    if not layers:
        raise CheckpointError(f"{path}: no layer named conv3d or dense; expected Keras weights of CosmoFlow")
    return [layers[key][parameter] for key in sorted(layers) for parameter in ("kernel", "bias")]
