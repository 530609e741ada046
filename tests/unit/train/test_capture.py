"""A captured step equals the eager one. ``CPUGraph`` replays operations on static memory; tests/gpu has the CUDA graph."""

import gc
import os
import re
import weakref
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.dist import watchdog
from hpcai.errors import ConfigError, DivergedError
from hpcai.nn import cuda_graph
from hpcai.nn.cuda_graph import CudaGraph, graph_factory
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.capture import _WARMUP_STEPS as WARMUP
from hpcai.train.capture import Capture, batch_signature
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from hpcai.train.metrics import MetricSums
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph
from tests.reference_data import load_json


class Network(nn.Module):
    """A network with dropout and a buffer that every forward pass changes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(torch.relu(self.norm(self.first(x))), self.dropout, self.training)
        return self.last(x)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    error = (model(batch["x"]) - batch["y"]).square()
    return {"loss": error.mean(), "worst": (error.detach().amax(), 1)}


def make_batch(seed: int, count: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, 6, generator=generator), "y": torch.randn(count, 2, generator=generator)}


def new_step(capture: str, dropout: float = 0.0, loss: Any = loss, graph: Any = CPUGraph, **overrides: Any) -> Step:
    torch.manual_seed(0)
    names = {"decay_names": ("first.weight",), "muon_names": ("first.weight",)}
    cfg = StepConfig(capture=capture, **{"weight_decay": 0.1, **names} | overrides)
    return Step(Network(dropout), loss, cfg, dist.single_process(torch.device("cpu")), graph=graph)


def run_steps(step: Step, count: int, samples: int = 8) -> list[dict[str, Any]]:
    return [step(make_batch(seed, samples)) for seed in range(count)]


def test_a_deleted_step_frees_its_memory() -> None:
    step = new_step("whole")
    run_steps(step, 4)
    weights = [weakref.ref(parameter) for parameter in step.model.parameters()]
    del step
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def clone_state(step: Step) -> dict[str, torch.Tensor]:
    parts = (step.model.state_dict(), step.optimizer.weights(), step.optimizer.state(), step.average.state())
    return {f"{i}/{name}": tensor.clone() for i, part in enumerate(parts) for name, tensor in part.items()}


def check_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


OPTIMIZERS = load_json("captured_optimizers")


@pytest.mark.parametrize("mode", ["forward", "whole"])
@pytest.mark.parametrize("overrides", OPTIMIZERS, ids=str)
def test_captured_is_eager_bit_for_bit(mode: str, overrides: dict[str, Any]) -> None:
    eager, captured = new_step("whole", **overrides), new_step(mode, **overrides)
    eager._capture = None  # the same flat parameters, without a graph
    sums = [MetricSums(), MetricSums()]
    for i, rate in enumerate((1e-3, 0.0, 2e-3, 5e-4, 3e-3, 1e-3, 2e-3, 1e-3)):
        part = make_batch(i, 4 if i in (1, 3, 6) else 8)  # a second shape, and back
        values = [step(part, rate) for step in (eager, captured)]
        assert torch.equal(values[0]["loss"], values[1]["loss"]) and torch.equal(values[0]["worst"][0], values[1]["worst"][0])
        for total, value in zip(sums, values):
            total.add(value, len(part["x"]))
        check_equal(clone_state(eager), clone_state(captured))
    reports = [total.reduce(step.mesh["replicate"], step.mesh.device) for total, step in zip(sums, (eager, captured))]
    assert reports[0] == reports[1] and eager.count == captured.count == 8
    assert captured._capture is not None and captured._capture.recorded() == 2


@pytest.mark.parametrize("mode", ["forward", "whole"])
def test_dropout_differs_from_replay_to_replay(mode: str) -> None:
    step = new_step(mode, dropout=0.5)
    same_batch = make_batch(0)
    losses = {step(same_batch, 0.0)["loss"].item() for _ in range(WARMUP + 4)}
    assert len(losses) == WARMUP + 4 and step._capture is not None and step._capture.recorded() == 1


def test_recording_leaves_no_trace_bit_for_bit() -> None:
    step = new_step("whole", dropout=0.5, ema_decay=0.9)
    for i in range(WARMUP):
        step(make_batch(i))
    before, random, capture = clone_state(step), torch.get_rng_state(), step._capture
    counts = step.count, step._count.clone(), step._first_nonfinite.clone()
    assert capture is not None and capture.recorded() == 0
    slot = capture._record(capture._slots[batch_signature(make_batch(0))], make_batch(7))
    assert slot is not None and capture.recorded() == 1
    check_equal(clone_state(step), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert step.count == counts[0] and torch.equal(step._count, counts[1]) and torch.equal(step._first_nonfinite, counts[2])


@pytest.mark.parametrize("mode", ["forward", "whole"])
def test_a_nan_under_capture_leaves_the_weights_and_names_its_step(mode: str) -> None:
    step = new_step(mode, optimizer="adamw", ema_decay=0.9)
    run_steps(step, WARMUP + 1)
    good = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    bad = make_batch(2)
    bad["y"][0] = float("nan")
    step(bad)
    step(make_batch(3))
    for name, p in step.model.named_parameters():
        assert torch.equal(p, good[name])
    with pytest.raises(DivergedError, match=f"step {WARMUP + 2}: the loss is not finite on rank 0"):
        step.check()


def test_a_captured_run_resumes_bit_for_bit(tmp_path: Any) -> None:
    step = new_step("whole", dropout=0.5)
    run_steps(step, WARMUP + 2)
    Checkpoints(tmp_path, CheckpointConfig(), step.mesh).save(step, Progress(step=WARMUP + 2))
    expected = [values["loss"].item() for values in run_steps(step, WARMUP + 2)]
    resumed = new_step("whole", dropout=0.5)
    Checkpoints(tmp_path, CheckpointConfig(), resumed.mesh).resume(resumed)
    assert [values["loss"].item() for values in run_steps(resumed, WARMUP + 2)] == expected
    check_equal(clone_state(step), clone_state(resumed))


def test_a_loss_that_reads_the_device_is_refused_with_its_line() -> None:
    def reads(model: nn.Module, part: dict[str, torch.Tensor]) -> dict[str, Any]:
        values = loss(model, part)
        if values["loss"].item() > 1e9:  # here
            raise AssertionError
        return values

    text = r"aten._local_scalar_dense at .*test_capture.py:\d+ \(if values\[\"loss\"\].item\(\) > 1e9:.*\) makes the host wait"
    with pytest.raises(ConfigError, match="step.capture: " + text + ".*step.capture=none"):
        new_step("whole", loss=reads)(make_batch(0))


def test_more_shapes_than_allowed_are_refused() -> None:
    step = new_step("whole", capture_shapes=2)
    step(make_batch(0, 8))
    step(make_batch(0, 4))
    step(make_batch(1, 8))
    with pytest.raises(ConfigError, match=r"a batch of another shape, .*\(6, 6\).*, after 2 that were captured .*drop the last"):
        step(make_batch(0, 6))


def test_a_capture_that_fails_names_the_operation() -> None:
    class Refusing(CPUGraph):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "cumsum" in str(function):
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__torch_dispatch__(function, types, args, kwargs)

    def summed(model: nn.Module, part: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"loss": model(part["x"]).cumsum(0).mean()}

    with pytest.raises(ConfigError, match=r"cannot be captured by aten.cumsum.default at .*test_capture.py.*not permitted"):
        run_steps(new_step("whole", loss=summed, graph=Refusing), WARMUP + 1)


def test_without_a_gpu_capture_is_refused_or_left_out() -> None:
    mesh = dist.single_process(torch.device("cpu"))
    with pytest.raises(ConfigError, match="step.capture is whole, but there is no GPU: this rank computes on cpu"):
        Step(Network(), loss, StepConfig(capture="whole"), mesh)
    step = Step(Network(), loss, StepConfig(capture="auto"), mesh)
    assert (step.cfg.capture, step.messages) == ("none", ["step.capture: none, since there is no GPU: this rank computes on cpu"])


class Failing(CPUGraph):
    """A graph that fails at one point."""

    where, tries = "", 0

    def __init__(self) -> None:
        super().__init__()
        type(self).tries += 1

    def fail(self, where: str) -> None:
        if self.where == where:
            raise RuntimeError(f"no {where} today\nCUDA kernel errors might be asynchronous")

    def capture(self, function: Any) -> Any:
        outputs = super().capture(function)
        self.fail("capture")
        return outputs

    def replay(self) -> None:
        self.fail("replay")
        super().replay()


def failing_graph(where: str) -> type[Failing]:
    return type("Failing", (Failing,), {"where": where})


def check_eager(step: Step, parts: list[dict[str, torch.Tensor]]) -> None:
    """Assert that the step equals an uncaptured one on these batches."""
    eager = new_step("whole", 0.5, ema_decay=0.9)
    eager._capture = None
    for i, part in enumerate(parts):
        assert torch.equal(step(part, 1e-3 * (i + 1))["loss"], eager(part, 1e-3 * (i + 1))["loss"])
        check_equal(clone_state(step), clone_state(eager))


def test_auto_continues_uncaptured_after_a_failed_capture_and_reports_it_once() -> None:
    graph = failing_graph("capture")
    step = new_step("auto", 0.5, graph=graph, ema_decay=0.9)
    check_eager(step, [*(make_batch(i) for i in range(WARMUP + 2)), make_batch(2, 4)])
    assert graph.tries == 1, "a failed capture is not repeated"
    (message,) = step.news()
    assert message.startswith("step.capture: ") and "no capture today" in message and message.endswith("run uncaptured from now on")
    assert step.news() == []
    for mode in ("whole", "forward"):
        with pytest.raises(ConfigError, match="no capture today"):
            run_steps(new_step(mode, graph=failing_graph("capture")), WARMUP + 1)


def test_auto_runs_excess_shapes_uncaptured_and_reports_it_once() -> None:
    step = new_step("auto", 0.5, ema_decay=0.9, capture_shapes=1)
    check_eager(step, [make_batch(i, count) for i, count in enumerate((8, 4, 6, 8, 8, 4, 8))])
    assert step._capture is not None and step._capture.recorded() == 1
    excess, recorded = step.news()
    assert "a batch of another shape" in excess and "run uncaptured" in excess
    assert re.fullmatch(r"step.capture: graph 1 of at most 1 recorded in \d+\.\d s", recorded) and step.news() == []


def test_a_failed_replay_raises() -> None:
    with pytest.raises(RuntimeError, match="no replay today"):
        run_steps(new_step("auto", graph=failing_graph("replay")), WARMUP + 1)


class FakeCuda:
    """A substitute of the functions of ``torch.cuda`` that a graph uses. It records calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.now = list[str](), "main"
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: self.calls.append(f"{name} {pool}"), raising=False)
        for name, value in {
            "synchronize": lambda: None, "current_stream": lambda: self.now, "current_device": lambda: 0, "CUDAGraph": lambda: self,
            "set_stream": lambda stream: setattr(self, "now", stream), "default_generators": (self,), "graph": self.graph,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def clone_state(self) -> str:
        return "rng"

    def graphsafe_set_state(self, state: str) -> None:
        self.calls.append(f"set {state}")

    def reset(self) -> None:
        self.calls.append("reset")

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        self.now = stream
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_failed_capture_restores_stream_memory_and_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraph("pool", "side").capture(lambda: None)
    assert cuda.now == "main"
    assert cuda.calls == ["_cuda_endAllocateToPool pool", "_cuda_releasePool pool", "reset", "set rng"]


def test_each_capture_has_a_pool_of_its_own_for_all_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = iter("abc")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: object())
    monkeypatch.setattr(cuda_graph, "_idle_streams", {})
    captures = [Capture(lambda part: part, 4) for _ in range(2)]
    assert [capture.graph()._pool for capture in (*captures, *captures)] == ["a", "b", "a", "b"]  # type: ignore[attr-defined]
    first, second = (capture.graph()._stream for capture in captures)  # type: ignore[attr-defined]
    assert first is not second
    del captures[0]
    assert graph_factory(captures[0])()._stream is first, "the workspaces of cuBLAS are reused"


@pytest.mark.parametrize("error", [None, DivergedError("step 3: the loss is not finite", 3)], ids=str)
def test_graphs_are_deleted_before_the_process_groups(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class RecordingGraph(CPUGraph):
        def reset(self) -> None:
            events.append("reset")

    step = new_step("whole", graph=RecordingGraph)
    run_steps(step, WARMUP + 1)
    run_steps(step, WARMUP + 1, 4)
    for name, function in {"is_initialized": lambda: True, "destroy_process_group": lambda: events.append("destroy")}.items():
        monkeypatch.setattr(watchdog.torch_dist, name, function)
    for name, function in {"is_initialized": lambda: True, "synchronize": lambda: events.append("synchronize")}.items():
        monkeypatch.setattr(torch.cuda, name, function)
    job = watchdog.Watchdog(0, 1, "127.0.0.1", torch.distributed.HashStore(), os._exit)
    with pytest.raises(SystemExit) if error else nullcontext(), job:
        if error:
            raise error
    assert events == ["reset", "reset", "synchronize", "destroy"]
