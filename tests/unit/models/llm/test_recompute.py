"""Saved tensors of a layer of a language model, and gradients, which do not depend on recomputation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.models.llm import LLM, LLMConfig
from tests.unit.models.watched import kept

pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA: dict[str, Any] = {"vocabulary": 11, "width": 32, "heads": 4, "key_heads": 2, "inner": 48, "positions": 16}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True, "inner": 128}
WAYS = ("none", "selective", "layers")


def trained(changes: dict[str, Any], recompute: str, layers: int, packed: bool = True, **autocast: Any) -> tuple[list[Tensor], int]:
    """Return gradients, and bytes of saved tensors without parameters."""
    torch.manual_seed(0)
    model = LLM(LLMConfig(**changes, layers=layers, recompute=recompute))
    tokens = torch.randint(0, 11, (3, 17), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(17) // 6).expand(3, -1)
    with kept(model) as found, torch.autocast("cpu", **{"enabled": False, **autocast}):
        cost = model(tokens[:, :-1], tokens[:, 1:], documents=documents[:, :-1] if packed else None)
    cost.sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], sum(found.values())


@pytest.mark.parametrize("autocast", [{}, {"enabled": True, "dtype": torch.bfloat16}], ids=["wide", "narrow"])
@pytest.mark.parametrize("changes", [LLAMA, {**GPT, "dropout": 0.1}], ids=["llama", "gpt with dropout"])
def test_gradients_are_the_same_to_the_bit(changes: dict[str, Any], autocast: dict[str, Any]) -> None:
    expected, _ = trained(changes, "none", 2, **autocast)
    for way in WAYS[1:]:
        assert all(map(torch.equal, trained(changes, way, 2, **autocast)[0], expected)), way


@pytest.mark.parametrize("changes", [LLAMA, GPT], ids=["llama", "gpt"])
def test_bytes_of_saved_tensors_of_a_layer(changes: dict[str, Any]) -> None:
    """In units of the channels of its tokens, besides statistics of each row: means, deviations, sums of exponentials."""
    found = {}
    for way in WAYS:
        two, three = (trained(changes, way, layers, packed=False)[1] for layers in (2, 3))
        found[way] = (three - two) / (3 * 16 * 32 * 4)
    cfg = LLMConfig(**changes)
    inner, keys = cfg.inner / cfg.width, cfg.kv_heads * cfg.head_dim / cfg.width
    products = 2 + 1 + 2 * keys + 1 + inner * (2 if cfg.feed == "swiglu" else 1)  # sums; queries, keys, values; attention; gate, up
    assert found["layers"] == 1
    assert products <= found["selective"] <= products + 0.3
    assert found["none"] - found["selective"] == pytest.approx(2 + inner), "two norms, and what the last product reads"
