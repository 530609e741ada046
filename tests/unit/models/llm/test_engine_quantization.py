"""An engine with weights of 8 or 4 bits samples the tokens of a model that has the rounded weights."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError
from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, LoRAConfig, Request, adapt
from hpcai.models.llm.engine import quantization
from hpcai.models.llm.engine.quantization import QuantizedLayers, dequantize, quantize_int4
from hpcai.models.llm.gathered import override_attributes
from hpcai.nn.quantized import int8_scales, quantize_int8
from tests.unit.models.llm.test_engine import GREEDY, model_of, prompts, similar
from tests.unit.models.llm.test_engine_capture import CountingGraph, dense_model, sample

INT8, INT4 = ({"quantization": kind, "quantization_group_size": 4} for kind in ("int8", "int4"))
WIDE = {"vocabulary": 64, "width": 64, "layers": 2, "heads": 2, "inner": 128, "positions": 64}


def with_rounded_weights(model: LLM, sizes: dict[str, Any]) -> LLM:
    """Return a copy of ``model`` whose linear layers and experts have the rounded weights."""
    rounded = LLM(model.cfg).to(next(model.parameters()).dtype).train(model.training)
    rounded.load_state_dict(model.state_dict())
    group = sizes["quantization_group_size"]
    for name, weight in rounded.model.layers.named_parameters():
        for matrix in weight.data.view(-1, *weight.shape[-2:]) if "_proj" in name and not name.endswith("bias") else ():
            if sizes["quantization"] == "int8":
                scale = int8_scales(matrix.abs().amax(1))
                matrix.copy_(quantize_int8(matrix, scale) * scale[:, None])
            else:
                matrix.copy_(dequantize(*quantize_int4(matrix, group), group))
    return rounded


def log_probs(engine: Engine) -> Tensor:
    """Return tokens and their log-probabilities.   [2, tokens]"""
    requests = [Request(prompt, GREEDY, seed=n) for n, prompt in enumerate(prompts())]
    assert {*engine.run(requests)} == {*requests}
    return torch.tensor([[x for r in requests for x in r.output], [x for r in requests for x in r.log_probs]], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [("llama", INT8), ("gpt", INT4), ("gpt_oss", INT4), ("deepseek", INT8)])
def test_tokens_are_those_of_rounded_weights(kind: str, sizes: dict[str, Any]) -> None:
    model = similar(model_of(kind))
    cfg, draft = EngineConfig(max_num_batched_tokens=7, block_size=4, **sizes), similar(model)
    engines = [Engine(model, cfg), Engine(model, cfg, draft=draft)]
    for _ in range(2):
        before = {name: x.clone() for name, x in model.state_dict().items()}
        expected, other = log_probs(Engine(with_rounded_weights(model, sizes))), log_probs(Engine(model))
        for engine in engines:
            torch.testing.assert_close(log_probs(engine), expected, rtol=0, atol=1e-10)
        assert other.shape != expected.shape or (other - expected).abs().max() > 1e-4
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()), "the model keeps its weights"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for engine in engines:
            engine.reset()


def test_captured_steps_keep_their_memory_when_weights_change() -> None:
    model, cfg = similar(dense_model("llama")), EngineConfig(max_num_seqs=4, block_size=4, **INT4)
    engine = Engine(model, cfg, graph=CountingGraph)
    for _ in range(2):
        before, graphs = sample(engine), engine.target.graphs
        assert before == sample(Engine(with_rounded_weights(model, INT4))) and graphs is not None and graphs.captured
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
        engine.reset()
        assert graphs.captured and sample(engine) != before


@pytest.mark.parametrize(("outs", "ins", "group"), [(5, 7, 3), (64, 96, 32), (33, 128, 64), (1, 1, 128), (16, 256, 128)])
def test_rounded_weights_are_the_nearest(outs: int, ins: int, group: int) -> None:
    weight = torch.randn(outs, ins, dtype=torch.float64)
    weight[:, : ins // 3] *= 1e-3
    weight[0] = torch.tensor(0.0 if ins % 2 else -0.7)
    codes, scales = quantize_int4(weight, group)
    values = dequantize(codes, scales, group)
    steps = scales[..., 0].repeat_interleave(group, 1)[:, :ins]
    assert ((values - weight).abs() <= 0.56 * steps).all() and (values[0] - weight[0]).abs().max() <= 0.003
    x = torch.randn(3, ins, dtype=torch.float64)
    each = [(int(codes[o, i]) - 8) * scales[o, i // group, 0] + scales[o, i // group, 1] for o in range(outs) for i in range(ins)]
    torch.testing.assert_close(x @ values.T, x @ torch.stack(each).view(outs, ins).T, rtol=0, atol=1e-12)


def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each product by a kernel."""
    rows, multiply = list[int](), quantization._multiply

    def counted(x: Tensor, *args: Any) -> Tensor:
        rows.append(len(x))
        return multiply(x, *args)

    monkeypatch.setattr(quantization, "_multiply", counted)
    return rows


@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)])
def test_kernels_multiply_as_the_rounded_weights(kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters too; a model in float32 is under autocast."""
    torch.manual_seed(0)
    cfg, rows = EngineConfig(quantization=kind, quantization_group_size=32), kernel_calls(monkeypatch)
    model = adapt(LLM(LLMConfig(**WIDE, bias=True)).to(dtype).eval(), LoRAConfig(rank=2))
    layers = QuantizedLayers(model, cfg)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        for count in (1, 3, 40):
            tokens = torch.randint(64, (1, count))
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.1)
            overrides = layers.refresh()
            packed = [type(value).__name__ for _, _, value in overrides]
            assert packed.count("_PackedLinear") == 14
            del rows[:]
            with override_attributes(overrides):
                actual = model(tokens)
            assert bool(rows) == (count < 40) and max(rows, default=0) <= count
            with override_attributes([each for each in overrides if not isinstance(each[2], nn.Module)]):
                expected = model(tokens)
            assert 0 < (actual - expected).float().norm() / expected.float().norm() < 0.02 or count == 40


def test_errors_name_the_setting() -> None:
    model = model_of("llama")
    refused = pytest.raises(ConfigError, match="engine.quantization is int8, and the weights are fully sharded")
    with patch.object(model, "unshard", None, create=True), refused:
        Engine(model, EngineConfig(quantization="int8"))
