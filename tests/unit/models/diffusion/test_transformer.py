"""DiT, Flux and SD3: conditions, saved tensors, and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError, DataError
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import DiffusionConfig, DiTConfig, FluxConfig, SD3Config
from hpcai.models.diffusion.load import from_config, save_folder, to_config
from hpcai.models.diffusion.model import Diffusion
from hpcai.models.diffusion.transformer import modulate
from hpcai.nn.matmul import FusedLinear
from hpcai.settings import StepConfig
from hpcai.train.auto_settings import enable_float8
from hpcai.train.compiling import repeated_blocks
from tests.reference_data import load_json
from tests.unit.models.operation_checks import saved_tensor_bytes

DIT: dict[str, Any] = {"inputs": 2, "outputs": 2, "size": 8, "layers": 2, "heads": 2, "head": 16, "classes": 3, "zero": False}
FLUX: dict[str, Any] = {
    "inputs": 8, "double": 2, "single": 2, "heads": 2, "head": 16, "tokens": 5, "pooled": 3, "turned": (4, 4, 8), "zero": False,
}  # fmt: skip
SD3: dict[str, Any] = {
    "inputs": 2, "outputs": 2, "size": 8, "positions": 6, "layers": 3, "heads": 2, "head": 16, "tokens": 5, "pooled": 3,
    "dual_attention": (0, 1), "zero": False,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {"dit": DIT, "flux": FLUX, "sd3": SD3}
RECOMPUTE = ("none", "selective", "layers")
SAMPLES = 3
TEXT_CONDITION = Condition(tokens=torch.linspace(-1, 1, 60).view(3, 4, 5), pooled=torch.linspace(1, -1, 9).view(3, 3))


def network(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return Diffusion(DiffusionConfig(**{"unet": None, kind: SIZES[kind] | changes})).network


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 2, 8, 8, generator=draw), torch.rand(SAMPLES, generator=draw)


def condition(kind: str) -> Condition:
    return Condition(classes=torch.tensor([0, 2, 3])) if kind == "dit" else TEXT_CONDITION


def test_classes_are_dropped_in_training_only() -> None:
    model, (x, time), classes = network("dit", dropout=0.5), samples(), []
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder["embedding_table"].register_forward_hook(lambda _, inputs, out: classes.append(inputs[0]))
    inputs = x[:1].expand(400, -1, -1, -1), time[:1].expand(400), Condition(classes=torch.zeros(400, dtype=torch.int64))
    with torch.no_grad():
        model(*inputs)
        assert torch.equal(*classes), "all blocks receive the same classes"
        assert set(classes[0].tolist()) == {0, 3} and 150 < int((classes[0] == 3).sum()) < 250
        model.eval()(*inputs)
        assert not classes[2].any()


@pytest.mark.parametrize("kind", SIZES)
def test_a_new_network_returns_zero_if_its_last_weights_are_zero(kind: str) -> None:
    model, (x, time) = network(kind, zero=True), samples()
    assert not model(x, time, condition(kind)).any()
    zero = {name.removesuffix(".weight") for name, p in model.named_parameters() if name.endswith("weight") and not p.any()}
    modulations = [name for name, _ in model.named_modules() if name.endswith(("norm1.linear", "context.linear", "norm.linear"))]
    assert zero == {*modulations, *(("proj_out_1", "proj_out_2") if kind == "dit" else ("norm_out.linear", "proj_out"))}
    assert all(p.any() != name.endswith("bias") for name, p in network(kind).named_parameters())


def test_modulate_is_the_formula_and_saves_its_input_only() -> None:
    draw = torch.Generator().manual_seed(2)
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6), (2, 6), (2, 6))]
    with saved_tensor_bytes(nn.ParameterList(inputs)) as saved:
        actual = modulate(*inputs)
    x, shift, scale = inputs
    formula = F.layer_norm(x, (6,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(actual, formula, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(modulate, inputs)
    assert sum(saved.values()) == 2 * 2 * 5 * 8, "means and deviations"


# ---- recomputation


def gradients(kind: str, recompute: str, **autocast: Any) -> list[Tensor]:
    """Return the gradients of a step."""
    model = network(kind, recompute=recompute)
    with torch.autocast("cpu", **{"enabled": False, **autocast}):
        outputs = model(*samples(), condition(kind))
    outputs.square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("autocast", [{}, {"enabled": True, "dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", SIZES)
def test_recomputation_keeps_gradients_bitwise(kind: str, autocast: dict[str, Any]) -> None:
    expected = gradients(kind, "none", **autocast)
    for recompute in RECOMPUTE[1:]:
        assert all(map(torch.equal, gradients(kind, recompute, **autocast), expected)), recompute


# ---- parts of a step


@pytest.mark.parametrize("kind", SIZES)
def test_linear_layers_use_float8_except_modulations_and_the_outermost(kind: str) -> None:
    model, (x, time) = network(kind), samples()
    expected = model(x, time, condition(kind))
    enable_float8(model, StepConfig(matmul="fp8"), torch.device("cpu"))
    names = {name for name, part in model.named_modules() if isinstance(part, FusedLinear)}
    assert not [name for name in names if "embed" in name or "norm" in name or name.startswith("proj")]
    linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "transformer_blocks" in name]
    assert names == {name for name in linears if "norm" not in name} and names
    actual = model(x, time, condition(kind))
    assert 0 < (actual - expected).norm() < 0.2 * expected.norm()
    actual.square().sum().backward()
    assert len(repeated_blocks(model)) == {"dit": 2, "flux": 4, "sd3": 3}[kind], "blocks that are compiled and gathered separately"


# ---- errors

UNSUPPORTED = load_json("refused/transformers")


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_settings_are_named(case: str) -> None:
    config, message = UNSUPPORTED[case]
    with pytest.raises(ConfigError, match=message):
        from_config(config, Path("config.json"))


def test_equivalent_settings_of_diffusers() -> None:
    old = load_json("diffusion/equivalent_settings")
    path = Path("config.json")
    assert from_config(old, path)[1] == DiTConfig()
    flux = {"_class_name": "FluxTransformer2DModel", "in_channels": 8, "out_channels": 8}
    assert from_config(flux, path)[1] == FluxConfig(inputs=8)
    assert from_config({"_class_name": "DiTTransformer2DModel"}, path)[1] == DiTConfig(outputs=4), "outputs default to inputs"
    for cfg in (DiTConfig(**DIT), FluxConfig(**FLUX), SD3Config(**SD3)):
        assert from_config(to_config(cfg) or {}, path)[1] == cfg.model_copy(update={"zero": True})
    with pytest.raises(CheckpointError, match="no class for these settings of a FluxConfig: theta 500"):
        save_folder({}, FluxConfig(theta=500.0), path)
    with pytest.raises(ValueError, match="a token of 6 channels cannot hold 2 x 2 pixels; give a multiple of 4"):
        FluxConfig(inputs=6)


def test_samples_beyond_the_table_of_positions_raise() -> None:
    with pytest.raises(DataError, match=r"SD3: samples are \[3, 2, 16, 14\], .* multiples of 2 up to 12 as H and W; pad or crop"):
        network("sd3")(torch.zeros(3, 2, 16, 14), torch.zeros(3), TEXT_CONDITION)
