"""Captured steps of the generation engine change no token, and are captured once for all texts of their size."""

import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.errors import ConfigError
from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, Request, SamplingConfig, generation
from tests.cpu_graph import CPUGraph, NoHostRead
from tests.ranks.language_model import MODELS
from tests.unit.models.llm.test_engine import GREEDY, outputs, prompts, similar

SIZES: dict[str, dict[str, Any]] = {
    "one step": {}, "chunks": {"texts": 5, "tokens": 11, "block": 4},
    "preempted": {"texts": 20, "tokens": 32, "block": 4, "cache": 36},
}  # fmt: skip
CASES = [  # whether there is a draft model
    ("llama", "one step", False), ("llama", "chunks", False), ("llama", "preempted", True), ("gpt", "chunks", False),
    ("gemma", "chunks", True), ("gpt_oss", "chunks", False), ("deepseek", "chunks", True),
]  # fmt: skip


@cache
def dense_model(kind: str) -> LLM:
    """Return a model without experts: on a CPU the host reads the numbers of their tokens."""
    torch.manual_seed(0)
    model = LLM(LLMConfig(**MODELS[kind] | {"positions": 40, "experts": None})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


class CountingGraph(CPUGraph):
    """A graph that counts its replays, during which the host reads no value."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with NoHostRead():
            super().replay()


class FailingGraph(CPUGraph):
    def capture(self, function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def sample(engine: Engine) -> list[list[int]]:
    """Return texts that end at different times, the last of them short."""
    cfgs = [SamplingConfig(most=2 + 5 * n % 13, temperature=1.2, top_k=12, top_p=0.95, repetition=1.1) for n in range(10)]
    requests = [Request(prompt, cfg, n) for n, (prompt, cfg) in enumerate(zip([*prompts(9), [7]], cfgs))]
    assert {*engine.run(requests)} == {*requests}
    return [request.output for request in requests]


@pytest.mark.parametrize(("kind", "name", "has_draft"), CASES)
def test_captured_steps_sample_the_tokens_of_eager_ones(kind: str, name: str, has_draft: bool) -> None:
    model, cfg = dense_model(kind), EngineConfig(**SIZES[name])
    expected = sample(Engine(model, cfg))
    engine = Engine(model, cfg, draft=similar(model) if has_draft else None, graph=CountingGraph)
    assert sample(engine) == expected
    (scheduler,), most, keys = engine.schedulers, cfg.texts * (1 + has_draft * cfg.ahead), set[Any]()
    assert bool(scheduler.preempted) == (name == "preempted") and has_draft == (engine.accepted > 0)
    for each in engine._models:
        assert each.graphs is not None
        keys |= {*each.graphs.captured}
        replays = [graph.replays for graph in each.graphs.captured.values()]  # type: ignore[attr-defined]
        assert sum(replays) > len(replays), "graphs are replayed for other texts"
    rows, columns = ({key[n] for key in keys} for n in (0, 1))
    assert len(rows) > 2 and rows <= {1, 2, 4, *range(8, most + 8, 8)}
    assert columns <= {4, 8, 16} and (len(columns) > 1) == (name != "one step")


def test_graphs_hold_for_new_weights_in_their_memory_alone() -> None:
    model = similar(dense_model("llama"))
    engine = Engine(model, EngineConfig(texts=4, block=4), graph=CountingGraph)
    outputs(engine, GREEDY)
    for in_place in (True, False):
        before, graphs = outputs(engine, GREEDY), engine.target.graphs
        assert graphs is not None and graphs.captured
        with torch.no_grad():
            for parameter in model.parameters():
                new = parameter + 0.2 * torch.randn_like(parameter)
                parameter.copy_(new) if in_place else parameter.set_(new)  # type: ignore[call-overload]
        engine.reset()
        assert (engine.target.graphs is graphs) == bool(graphs.captured) == in_place
        assert outputs(engine, GREEDY) == outputs(Engine(model), GREEDY) != before


def test_a_step_that_cannot_be_captured_is_an_error_and_graphs_are_reset_before_process_groups() -> None:
    model = dense_model("llama")
    with pytest.raises(ConfigError, match="cannot be captured: operation not permitted when .* capturing; give capture=False"):
        outputs(Engine(model, graph=FailingGraph), GREEDY)
    expected, engine = outputs(Engine(model), GREEDY), Engine(model, draft=similar(model), graph=CPUGraph)
    outputs(engine, GREEDY)
    request = engine.add(Request([1, 2, 3], GREEDY))
    for _ in range(2):
        engine.step()
    gc.collect()
    graphs = [graph for each in engine._models for graph in each.graphs.captured.values()]  # type: ignore[union-attr]
    assert len(graphs) > 2 and all(graph.operations for graph in graphs)  # type: ignore[attr-defined]
    generation.close_all()
    assert not any(graph.operations for graph in graphs)  # type: ignore[attr-defined]
    assert [*engine.run()] == [request] and request.output == next(iter(Engine(model).run([Request([1, 2, 3], GREEDY)]))).output
    assert outputs(engine, GREEDY) == expected, "steps are captured anew"
