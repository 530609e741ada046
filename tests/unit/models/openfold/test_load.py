"""OpenFold weights in every lineage's names, shapes and files."""

from collections.abc import Callable
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
from tests.proteins import masks

TINY = OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True})
COLUMN = "evoformer.blocks.7.msa_att_col."
# Unlike published in all that weights tell, and no two sizes alike.
ODD = OpenFoldConfig.model_validate({
    "msa": 24, "pair": 20, "single": 28, "blocks": 3,
    "rows": {"head": 6, "heads": 2, "outer": 3, "transition": 3}, "pairs": {"triangle": 10, "head": 5, "heads": 3, "transition": 1},
    "extra": {
        "channels": 12, "blocks": 2, "msa": {"head": 2, "heads": 5, "outer": 7, "transition": 2},
        "pairs": {"triangle": 9, "head": 4, "heads": 6, "transition": 5},
    },
    "template": {
        "channels": 14, "blocks": 2, "pairs": {"triangle": 11, "head": 8, "heads": 4, "transition": 6}, "head": 13, "heads": 4,
    },
    "structure": {"head": 5, "heads": 3, "query_points": 2, "value_points": 6, "angle": 17},
    "heads": {"plddt": 15},
})  # fmt: skip


def network(cfg: OpenFoldConfig = TINY) -> OpenFold:
    torch.manual_seed(0)
    model = OpenFold(cfg)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model


@cache
def bare(name: str) -> tuple[OpenFoldConfig, dict[str, Tensor]]:
    """The settings of a preset, and the names and shapes of its weights without their values."""
    cfg = OpenFoldConfig.preset(name)
    with torch.device("meta"):
        return cfg, OpenFold(cfg).state_dict()


def same(found: OpenFold, expected: OpenFold) -> bool:
    pairs = [(dict(m.state_dict()) | dict(m.named_buffers())) for m in (found, expected)]
    return pairs[0].keys() == pairs[1].keys() and all(torch.equal(value, pairs[1][name]) for name, value in pairs[0].items())


@pytest.fixture(scope="module")
def public() -> dict[str, Tensor]:
    return to_public(network().state_dict(), TINY)


# ---- round trips


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("cfg", [TINY, OpenFoldConfig.preset("tiny", template=None), ODD])
def test_a_file_of_any_lineage_gives_every_bit_and_all_settings_back(cfg: OpenFoldConfig, form: Form, tmp_path: Path) -> None:
    model = network(cfg)
    model.save(tmp_path / "weights", form=form)
    found = load_weights(tmp_path / "weights")
    assert found.cfg == cfg and same(found, model) and not found.training
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    (tmp_path / "weights").write_bytes((tmp_path / "weights").read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="damaged"):
        load_weights(tmp_path / "weights")


def test_what_weights_do_not_tell_is_taken_from_given_settings(tmp_path: Path) -> None:
    told = {"passes": 3, "dropout": 0.2}
    cfg = ODD.model_copy(update={"structure": ODD.structure.model_copy(update=told), "checkpoint": True})
    network(cfg).save(tmp_path / "w.pt", form="openfold")
    assert load_weights(tmp_path / "w.pt").cfg == ODD
    assert load_weights(tmp_path / "w.pt", cfg).cfg == cfg


def test_alphafold_s_file_tells_the_heads_of_the_attention_over_templates(tmp_path: Path) -> None:
    """They may be other heads than those within a template."""
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
def test_the_full_network_has_the_names_of_each_lineage(preset: str, form: Form, count: int) -> None:
    cfg, ours = bare(preset)
    theirs = to_public(ours, cfg, form)
    assert len(theirs) == count and sum(value.numel() for value in theirs.values()) == sum(value.numel() for value in ours.values())


@pytest.mark.parametrize(
    "ours, form, theirs",
    [
        (f"{COLUMN}attention.gate_bias", "openfold", [f"{COLUMN}_msa_att.mha.linear_g.bias"]),
        (f"{COLUMN}attention.gate_bias", "mlperf_fused", ["evoformer_stack.blocks.7.msa_att_col.mha.linear_g_bias"]),
        ("extra_msa_stack.blocks.0.outer_product_mean.linear_1.weight", "openfold_v1",
         ["extra_msa_stack.blocks.0.core.outer_product_mean.linear_1.weight"]),
        ("evoformer.blocks.12.pair.tri_mul_in.linear_ab.bias", "alphafold",
         [f"alphafold/alphafold_iteration/evoformer/evoformer_iteration/triangle_multiplication_incoming/{part}//bias"
          for part in ("right_projection", "left_projection", "right_gate", "left_gate")]),
        ("template_embedder.template_pointwise_att.linear_kv.weight", "mlperf_fused",
         ["template_pointwise_attention.mha.linear_kv.weight"]),
        ("template_embedder.template_single_embedder.linear_2.bias", "openfold_v1", ["template_angle_embedder.linear_2.bias"]),
        ("structure_module.transition.layers.0.linear_3.bias", "mlperf", ["structure_module.transition.linear_3.bias"]),
        ("structure_module.ipa.head_weights", "alphafold",
         ["alphafold/alphafold_iteration/structure_module/fold_iteration/invariant_point_attention//trainable_point_weights"]),
        ("input_embedder.linear_relpos.bias", "alphafold", ["alphafold/alphafold_iteration/evoformer/pair_activiations//bias"]),
    ],
)  # fmt: skip
def test_names_are_those_of_the_public_codes(ours: str, form: Form, theirs: list[str]) -> None:
    assert public_names(ours, form) == theirs


# ---- AlphaFold's shapes: its layers as its paper and code have them, from arrays of the file, in numpy


def norm(x: Any, p: Callable[[str], Any], name: str) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p(f"{name}//scale") + p(f"{name}//offset")


def linear(x: Any, p: Callable[[str], Any], name: str) -> Any:
    return x @ p(f"{name}//weights") + p(f"{name}//bias")


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def row_attention(m: Any, z: Any, p: Callable[[str], Any]) -> Any:
    m, bias = norm(m, p, "/query_norm"), np.einsum("ijc,ch->hij", norm(z, p, "/feat_2d_norm"), p("//feat_2d_weights"))
    q, k, v, g = (np.einsum("sra,ahc->srhc", m, p(f"/attention//{name}_w")) for name in ("query", "key", "value", "gating"))
    weights = softmax(np.einsum("sihc,sjhc->shij", q, k) / np.sqrt(q.shape[-1]) + bias)
    found = np.einsum("shij,sjhc->sihc", weights, v) * sigmoid(g + p("/attention//gating_b"))
    return np.einsum("sihc,hco->sio", found, p("/attention//output_w")) + p("/attention//output_b")


def global_attention(m: Any, z: Any, p: Callable[[str], Any]) -> Any:
    m = norm(m, p, "/query_norm")
    q = np.einsum("ra,ahc->rhc", m.mean(0), p("/attention//query_w"))
    k, v = (np.einsum("sra,ac->rsc", m, p(f"/attention//{name}_w")) for name in ("key", "value"))
    found = np.einsum("rhs,rsc->rhc", softmax(np.einsum("rhc,rsc->rhs", q, k) / np.sqrt(q.shape[-1])), v)
    g = sigmoid(np.einsum("sra,ahc->srhc", m, p("/attention//gating_w")) + p("/attention//gating_b"))
    return np.einsum("srhc,hco->sro", found * g, p("/attention//output_w")) + p("/attention//output_b")


def triangle(equation: str) -> Callable[[Any, Any, Callable[[str], Any]], Any]:
    def multiplied(m: Any, z: Any, p: Callable[[str], Any]) -> Any:
        z = norm(z, p, "/layer_norm_input")
        left, right = (linear(z, p, f"/{x}_projection") * sigmoid(linear(z, p, f"/{x}_gate")) for x in ("left", "right"))
        found = linear(norm(np.einsum(equation, left, right), p, "/center_layer_norm"), p, "/output_projection")
        return found * sigmoid(linear(z, p, "/gating_linear"))

    return multiplied


def outer_product(m: Any, z: Any, p: Callable[[str], Any]) -> Any:
    m = norm(m, p, "/layer_norm_input")
    left, right = linear(m, p, "/left_projection"), linear(m, p, "/right_projection")
    found = np.einsum("sic,sjd,cdo->ijo", left, right, p("//output_w")) + p("//output_b")
    return found / (len(m) + 1e-3)


@pytest.mark.parametrize(
    "stack, ours, theirs, layer",
    [
        ("evoformer", "msa_att_row", "msa_row_attention_with_pair_bias", row_attention),
        ("extra_msa_stack", "msa_att_col", "msa_column_global_attention", global_attention),
        ("evoformer", "pair.tri_mul_out", "triangle_multiplication_outgoing", triangle("ikc,jkc->ijc")),
        ("evoformer", "pair.tri_mul_in", "triangle_multiplication_incoming", triangle("kjc,kic->ijc")),
        ("evoformer", "outer_product_mean", "outer_product_mean", outer_product),
    ],
)
def test_a_layer_of_alphafold_s_file_is_ours(stack: str, ours: str, theirs: str, layer: Any, tmp_path: Path) -> None:
    model = network(ODD).double()
    model.save(tmp_path / "params_model_1.npz", form="alphafold")
    arrays, block = np.load(tmp_path / "params_model_1.npz"), 1
    place = "alphafold/alphafold_iteration/evoformer/" + {"evoformer": "evoformer_iteration"}.get(stack, stack) + f"/{theirs}"
    random = np.random.default_rng(0)
    m, z = random.normal(size=(4, 5, ODD.msa if stack == "evoformer" else ODD.extra.channels)), random.normal(size=(5, 5, ODD.pair))
    expected = layer(m, z, lambda name: arrays[place + name][block].astype(np.float64))
    rows, pairs = torch.from_numpy(m)[None], torch.from_numpy(z)[None]
    module = load_weights(tmp_path / "params_model_1.npz").double().get_submodule(f"{stack}.blocks.{block}.{ours}")
    seen = rows.new_ones(1, 4, 5)
    given: Any = (pairs, pairs.new_ones(1, 5, 5)) if "tri" in ours else (rows, seen)
    given = (rows, masks(seen, seen)) if ours == "outer_product_mean" else given
    found = module(*given, pairs) if ours == "msa_att_row" else module(*given)
    np.testing.assert_allclose(found[0].detach().numpy(), expected, rtol=1e-7, atol=1e-7)  # a mean divides by its number and 1e-8


# ---- refusals


def changed(public: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    found = {**public, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"heads__more": torch.ones(2)}, r"none missing; 1 \(heads.more\) unexpected"),
        ({"evoformer__linear__bias": None}, r"1 \(evoformer.linear.bias\) missing; none unexpected"),
        ({"evoformer__linear__bias": torch.ones(31)}, r"evoformer.linear.bias is \(31,\), expected \(32,\)"),
        ({"evoformer__blocks__1__msa_att_row__linear_z__weight": torch.ones(5, 16)}, r"msa_att_row.linear_z.weight is \(5, 16\)"),
        ({"structure_module__ipa__head_weights": torch.ones(0)}, "in shapes of no OpenFold"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(changes: Any, text: str, public: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(changed(public, **changes), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=text):
        load_weights(tmp_path / "w.pt")


def test_a_mixture_of_lineages_is_refused_by_the_first_names(public: dict[str, Tensor], tmp_path: Path) -> None:
    old = to_public(network().state_dict(), TINY, "openfold_v1")
    mixed = {name: value for name, value in public.items() if ".pair_stack.tri_" not in name}
    torch.save(mixed | {name: value for name, value in old.items() if ".core.tri_" in name}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'openfold'.*pair_stack.tri_mul_out.* missing; .*core.tri_mul_out.* unexpected"):
        load_weights(tmp_path / "w.pt")
    torch.save({"encoder.weight": torch.ones(2, 2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"no OpenFold that is known: 1 \(encoder.weight\); expected aux_heads"):
        load_weights(tmp_path / "w.pt")


def test_settings_that_are_not_the_weights_are_refused(tmp_path: Path) -> None:
    model = network()
    model.save(tmp_path / "w.pt", form="mlperf")
    with pytest.raises(CheckpointError, match=r"none missing; 2 \(auxiliary_heads.tm.linear.weight, "):
        load_weights(tmp_path / "w.pt", OpenFoldConfig.preset("tiny"))
    model.save(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="holds its own settings"):
        load_weights(tmp_path / "w.safetensors", ODD)
