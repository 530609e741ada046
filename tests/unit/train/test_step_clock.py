"""Parts of a step in the reports of a run: on a CPU by the clock of the host, on a GPU by events of one step of each report."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist, log, startup, train
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train.loop import Batches
from hpcai.train.step_clock import StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the host, which advances by ``wait`` alone, in powers of two: sums are exact."""
    clock = SimpleNamespace(now=0.0)
    clock.wait = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(startup, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_the_parts_of_reports_are_what_the_host_waited_for_and_add_up_to_all_of_its_time(clock: SimpleNamespace) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        clock.wait(0.5)
        mean = model(batch).mean()
        mean.register_hook(lambda gradient: clock.wait(0.25))
        return {"loss": mean}

    def metric(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        clock.wait(4.0)
        return {"error": (model(batch).sum(), len(batch))}

    class SlowBatches(Batches):
        def epoch(self, *args: Any) -> Iterator[Any]:
            for batch in super().epoch(*args):
                clock.wait(0.125)
                yield batch

    step = train.Step(nn.Linear(3, 1), loss, StepConfig(accumulate=2), dist.single_process())
    step.optimizer.step = lambda *_: clock.wait(0.0625)  # type: ignore[method-assign]
    run, events = train.Run("test", None, step.mesh), list[log.Event]()
    run.reports.sinks = (SimpleNamespace(write=events.append, close=lambda: None),)
    batches, cfg = [torch.ones(4, 3)] * 3, TrainConfig(epochs=2, report_every=2)
    train.fit(step, SlowBatches(batches), cfg, validation=batches[:1], evaluate=metric, run=run)
    reports = [event.fields for event in events if event.kind == "train"]
    usual = {"data": 0.125, "forward": 1.0, "backward": 0.5, "update": 0.0625}
    assert [(report["step"], report["parts"]) for report in reports] == [
        (2, usual), (3, usual), (4, usual | {"evaluate": 4.0}), (6, usual)]  # fmt: skip
    assert reports[-1]["seconds"] == sum(usual.values()) * 6 == clock.now - 8
    assert events[-1].fields["parts"] == {"evaluate": 4.0}, "after the last report"


class FakeGpu:
    """Events with the time of a device that advances only by ``seconds``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.capturing, self.events = 0.0, False, 0
        monkeypatch.setattr(torch.cuda, "Event", self.new_event)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def new_event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.events += 1
        event = SimpleNamespace(elapsed_time=lambda later: 1000 * (later.at - event.at))
        event.record = lambda: setattr(event, "at", self.seconds)
        return event


def test_on_a_gpu_one_step_of_a_report_is_measured_and_the_rest_is_time_without_work(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, parts = FakeGpu(monkeypatch), StepClock(torch.device("cuda"))

    def run_step(*names: str, seconds: float = 2.0) -> None:
        for name in (*names, "other"):
            parts.begin(name)
            gpu.seconds += seconds
        clock.wait(8.0)

    run_step("forward", "update")
    assert gpu.events == 0, "no event in a step that is not measured"
    parts.measure_next_step()
    run_step("forward", "backward", "forward", "backward", "reduce", "update")
    run_step("forward", "update", seconds=100.0)
    marks = parts.take_marks()
    assert gpu.events == 7 and parts.take_marks() == []
    work = {"forward": 4.0, "backward": 4.0, "reduce": 2.0, "update": 2.0}
    assert parts.end_interval(3, marks) == (24.0, work), "the GPU always had work"
    # Without a measured step the work is that of the last one. A wait for data counts as far as the GPU had no work.
    for before, wait, idle in ((8.0, 1.0, {"data": 1.0, "other": 4.0}), (0.0, 6.0, {"data": 2.0})):
        clock.wait(before)
        for _ in parts.wait_for(clock.wait(wait) or [None] for _ in range(1)):
            run_step("forward")
        with parts.during("evaluate"):
            clock.wait(1.0)
        assert parts.end_interval(1, []) == (before + wait + 8.0, work | idle | {"evaluate": 1.0}), wait
    # A part that is recorded for a graph has no event.
    parts.measure_next_step()
    parts.begin("graph")
    gpu.capturing = True
    parts.begin("forward")
    gpu.capturing, gpu.seconds = False, gpu.seconds + 5
    parts.begin("other")
    assert parts.end_interval(1, parts.take_marks())[1]["graph"] == 5
