"""Weights of every lineage: names in ours, in AlphaFold's parameters and in what was made of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

_QKVG = ("q", "k", "v", "g")
# Ours -> names of the public OpenFold 2; where there are several, ours are theirs one after another.
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (".attention.linear_qkvg.weight", tuple(f".mha.linear_{x}.weight" for x in _QKVG)),
    (".attention.gate_bias", (".mha.linear_g.bias",)),
    (".attention.linear_o.", (".mha.linear_o.",)),
    (".template_pointwise_att.linear_q.", (".template_pointwise_att.mha.linear_q.",)),
    (".template_pointwise_att.linear_kv.", (".template_pointwise_att.mha.linear_k.", ".template_pointwise_att.mha.linear_v.")),
    (".template_pointwise_att.linear_o.", (".template_pointwise_att.mha.linear_o.",)),
    (".linear_ab.", (".linear_a_p.", ".linear_b_p.", ".linear_a_g.", ".linear_b_g.")),
    (".msa_att_col.linear_kv.", (".msa_att_col.global_attention.linear_k.", ".msa_att_col.global_attention.linear_v.")),
    (".linear_q_points.", (".linear_q_points.linear.",)),
    (".linear_kv_points.", (".linear_kv_points.linear.",)),
    (".bb_update.", (".bb_update.linear.",)),
    (".template_pair_embedder.", (".template_pair_embedder.linear.",)),
)


def public_names(name: str) -> list[str]:
    """What the public OpenFold calls the tensors that make up one of ours."""
    found = [name]
    for ours, theirs in _PARTS:
        if ours in f".{name}":
            found = [f".{name}".replace(ours, each)[1:] for each in theirs]
    return [_place(each) for each in found]


def _place(name: str) -> str:
    name = name.replace(".pair.", ".pair_stack.").replace("to_single.", "evoformer.linear.")
    if name.startswith("heads."):
        name = "aux_" + name
        for head in ("distogram", "masked_msa", "experimentally_resolved", "tm"):
            name = name.replace(f"heads.{head}.", f"heads.{head}.linear.")
    if name.startswith("evoformer.blocks."):
        name = name.replace(".msa_att_col.", ".msa_att_col._msa_att.")
    elif ".msa_att_col.linear_" in name:
        name = name.replace(".msa_att_col.", ".msa_att_col.global_attention.")
    return name


def from_public(theirs: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights for a model whose state dict is ``names``."""
    return {name: torch.cat([theirs[part] for part in public_names(name)]) for name in names}
