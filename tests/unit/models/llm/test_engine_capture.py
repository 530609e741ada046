"""Captured steps of the generation engine change no token, and are captured once for all texts of their size."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.watchdog import before_destroy_process_group
from hpcai.errors import ConfigError
from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, Request, SamplingConfig, complete
from tests.cpu_graph import CPUGraph, NoHostRead
from tests.ranks.language_model import MODELS
from tests.unit.models.llm.test_engine import GREEDY, prompts, similar

CHUNKS = {"max_num_seqs": 5, "max_num_batched_tokens": 11, "block_size": 4}
CASES = [  # whether there is a draft model
    ("llama", {}, False), ("llama", CHUNKS, False),
    ("llama", {"max_num_seqs": 20, "max_num_batched_tokens": 32, "block_size": 4, "cache_tokens": 36}, True),
    ("gpt", CHUNKS, False), ("gemma", CHUNKS, True), ("gpt_oss", CHUNKS, False), ("deepseek", CHUNKS, True),
]  # fmt: skip


@cache
def dense_model(kind: str) -> LLM:
    """Return a model without experts: on a CPU the host reads the numbers of their tokens."""
    torch.manual_seed(0)
    model = LLM(LLMConfig(**MODELS[kind] | {"positions": 40, "experts": None})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


class FailingGraph(CPUGraph):
    def capture(self, function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class CountingGraph(CPUGraph):
    replays = 0

    def replay(self) -> None:
        self.replays += 1
        with NoHostRead():
            super().replay()


def sample(engine: Engine) -> list[list[int]]:
    """Return texts that end at different times, the last of them short."""
    cfgs = [SamplingConfig(most=2 + 5 * n % 13, temperature=1.2, top_k=12, top_p=0.95, repetition=1.1) for n in range(10)]
    requests = [Request(prompt, cfg, n) for n, (prompt, cfg) in enumerate(zip([*prompts(9), [7]], cfgs))]
    assert {*engine.run(requests)} == {*requests}
    return [request.output for request in requests]


@pytest.mark.parametrize(("kind", "sizes", "has_draft"), CASES)
def test_captured_steps_sample_the_tokens_of_eager_ones(kind: str, sizes: dict[str, Any], has_draft: bool) -> None:
    model, cfg, keys = dense_model(kind), EngineConfig(**sizes), set[Any]()
    engine = Engine(model, cfg, draft=similar(model) if has_draft else None, graph=CountingGraph)
    assert sample(engine) == sample(Engine(model, cfg))
    assert bool(engine.schedulers[0].preempted) == (cfg.cache_tokens is not None) and has_draft == (engine.accepted > 0)
    for graphs in (each.graphs.captured for each in engine._models if each.graphs):
        assert sum(graph.replays for graph in graphs.values()) > len(graphs), "for other texts"  # type: ignore[attr-defined]
        keys |= {*graphs}
    rows, columns = ({key[n] for key in keys} for n in (0, 1))
    assert len(rows) > 2 and rows <= {1, 2, 4, *range(8, cfg.max_num_seqs * (1 + has_draft * cfg.num_speculative_tokens) + 8, 8)}
    assert columns <= {4, 8, 16} and (len(columns) > 1) == (cfg.block_size == 4)


def test_graphs_hold_for_new_weights_in_their_memory_alone() -> None:
    model = similar(dense_model("llama"))
    engine = Engine(model, EngineConfig(max_num_seqs=4, block_size=4), graph=CountingGraph)
    for in_place in (True, False):
        before, graphs = sample(engine), engine.target.graphs
        assert graphs is not None and graphs.captured
        with torch.no_grad():
            for parameter in model.parameters():
                new = parameter + 0.2 * torch.randn_like(parameter)
                parameter.copy_(new) if in_place else parameter.set_(new)  # type: ignore[call-overload]
        engine.reset()
        assert bool(graphs.captured) == in_place and sample(engine) == sample(Engine(model)) != before


def test_a_step_that_cannot_be_captured_is_an_error_and_graphs_are_reset_before_process_groups() -> None:
    model = dense_model("llama")
    with pytest.raises(ConfigError, match="cannot be captured: operation not permitted .* give capture=False"):
        sample(Engine(model, graph=FailingGraph))
    engine = Engine(model, draft=similar(model), graph=CPUGraph)
    request = engine.add(Request([1, 2, 3], GREEDY))
    while len(request.output) < 9:
        engine.step()
    graphs: list[Any] = [graph for each in engine._models if each.graphs for graph in each.graphs.captured.values()]
    assert len(graphs) > 1 and all(graph.operations for graph in graphs)
    for callback in before_destroy_process_group:
        callback()
    assert not any(graph.operations for graph in graphs)
    assert [*engine.run()] == [request] and request.output == complete(model, [[1, 2, 3]], GREEDY)[0]
