"""Experiment trackers: the stores of the real packages after jobs that were killed, failed, were requeued, and finished."""

import json
import multiprocessing
import os
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist, log, trackers, train
from hpcai.settings import RunConfig


def run_job(directory: Path, when: int, number: int) -> None:
    """Train; at forward pass ``when`` this job gets the signal ``number``, or fails if it is 0."""

    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal when
        when -= 1
        if when == 0:
            last = 14 if number == 10 else 10
            while [json.loads(file.read_text()).get("train") for file in directory.glob("*/run.json")] != [last, last]:
                time.sleep(0.01)
            time.sleep(0.3)                                                    # W&B's process writes what it has received
            children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
            for pid in [*(children if number == 10 else ()), os.getpid()]:     # Slurm sends it to all
                os.kill(int(pid), number)
            assert number
        return {"loss": model(batch).square().mean()}

    cfg = RunConfig.model_validate({
        "train": {"steps": 20, "report_every": 2}, "checkpoint": {"every_steps": 4}, "step": {"optimizer": "sgd"},
        "report": {"directory": directory, "sinks": ("wandb", "mlflow")},
    })  # fmt: skip
    mesh, data = dist.single_process(), [torch.ones(4, 3)] * 5
    with train.Run("app", cfg, mesh) as run:
        run.reports.emit("note", text="before the start")
        step = train.Step(nn.Linear(3, 1), loss, cfg.step, mesh)
        result = train.fit(step, data, cfg.train, validation=data, evaluate=lambda *args: {"error": (torch.ones(()), 4)}, run=run)
    sys.exit(result.exit_code)


def read_wandb(file: Path) -> dict[str, list[Any]]:
    """Return the records of an offline run by kind. The file is a LevelDB log of protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, content, records = file.read_bytes(), 7, b"", defaultdict(list)
    while at + 7 <= len(data):
        at += -at % 32768 if at % 32768 > 32768 - 7 else 0                     # the end of a block
        size, kind = struct.unpack_from("<HB", data, at + 4)
        content, at = content + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):                                                     # whole, or the last part
            record, content = Record.FromString(content), b""
            records[record.WhichOneof("record_type")].append(getattr(record, record.WhichOneof("record_type")))
    return records


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


# The exit code and status of a job, by its fault: kill -9, an error, Slurm's signal (to a later or to the first job), none.
STOPPED = 85, "SCHEDULED"
ENDS = {(11, 9): (-9, "RUNNING"), (3, 0): (1, "FAILED"), (7, 10): STOPPED, (15, 10): STOPPED, (0, 0): (0, "FINISHED")}
ALL = (11, 9), (3, 0), (7, 10), (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [((15, 10), (0, 0)), pytest.param(ALL, marks=pytest.mark.claim)], ids=len)
def test_jobs_that_end_in_any_way_continue_one_run_of_each_tracker(
    faults: Sequence[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip("wandb", reason="wandb is not installed: trackers are NOT tested")
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: trackers are NOT tested")
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    client, ends, pids = mlflow.MlflowClient(str(tmp_path / "run/mlflow")), [], []
    for fault in faults:
        job = multiprocessing.get_context("fork").Process(target=run_job, args=(tmp_path / "run", *fault))
        job.start()
        job.join()
        (run,) = client.search_runs([client.get_experiment_by_name("app").experiment_id])
        ends.append((job.exitcode, run.info.status))
        pids.append(job.pid)
    assert ends == [ENDS[fault] for fault in faults]
    assert capfd.readouterr().err.count(f"later: wandb sync {tmp_path}/run/wandb\n") == len(faults)
    assert not list(home.rglob("*"))

    steps = {"train/loss": [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20], "evaluate/error": [5, 10, 15, 20]}
    assert {name: [point.step for point in client.get_metric_history(run.info.run_id, name)] for name in steps} == steps
    assert (run.data.params["step.optimizer"], run.data.params["job.world"], run.info.run_name) == ("sgd", "1", "run")
    assert run.data.tags["stop/reason"] == "finished" and run.data.metrics["stop/samples"] == 80

    jobs = [read_wandb(file) for file in sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))]
    assert len({(job["run"][0].run_id, job["run"][0].project, job["run"][0].display_name) for job in jobs}) == 1
    assert [[each.exit_code for each in job["exit"]] for job in jobs] == [[code] * (code >= 0) for code, _ in ends]
    assert [len(job["preempting"]) for job in jobs] == [code == 85 for code, _ in ends]
    assert values(jobs[0]["run"][0].config.update)["step"]["optimizer"] == "sgd"
    rows = [values(row.item) for job in jobs for row in job["history"]]
    assert {name: [row["step"] for row in rows if name in row] for name in steps} == steps
    assert "finished" in [values(each.update).get("stop/reason") for each in jobs[-1]["summary"]]
    deadline = time.monotonic() + 20
    while any(f"--pid {pid}\n" in subprocess.check_output(["ps", "-eo", "args"], text=True) for pid in pids):
        assert time.monotonic() < deadline, "W&B's process is left"
        time.sleep(0.05)


def test_a_tracker_that_fails_warns_once_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(trackers.Tracker):
        def open(self, *args: Any) -> str:
            raise RuntimeError("no server")

    with log.Reports([Broken(tmp_path / "json", None)]) as reports:
        for kind in ("start", "train", "evaluate", "stop"):
            reports.emit(kind, name="app", settings={}, step=1, loss=0.5)
    (warning,) = caplog.records
    assert warning.getMessage() == "Broken cannot write (RuntimeError('no server')); the run continues without it"
