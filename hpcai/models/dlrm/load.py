"""Load DLRM-dcnv2 weights, also those of torchrec."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.dlrm.config import DLRMConfig
from hpcai.models.dlrm.model import DLRM
from hpcai.nn import weights

FORMS = ("torchrec",)
_STATES = re.compile(r"embedding\.\d+\.sum")


def torchrec_names(cfg: DLRMConfig) -> dict[str, str]:
    """Return the names of torchrec's DLRM_DCN by our names. Table t has the name t_cat_<t> there, as in MLPerf."""
    last = len(cfg.top) - 1
    names = {f"embedding.{t}.weight": f"sparse_arch.embedding_bag_collection.embedding_bags.t_cat_{t}.weight" for t in range(len(cfg.rows))}
    for kind in ("weight", "bias"):
        names |= {f"bottom.{k}.{kind}": f"dense_arch.model._mlp.{k}._linear.{kind}" for k in range(len(cfg.bottom))}
        names |= {f"top.{k}.{kind}": f"over_arch.model.0._mlp.{k}._linear.{kind}" for k in range(last)}
        names[f"top.{last}.{kind}"] = f"over_arch.model.1.{kind}"
    for kind, theirs in (("V", "V_kernels"), ("W", "W_kernels"), ("bias", "bias")):
        names |= {f"cross.{k}.{kind}": f"inter_arch.crossnet.{theirs}.{k}" for k in range(cfg.cross_layers)}
    return names


def in_form(state: Mapping[str, Tensor], cfg: DLRMConfig, form: str) -> dict[str, Tensor]:
    """Return the weights under the names of torchrec's DLRM_DCN, without the state of Adagrad."""
    return {theirs: state[ours].clone() for ours, theirs in torchrec_names(cfg).items()}


def load_weights(path: str | Path, cfg: DLRMConfig | None = None) -> DLRM:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``) of hpcai or of torchrec's DLRM_DCN, whose tables may have any names.

    ``cfg`` gives the settings that such files lack (hotness, Adagrad); sizes are inferred from the weights and must agree with it.
    Tables begin with a new state of Adagrad if the file has none. Raises CheckpointError if the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "dlrm", DLRMConfig)
    if saved_cfg is None:
        with weights.check_names(path, state, "of torchrec's DLRM_DCN, or of hpcai (bottom.0.weight, embedding.0.weight, ...)"):
            state = _our_names(state)
            sizes = _infer_sizes(state)
        if cfg is None:
            raise CheckpointError(f"{path}: has no hotness of the tables; give cfg, such as DLRMConfig()")
        weights.check_sizes(path, sizes, {name: getattr(cfg, name) for name in sizes})
        saved_cfg = cfg
    elif cfg is not None and cfg != saved_cfg:
        raise CheckpointError(f"{path}: contains settings that differ from cfg; load without cfg")
    model = DLRM(saved_cfg)
    for name, value in model.state_dict().items():
        if _STATES.fullmatch(name):
            state.setdefault(name, value)
    weights.load_into(model, state, path)
    for table in model.embedding.tables:  # which are trained, though frozen for optimizers
        del table.weight.origin, table.sum.origin
    return model


def _our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "sparse_arch.embedding_bag_collection.embedding_bags."
    if not any(name.startswith(prefix) for name in state):
        return dict(state)
    tables = [name for name in state if name.startswith(prefix)]  # in their order
    renamed = {name: f"embedding.{number}.weight" for number, name in enumerate(tables)}
    last = 1 + max(int(match[1]) for name in state if (match := re.match(r"over_arch\.model\.0\._mlp\.(\d+)", name)))
    rules = (
        (r"dense_arch\.model\._mlp\.(\d+)\._linear\.", r"bottom.\1."), (r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.", r"top.\1."),
        (r"over_arch\.model\.1\.", f"top.{last}."), (r"inter_arch\.crossnet\.(V|W)_kernels\.(\d+)", r"cross.\2.\1"),
        (r"inter_arch\.crossnet\.bias\.(\d+)", r"cross.\1.bias"),
    )  # fmt: skip
    for name in state.keys() - renamed.keys():
        renamed[name] = name
        for pattern, ours in rules:
            renamed[name] = re.sub(f"^{pattern}", ours, renamed[name])
    return {renamed[name]: value for name, value in state.items()}


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    def sizes(kind: str) -> list[Any]:
        count = len({name.split(".")[1] for name in state if name.startswith(f"{kind}.") and not _STATES.fullmatch(name)})
        return [state[f"{kind}.{k}.{'V' if kind == 'cross' else 'weight'}"].shape for k in range(count)]

    bottom, top, cross, tables = map(sizes, ("bottom", "top", "cross", "embedding"))
    return {
        "dense_features": bottom[0][1], "bottom": tuple(shape[0] for shape in bottom), "top": tuple(shape[0] for shape in top),
        "rows": tuple(shape[0] for shape in tables), "dim": tables[0][1], "cross_layers": len(cross), "cross_rank": cross[0][0],
    }  # fmt: skip
