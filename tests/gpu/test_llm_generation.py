"""Text generation on a GPU: captured steps generate the tokens of eager ones, and the host waits for tokens only."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, Request, SamplingConfig, complete, generate
from tests.gpu.device import DEVICE, GRAPH, forbid_synchronization

LLAMA: dict[str, Any] = {"vocabulary": 320, "width": 128, "layers": 2, "heads": 4, "key_heads": 2, "inner": 192, "positions": 400}
GPT: dict[str, Any] = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 0, 11, 13, 5] * 3]
SAMPLING = [SamplingConfig(most=200), SamplingConfig(most=200, temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, repetition=1.1)]


def build_model(sizes: dict[str, Any]) -> LLM:
    torch.manual_seed(0)
    model = LLM(LLMConfig(**sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.to(DEVICE)


@pytest.mark.parametrize("cfg", SAMPLING, ids=["greedy", "drawn"])
@pytest.mark.parametrize("sizes", [LLAMA, GPT], ids=["llama", "gpt"])
def test_captured_steps_generate_as_eager_ones(sizes: dict[str, Any], cfg: SamplingConfig) -> None:
    model = build_model(sizes).double()
    expected = complete(model, PROMPTS, cfg, seed=3, capture=False)
    assert complete(model, PROMPTS, cfg, seed=3, graph=GRAPH) == expected
    assert complete(model.cpu(), PROMPTS, cfg, seed=3) == expected


@pytest.mark.parametrize("low_precision", ["weights", "autocast"])
def test_a_captured_step_waits_for_nothing(low_precision: str) -> None:
    model = build_model(LLAMA)
    if low_precision == "weights":
        model.bfloat16()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=low_precision == "autocast"):
        tokens = generate(model, PROMPTS, SAMPLING[1], seed=3, graph=GRAPH)
        next(tokens)
    for _ in range(9):
        next(tokens)
    assert any(tokens.graphs.captured.values()) and tokens._span(tokens.max_length + tokens.launched) in tokens.graphs.captured
    with forbid_synchronization():
        tokens._launch()
    remaining = list(tokens)
    assert len(remaining) == 190 and all(token is not None and 0 <= token < 320 for row in remaining for token in row)
    assert not tokens.graphs.captured and all(tokens.ended)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_captured_steps_of_the_engine_sample_as_eager_ones_and_wait_for_nothing(dtype: torch.dtype) -> None:
    model, cfg = build_model(LLAMA).to(dtype), EngineConfig(max_num_seqs=2, block_size=16, max_num_batched_tokens=16)
    outputs, sampling = [], [SamplingConfig(most=20 + 9 * n, temperature=1.0, top_p=0.9, repetition=1.1) for n in range(3)]
    for engine in (Engine(model, cfg, capture=False), Engine(model, cfg, graph=GRAPH)):
        requests = [Request(prompt, cfg, seed=3) for prompt, cfg in zip(PROMPTS, sampling)]
        assert {*engine.run(requests)} == {*requests}
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] or dtype != torch.float64
    request = engine.add(Request([1, 2, 3], sampling[0]))
    for _ in range(4):
        engine.step()
    chunks = engine.schedulers[0].next_chunks()
    with forbid_synchronization():
        step = engine._lay_out(chunks)
        logits = engine.target.run(lambda: engine.target.forward(step.layout))
        engine._sample([(request, [])], logits)
    assert engine.target.graphs is not None and step.layout.key in engine.target.graphs.captured
