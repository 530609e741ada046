"""Load and export DimeNet++ weights, also in the formats of other codes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.dimenet.config import DimeNetConfig
from hpcai.models.dimenet.model import DimeNet
from hpcai.nn import weights

FORMS = "fairchem", "pyg"
# Setting -> argument of PyTorch Geometric; other settings have no counterpart there.
_PYG_KWARGS = {
    "hidden": "hidden_channels", "blocks": "num_blocks", "interaction": "int_emb_size", "basis": "basis_emb_size",
    "output": "out_emb_channels", "spherical": "num_spherical", "radial": "num_radial", "cutoff": "cutoff",
    "envelope": "envelope_exponent", "before_skip": "num_before_skip", "after_skip": "num_after_skip",
    "output_layers": "num_output_layers",
}  # fmt: skip
_PYG_ELEMENTS = 95  # rows of PyTorch Geometric's embedding
_UNLIMITED_NEIGHBOURS = 512  # instead of no limit: a metal has fewer neighbours within 10 angstrom


def in_form(state: Mapping[str, Tensor], cfg: DimeNetConfig, form: str) -> dict[str, Any]:
    """Return the weights in the format of another code:

    - ``fairchem``: a checkpoint of fairchem and the MLPerf HPC reference: under ``state_dict``, with the prefix ``module.module.``;
    - ``pyg``: the state dict of PyTorch Geometric's ``DimeNetPlusPlus(**pyg_kwargs(model.cfg))``. Its output blocks lack the bias
      of ``lin_up``, which is folded into the bias of the next layer: energies are the same.

    Energies of both are in units of the network: ``scale``, ``mean`` and ``references`` are dropped. Raises CheckpointError for a
    network that PyTorch Geometric cannot represent.
    """
    converted = {name: value.clone() for name, value in state.items()}  # torch.save would write the whole storage of a view
    if form == "fairchem":
        return {"state_dict": {f"module.module.{name}": value for name, value in converted.items()}}
    if cfg.elements != _PYG_ELEMENTS:
        raise CheckpointError(f"elements is {cfg.elements}, but PyTorch Geometric's embedding has {_PYG_ELEMENTS} rows")
    for name in [name for name in state if name.startswith("output_blocks.") and name.endswith("lin_up.bias")]:
        bias, layer = converted.pop(name), name.replace("lin_up.bias", "lins.0")
        if f"{layer}.bias" in converted:  # W (U x + b) + c = W U x + (W b + c)
            converted[f"{layer}.bias"] += converted[f"{layer}.weight"] @ bias
        elif bias.any():
            raise CheckpointError(f"{name} is not 0, which PyTorch Geometric lacks, and no layer follows (output_layers=0)")
    return converted


def pyg_kwargs(cfg: DimeNetConfig) -> dict[str, Any]:
    """Return the arguments of PyTorch Geometric's ``DimeNetPlusPlus`` for the same network. It has no periodic images, and its
    forces are those of conservative angles."""
    kwargs = {argument: getattr(cfg, name) for name, argument in _PYG_KWARGS.items()}
    return kwargs | {"out_channels": 1, "max_num_neighbors": cfg.most or _UNLIMITED_NEIGHBOURS}


def load_weights(path: str | Path, cfg: DimeNetConfig | None = None) -> DimeNet:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``) of hpcai, the MLPerf HPC reference or fairchem, alone or within a checkpoint; or of PyTorch
      Geometric, whose output blocks have no bias in ``lin_up``.

    ``cfg`` gives the settings that such files lack (cutoff, neighbours, angles, units); widths are inferred and must agree with it.
    Without it such a model has the benchmark's detached angles. Raises CheckpointError if format is unknown or weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "dimenet", DimeNetConfig)
    if saved_cfg is None:
        with weights.check_names(path, state, "of the reference (rbf.freq, emb.emb.weight, ...)"):
            sizes = _infer_sizes(state)
        if cfg is not None:
            weights.check_sizes(path, sizes, {name: getattr(cfg, name) for name in sizes})
        saved_cfg = (cfg or DimeNetConfig(angles="detached")).model_copy(update=sizes)
    elif cfg is not None and cfg != saved_cfg:
        raise CheckpointError(f"{path}: contains settings that differ from cfg; load without cfg")
    model = DimeNet(saved_cfg)
    for name, value in model.state_dict().items():
        if name.endswith("lin_up.bias") and name not in state:
            state[name] = value.new_zeros(value.shape)
    return weights.load_into(model, state, path)


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    def count(start: str, end: str) -> int:
        return sum(name.startswith(start) and name.endswith(end) for name in state)

    prefix = "interaction_blocks.0."
    basis, functions = state[f"{prefix}lin_sbf1.weight"].shape
    radial = len(state["rbf.freq"])
    return {
        "hidden": state["emb.emb.weight"].shape[1], "elements": len(state["emb.emb.weight"]), "radial": radial, "basis": basis,
        "spherical": functions // radial, "output": len(state["output_blocks.0.lin_up.weight"]),
        "interaction": len(state[f"{prefix}lin_down.weight"]), "blocks": count("interaction_blocks.", ".lin_up.weight"),
        "before_skip": count(f"{prefix}layers_before_skip.", "lin1.weight"),
        "after_skip": count(f"{prefix}layers_after_skip.", "lin1.weight"),
        "output_layers": count("output_blocks.0.lins.", "weight"),
    }  # fmt: skip
