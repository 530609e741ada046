"""Experiment trackers: the stores of the real packages after runs that were killed, requeued, finished or failed."""

import os
import signal
import struct
import time
import tomllib
from collections.abc import Callable
from functools import partial
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

def kill():
    while [json.loads(path.read_text()).get("train") for path in Path(sys.argv[3][17:]).glob("*/run.json")] != [10, 10]:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)

FAULTS = {{"kill": kill, "fail": lambda: 1 / 0, "signal": lambda: os.kill(os.getpid(), signal.SIGTERM), "": int}}
count, when, fault = 0, int(sys.argv[1]), sys.argv[2]

def loss(model, batch):
    global count
    count += 1
    if count == when:
        FAULTS[fault]()
    return {{"loss": model(batch).square().mean()}}

def error(model, batch):
    return {{"error": (model(batch).abs().sum(), len(batch))}}

def main(cfg):
    step = train.Step(nn.Linear(3, 1), loss, cfg.step, dist.single_process())
    with train.Run("app", cfg, dist.single_process()) as run:
        result = train.fit(step, [torch.ones(4, 3)] * 5, cfg.train, validation=[torch.ones(4, 3)], evaluate=error, run=run)
    raise SystemExit(result.exit_code)

config.run(RunConfig, main, ["report.sinks=[wandb, mlflow]", "train.steps=20", "train.report_every=2", "checkpoint.every_steps=4",
                             "step.lr=0.01", *sys.argv[3:]])
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs a job, in which forward pass ``when`` has a fault, and returns its exit code."""
    for name in [name for name in os.environ if name.startswith(("WANDB", "MLFLOW"))]:
        monkeypatch.delenv(name)
    for name, value in tomllib.loads(Path(trackers.__file__).with_suffix(".toml").read_text()).items():
        monkeypatch.setenv(name, value)
    for name in ("wandb", "mlflow.entities"):
        pytest.importorskip(name, reason="wandb or mlflow-skinny is not installed: trackers are NOT tested")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    (tmp_path / "job.py").write_text(PROGRAM.format())

    def run(when: int = 0, fault: str = "", *overrides: str, **environ: str) -> int:
        directory = f"report.directory={tmp_path / 'run'}"
        process = fork_script.fork_script(tmp_path / "job.py", str(when), fault, directory, *overrides,
                                          out=tmp_path / "out", err=tmp_path / "err", **environ)  # fmt: skip
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    return run


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows of an offline run, and its last records by kind. The file is a LevelDB log of protobuf records."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    data, at, content, rows, last = next(folder.glob("*.wandb")).read_bytes(), 7, b"", [], {}
    while at + 7 <= len(data):
        if (at % 32768) > 32768 - 7:
            at += -at % 32768
        _, size, kind = struct.unpack_from("<IHB", data, at)
        content += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):                               # whole, or its last part
            record = Record.FromString(content)
            content, name = b"", record.WhichOneof("record_type")
            last[name] = getattr(record, name)
            if name == "history":
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return rows, last


def test_x(job, tmp_path):
    for args in ((11, "kill"), (7, "signal"), ()):
        t = time.time(); print(job(*args), time.time() - t)
    print((tmp_path / "err").read_text())
    for folder in sorted((tmp_path / "run/wandb").glob("offline-run-*")):
        rows, last = read_wandb(folder)
        print(folder.name, list(last)); [print(r) for r in rows]
        print(last.get("exit"), last.get("summary"), last.get("preempting"))
    os.system(f"find {tmp_path} | grep -v checkpoints; ps -ef | grep wandb-core")
