"""A sharded language model generates the tokens and computes the likelihoods of one rank."""

from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.models import llm
from hpcai.models.llm import LLM, LLMConfig, SamplingConfig, Tokenizer, complete
from hpcai.models.llm.config import EngineConfig
from hpcai.models.llm.engine import Engine, Request
from hpcai.nn.deferred_init import deferred, materialize
from tests.ranks.language_model import MODELS
from tests.ranks.launch import on_ranks

LLAMA = {"vocabulary": 260, "width": 16, "layers": 4, "heads": 4, "key_heads": 2, "inner": 24, "positions": 40}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
SMALL = {"vocabulary": 25}
WIDE = {**LLAMA, "layers": 2, "width": 128, "key_heads": 4, "inner": 128}
MESHES = [
    {"tensor": 4}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"context": 4}, {"context": 2, "tensor": 2},
    {"pipeline": 2, "context": 2}, {"replicate": 2, "pipeline": 2},
]  # fmt: skip
PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 0, 11, 13, 5]]
SAMPLING = [SamplingConfig(most=5), SamplingConfig(most=5, temperature=1.2, top_k=12, top_p=0.95, repetition=1.1)]
PAIRS = [([1, 2], [3]), ([5], [6, 7, 8, 9]), ([3, 4, 5, 6, 7], [1, 2]), ([0], [0])]


def build_model(mesh: Mesh, sizes: dict[str, Any]) -> tuple[LLM, Any]:
    with deferred(3):
        model = llm.parallelize(LLM(LLMConfig(**sizes)), mesh)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    pipeline = llm.build_pipeline(model, mesh)
    materialize(model, "cpu", dtype=torch.float64)
    return model, pipeline


def engine_outputs(model: LLM, cfg: SamplingConfig, pipeline: Any) -> list[list[int]]:
    """Return the tokens of an engine whose cache does not hold all texts, and whose steps are shorter than prompts."""
    engine = Engine(model, EngineConfig(max_num_seqs=8, max_num_batched_tokens=8, block_size=2, cache_tokens=16), pipeline=pipeline)
    requests = [Request(prompt, cfg, 5 + row, [3]) for row, prompt in enumerate(PROMPTS)]
    early = engine.add(Request([9, 8, 7], SamplingConfig(most=12), 3))
    for request in requests:
        engine.add(request)
    for _ in range(6):  # its step may be at any stage
        engine.step()
    engine.end(early)
    assert early.ended and len(early.output) < 7
    ended = {*engine.run()}
    assert early not in ended and all(request.ended for request in requests) and engine.blocks.free == engine.blocks.count
    return [request.output for request in requests]


def generate_outputs(mesh: Mesh) -> list[Any]:
    results: list[Any] = []
    for sizes in (LLAMA | SMALL, GPT | SMALL):
        model, pipeline = build_model(mesh, sizes)
        assert model.training
        for cfg in SAMPLING:
            results.append(complete(model, PROMPTS, cfg, stop=[3], seed=5, pipeline=pipeline))
            results.append(engine_outputs(model, cfg, pipeline))
            assert results[-1] == results[-2]
        results.append(llm.log_likelihoods(model, PAIRS, rows=3, pipeline=pipeline))
        results += map(list, zip(*llm.greedy_log_likelihoods(model, [*PAIRS, ([1, 2], [4])], rows=3, pipeline=pipeline)))
        results.append(llm.likelihoods(model, [1], [[2], [3, 4]], pipeline=pipeline))
        assert model.training and all(part.training for part in model.modules())
    model, pipeline = build_model(mesh, LLAMA)
    model.tokenizer = Tokenizer.byte_level()
    results.append(model.generate(["ab", "abc"], most=5, temperature=1.5, pipeline=pipeline))
    results.append(str(model.generate("ab", most=5, pipeline=pipeline)))
    return results


@cache
def unsharded_outputs() -> list[Any]:
    return generate_outputs(Mesh({}))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_sharded_model_generates_as_a_full_one(axes: dict[str, int]) -> None:
    for results in on_ranks(axes, generate_outputs):
        for actual, expected in zip(results, unsharded_outputs(), strict=True):
            if isinstance(actual[0], float):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11)
            else:
                assert actual == expected


def quantized_outputs(mesh: Mesh, kind: Any) -> list[Any]:
    """Return tokens and log-probabilities of engines in float64, then by kernels in bfloat16."""
    results: list[Any] = []
    for sizes in (MODELS["llama"], MODELS["gpt_oss"], WIDE):
        model, pipeline = build_model(mesh, sizes)
        cfg = EngineConfig(quantization=kind, quantization_group_size=32 if sizes is WIDE else 2)
        engine = Engine(model.bfloat16() if sizes is WIDE else model, cfg, pipeline=pipeline)
        assert all(bool(each.packed) == (sizes is WIDE) for *_, each in cast(Any, engine.target.quantized)._weights)
        requests = [Request(prompt[:3], SamplingConfig(most=1 if sizes is WIDE else 6), row) for row, prompt in enumerate(PROMPTS)]
        assert {*engine.run(requests)} == {*requests}
        results.append([[] if sizes is WIDE else request.output for request in requests])
        results.append([x for request in requests for x in request.log_probs])
    return results


@pytest.mark.parametrize(("axes", "kind"), [({"tensor": 2}, "int8"), ({"pipeline": 2, "tensor": 2}, "int4")], ids=str)
def test_sharded_weights_are_rounded_as_full_ones(axes: dict[str, int], kind: str) -> None:
    for results in on_ranks(axes, quantized_outputs, kind):
        for n, (actual, full) in enumerate(zip(results, quantized_outputs(Mesh({}), kind), strict=True)):
            if n % 2:
                np.testing.assert_allclose(actual, full, rtol=0, atol=0.05 if n == 5 else 1e-10)
            else:
                assert actual == full


def cut_groups(mesh: Mesh) -> str:
    with pytest.raises(ConfigError) as raised:
        Engine(build_model(mesh, LLAMA)[0], EngineConfig(quantization="int4", quantization_group_size=8))
    return str(raised.value)


def test_a_group_that_ranks_would_share_is_an_error() -> None:
    expected = "layers.0.self_attn.o_proj has 16 inputs, sharded over 4 ranks: expected whole groups of 8 on each"
    assert all(expected in text for text in on_ranks({"tensor": 4}, cut_groups))


def losses_around_generation(mesh: Mesh) -> tuple[float, float]:
    """Return the loss before and after generation: seams are restored."""
    model, pipeline = build_model(mesh, LLAMA | SMALL)
    batch = llm.Batch(torch.arange(34).view(2, 17) % 25)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            values = llm.loss(model, batch) if pipeline is None else pipeline.forward(llm.loss, batch, torch.no_grad)
        losses.append(0.0 if values is None else float(values["loss"][0]))
        complete(model, PROMPTS, SAMPLING[0], pipeline=pipeline)
    return losses[0], losses[1]


@pytest.mark.parametrize("axes", [{"context": 2, "tensor": 2}, {"pipeline": 2, "context": 2}], ids=str)
def test_generation_restores_the_sharded_model(axes: dict[str, int]) -> None:
    (expected, _), = on_ranks({}, losses_around_generation)  # fmt: skip
    for before, after in on_ranks(axes, losses_around_generation):
        assert before == after and before in (0.0, pytest.approx(expected, abs=1e-10))
