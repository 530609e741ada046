"""Load R-GAT weights, also those of PyTorch Geometric."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.rgat.config import SEPARATOR, RGATConfig
from hpcai.models.rgat.model import RGAT
from hpcai.nn import weights

FORMS = ("pyg",)  # its names are ours
_CONV = re.compile(r"(convs\.\d+\.convs\.)<?(\w+?)>?\.(att_src|att_dst|bias|lin(?:_src|_dst)?\.weight)$")


def load_weights(path: str | Path, cfg: RGATConfig | None = None) -> RGAT:
    """Load a model in evaluation mode. The format is detected:

    - safetensors: from hpcai, with settings, or a plain state dict;
    - a torch state dict (``.pt``) of hpcai, of MLPerf's reference or of PyTorch Geometric's ``HeteroConv`` of ``GATConv``, in a
      list ``convs`` beside a linear layer ``lin``, alone or within a checkpoint; also of versions that store the projection as
      ``lin_src`` and ``lin_dst``, if both are equal.

    ``cfg`` gives the settings that such files lack (names of the classes, dropout); sizes are inferred from the weights and must
    agree with it. Raises CheckpointError if the format is unknown or the weights do not fit.
    """
    path = Path(path)
    state, saved_cfg = weights.load_state(path, "rgat", RGATConfig)
    state = dict(_our_names(path, state))
    with weights.check_names(path, state, "of PyTorch Geometric (convs.0.convs.<paper___cites___paper>.lin.weight, lin.weight)"):
        sizes = _infer_sizes(state)
    if cfg is not None:
        ours = {"features": cfg.inputs, "relations": {*cfg.relation_names}, "num_classes": cfg.outputs}
        weights.check_sizes(path, {**sizes, "relations": {*sizes["relations"]}}, {**cfg.model_dump(), **ours})
    if saved_cfg is None:
        saved_cfg = (cfg or RGATConfig()).model_copy(update=sizes)
    return weights.load_into(RGAT(saved_cfg), state, path)


def _our_names(path: Path, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if (match := _CONV.match(name)) is None:
            yield name, tensor
            continue
        prefix, relation, rest = match.groups()
        relation = relation if SEPARATOR in relation else SEPARATOR.join(relation.split("__"))  # of PyTorch Geometric before 2.4
        if rest == "lin_dst.weight" and not tensor.equal(state[name.replace("lin_dst", "lin_src")]):
            expected = "expected one projection for sources and destinations"
            raise CheckpointError(f"{path}: {name} differs from lin_src.weight; {expected}")
        yield f"{prefix}<{relation}>.{rest.replace('lin_src', 'lin').replace('lin_dst', 'lin')}", tensor


def _infer_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    names = [match for name in state if (match := _CONV.match(name)) and match[3] == "att_src"]
    relations = tuple(match[2] for match in names if match[1].startswith("convs.0."))
    first = f"convs.0.convs.<{relations[0]}>"
    heads, width = state[f"{first}.att_src"].shape[1:]
    return {
        "features": state[f"{first}.lin.weight"].shape[1], "hidden": heads * width, "heads": heads, "relations": relations,
        "layers": len({match[1] for match in names}), "num_classes": len(state["lin.weight"]),
    }  # fmt: skip
