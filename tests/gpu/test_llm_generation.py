"""Text generation on a GPU: captured steps are those of eager ones, and the host waits for tokens only."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.models.llm import LLM, LLMConfig, SamplingConfig, complete, generate
from tests.gpu.machine import DEVICE, GRAPH, nothing_waits

LLAMA: dict[str, Any] = {
    "vocabulary": 320, "width": 128, "layers": 2, "heads": 4, "key_heads": 2, "inner": 192, "positions": 400,
}  # fmt: skip
GPT: dict[str, Any] = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 0, 11, 13, 5] * 3]
WAYS = [
    SamplingConfig(most=200), SamplingConfig(most=200, temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, repetition=1.1),
]  # fmt: skip


def model_of(sizes: dict[str, Any]) -> LLM:
    torch.manual_seed(0)
    model = LLM(LLMConfig(**sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.to(DEVICE)


@pytest.mark.parametrize("cfg", WAYS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("sizes", [LLAMA, GPT], ids=["llama", "gpt"])
def test_captured_steps_generate_as_eager_ones(sizes: dict[str, Any], cfg: SamplingConfig) -> None:
    model = model_of(sizes).double()
    right = complete(model, PROMPTS, cfg, seed=3, capture=False)
    assert complete(model, PROMPTS, cfg, seed=3, graph=GRAPH) == right
    assert complete(model.cpu(), PROMPTS, cfg, seed=3) == right


@pytest.mark.parametrize("narrow", ["weights", "autocast"])
def test_a_captured_step_waits_for_nothing(narrow: str) -> None:
    model = model_of(LLAMA)
    if narrow == "weights":
        model.bfloat16()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=narrow == "autocast"):
        given = generate(model, PROMPTS, WAYS[1], seed=3, graph=GRAPH)
        next(given)
    for _ in range(9):
        next(given)
    assert any(given._captured.values()) and given._span(given.max_length + given.launched) in given._captured
    with nothing_waits():
        given._launch()
    rest = list(given)
    assert len(rest) == 190 and all(token is not None and 0 <= token < 320 for row in rest for token in row)
    assert not given._captured and all(given.ended)
