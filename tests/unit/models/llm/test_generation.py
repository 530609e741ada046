"""Generation: the KV cache and captured steps change no token; the cache costs a fraction of full forward passes."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpcai.models.llm import LLM, LLMConfig, SamplingConfig, complete, generate, generation, likelihoods, log_likelihoods
from hpcai.models.llm.gathered import override_attributes
from hpcai.models.llm.generation import sample_tokens
from hpcai.models.llm.likelihood import greedy_log_likelihoods
from tests.cpu_graph import CPUGraph

LLAMA: dict[str, Any] = {
    "vocabulary": 25, "width": 16, "layers": 2, "heads": 4, "key_heads": 2, "inner": 24, "positions": 40, "dropout": 0.5,
}  # fmt: skip
GPT: dict[str, Any] = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
MODELS = {"llama": LLAMA, "gpt": GPT}
PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 0, 11, 13, 5], [3, 3, 3]]
GREEDY = SamplingConfig(most=20)
SAMPLED = SamplingConfig(most=20, temperature=1.2, top_k=12, top_p=0.95, min_p=0.01, repetition=1.1)


@cache
def model_of(kind: str) -> LLM:
    torch.manual_seed(0)
    model = LLM(LLMConfig(**MODELS[kind])).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def generate_without_cache(model: LLM, prompt: list[int], cfg: SamplingConfig, seed: int, stop: int) -> list[int]:
    """Run the full sequence through the model for every token."""
    generator, tokens, seen = torch.Generator().manual_seed(seed), list[int](), torch.zeros(1, 25, dtype=torch.bool)
    seen[0, prompt] = True
    model.eval()
    while len(tokens) < cfg.most and stop not in tokens and len(prompt) + len(tokens) < model.cfg.positions:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]))[:, -1]
        tokens.append(int(sample_tokens(logits, seen, cfg, torch.rand(1, generator=generator))))
        seen[0, tokens[-1]] = True
    model.train()
    return tokens


@pytest.mark.parametrize("cfg", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", MODELS)
def test_cache_and_capture_change_no_token(kind: str, cfg: SamplingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    unstopped = [generate_without_cache(model, prompt, cfg, 5 + row, -1) for row, prompt in enumerate(PROMPTS)]
    assert all(len(text) == 20 for text in unstopped) and len({*map(tuple, unstopped)}) > 1
    stop = unstopped[0][5]
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in unstopped]
    assert complete(model, PROMPTS, cfg, stop=[stop], seed=5) == expected and complete(model, PROMPTS, cfg, seed=5) == unstopped
    monkeypatch.setattr(generation, "_BLOCK", 8)
    graphs: list[CPUGraph] = []

    def new_graph() -> CPUGraph:
        graphs.append(CPUGraph())
        return graphs[-1]

    steps, recorded = [], []
    for row in generate(model, PROMPTS, cfg, seed=5, graph=new_graph):
        steps.append(row)
        recorded.append([bool(each.operations) for each in graphs])
    assert [list(text) for text in zip(*steps)] == unstopped
    # After the first token, one step attends to 8 positions, the next to 16 or fewer, the others to all.
    assert recorded[-1] == [False, True, True] and recorded[1] == [False] and recorded[3] == [False, True]
    assert not any(each.operations for each in graphs), "graphs are reset after the last token"
    alone = [complete(model, [prompt], cfg, stop=[stop], seed=5 + row, graph=CPUGraph)[0] for row, prompt in enumerate(PROMPTS)]
    assert alone == expected


@pytest.mark.parametrize("kind", MODELS)
def test_copies_of_weights_change_no_token_and_are_gone_afterwards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = model_of(kind), []
    state, expected = dict(model.named_parameters()), complete(model, PROMPTS, GREEDY)
    monkeypatch.setattr(generation, "_MANY", 1)
    for adapted, limit in ((0, 1 << 29), (1, 1 << 29), (0, model.lm_head.weight.nbytes - 1)):
        hook = model.get_submodule("model.layers.0.mlp.up_proj" if adapted else "model.norm").register_forward_hook(lambda *_: None)
        monkeypatch.setattr(generation, "_COPIES", limit)
        texts = generate(model, PROMPTS, GREEDY)
        counts.append(sum(name in ("fused_linear", "weight") for _, name, _ in texts._overrides))
        assert [list(row) for row in zip(*texts)] == expected
        hook.remove()
        assert all(parameter is state[name] for name, parameter in model.named_parameters()) and not texts._overrides
    assert counts[:2] == [5, 4] and counts[2] < 2, "of two attentions, two feed-forward layers and the output layer"
    model(torch.tensor([PROMPTS[2]]), torch.tensor([PROMPTS[2]])).sum().backward()  # no state is left in inference mode


def test_the_caller_can_end_a_text() -> None:
    texts, rows = generate(model_of("llama"), PROMPTS, GREEDY), []
    for row in texts:
        rows.append(row)
        texts.ended[1] = True
        if len(rows) == 3:
            texts.ended[:] = [True] * 4
    assert [[token is None for token in row] for row in rows] == [[False] * 4] + [[False, True, False, False]] * 2
    assert next(texts, "none") == "none" and next(texts, "none") == "none"


def test_tokens_beyond_those_of_a_tokenizer_are_never_sampled() -> None:
    model = model_of("llama")
    for cfg in (GREEDY, SamplingConfig(most=20, temperature=100.0)):
        assert max(max(text) for text in complete(model, PROMPTS, cfg)) > 12
        assert max(max(text) for text in complete(model, PROMPTS, cfg, vocab_size=13)) <= 12


def test_a_cache_makes_256_tokens_at_less_than_a_tenth_of_the_work() -> None:
    model, most = LLM(LLMConfig(vocabulary=512, width=64, layers=1, heads=2, inner=160, positions=512)).eval(), 256
    with FlopCounterMode(display=False) as with_cache:
        complete(model, [[1] * 8], SamplingConfig(most=most))
    flops = []
    with torch.no_grad():
        for length in (8, 8 + most // 2, 8 + most):
            with FlopCounterMode(display=False) as counter:
                model(torch.ones(1, length, dtype=torch.int64))
            flops.append(counter.get_total_flops())
    first, middle, last = flops  # quadratic in the length: Simpson's rule gives the mean
    assert with_cache.get_total_flops() * 10 < most * (first + 4 * middle + last) / 6


def test_likelihoods_do_not_depend_on_the_rest_of_the_batch() -> None:
    """Greedy continuations are marked, and continuations of one context that differ in their last token share a row."""
    model = model_of("llama")
    pairs = [([1, 2], [3]), ([5], [6, 7, 8, 9]), ([3, 4, 5, 6, 7], [1, 2]), ([0], [0])]
    pairs += [([1, 2], [token]) for token in range(3)] + [([5], complete(model, [[5]], SamplingConfig(most=4))[0])]
    expected = []
    model.eval()
    for prompt, continuation in pairs:
        with torch.no_grad():
            log_probs = model(torch.tensor([[*prompt, *continuation]]))[0].log_softmax(-1)
        expected.append(sum(float(log_probs[len(prompt) - 1 + n, token]) for n, token in enumerate(continuation)))
    model.train()
    for rows in (1, 3, 9):
        assert log_likelihoods(model, pairs, rows) == pytest.approx(expected, abs=1e-12)
        sums, greedy = zip(*greedy_log_likelihoods(model, pairs, rows))
        assert sums == pytest.approx(expected, abs=1e-12)
        assert list(greedy) == [complete(model, [a], SamplingConfig(most=len(b)))[0] == b for a, b in pairs] and greedy[-1]
    assert likelihoods(model, [5], [[6, 7, 8, 9], [1]])[0] == pytest.approx(expected[1], abs=1e-12) and model.training


def test_copies_of_weights_change_no_logit() -> None:
    latent = {"q_rank": None, "kv_rank": 8, "nope": 4, "rope": 4, "value": 4}
    for kind in (LLAMA, GPT, {**LLAMA, "key_heads": 4, "bias": True, "dropout": 0.0, "latent": latent}):
        torch.manual_seed(0)
        model, tokens = LLM(LLMConfig(**kind)).double().eval(), torch.tensor([PROMPTS[2]])
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
        with torch.no_grad():
            expected = model(tokens)
            with override_attributes(overrides := generation.copy_weights(model)):
                torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
        assert any(name == "fused_linear" for _, name, _ in overrides)
