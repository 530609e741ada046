"""Fused linear layers of one input, and matrix products in FP8."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai import dist
from hpcai.kernels.float8 import quantize
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig, LoRAConfig
from hpcai.nn.matmul import FusedLinear, convert_to_float8, fused_linear
from hpcai.settings import StepConfig
from hpcai.train import compiling
from hpcai.train.step import Step

SIZES: dict[str, Any] = {"vocabulary": 61, "width": 32, "layers": 2, "heads": 2, "inner": 48, "positions": 32}


def round_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    quantized = quantize(x.reshape(-1, x.shape[-1]), dtype)
    assert quantized.rows is not None
    return (quantized.rows.to(x.dtype) * quantized.scale.to(x.dtype)).view(x.shape)


def build_layers(count: int = 3, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    linears = [nn.Linear(32, 16 * (n + 1), bias, dtype=torch.float64) for n in range(count)]
    for number, linear in enumerate(linears):
        convert_to_float8(linear, f"layer {number}")
    return linears


def test_fp8_outputs_and_gradients_equal_those_of_rounded_factors() -> None:
    linears, x = build_layers(), torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    ys = fused_linear(x, *linears)
    grads = [torch.randn_like(y) for y in ys]
    actual = torch.autograd.grad(ys, [x, *(linear.weight for linear in linears), *(linear.bias for linear in linears)], grads)
    grad_input = torch.zeros_like(x)
    for number, (linear, y, grad) in enumerate(zip(linears, ys, grads)):
        torch.testing.assert_close(y, F.linear(round_fp8(x), round_fp8(linear.weight), linear.bias), rtol=1e-13, atol=1e-13)
        narrow = round_fp8(grad, torch.float8_e5m2)
        grad_input += narrow @ round_fp8(linear.weight)
        grad_weight = narrow.flatten(0, 1).T @ round_fp8(x).flatten(0, 1)
        torch.testing.assert_close(actual[1 + number], grad_weight, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(actual[1 + len(linears) + number], grad.sum((0, 1)))
    torch.testing.assert_close(actual[0], grad_input, rtol=1e-13, atol=1e-13)


def test_fused_layers_equal_separate_ones() -> None:
    fp8_layers, x = build_layers(), torch.randn(7, 32, dtype=torch.float64, requires_grad=True)
    mixed = [*fp8_layers, nn.Linear(32, 16, dtype=torch.float64)]
    for linears in (fp8_layers, mixed):
        ys, separate = fused_linear(x, *linears), [linear(x) for linear in linears]
        assert all(torch.equal(actual, expected) for actual, expected in zip(ys, separate))
        actual, expected = (torch.autograd.grad([y.square().sum() for y in outputs], x)[0] for outputs in (ys, separate))
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_no_input_is_saved_for_frozen_weights() -> None:
    (linear,), x = build_layers(1), torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    linear.requires_grad_(False)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = linear(x)
    assert sum(tensor.numel() for tensor in saved) <= linear.weight.numel() + 2
    y.sum().backward()
    assert x.grad is not None and linear.weight.grad is None


def new_step(matmul: str, lora: LoRAConfig | None = None, compiled: str = "none", **kwargs: Any) -> Step:
    torch.manual_seed(0)
    model = LLM(LLMConfig(**SIZES | kwargs))
    if lora is not None:
        llm.adapt(model, lora)
    cfg = StepConfig(matmul=matmul, lr=0.003, capture="none", compile=compiled)  # type: ignore[arg-type]
    return Step(model, llm.loss, cfg, dist.single_process())


def train_losses(step: Step, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 61, (4, 33), generator=generator)
    return [float(total) / float(count) for total, count in (step(llm.Batch(rows))["loss"] for _ in range(steps))]


def test_a_model_trains_in_fp8_as_without() -> None:
    wide, narrow = new_step("precision"), new_step("fp8")
    base, fp8 = train_losses(wide, 40), train_losses(narrow, 40)
    assert base != fp8 and abs(fp8[0] / base[0] - 1) < 0.002
    assert base[0] - base[-1] > 1 and abs((fp8[0] - fp8[-1]) / (base[0] - base[-1]) - 1) < 0.02, (base[-1], fp8[-1])
    (note,) = [note for note in narrow.messages if note.startswith("step.matmul")]
    assert "14 linear layers use FP8; cpu emulates its rounding" in note
    assert {name for name, part in narrow.model.named_modules() if isinstance(part, FusedLinear)} == {
        f"model.layers.{n}.{part}_proj" for n in range(2)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }  # fmt: skip


@pytest.mark.parametrize("recompute", ["selective", "layers"])
def test_recomputation_does_not_change_the_losses(recompute: str) -> None:
    assert train_losses(new_step("fp8", recompute=recompute), 3) == train_losses(new_step("fp8"), 3)


def test_compiled_layers_have_no_graph_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_model", partial(compiling.compile_model, backend="aot_eager"))
    torch._dynamo.reset()
    step = new_step("fp8", compiled="blocks")
    assert train_losses(step, 3) == pytest.approx(train_losses(new_step("fp8"), 3), rel=1e-6)
    assert "0 graph breaks" in step.news()[0]
