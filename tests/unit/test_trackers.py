"""Experiment trackers: the stores of the real packages after jobs that were killed, failed, were requeued, and finished."""

import json
import logging
import os
import struct
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hpcai import log, trackers
from tests import fork_script

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from hpcai import config, dist, train
from hpcai.settings import RunConfig

when, number, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def loss(model, batch):
    global when
    when -= 1
    if when == 0:
        while [json.loads(file.read_text()).get("train") for file in directory.glob("*/run.json")] != [10 + 4 * (number == 10)] * 2:
            time.sleep(0.01)                            # both have logged the last report
        time.sleep(0.3)                                  # and W&B's process has written it
        children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
        for pid in [*(children if number == 10 else ()), os.getpid()]:
            os.kill(int(pid), number)                    # 0: no signal; Slurm sends SIGUSR1 to all processes
        assert number, "a failure"
    return {"loss": model(batch).square().mean()}

def error(model, batch):
    return {"error": (model(batch).abs().sum(), len(batch))}

def main(cfg):
    step = train.Step(nn.Linear(3, 1), loss, cfg.step, dist.single_process())
    with train.Run("app", cfg, dist.single_process()) as run:
        result = train.fit(step, [torch.ones(4, 3)] * 5, cfg.train, validation=[torch.ones(4, 3)], evaluate=error, run=run)
    raise SystemExit(result.exit_code)

config.run(RunConfig, main, ["report.sinks=[wandb, mlflow]", "train.steps=20", "train.report_every=2", "checkpoint.every_steps=4",
                             "step.optimizer=sgd", f"report.directory={directory}"])
"""


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


def has_service(job: int) -> bool:
    files = [file for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    return any(f"--pid\0{job}\0".encode() in file.read_bytes() for file in files if file.exists())


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_jobs_that_end_in_any_way_continue_one_run_of_each_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in tomllib.loads(Path(trackers.__file__).with_suffix(".toml").read_text()).items():
        monkeypatch.setenv(name, value)
    for name in ("wandb", "mlflow"):
        pytest.importorskip(name, reason="wandb or mlflow-skinny is not installed: trackers are NOT tested")
    from mlflow import MlflowClient

    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    (tmp_path / "job.py").write_text(PROGRAM)
    client, ends = MlflowClient(str(tmp_path / "run/mlflow")), []
    for when, number in ((11, 9), (3, 0), (7, 10), (0, 0)):
        job = fork_script.fork_script(tmp_path / "job.py", str(when), str(number), str(tmp_path / "run"),
                                      out=tmp_path / "out", err=tmp_path / "err")  # fmt: skip
        job.join()
        (run,) = client.search_runs([client.get_experiment_by_name("app").experiment_id])
        ends.append((job.exitcode, run.info.status))
        deadline = time.monotonic() + 20
        while has_service(job.pid or 0):
            assert time.monotonic() < deadline, "W&B's process is left"
            time.sleep(0.05)
    assert ends == [(-9, "RUNNING"), (1, "FAILED"), (85, "SCHEDULED"), (0, "FINISHED")], (tmp_path / "err").read_text()
    assert (tmp_path / "err").read_text().count(f"later: wandb sync {tmp_path}/run/wandb\n") == 4
    assert not list(home.rglob("*"))

    steps = {"train/loss": [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20], "evaluate/error": [5, 10, 15, 20]}
    for name, expected in steps.items():
        assert [point.step for point in client.get_metric_history(run.info.run_id, name)] == expected
    assert (run.data.params["step.optimizer"], run.data.params["job.world"], run.info.run_name) == ("sgd", "1", "run")
    assert run.data.tags["stop/reason"] == "finished" and run.data.metrics["stop/samples"] == 80

    jobs = [read_wandb(file) for file in sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))]
    assert len({(job["run"][0].run_id, job["run"][0].project, job["run"][0].display_name) for job in jobs}) == 1
    assert [[each.exit_code for each in job["exit"]] for job in jobs] == [[], [1], [85], [0]]
    assert [len(job["preempting"]) for job in jobs] == [0, 0, 1, 0]
    assert values(jobs[0]["run"][0].config.update)["step"]["optimizer"] == "sgd"
    rows = [values(row.item) for job in jobs for row in job["history"]]
    assert {name: [row["step"] for row in rows if name in row] for name in steps} == steps
    assert "finished" in [values(each.update).get("stop/reason") for each in jobs[3]["summary"]]


def test_a_tracker_that_fails_warns_once_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(trackers.Tracker):
        def open(self, *args: Any) -> str:
            raise RuntimeError("no server")

    with caplog.at_level(logging.WARNING), log.Reports([Broken(tmp_path / "json", None)]) as reports:
        for kind in ("start", "train", "evaluate", "stop"):
            reports.emit(kind, name="app", settings={}, step=1, loss=0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "Broken cannot write (RuntimeError('no server')); the run continues without it"
    ]
