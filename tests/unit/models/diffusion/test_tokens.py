"""DiT and Flux: what they are asked, what they keep, what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError, DataError
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import DiTConfig, FluxConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.load import from_config, save_folder, to_config
from hpcai.models.diffusion.tokens import modulated
from hpcai.nn.products import Joint
from hpcai.settings import StepConfig
from hpcai.train.choices import narrow_products
from hpcai.train.compiling import blocks
from tests.unit.models.watched import kept

pytestmark = pytest.mark.usefixtures("one_thread")
DIT: dict[str, Any] = {"inputs": 2, "outputs": 2, "size": 8, "layers": 2, "heads": 2, "head": 16, "classes": 3, "zero": False}
FLUX: dict[str, Any] = {
    "inputs": 8, "double": 2, "single": 2, "heads": 2, "head": 16, "tokens": 5, "pooled": 3, "turned": (4, 4, 8), "zero": False,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {"dit": DIT, "flux": FLUX}
WAYS = ("none", "selective", "layers")
WORDS, TOKENS, SAMPLES = 4, 16, 3
ASKED = Condition(tokens=torch.linspace(-1, 1, 60).view(3, 4, 5), pooled=torch.linspace(1, -1, 9).view(3, 3))


def network(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    words = SIZES[kind] | changes
    return DiT(DiTConfig(**words)) if kind == "dit" else Flux(FluxConfig(**words))


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 2, 8, 8, generator=draw), torch.rand(SAMPLES, generator=draw)


def asked(kind: str) -> Condition:
    return Condition(classes=torch.tensor([0, 2, 3])) if kind == "dit" else ASKED


def test_classes_are_left_out_in_training_alone() -> None:
    model, (x, time), seen = network("dit", dropout=0.5), samples(), []
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    given = x[:1].expand(400, -1, -1, -1), time[:1].expand(400), Condition(classes=torch.zeros(400, dtype=torch.int64))
    with torch.no_grad():
        model(*given)
        assert torch.equal(*seen), "all blocks are told the same"
        assert set(seen[0].tolist()) == {0, 3} and 150 < int((seen[0] == 3).sum()) < 250
        model.eval()(*given)
        assert not seen[2].any()


@pytest.mark.parametrize("kind", SIZES)
def test_a_new_one_says_nothing_where_its_last_weights_are_zero(kind: str) -> None:
    model, (x, time) = network(kind, zero=True), samples()
    assert not model(x, time, asked(kind)).any()
    zero = {name.removesuffix(".weight") for name, p in model.named_parameters() if name.endswith("weight") and not p.any()}
    modulations = [name for name, _ in model.named_modules() if name.endswith(("norm1.linear", "context.linear", "norm.linear"))]
    assert zero == {*modulations, *(("proj_out_1", "proj_out_2") if kind == "dit" else ("norm_out.linear", "proj_out"))}
    assert all(p.any() != name.endswith("bias") for name, p in network(kind).named_parameters())


def test_a_modulated_norm_is_the_formula_and_keeps_its_input_alone() -> None:
    draw = torch.Generator().manual_seed(2)
    given = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6), (2, 6), (2, 6))]
    with kept(nn.ParameterList(given)) as bytes_:
        found = modulated(*given)
    x, shift, scale = given
    formula = F.layer_norm(x, (6,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(found, formula, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(modulated, given)
    assert sum(bytes_.values()) == 2 * 2 * 5 * 8, "means and deviations"


def test_a_small_scale_is_not_lost_beside_1() -> None:
    """Half a step of bfloat16 above 1 is none of it, but shows in numbers whose own steps are finer for their size."""
    x = torch.randn(1, 1, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    shift, scale = torch.zeros(1, 512, dtype=torch.bfloat16), torch.full((1, 512), 2.0**-8, dtype=torch.bfloat16)
    assert torch.equal(1 + scale, torch.ones_like(scale))
    assert not torch.equal(modulated(x, shift, scale), modulated(x, shift, 0 * scale))


# ---- what is computed again


def learnt(kind: str, recompute: str, layers: int, **autocast: Any) -> tuple[list[Tensor], int]:
    """Gradients, and bytes of what is kept but parameters; ``layers`` of a DiT, or single ones of a Flux."""
    model = network(kind, recompute=recompute, **{"layers" if kind == "dit" else "single": layers})
    with kept(model) as bytes_, torch.autocast("cpu", **{"enabled": False, **autocast}):
        found = model(*samples(), asked(kind))
    found.square().sum().backward()
    return [p.grad for p in model.parameters()], sum(bytes_.values())


@pytest.mark.parametrize("autocast", [{}, {"enabled": True, "dtype": torch.bfloat16}], ids=["wide", "narrow"])
@pytest.mark.parametrize("kind", SIZES)
def test_gradients_are_the_same_to_the_bit(kind: str, autocast: dict[str, Any]) -> None:
    expected, _ = learnt(kind, "none", 2, **autocast)
    for way in WAYS[1:]:
        assert all(map(torch.equal, learnt(kind, way, 2, **autocast)[0], expected)), way


@pytest.mark.parametrize("kind", SIZES)
def test_bytes_that_a_layer_keeps(kind: str) -> None:
    """In units of the channels of its tokens, beside some numbers of each row and of each sample."""
    found, tokens = {}, TOKENS + (WORDS if kind == "flux" else 0)
    for way in WAYS:
        two, three = (learnt(kind, way, layers)[1] for layers in (2, 3))
        found[way] = (three - two) / (SAMPLES * tokens * 32 * 4)
    # A sum, q, k, v, attention, its product, up; of a DiT also the second sum and product. A Flux turns q and k, which both ways
    # keep as they were; again are made the norms, what the last product reads, and the turned.
    products = 5 + 4 + (3 if kind == "dit" else 1)
    again = (2 + 4) if kind == "dit" else (1 + 5 + 2)
    assert found["layers"] < 1.6
    assert products <= found["selective"] <= products + 1.3, found
    assert found["none"] - found["selective"] == pytest.approx(again, abs=0.2), found


# ---- parts of a step


@pytest.mark.parametrize("kind", SIZES)
def test_layers_multiply_in_8_bits_but_those_of_few_rows_and_the_outermost(kind: str) -> None:
    model, (x, time) = network(kind), samples()
    before = model(x, time, asked(kind))
    narrow_products(model, StepConfig(products="fp8"), torch.device("cpu"))
    names = {name for name, part in model.named_modules() if isinstance(part, Joint)}
    assert not [name for name in names if "embed" in name or "norm" in name or name.startswith("proj")]
    linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "transformer_blocks" in name]
    assert names == {name for name in linears if "norm" not in name} and names
    found = model(x, time, asked(kind))
    assert 0 < (found - before).norm() < 0.2 * before.norm()
    found.square().sum().backward()
    assert len(blocks(model)) == (2 if kind == "dit" else 4), "which are compiled and gathered one by one"


# ---- what is refused

X, TIME = samples()
WRONG: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "odd sides": ("flux", (X[:, :, :7], TIME, ASKED), r"samples are \[3, 2, 7, 8\], expected \[B, 2, H, W\] with even H and W"),
    "tokens of other channels": (
        "flux", (X, TIME, ASKED._replace(tokens=torch.ones(3, 4, 6))),
        r"condition.tokens is \[3, 4, 6\], expected \[3, N, 5\] for samples \[3, 2, 8, 8\]",
    ),
    "no pooled": ("flux", (X, TIME, ASKED._replace(pooled=None)), r"needs condition.pooled \[3, 3\]; give it"),
    "guidance": ("flux", (X, TIME, ASKED._replace(guidance=TIME)), "has no use for condition.guidance; leave it out, or change"),
    "one time": ("flux", (X, TIME[0], ASKED), r"Flux: time is \[\], expected \[3\]"),
    "another size": ("dit", (X[:, :, :6, :6], TIME), r"samples are \[3, 2, 6, 6\], expected \[B, 2, 8, 8\]; cut them, or set size"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    kind, given, told = WRONG[case]
    with pytest.raises(DataError, match=told):
        network(kind)(*given)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another class": ({"_class_name": "UNet3DModel"}, "_class_name is 'UNet3DModel'; expected one of UNet2DConditionModel, "),
    "a norm": ({"_class_name": "DiTTransformer2DModel", "norm_eps": 1e-6}, "norm_eps is 1e-06; networks here know 1e-05 alone"),
    "patches": ({"_class_name": "FluxTransformer2DModel", "patch_size": 2}, "patch_size is 2; networks here know 1 alone"),
    "other outputs": ({"_class_name": "FluxTransformer2DModel", "out_channels": 3}, "out_channels is 3; networks here know null"),
    "something new": ({"_class_name": "FluxTransformer2DModel", "experts": 4}, "experts is 4; networks here know null alone"),
    "of another kind": ({"_class_name": "FluxTransformer2DModel", "num_layers": "two"}, "(?s)config.json: .*valid integer"),
    "angles": ({"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [2, 2, 2]}, "must be even and add up to a head's 128"),
    "an old one of another kind": ({"_class_name": "Transformer2DModel"}, "attention_bias is false; networks here"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_settings_that_cannot_be_had_are_named(case: str) -> None:
    found, told = OTHERS[case]
    with pytest.raises(ConfigError, match=told):
        from_config(found, Path("config.json"))


def test_settings_of_others_that_say_the_same() -> None:
    old = {
        "_class_name": "Transformer2DModel", "_diffusers_version": "0.12.0", "activation_fn": "gelu-approximate", "out_channels": 8,
        "attention_bias": True, "cross_attention_dim": None, "norm_elementwise_affine": False, "norm_type": "ada_norm_zero",
        "num_embeds_ada_norm": 1000, "num_vector_embeds": None, "only_cross_attention": False, "patch_size": 2, "sample_size": 32,
        "attention_head_dim": 72, "num_attention_heads": 16, "num_layers": 28, "in_channels": 4,
    }  # fmt: skip
    path = Path("config.json")
    assert from_config(old, path)[1] == DiTConfig()
    flux = {"_class_name": "FluxTransformer2DModel", "in_channels": 8, "out_channels": 8}
    assert from_config(flux, path)[1] == FluxConfig(inputs=8)
    assert from_config({"_class_name": "DiTTransformer2DModel"}, path)[1] == DiTConfig(outputs=4), "as many as there are inputs"
    for cfg in (DiTConfig(**DIT), FluxConfig(**FLUX)):
        assert from_config(to_config(cfg)[1], path)[1] == cfg.model_copy(update={"zero": True})
    with pytest.raises(CheckpointError, match="no class for these settings of a FluxConfig: theta 500"):
        save_folder({}, FluxConfig(theta=500.0), path)
    with pytest.raises(ValueError, match="a token of 6 channels cannot hold 2 x 2 places; give a multiple of 4"):
        FluxConfig(inputs=6)
