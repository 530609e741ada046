"""The generation engine: what shares a step, a block or the cache changes no token."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError, DataError
from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, Request, SamplingConfig, complete
from hpcai.models.llm.engine.blocks import BlockPool, extend_keys
from tests.ranks.language_model import MODELS

GREEDY = SamplingConfig(most=12)
SAMPLED = SamplingConfig(most=12, temperature=1.2, top_k=12, top_p=0.95, min_p=0.01, repetition=1.1)
SIZES = {
    "one step": {"block_size": 40}, "chunks": {"max_num_seqs": 5, "max_num_batched_tokens": 7, "block_size": 4},
    "preempted": {"max_num_seqs": 20, "max_num_batched_tokens": 16, "block_size": 4, "cache_tokens": 36},
    "one token": {"max_num_batched_tokens": 1, "block_size": 1},
}  # fmt: skip


@cache
def model_of(kind: str, seed: int = 0) -> LLM:
    torch.manual_seed(seed)
    model = LLM(LLMConfig(**MODELS[kind] | {"positions": 40})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def similar(model: LLM) -> LLM:
    """Return a model that often samples the same tokens."""
    other = LLM(model.cfg).double()
    other.load_state_dict({name: x + 0.03 * torch.randn_like(x) for name, x in model.state_dict().items()})
    return other


def prompts(count: int = 12) -> list[list[int]]:
    """Return prompts of which many begin alike."""
    draw = random.Random(1)
    start = [draw.randrange(25) for _ in range(17)]
    return [start[: draw.randrange(1, 17)] + [draw.randrange(25) for _ in range(draw.randrange(8))] for _ in range(count)]


def outputs(engine: Engine, cfg: SamplingConfig, stop: int = -1, count: int = 12) -> list[list[int]]:
    requests = [Request(prompt, cfg, seed=n, stop={stop}) for n, prompt in enumerate(prompts(count))]
    assert {*engine.run(requests)} == {*requests} and engine.unfinished == 0
    assert engine.blocks.free == engine.blocks.count, "all blocks are given back"
    return [request.output for request in requests]


CASES = [("llama", name) for name in SIZES] + [(kind, "chunks") for kind in ("gpt", "gemma", "olmo", "gpt_oss", "deepseek")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_tokens_are_those_of_the_plain_loop(kind: str, name: str) -> None:
    model, cfg, count = model_of(kind), EngineConfig(**SIZES[name]), 4 if name == "one token" else 12
    for sampling in (GREEDY, SAMPLED):
        plain = [complete(model, [prompt], sampling, seed=n)[0] for n, prompt in enumerate(prompts(count))]
        stop = plain[0][4]
        expected = [text[: text.index(stop) + 1] if stop in text else text for text in plain]
        for draft in (None, similar(model)):
            engine = Engine(model, cfg, draft=draft)
            assert outputs(engine, sampling, stop, count) == expected
            (scheduler,) = engine.schedulers
            assert bool(scheduler.shared) == (name != "one step") and (0 < engine.accepted < engine.proposed) == (draft is not None)
            assert bool(scheduler.preempted) == (name == "preempted") or draft is not None
    assert model.training, "the engine leaves the model as it was"


def test_log_probabilities_are_those_of_the_model() -> None:
    model, cfg = model_of("gemma"), SamplingConfig(most=9, temperature=0.7, top_k=5)
    requests = [Request(prompt, cfg, n) for n, prompt in enumerate(prompts(5))]
    for request in Engine(model, EngineConfig(max_num_batched_tokens=6, block_size=4), draft=similar(model)).run(requests):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([request.tokens[:-1]]))[0, len(request.prompt) - 1 :] / 0.7
        model.train()
        expected = logits.log_softmax(-1)[range(9), request.output]
        torch.testing.assert_close(torch.tensor(request.log_probs, dtype=torch.float64), expected, rtol=0, atol=1e-12)


def test_texts_of_a_step_have_their_own_sampling_and_processors() -> None:
    model, seen = model_of("llama"), list[list[int]]()

    def without_even(tokens: Any, logits: Tensor) -> Tensor:
        seen.append([*tokens])
        return logits.masked_fill(torch.arange(len(logits)) % 2 == 0, -torch.inf)

    cfgs = [GREEDY, SAMPLED, SamplingConfig(most=3), SamplingConfig(most=5, temperature=2.0)]
    requests = [Request(prompt, cfg, n) for n, (prompt, cfg) in enumerate(zip(prompts(4), cfgs))]
    odd = Request([1, 2], GREEDY, processor=without_even)
    assert {*Engine(model).run([*requests, odd])} == {*requests, odd}
    for n, request in enumerate(requests):
        assert request.output == complete(model, [request.prompt], request.cfg, seed=n)[0]
    assert all(token % 2 for token in odd.output) and seen == [odd.tokens[: 2 + n] for n in range(12)]
    assert max(Engine(model, vocab_size=13).add(Request([1], SamplingConfig(most=30, temperature=50.0))).prompt) == 1
    limited = Engine(model, vocab_size=13)
    assert max(next(limited.run([Request([1], SamplingConfig(most=30, temperature=50.0))])).output) <= 12


def test_texts_arrive_and_are_ended_at_any_time() -> None:
    model, cfg = model_of("llama"), EngineConfig(max_num_seqs=2, block_size=2, max_num_batched_tokens=5)
    engine = Engine(model, cfg)
    first, second = (engine.add(Request(prompt, GREEDY)) for prompt in ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10]))
    for _ in range(3):
        engine.step()
    third, waiting = engine.add(Request([1, 2, 3], GREEDY)), engine.add(Request([7], GREEDY))
    engine.end(first)
    engine.end(waiting)
    assert {*engine.run()} == {second, third} and first.ended and waiting.output == []
    for request, count in ((first, len(first.output)), (second, 12), (third, 12)):
        assert request.output == complete(model, [request.prompt], GREEDY)[0][:count]
    assert engine.blocks.free == engine.blocks.count


def test_changed_weights_share_no_earlier_keys() -> None:
    model = similar(model_of("llama"))
    engine = Engine(model, EngineConfig(block_size=2))
    outputs(engine, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    unfinished = engine.add(Request([1], GREEDY))
    with pytest.raises(ConfigError, match="1 texts are not finished"):
        engine.reset()
    engine.end(unfinished)
    engine.reset()
    assert outputs(engine, GREEDY) == [complete(model, [prompt], GREEDY)[0] for prompt in prompts()]


def test_what_cannot_be_continued_is_refused() -> None:
    model = model_of("llama")
    for prompt, message in (([], "prompt 0 has no token"), ([25], "has token 25"), ([1] * 40, "has 40 tokens, the model 40")):
        with pytest.raises(DataError, match=message):
            Engine(model).add(Request(prompt, GREEDY))
    with pytest.raises(DataError, match="prompt third has token 25"):
        Engine(model).add(Request([25], GREEDY, name="third"))
    with pytest.raises(ConfigError, match="3 tokens and 12 further ones does not fit into a cache of 8 tokens; set engine.cache_t"):
        Engine(model, EngineConfig(block_size=4, cache_tokens=8)).add(Request([1, 2, 3], GREEDY))
    with pytest.raises(ConfigError, match="a cache of 8 tokens is less than a block of 16"):
        Engine(model, EngineConfig(cache_tokens=8))
    with pytest.raises(ConfigError, match="a draft model of 20 vocabulary entries, the model has 25"):
        Engine(model, draft=LLM(LLMConfig(**MODELS["llama"] | {"vocabulary": 20})))


def test_blocks_are_shared_kept_and_evicted_in_order() -> None:
    pool, keys, other = BlockPool(4), list[bytes](), list[bytes]()
    extend_keys(keys, [1, 2, 3, 4, 5, 6, 7], 2)
    extend_keys(other, [1, 2, 9, 4], 2)
    assert len(keys) == 3 and keys[0] == other[0] and keys[1] != other[1]
    blocks = [pool.allocate() for _ in range(3)]
    for block, key in zip(blocks, keys):
        pool.cache(block, key)
    assert blocks == [0, 1, 2] and pool.share(other) == [0] and pool.free == 1
    pool.release(blocks)
    assert pool.free == 3 and pool.share(keys) == [0, 1, 2]
    pool.release([0])
    pool.release([0, 1, 2])
    assert pool.free == 4 and [pool.allocate() for _ in range(2)] == [3, 2], "an empty block, then the end of the prefix"
    assert pool.share(keys) == [0, 1]
    pool.clear_cache()
    assert pool.share(keys) == [] and pool.free == 0
    pool.release([0, 1])
    assert pool.free == 2 and pool.allocate() == 0


def test_texts_of_unequal_lengths_take_less_than_half_of_the_steps_of_batches() -> None:
    """Each batch of 8 takes as many steps as its longest text."""
    model, draw = model_of("one key"), random.Random(0)
    lengths = [min(38, round(draw.paretovariate(0.8))) for _ in range(64)]
    engine, steps, empty, used = Engine(model, EngineConfig(max_num_seqs=8, block_size=2)), 0, 0, 0
    for length in lengths:
        engine.add(Request([1], SamplingConfig(most=length)))
    while engine.unfinished:
        engine.step()
        steps += 1
        (scheduler,) = engine.schedulers
        used += sum(len(request.blocks) * 2 for request in scheduler.running)
        empty += sum(len(request.blocks) * 2 - request.computed for request in scheduler.running)
    assert steps < sum(max(lengths[at : at + 8]) for at in range(0, 64, 8)) / 2
    assert empty < used / 10, "half of the last block of each text"
