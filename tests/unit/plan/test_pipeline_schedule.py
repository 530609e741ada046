"""Stages of a pipeline and tokens over context, planned."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import apps.llm.benchmarks as llm
from hpcai.cli import main
from hpcai.cli.plan import print_tables
from hpcai.cli.plan.planner import Planner
from hpcai.dist.mesh import Mesh
from hpcai.parallel.context import ContextParallelAttention
from hpcai.parallel.pipeline import Pipeline
from hpcai.plan.machines import Link
from hpcai.plan.machines import find_machine as machine
from hpcai.plan.pipeline_schedule import peak_memory, simulate_schedule
from hpcai.plan.step_trace import Communication, Kernel, traced_job


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))


def order(schedule: Any, ranks: int, parts: int, per_rank: int = 1) -> list[list[tuple[str, int, int]]]:
    with traced_job(ranks):
        pipeline = Pipeline(Chain(), Mesh({"pipeline": ranks}, ranks), first=(), last=(), schedule=schedule, per_rank=per_rank)
        return pipeline.order(parts)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_a_schedule_fills_and_empties_in_as_many_passes_as_there_are_other_stages(schedule: Any, ranks: int, parts: int) -> None:
    found = order(schedule, ranks, parts)
    ends = simulate_schedule(found, ranks - 1, lambda kind, _: {"F": 1.0, "B": 2.0}[kind], lambda *_: 0.0)
    assert max(ends) == 3 * (parts + ranks - 1)
    ends = simulate_schedule(found, ranks - 1, lambda *_: 1.0, lambda *_: 0.25)
    assert max(ends) >= 2 * (parts + ranks - 1) + 2 * (ranks - 1) * 0.25


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("gpipe", 2), ("zero-bubble-v", 2)])
def test_each_rank_passes_each_micro_batch_through_its_stages_once(schedule: Any, per_rank: int) -> None:
    found = order(schedule, 2, 4, per_rank)
    for rank, own in enumerate(found):
        stages = [rank, 3 - rank if schedule.endswith("v") else rank + 2][:per_rank]
        kinds = {"B": {"B"}, "W": {"I", "W"}}
        seen = Counter(own)
        assert max(seen.values()) == 1 and {stage for _, stage, _ in own} == set(stages)
        for stage in stages:
            for micro in range(4):
                did = {kind for kind, at, n in own if (at, n) == (stage, micro)}
                assert did in ({"F"} | kinds["B"], {"F"} | kinds["W"])
    last = 2 * per_rank - 1
    took = max(simulate_schedule(found, last, lambda kind, _: {"F": 1.0, "B": 2.0}.get(kind, 1.0), lambda *_: 0.0))
    assert 3 * 4 * per_rank <= took <= 3 * (4 * per_rank + 2)


def test_a_stage_stores_the_micro_batches_in_flight() -> None:
    bytes = {0: (12.0, 5.0, 10.0, 3.0)}
    first, second = ([one for one in each if one[1] == 0] for each in (order("1f1b", 2, 6)[0], order("gpipe", 2, 6)[0]))
    assert peak_memory(first, bytes) == 2 * 10 + 5 + 3 and peak_memory(second, bytes) == 6 * 10 + 5
    assert peak_memory([("F", 0, 0), ("B", 0, 0)], bytes) == 15  # before the gradients are there


# ---- of a language model

TINY = (*llm.Benchmark.tiny, "lora=null", "data.documents=joined", "model.layers=256", "data.batch=8", "step.bucket_mb=1e-6")


def test_a_planned_pipeline_takes_as_many_passes_as_micro_batches_and_other_stages() -> None:
    on = machine("h100", intra_node=Link(0, 1e15))
    words = ("model.recompute=none", "step.accumulate=1")
    whole, two = (Planner("llm", [*TINY, "step.bucket_mb=25", f"mesh.pipeline={n}"]) for n in (1, 2))
    few, many = (two.mean_step(1, 1, parts, on, words).step for parts in (2, 16))
    one = (many.seconds - few.seconds) / 14
    for parts, found in ((2, few), (16, many)):
        assert found.seconds == pytest.approx((parts + 1) * one, rel=0.04)
        assert found.idle == pytest.approx(one, rel=0.2)  # and the last stage has more to do
        assert found.seconds == pytest.approx(sum(v for k, v in vars(found).items() if k not in ("seconds", "sent", "messages")))
    assert one == pytest.approx(whole.mean_step(1, 1, 1, on, words).step.seconds / 2, rel=0.05)  # of both stages in sequence


@pytest.mark.parametrize("lean", ["none", pytest.param("layers", marks=pytest.mark.claim)])
def test_layers_of_stages_are_planned_from_few_as_from_all(lean: str) -> None:
    words = [*TINY, "model.layers=9", "mesh.pipeline=2", "mesh.tensor=2"]
    few, every = Planner("llm", words), Planner("llm", words)
    every.training.depth = None
    found = [each.mean_step(2, 2, 4, machine("h100"), ("step.accumulate=1", f"model.recompute={lean}")) for each in (few, every)]
    assert found[0].peak == pytest.approx(found[1].peak, rel=1e-9)
    assert found[0].step.seconds == pytest.approx(found[1].step.seconds, rel=1e-2)
    assert found[0].step.sent == pytest.approx(found[1].step.sent, rel=1e-9)


def attended(ranks: int, rank: int, again: bool = True) -> tuple[float, list[Communication]]:
    """Products of attention to 64 tokens by one of ``ranks``, forward and backward, and its messages."""
    with traced_job(ranks, rank=rank) as tracer:
        attend = ContextParallelAttention(Mesh({"context": ranks}, ranks, rank)["context"], again)
        with tracer.fake_tensors(), tracer.record() as trace:
            q, k, v = (torch.empty(1, heads, 64 // ranks, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
            attend(q, k, v).sum().backward()
    runs = [event for event in trace.events if isinstance(event, Kernel) and event.flops]
    assert {run.element_bytes for run in runs} == {2}  # the sums of exponentials beside them are wider
    return sum(run.flops for run in runs), [event for event in trace.events if isinstance(event, Communication)]


def test_context_parallel_attention_has_the_flop_of_one_rank_in_total() -> None:
    whole = attended(1, 0)[0]
    assert whole == (2 + 5) * 2 * 4 * 64 * 64 * 16 / 2
    for ranks in (2, 4):
        assert [attended(ranks, rank)[0] for rank in range(ranks)] == [whole / ranks] * ranks


def test_context_parallel_attention_saves_local_queries_and_keys() -> None:
    def kept(again: bool) -> int:
        with traced_job(4) as tracer, tracer.fake_tensors():
            attend = ContextParallelAttention(Mesh({"context": 4}, 4)["context"], again)
            q, k, v = (torch.empty(1, heads, 16, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
            before = tracer.bytes
            out = attend(q * 2, k * 2, v * 2)
            return tracer.bytes - before - out.nbytes

    own, whole = 2 * 2 * 2 * 16 * 16, 2 * 2 * 2 * 64 * 16
    queries = outs = 2 * 4 * 16 * 16
    assert (kept(True), kept(False)) == (queries + own + outs + 4 * 4 * 16, queries + own + outs + 4 * 4 * 16 + whole)


def test_communication_of_context_parallel_attention_is_recorded() -> None:
    keys = 2 * 2 * 2 * 16 * 16  # bytes of keys and values, 16 tokens of 2 heads
    for again, names in ((True, ["all-gather"] * 2 + ["reduce-scatter"]), (False, ["all-gather", "reduce-scatter"])):
        found = attended(4, 1, again)[1]
        assert [(send.name, send.bytes) for send in found] == [(name, keys) for name in names]
    assert not attended(1, 0)[1]


def test_micro_batches_send_and_update_once_in_a_step() -> None:
    planner = Planner("llm", [*TINY, "model.layers=2"])
    one, two, four = (planner.mean_step(1, 4, each, machine("h100"), ("step.accumulate=1",)).step for each in (1, 2, 4))
    assert (two.sent, two.messages) == (four.sent, four.messages) and two.messages > 0
    assert two.sent == 2 * one.sent  # in float32, not bfloat16
    assert 1.2 * two.memory_bound < four.memory_bound < 2 * two.memory_bound
    assert four.compute_bound == pytest.approx(2 * two.compute_bound)


def test_settings_say_the_mesh_and_the_steps_of_another_training() -> None:
    planner = Planner("llm", [word for word in llm.Benchmark.tiny if "data.batch" not in word], "apps/llm/configs/gpt3.yaml")
    assert planner.fixed_axes() == {"pipeline": 8} and planner.ways == [4] and planner.training.samples == {2304: 2304 * 72_401}
    assert Planner("llm").fixed_axes() == {} and Planner("llm").ways == [1, 2, 4, 8]


def test_the_command_plans_the_mesh_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["mesh.pipeline=2", "mesh.tensor=2", "mesh.context=2"]
    words = [*llm.Benchmark.tiny, "apps/llm/configs/gpt3.yaml", "data.batch=16", *axes]
    assert main(["plan", "llm", *words, "--gpus", "4", "16", "--slower", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["jobs"]["16"]
    parts = ("kernels_s", "launches_s", "messages_s", "idle_s", "loader_s")
    assert row["step_s"] == pytest.approx(sum(row[part] for part in parts)) and row["idle_s"] > 0
    assert (row["ways"], row["batch"], found["axes"], found["jobs"]["4"]) == (2, 16, {"pipeline": 2, "context": 2}, [])
    print_tables(found)
    assert "each of them over context 2 x pipeline 2" in capsys.readouterr().out
