"""A sharded language model generates the tokens and computes the likelihoods of one rank."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig, SamplingConfig, Tokenizer, complete
from hpcai.nn.deferred_init import deferred, materialize
from tests.ranks.launch import on_ranks

LLAMA = {"vocabulary": 260, "width": 16, "layers": 4, "heads": 4, "key_heads": 2, "inner": 24, "positions": 40}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
SOME = {"vocabulary": 25}
MESHES = [
    {"tensor": 2}, {"tensor": 4}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"context": 4}, {"context": 2, "tensor": 2},
    {"pipeline": 2, "context": 2}, {"replicate": 2, "pipeline": 2},
]  # fmt: skip
PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 0, 11, 13, 5]]
WAYS = [SamplingConfig(most=8), SamplingConfig(most=8, temperature=1.2, top_k=12, top_p=0.95, repetition=1.1)]
PAIRS = [([1, 2], [3]), ([5], [6, 7, 8, 9]), ([3, 4, 5, 6, 7], [1, 2]), ([0], [0])]


def built(mesh: Mesh, sizes: dict[str, Any]) -> tuple[LLM, Any]:
    with deferred(3):
        model = llm.parallelize(LLM(LLMConfig(**sizes)), mesh)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    act = llm.build_pipeline(model, mesh)
    materialize(model, "cpu", dtype=torch.float64)
    return model, act


def outputs(mesh: Mesh) -> list[Any]:
    found: list[Any] = []
    for sizes in (LLAMA | SOME, GPT | SOME):
        model, act = built(mesh, sizes)
        assert model.training
        for cfg in WAYS:
            found.append(complete(model, PROMPTS, cfg, stop=[3], seed=5, pipeline=act))
        found.append(llm.log_likelihoods(model, PAIRS, rows=3, pipeline=act))
        found.append(llm.likelihoods(model, [1], [[2], [3, 4]], pipeline=act))
        assert model.training and all(part.training for part in model.modules())
    model, act = built(mesh, LLAMA)
    model.tokenizer = Tokenizer.byte_level()
    found.append(model.generate(["ab", "abc"], most=9, temperature=1.5, pipeline=act))
    found.append(str(model.generate("ab", most=9, pipeline=act)))
    return found


@cache
def outputs_of_one() -> list[Any]:
    return outputs(Mesh({}))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_sharded_model_generates_as_a_full_one(axes: dict[str, int]) -> None:
    for found in on_ranks(axes, outputs):
        for own, whole in zip(found, outputs_of_one(), strict=True):
            if isinstance(own[0], float):
                np.testing.assert_allclose(own, whole, rtol=0, atol=1e-11)
            else:
                assert own == whole


def trained_after(mesh: Mesh) -> tuple[float, float]:
    """Return the loss before and after generation: seams are restored."""
    model, act = built(mesh, LLAMA | SOME)
    batch = llm.Batch(torch.arange(34).view(2, 17) % 25)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            found = llm.loss(model, batch) if act is None else act.forward(llm.loss, batch, torch.no_grad)
        losses.append(0.0 if found is None else float(found["loss"][0]))
        complete(model, PROMPTS, WAYS[0], pipeline=act)
    return losses[0], losses[1]


@pytest.mark.parametrize("axes", [{"context": 2, "tensor": 2}, {"pipeline": 2, "context": 2}], ids=str)
def test_generation_restores_the_sharded_model(axes: dict[str, int]) -> None:
    (right, _), = on_ranks({}, trained_after)  # fmt: skip
    for before, after in on_ranks(axes, trained_after):
        assert before == after and before in (0.0, pytest.approx(right, abs=1e-10))
