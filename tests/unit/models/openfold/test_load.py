"""OpenFold weights in the names, shapes and files of public codes."""

from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.models.openfold.config import OpenFoldConfig
from hpcai.models.openfold.load import Form, load_weights, public_names, to_public
from hpcai.models.openfold.model import OpenFold
from tests.reference_data import load_json

TINY = OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True})
# Differs from the published presets in every setting that is inferred from weights; sizes are unequal.
ODD = OpenFoldConfig.model_validate(load_json("openfold/odd_settings"))


def network(cfg: OpenFoldConfig = TINY) -> OpenFold:
    torch.manual_seed(0)
    model = OpenFold(cfg)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model


@cache
def meta_state(name: str) -> tuple[OpenFoldConfig, dict[str, Tensor]]:
    """Return the settings of a preset, and the state dict of its model on the meta device."""
    cfg = OpenFoldConfig.preset(name)
    with torch.device("meta"):
        return cfg, OpenFold(cfg).state_dict()


def equal_weights(actual: OpenFold, expected: OpenFold) -> bool:
    pairs = [(dict(m.state_dict()) | dict(m.named_buffers())) for m in (actual, expected)]
    return pairs[0].keys() == pairs[1].keys() and all(torch.equal(value, pairs[1][name]) for name, value in pairs[0].items())


@pytest.fixture(scope="module")
def public() -> dict[str, Tensor]:
    return to_public(network().state_dict(), TINY)


# ---- round trips


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("cfg", [TINY, OpenFoldConfig.preset("tiny", template=None), ODD])
def test_round_trip_of_every_form_is_bitwise_with_all_settings(cfg: OpenFoldConfig, form: Form, tmp_path: Path) -> None:
    model = network(cfg)
    model.save(tmp_path / "weights", form=form)
    loaded = load_weights(tmp_path / "weights")
    assert loaded.cfg == cfg and equal_weights(loaded, model) and not loaded.training
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    (tmp_path / "weights").write_bytes((tmp_path / "weights").read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="damaged"):
        load_weights(tmp_path / "weights")


def test_heads_of_template_attention_are_inferred_from_alphafold(tmp_path: Path) -> None:
    """Attention over templates may have another number of heads than attention within a template."""
    template = OpenFoldConfig.preset("tiny").template
    assert template is not None and template.pairs.heads == 2
    cfg = OpenFoldConfig.preset("tiny", template=template.model_copy(update={"heads": 8, "head": 2}))
    OpenFold(cfg).save(tmp_path / "w.npz", form="alphafold")
    assert load_weights(tmp_path / "w.npz").cfg == cfg


# ---- names


@pytest.mark.parametrize("preset, form, count", [
    ("initial", "openfold", 5044), ("initial", "mlperf_fused", 4419), ("model_1_ptm", "openfold", 5046),
    ("model_1_ptm", "alphafold", 338), ("model_3", "mlperf", 4915),
])  # fmt: skip
def test_the_full_network_has_the_names_of_each_form(preset: str, form: Form, count: int) -> None:
    cfg, state = meta_state(preset)
    saved = to_public(state, cfg, form)
    assert len(saved) == count and sum(value.numel() for value in saved.values()) == sum(value.numel() for value in state.values())


@pytest.mark.parametrize("name, form, expected", load_json("openfold/public_names"))
def test_names_are_those_of_the_public_codes(name: str, form: Form, expected: list[str]) -> None:
    assert public_names(name, form) == expected


# ---- AlphaFold's dims


# AlphaFold's array of block 1, the weight of the public code that is its transpose, and its dims in AlphaFold's paper and code.
ROW, PAIRS = "evoformer_iteration/msa_row_attention_with_pair_bias/", "evoformer.blocks.1.pair_stack."
LAYOUTS = [
    (f"{ROW}attention//query_w", "evoformer.blocks.1.msa_att_row.mha.linear_q.weight", (ODD.msa, 2, 6)),
    (f"{ROW}attention//gating_b", "evoformer.blocks.1.msa_att_row.mha.linear_g.bias", (2, 6)),
    (f"{ROW}/feat_2d_weights", "evoformer.blocks.1.msa_att_row.linear_z.weight", (ODD.pair, 2)),
    ("extra_msa_stack/msa_column_global_attention/attention//key_w",
     "extra_msa_stack.blocks.1.msa_att_col.global_attention.linear_k.weight", (ODD.extra.channels, 2)),
    ("evoformer_iteration/triangle_multiplication_outgoing/left_projection//weights", f"{PAIRS}tri_mul_out.linear_a_p.weight",
     (ODD.pair, 10)),
    ("evoformer_iteration/outer_product_mean//output_w", "evoformer.blocks.1.outer_product_mean.linear_out.weight",
     (3, 3, ODD.pair)),
]  # fmt: skip


@pytest.mark.parametrize("array, weight, dims", LAYOUTS)
def test_arrays_of_alphafold_have_its_dims(array: str, weight: str, dims: tuple[int, ...], tmp_path: Path) -> None:
    model = network(ODD)
    model.save(tmp_path / "params_model_1.npz", form="alphafold")
    actual = np.load(tmp_path / "params_model_1.npz")[f"alphafold/alphafold_iteration/evoformer/{array}"][1]
    assert np.array_equal(actual, to_public(model.state_dict(), ODD)[weight].numpy().T.reshape(dims))


# ---- errors


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"heads.more": torch.ones(2)}, r"none missing; 1 \(heads.more\) unexpected"),
        ({"evoformer.linear.bias": None}, r"1 \(evoformer.linear.bias\) missing; none unexpected"),
        ({"evoformer.linear.bias": torch.ones(31)}, r"evoformer.linear.bias is \(31,\), expected \(32,\)"),
        ({"evoformer.blocks.1.msa_att_row.linear_z.weight": torch.ones(5, 16)}, r"msa_att_row.linear_z.weight is \(5, 16\)"),
        ({"structure_module.ipa.head_weights": torch.ones(0)}, "with shapes of no OpenFold"),
    ],
)
def test_mismatched_weights_raise(changes: Any, text: str, public: dict[str, Tensor], tmp_path: Path) -> None:
    weights = {name: value for name, value in {**public, **changes}.items() if value is not None}
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=text):
        load_weights(tmp_path / "w.pt")


def test_mismatched_settings_raise(tmp_path: Path) -> None:
    model = network()
    model.save(tmp_path / "w.pt", form="mlperf")
    with pytest.raises(CheckpointError, match=r"none missing; 2 \(auxiliary_heads.tm.linear.weight, "):
        load_weights(tmp_path / "w.pt", OpenFoldConfig.preset("tiny"))
    model.save(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="contains settings that differ"):
        load_weights(tmp_path / "w.safetensors", ODD)
