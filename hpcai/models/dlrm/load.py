"""Load DLRM-dcnv2 weights, also those of torchrec."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.dlrm.config import DLRMConfig
from hpcai.models.dlrm.model import DLRM
from hpcai.nn import weights

FORMS = ("torchrec",)
_TABLES = "sparse_arch.embedding_bag_collection.embedding_bags."


def torchrec_names(cfg: DLRMConfig, tables: Sequence[str] = ()) -> dict[str, str]:
    """Return the names of torchrec's DLRM_DCN by ours. ``tables``: Names of the tables there, by default those of MLPerf."""
    last = len(cfg.top) - 1
    layers = {f"bottom.{k}": f"dense_arch.model._mlp.{k}._linear" for k in range(len(cfg.bottom))}
    layers |= {f"top.{k}": f"over_arch.model.0._mlp.{k}._linear" for k in range(last)} | {f"top.{last}": "over_arch.model.1"}
    kernels, count = {"V": "V_kernels", "W": "W_kernels", "bias": "bias"}, cfg.cross_layers
    return {
        **{f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in layers.items() for kind in ("weight", "bias")},
        **{f"cross.{k}.{ours}": f"inter_arch.crossnet.{theirs}.{k}" for ours, theirs in kernels.items() for k in range(count)},
        **{f"embedding.{t}.weight": f"{_TABLES}{tables[t] if tables else f't_cat_{t}'}.weight" for t in range(len(cfg.rows))},
    }


def in_form(state: Mapping[str, Tensor], cfg: DLRMConfig, form: str) -> dict[str, Tensor]:
    """Return the weights under the names of torchrec's DLRM_DCN."""
    return {theirs: state[ours].clone() for ours, theirs in torchrec_names(cfg).items()}


def load_weights(path: str | Path, cfg: DLRMConfig | None = None) -> DLRM:
    """Load a model in evaluation mode, with a new state of Adagrad, from safetensors of hpcai, or from a state dict of hpcai or
    of torchrec's DLRM_DCN (``.pt``), whose settings ``cfg`` gives: such files lack the hotness. Raises CheckpointError if the
    weights do not fit."""
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "dlrm", DLRMConfig)
    if saved_cfg is None and cfg is None:
        raise CheckpointError(f"{path}: has no settings, such as the hotness of the tables; give cfg")
    if None not in (saved_cfg, cfg) and cfg != saved_cfg:
        raise CheckpointError(f"{path}: contains settings that differ from cfg; load without cfg")
    model = DLRM(saved_cfg or cfg)
    if tables := [name[len(_TABLES) : -len(".weight")] for name in state if name.startswith(_TABLES)]:
        with weights.check_names(path, state, "of torchrec's DLRM_DCN with these settings"):
            state = {ours: state[theirs] for ours, theirs in torchrec_names(model.cfg, tables).items()}
    weights.load_into(model, {name: x for name, x in model.state_dict().items() if name.endswith(".sum")} | state, path)
    for table in model.embedding.tables:  # which are trained, though frozen for optimizers
        del table.weight.origin, table.sum.origin
    return model
