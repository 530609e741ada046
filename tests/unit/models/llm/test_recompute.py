"""Recomputation in a language model: gradients stay bitwise equal, and a layer saves the expected number of bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.models.llm import LLM, LLMConfig
from tests.unit.models.operation_checks import saved_tensor_bytes

LLAMA: dict[str, Any] = {"vocabulary": 11, "width": 32, "heads": 4, "key_heads": 2, "inner": 48, "positions": 16}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True, "inner": 128}
RECOMPUTE = ("none", "selective", "layers")


def train(changes: dict[str, Any], recompute: str, layers: int, packed: bool = True, **autocast: Any) -> tuple[list[Tensor], int]:
    """Return gradients, and bytes of saved tensors without parameters."""
    torch.manual_seed(0)
    model = LLM(LLMConfig(**changes, layers=layers, recompute=recompute))
    tokens = torch.randint(0, 11, (3, 17), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(17) // 6).expand(3, -1)
    with saved_tensor_bytes(model) as saved, torch.autocast("cpu", **{"enabled": False, **autocast}):
        cost = model(tokens[:, :-1], tokens[:, 1:], documents=documents[:, :-1] if packed else None)
    cost.sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], sum(saved.values())


@pytest.mark.parametrize("autocast", [{}, {"enabled": True, "dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", [LLAMA, {**GPT, "dropout": 0.1}], ids=["llama", "gpt with dropout"])
def test_recomputation_keeps_gradients_bitwise(changes: dict[str, Any], autocast: dict[str, Any]) -> None:
    expected, _ = train(changes, "none", 2, **autocast)
    for recompute in RECOMPUTE[1:]:
        assert all(map(torch.equal, train(changes, recompute, 2, **autocast)[0], expected)), recompute


@pytest.mark.parametrize("changes", [LLAMA, GPT], ids=["llama", "gpt"])
def test_bytes_of_saved_tensors_of_a_layer(changes: dict[str, Any]) -> None:
    """In units of one activation [B, L, channels]; statistics of rows (means, deviations, sums of exponentials) are additional."""
    saved = {}
    for recompute in RECOMPUTE:
        two, three = (train(changes, recompute, layers, packed=False)[1] for layers in (2, 3))
        saved[recompute] = (three - two) / (3 * 16 * 32 * 4)
    cfg = LLMConfig(**changes)
    inner, keys = cfg.inner / cfg.width, cfg.kv_heads * cfg.head_dim / cfg.width
    expected = 2 + 1 + 2 * keys + 1 + inner * (2 if cfg.feed == "swiglu" else 1)  # sums; queries, keys, values; attention; gate, up
    assert saved["layers"] == 1
    assert expected <= saved["selective"] <= expected + 0.3
    assert saved["none"] - saved["selective"] == pytest.approx(2 + inner), "two norms, and the input of the last product"
