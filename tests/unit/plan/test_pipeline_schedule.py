"""Plans of pipeline stages and of context-parallel attention."""

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


def make_order(schedule: Any, ranks: int, parts: int, per_rank: int = 1) -> list[list[tuple[str, int, int]]]:
    with traced_job(ranks):
        pipeline = Pipeline(Chain(), Mesh({"pipeline": ranks}, ranks), first=(), last=(), schedule=schedule, per_rank=per_rank)
        return pipeline.order(parts)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_a_schedule_fills_and_empties_in_as_many_passes_as_there_are_other_stages(schedule: Any, ranks: int, parts: int) -> None:
    order = make_order(schedule, ranks, parts)
    ends = simulate_schedule(order, ranks - 1, lambda kind, _: {"F": 1.0, "B": 2.0}[kind], lambda *_: 0.0)
    assert max(ends) == 3 * (parts + ranks - 1)
    ends = simulate_schedule(order, ranks - 1, lambda *_: 1.0, lambda *_: 0.25)
    assert max(ends) >= 2 * (parts + ranks - 1) + 2 * (ranks - 1) * 0.25


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("gpipe", 2), ("zero-bubble-v", 2)])
def test_each_rank_passes_each_micro_batch_through_its_stages_once(schedule: Any, per_rank: int) -> None:
    order = make_order(schedule, 2, 4, per_rank)
    for rank, actions in enumerate(order):
        stages = [rank, 3 - rank if schedule.endswith("v") else rank + 2][:per_rank]
        kinds = {"B": {"B"}, "W": {"I", "W"}}
        counts = Counter(actions)
        assert max(counts.values()) == 1 and {stage for _, stage, _ in actions} == set(stages)
        for stage in stages:
            for micro in range(4):
                done = {kind for kind, s, n in actions if (s, n) == (stage, micro)}
                assert done in ({"F"} | kinds["B"], {"F"} | kinds["W"])
    last = 2 * per_rank - 1
    seconds = max(simulate_schedule(order, last, lambda kind, _: {"F": 1.0, "B": 2.0}.get(kind, 1.0), lambda *_: 0.0))
    assert 3 * 4 * per_rank <= seconds <= 3 * (4 * per_rank + 2)


def test_a_stage_stores_the_micro_batches_in_flight() -> None:
    bytes = {0: (12.0, 5.0, 10.0, 3.0)}
    first, second = ([a for a in actions if a[1] == 0] for actions in (make_order("1f1b", 2, 6)[0], make_order("gpipe", 2, 6)[0]))
    assert peak_memory(first, bytes) == 2 * 10 + 5 + 3 and peak_memory(second, bytes) == 6 * 10 + 5
    assert peak_memory([("F", 0, 0), ("B", 0, 0)], bytes) == 15  # no gradients yet


# ---- a language model

TINY = (*llm.Benchmark().tiny, "lora=null", "data.documents=joined", "model.layers=256", "data.batch=8", "step.bucket_mb=1e-6")


def test_a_planned_pipeline_takes_as_many_passes_as_micro_batches_and_other_stages() -> None:
    h100 = machine("h100", intra_node=Link(0, 1e15))
    overrides = ("model.recompute=none", "step.accumulate=1")
    single, pipeline = (Planner("llm", [*TINY, "step.bucket_mb=25", f"mesh.pipeline={n}"]) for n in (1, 2))
    few, many = (pipeline.mean_step(1, 1, parts, h100, overrides).step for parts in (2, 16))
    seconds = (many.seconds - few.seconds) / 14
    for parts, step in ((2, few), (16, many)):
        assert step.seconds == pytest.approx((parts + 1) * seconds, rel=0.04)
        assert step.idle == pytest.approx(seconds, rel=0.2)  # the last stage has more work
        assert step.seconds == pytest.approx(sum(v for k, v in vars(step).items() if k not in ("seconds", "sent", "messages")))
    assert seconds == pytest.approx(single.mean_step(1, 1, 1, h100, overrides).step.seconds / 2, rel=0.05)  # stages in sequence


@pytest.mark.parametrize("recompute", ["none", pytest.param("layers", marks=pytest.mark.claim)])
def test_plans_from_few_layers_of_a_stage_equal_plans_from_all(recompute: str) -> None:
    overrides = [*TINY, "model.layers=9", "mesh.pipeline=2", "mesh.tensor=2"]
    few, full = Planner("llm", overrides), Planner("llm", overrides)
    full.training.depth = None
    plans = [p.mean_step(2, 2, 4, machine("h100"), ("step.accumulate=1", f"model.recompute={recompute}")) for p in (few, full)]
    assert plans[0].peak == pytest.approx(plans[1].peak, rel=1e-9)
    assert plans[0].step.seconds == pytest.approx(plans[1].step.seconds, rel=1e-2)
    assert plans[0].step.sent == pytest.approx(plans[1].step.sent, rel=1e-9)


def trace_attention(ranks: int, rank: int, regather: bool = True) -> tuple[float, list[Communication]]:
    """Return FLOP and communication of attention to 64 tokens, forward and backward, on one of ``ranks``."""
    with traced_job(ranks, rank=rank) as tracer:
        attention = ContextParallelAttention(Mesh({"context": ranks}, ranks, rank)["context"], regather)
        with tracer.fake_tensors(), tracer.record() as trace:
            q, k, v = (torch.empty(1, heads, 64 // ranks, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
            attention(q, k, v).sum().backward()
    kernels = [event for event in trace.events if isinstance(event, Kernel) and event.flops]
    assert {kernel.element_bytes for kernel in kernels} == {2}  # sums of exponentials are wider
    return sum(kernel.flops for kernel in kernels), [event for event in trace.events if isinstance(event, Communication)]


def test_context_parallel_attention_has_the_flop_of_one_rank_in_total() -> None:
    total = trace_attention(1, 0)[0]
    assert total == (2 + 5) * 2 * 4 * 64 * 64 * 16 / 2
    for ranks in (2, 4):
        assert [trace_attention(ranks, rank)[0] for rank in range(ranks)] == [total / ranks] * ranks


def test_context_parallel_attention_saves_local_queries_and_keys() -> None:
    def saved(regather: bool) -> int:
        with traced_job(4) as tracer, tracer.fake_tensors():
            attention = ContextParallelAttention(Mesh({"context": 4}, 4)["context"], regather)
            q, k, v = (torch.empty(1, heads, 16, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
            before = tracer.bytes
            out = attention(q * 2, k * 2, v * 2)
            return tracer.bytes - before - out.nbytes

    local, full = 2 * 2 * 2 * 16 * 16, 2 * 2 * 2 * 64 * 16
    queries = outs = 2 * 4 * 16 * 16
    assert (saved(True), saved(False)) == (queries + local + outs + 4 * 4 * 16, queries + local + outs + 4 * 4 * 16 + full)


def test_communication_of_context_parallel_attention_is_recorded() -> None:
    keys = 2 * 2 * 2 * 16 * 16  # bytes of keys and values, 16 tokens of 2 heads
    for regather, names in ((True, ["all-gather"] * 2 + ["reduce-scatter"]), (False, ["all-gather", "reduce-scatter"])):
        sent = trace_attention(4, 1, regather)[1]
        assert [(send.name, send.bytes) for send in sent] == [(name, keys) for name in names]
    assert not trace_attention(1, 0)[1]


def test_micro_batches_send_and_update_once_in_a_step() -> None:
    planner = Planner("llm", [*TINY, "model.layers=2"])
    step1, step2, step4 = (planner.mean_step(1, 4, count, machine("h100"), ("step.accumulate=1",)).step for count in (1, 2, 4))
    assert (step2.sent, step2.messages) == (step4.sent, step4.messages) and step2.messages > 0
    assert step2.sent == 2 * step1.sent  # in float32, not bfloat16
    assert 1.2 * step2.memory_bound < step4.memory_bound < 2 * step2.memory_bound
    assert step4.compute_bound == pytest.approx(2 * step2.compute_bound)


def test_settings_select_the_mesh_and_the_steps_of_another_training() -> None:
    planner = Planner("llm", [item for item in llm.Benchmark().tiny if "data.batch" not in item], "apps/llm/configs/gpt3.yaml")
    assert planner.fixed_axes() == {"pipeline": 8} and planner.ways == [4] and planner.training.samples == {2304: 2304 * 72_401}
    assert Planner("llm").fixed_axes() == {} and Planner("llm").ways == [1, 2, 4, 8]


def test_the_command_plans_the_mesh_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["mesh.pipeline=2", "mesh.tensor=2", "mesh.context=2"]
    overrides = [*llm.Benchmark().tiny, "apps/llm/configs/gpt3.yaml", "data.batch=16", *axes]
    assert main(["plan", "llm", *overrides, "--gpus", "4", "16", "--slower", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = plan["jobs"]["16"]
    parts = ("kernels_s", "launches_s", "messages_s", "idle_s", "loader_s")
    assert row["step_s"] == pytest.approx(sum(row[part] for part in parts)) and row["idle_s"] > 0
    assert (row["ways"], row["batch"], plan["axes"], plan["jobs"]["4"]) == (2, 16, {"pipeline": 2, "context": 2}, [])
    print_tables(plan)
    assert "each of them over context 2 x pipeline 2" in capsys.readouterr().out
