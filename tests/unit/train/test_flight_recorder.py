"""Failure bundles of one process: their contents, and the first error, which no error of writing them hides."""

import logging
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpcai import dist, train
from hpcai.cli.replay import search_non_finite
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.errors import DataError
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train import flight_recorder, rng
from hpcai.train.flight_recorder import HEARTBEAT, LAST_FAILURE, FlightRecorder, describe_ranks, pause_watchdog, read_bundle
from tests.unit.train.test_run import run_in as new_run


def fail_in(folder: Path, before: Any = lambda: None) -> None:
    with new_run(folder) as run:
        run.begin()
        before()
        raise DataError("the first error")


def test_a_bundle_holds_logs_events_random_state_and_the_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the first error"), new_run(tmp_path) as run:
        run.begin()
        run.flight_recorder.describe = lambda step: {"step": 7, "samples": 1 / 0}
        for number in range(300):
            logging.getLogger("any").warning("line %d", number)
            run.reports.emit("train", step=number, loss=float("nan"))
        state = rng.state()["torch"]
        raise DataError("the first error")
    (record,) = read_bundle(tmp_path / LAST_FAILURE)
    assert len(record["log"]) == 200 and record["log"][-1].endswith("WARNING any: line 299")
    assert len(record["events"]) == 100 and record["events"][-1]["loss"] == "NaN"
    assert record["error"]["text"] == "the first error" and "raise DataError" in record["error"]["traceback"]
    assert record["step"] == 0 and "ZeroDivisionError" in record["position"], "an error of describe leaves the other entries"
    assert "MainThread" in record["threads"][0]["thread"] and record["pid"] == os.getpid()
    assert torch.equal(load_file(tmp_path / LAST_FAILURE / "rank-00000.safetensors")["torch"], state)
    assert all(not isinstance(handler, FlightRecorder) for handler in logging.getLogger().handlers)


def test_a_run_without_failure_writes_no_bundle(tmp_path: Path) -> None:
    for end in (SystemExit(85), KeyboardInterrupt()):
        with pytest.raises(type(end)), new_run(tmp_path / "stopped") as run:
            run.begin()
            raise end
    with pytest.raises(DataError), new_run(tmp_path / "refused"):
        raise DataError("before it began")
    with pytest.raises(DataError), new_run(None) as run:
        run.begin()
        raise DataError("without a directory")
    assert not list(tmp_path.rglob("*failure*"))


def test_a_full_disk_does_not_hide_the_first_error_and_keeps_no_half_bundle(tmp_path: Path) -> None:
    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def fail_with_full_disk() -> None:
        try:
            fail_in(tmp_path / "run", lambda: limit(100))
        finally:
            limit(resource.RLIM_INFINITY)

    with ForkedProcesses(fail_with_full_disk, tmp_path / "output") as forks:
        codes, output = forks.wait(30)
    assert codes == [1] and output.rstrip().endswith("DataError: the first error"), output
    assert (tmp_path / "run").is_dir() and not list((tmp_path / "run").glob("failure-*"))


def test_a_file_system_that_hangs_does_not_hold_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_WRITE_TIMEOUT", 0.2)
    monkeypatch.setattr(FlightRecorder, "_write", lambda *args: time.sleep(3))
    start = time.monotonic()
    with pytest.raises(DataError, match="the first error"):
        fail_in(tmp_path)
    assert time.monotonic() - start < 2


def test_ranks_at_the_same_location_share_a_line_and_the_rarest_is_first() -> None:
    records = [{"rank": rank, "step": 4, "where": "wait (a.py:1: w)" if rank != 5 else "sleep (b.py:2: s)"} for rank in range(9)]
    records = [record for record in records if record["rank"] != 7]
    assert describe_ranks(records, 10).splitlines() == [
        "  rank 5: step 4, in sleep (b.py:2: s)",
        "  ranks 7,9: wrote nothing: its node is gone, its disk full, or a call holds the interpreter",
        "  ranks 0-4,6,8: step 4, in wait (a.py:1: w)",
    ]


def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any, timeout: float = 0.3) -> list[float]:
    """Return the timeouts by which the watchdog ended the job while ``work`` ran."""
    ends: list[float] = []
    monkeypatch.setattr(FlightRecorder, "_end_job", lambda self, timeout: ends.append(timeout))
    with new_run(tmp_path) as run:
        run.begin()
        with run.flight_recorder.watch_hang(timeout):
            work()
    return ends


def test_only_missing_progress_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_step() -> None:
        time.sleep(0.9)

    def hang() -> None:
        HEARTBEAT.beats += 1
        time.sleep(0.9)

    def progress() -> None:
        for _ in range(9):
            HEARTBEAT.beats += 1
            time.sleep(0.1)

    def pause() -> None:
        HEARTBEAT.beats += 1
        with pause_watchdog():
            time.sleep(0.9)

    def save() -> None:
        HEARTBEAT.beats += 1
        partial = tmp_path / "checkpoints" / ".step-00000001.partial"
        partial.mkdir()
        for size in range(9):
            (partial / "file").write_bytes(bytes(size + 1))
            time.sleep(0.1)

    for work in (first_step, progress, pause, save):
        assert watch(tmp_path, monkeypatch, work) == [], work
    assert watch(tmp_path, monkeypatch, hang)
    assert watch(tmp_path, monkeypatch, lambda: time.sleep(4)), "the first step may take four times as long, but not longer"


def test_steps_and_batches_of_an_evaluation_count() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": model(batch).square().mean()}

    step = train.Step(nn.Linear(2, 1), loss, StepConfig(), dist.single_process())
    before = HEARTBEAT.beats
    batches = [torch.randn(2, 2) for _ in range(4)]
    train.fit(step, batches, TrainConfig(steps=3), validation=batches, evaluate=loss)
    assert HEARTBEAT.beats - before == 3 + 4


@pytest.mark.parametrize("where", ["batch", "second", "loss"])
def test_the_search_names_the_first_module_that_is_not_finite(where: str) -> None:
    class Second(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 0 if where == "second" else x

    model = nn.Sequential(nn.Linear(2, 2), Second(), nn.Linear(2, 1))
    batch = torch.full((3, 2), float("nan") if where == "batch" else 1.0)
    with search_non_finite(model, batch) as messages:
        out = model(batch)
        (torch.sqrt(out - out.detach()).sum()).backward()  # a finite value whose gradient is not
    expected = {
        "batch": ["the batch itself is non-finite",
                  "0 (Linear) is the first module with a non-finite output; its input was non-finite too"],
        "second": ["1 (Second) is the first module with a non-finite output"],
        "loss": ["all outputs are finite: the loss or the backward pass causes it",
                 "backward: the first non-finite gradient is that of the output of 2"],
    }[where]  # fmt: skip
    assert messages == expected
    assert not any(module._forward_hooks for module in model.modules())
