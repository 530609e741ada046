"""Frozen weights in int8 or bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai import dist
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig, LoRAConfig
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.nn.quantized import QuantizedLinear, int8_scales, quantize_int8
from hpcai.parallel.tensor import dequantize, quantize
from hpcai.settings import StepConfig
from hpcai.train.auto_settings import cast_to_bf16
from hpcai.train.step import Step
from tests.reference_data import DATA, load_arrays

SIZES: dict[str, Any] = {"vocabulary": 40, "width": 128, "layers": 3, "heads": 4, "key_heads": 2, "inner": 192, "positions": 32}


def new_layer(bits: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, dtype=dtype)
    quantize(layer, bits)
    return layer


@pytest.mark.parametrize("bits", ["8bit", "bf16"])
def test_output_and_gradient_equal_those_of_the_dequantized_weight(bits: str) -> None:
    layer, x = new_layer(bits), torch.randn(2, 5, 96, dtype=torch.float64, requires_grad=True)
    reference = nn.Linear(96, 40, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(layer.weight.double() if bits == "bf16" else layer.weight.double() * layer.scale[:, None])
        reference.bias.copy_(layer.bias)
    result, expected = layer(x), reference(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(result)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (result, expected)), rtol=0, atol=1e-13)
    assert layer.weight.dtype == {"8bit": torch.int8, "bf16": torch.bfloat16}[bits]
    dequantize(layer, torch.float64)
    assert type(layer) is nn.Linear and torch.equal(layer.weight, reference.weight) and [*layer.state_dict()] == ["weight", "bias"]


def test_the_quantization_error_is_at_most_half_a_scale() -> None:
    weight = torch.randn(50, 300) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0
    scale = int8_scales(weight.abs().amax(1))
    result = quantize_int8(weight, scale)
    assert torch.equal(scale, scale.bfloat16().float()) and result.abs().amax() <= 127 and not result[7].any()
    assert ((result * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    rows = torch.arange(50) != 7
    assert (scale[rows] * 127 >= weight.abs().amax(1)[rows]).all() and (scale[rows] * 125.5 <= weight.abs().amax(1)[rows]).all()


def test_non_finite_weights_give_non_finite_outputs() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        layer = nn.Linear(8, 3)
        layer.weight.data[1, 2] = bad
        quantize(layer, "8bit")
        assert layer(torch.ones(1, 8)).isfinite().tolist() == [[True, False, True]]


@pytest.mark.parametrize("bits", ["8bit", "bf16"])
def test_under_autocast_outputs_are_bf16_and_gradients_keep_their_dtype(bits: str) -> None:
    layer, x = new_layer(bits, torch.float32), torch.randn(4, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.02, atol=0.02)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_no_dequantized_weight_is_saved_for_the_backward_pass() -> None:
    layer, x, saved = new_layer("8bit", torch.float32), torch.randn(4, 96, requires_grad=True), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in saved} <= {layer.weight.data_ptr(), layer.scale.data_ptr()} and saved


def new_model(**kwargs: Any) -> LLM:
    with deferred(0):
        model = LLM(LLMConfig(**SIZES))
    return llm.adapt(model, LoRAConfig(rank=2, **kwargs))


def test_weights_take_at_most_1_1_bytes_per_element() -> None:
    layers = [layer for layer in materialize(new_model(base_dtype="8bit"), "cpu").modules() if isinstance(layer, QuantizedLinear)]
    nbytes = sum(parameter.nbytes for layer in layers for parameter in layer.parameters(recurse=False))
    assert len(layers) == 7 * 3 and 1 < nbytes / sum(layer.weight.numel() for layer in layers) <= 1.1


@pytest.mark.parametrize("bits", ["8bit", "bf16"])
def test_merging_adapters_keeps_the_outputs(bits: Any) -> None:
    model = materialize(new_model(base_dtype=bits, targets=("q_proj", "down_proj")), "cpu").double()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = model(tokens)
        llm.merge(model)  # type: ignore[arg-type]
        torch.testing.assert_close(model(tokens), before, rtol=0, atol=1e-11)
    assert not any(isinstance(part, QuantizedLinear) for part in model.modules())
    assert all(p.requires_grad and p.dtype == torch.float64 for p in model.parameters())


def train_adapters(bits: Any) -> tuple[float, float]:
    """Train adapters for 30 steps in bfloat16, and return the first and the last loss."""
    model = llm.load_weights(DATA / "llm" / "llama31_tiny" / "hf").train()
    with deferred(0):
        llm.adapt(model, LoRAConfig(rank=4, base_dtype=bits, targets=("q_proj", "v_proj", "o_proj", "down_proj")))
    step = Step(model, llm.loss, StepConfig(precision="bf16", lr=0.005, optimizer="adamw", capture="none"), dist.single_process())
    rows = llm.Batch(torch.from_numpy(load_arrays("llm/llama31_tiny/io")["ids"]))
    losses = [float(total) / float(count) for total, count in (step(rows)["loss"] for _ in range(30))]
    return losses[0], losses[-1]


def test_adapters_train_equally_with_int8_and_bf16_weights() -> None:
    (first, last), (first16, last16) = train_adapters("8bit"), train_adapters("bf16")
    assert abs(first - first16) < 0.002 * first16, (first, first16)
    assert first16 - last16 > 5 and abs((first - last) / (first16 - last16) - 1) < 0.01, (first, first16, last, last16)


def test_conversion_to_bf16_keeps_int8_weights_and_their_scales() -> None:
    model: Any = materialize(new_model(base_dtype="8bit"), "cpu")
    layer = model.model.layers[0].self_attn.q_proj
    weight, scale = layer.weight.clone(), layer.scale.clone()
    cast_to_bf16(model)
    assert torch.equal(layer.weight, weight) and layer.weight.dtype == torch.int8
    assert layer.scale.dtype == torch.bfloat16 and torch.equal(layer.scale.float(), scale)
