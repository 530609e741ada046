"""Reports: each sink's output for the same events; a sink that fails does not end the run."""

import io
import json
import logging
import math
import re
import resource
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hpcai import log
from hpcai.errors import ConfigError, DataError, MissingExtraError
from hpcai.log import Event, JsonLines, Reports, Terminal, read_metrics
from tests.reference_data import DATA

START = {
    "name": "small", "directory": "runs/small", "settings": {"step": {"lr": 0.01}}, "world": 2, "device": "NVIDIA H200",
    "parameters": 8907556, "steps": 640, "steps_per_epoch": 80, "epochs": 8, "global_batch": 32, "train_samples": 2560,
    "validation_samples": 320, "resumed_from": None,
}
TRAIN = {"epoch": 1.5, "samples": 3840, "seconds": 9.3, "samples_per_second": 412.4, "lr": 0.01, "loss": 0.0712, "mae": 0.199}


def steps(path: Path, kind: str) -> list[int]:
    return [event["step"] for event in read_metrics(path) if event["kind"] == kind]


# ------------------------------------------------------------------------------------------------------- JSON lines


def test_json_lines_are_strict_and_restored_exactly(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(Event("start", 1.0, {**START, "settings": {"where": Path("a/b"), "decay_at": (4, 6), "clip": math.inf}}))
    sink.write(Event("train", 2.5, {"step": 10, "loss": math.nan, "low": -math.inf, "mae": np.float32(0.5), "on": True, "é": None}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for line in path.read_text().splitlines():           # before close: every line is already in the file
        json.loads(line, parse_constant=refuse)
    start, train = read_metrics(path)
    assert (start["kind"], start["time"], start["parameters"], start["resumed_from"]) == ("start", 1.0, 8907556, None)
    assert start["settings"] == {"where": "a/b", "decay_at": [4, 6], "clip": math.inf}
    assert math.isnan(train.pop("loss"))
    assert train == {"kind": "train", "time": 2.5, "step": 10, "low": -math.inf, "mae": 0.5, "on": True, "é": None}
    sink.close()


def run_job(path: Path, resumed_from: int | None, last: int) -> None:
    sink = JsonLines(path)
    sink.write(Event("start", 0.0, START | {"resumed_from": resumed_from}))
    for step in range((resumed_from or 0) + 1, last + 1):
        if (step - 1) % 20 == 0:
            sink.write(Event("epoch", step, {"epoch": (step - 1) // 20, "step": step - 1}))
        sink.write(Event("train", step, {"step": step, "loss": 1.0}))
        if step % 20 == 0:
            sink.write(Event("evaluate", step, {"step": step, "mae": 0.5}))
            sink.write(Event("note", step, {"step": step, "text": f"at {step}"}))
    sink.close()


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_job(path, None, 70)
    run_job(path, 60, 65)
    run_job(path, 40, 100)
    assert steps(path, "train") == list(range(1, 101))
    assert steps(path, "evaluate") == steps(path, "note") == [20, 40, 60, 80, 100]
    assert steps(path, "epoch") == [0, 20, 40, 60, 80]                         # epoch 2 was begun twice
    assert [e["resumed_from"] for e in read_metrics(path) if e["kind"] == "start"] == [None, 40]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_in_an_old_directory_renames_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in (3, 4, 5):
        run_job(path, None, last)
    assert [steps(tmp_path / name, "train")[-1] for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")] == [3, 4, 5]


def test_an_incomplete_last_line_is_omitted_and_a_damaged_one_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_job(path, None, 5)
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    assert steps(path, "train") == [1, 2, 3, 4]
    run_job(path, 4, 6)                                     # appends after the torn line, not to it
    assert steps(path, "train") == [1, 2, 3, 4, 5, 6]
    path.write_bytes(content.replace(b'{"kind": "train", "time": 2', b'{"kind": "tra', 1))
    with pytest.raises(DataError, match=r"metrics\.jsonl:4: .* is no event"):
        read_metrics(path)
    for line in ("[1, 2]", '{"kind": "x"}', '{"kind": ["a"], "time": 1}', '{"kind": "x", "time": "y"}', "[" * 200_000,
                 '{"kind": "x", "time": 1, "step": null}'):  # fmt: skip
        path.write_text(line + "\n")
        with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
            read_metrics(path)
    with pytest.raises(DataError, match="No such file"):
        read_metrics(tmp_path / "missing.jsonl")


def test_a_full_disk_loses_lines_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Reports([JsonLines(path)]) as reports:
        reports.emit("start", **START)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))      # room for one line and a half
            for step in range(1, 6):
                reports.emit("train", step=step, loss=0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        reports.emit("train", step=6, loss=0.5)
    assert steps(path, "train") == [1, 6]
    assert path.read_bytes().endswith(b"\n")
    assert len(caplog.records) == 1
    assert "metrics.jsonl" in caplog.text and "the run continues" in caplog.text


# --------------------------------------------------------------------------------------------------------- terminal

EVENTS = [
    Event("start", 100.0, START | {"resumed_from": 110}), Event("epoch", 100.0, {"epoch": 1, "step": 110}),
    Event("train", 110.0, {"step": 120, **TRAIN}),
    Event("train", 111.0, {"step": 130, **TRAIN, "epoch": 1.625, "loss": math.nan, "samples_per_second": 8.25}),
    Event("evaluate", 120.0, {"step": 160, "epoch": 2, "samples": 5120, "seconds": 2.13, "mae": 0.15234}),
    Event("checkpoint", 121.0, {"step": 160, "path": "runs/small/checkpoints/160", "seconds": 0.4, "bytes": 106_890_672}),
    Event("note", 122.0, {"text": "rank 1 [slow]"}),
    Event("energy", 9.5, {"step": 640, "joules": 5.3e6, "gpu_joules": 5e6, "cpu_joules": 3e5, "joules_per_sample": 259.4,
                          "gpu_limits_w": [300.0, 300.0], "gpus": 8, "world": 8, "nodes_counted": 1, "nodes": 2}),
    Event("stop", 130.0, {"step": 640, "samples": 20480, "reason": "finished", "seconds": 3725.0, "target_reached": True}),
]
LINES = (DATA / "settings/terminal.txt").read_text()


@pytest.mark.parametrize("notebook", [False, True])
def test_a_job_log_and_a_notebook_get_one_plain_line_per_event(notebook: bool) -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, Console(file=stream, force_terminal=True, force_jupyter=True) if notebook else None)
    for event in EVENTS:
        terminal.write(event)
    terminal.close()
    assert stream.getvalue() == LINES


def test_a_terminal_gets_a_passing_bar_and_lasting_evaluations() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, Console(file=stream, force_terminal=True, width=150))
    for event in EVENTS[:5]:
        terminal.write(event)
    assert terminal._bar is not None and terminal._bar.tasks[0].completed == 130
    terminal._bar.refresh()
    terminal.write(EVENTS[2])
    terminal._bar.refresh()
    for event in EVENTS[5:]:
        terminal.write(event)
    assert terminal._bar is None
    terminal.close()
    assert "\x1b[2K" in stream.getvalue().rsplit("━", 1)[1]                     # the bar is erased when the run ends
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 120/640  epoch 1.5  loss 0.0712  mae 0.199  lr 1.0e-02  412 samples/s" in text
    assert "[evaluated: mae 0.1523]" in text
    assert "evaluation at step 160/640  epoch 2  mae 0.1523  2.1 s\n" in text
    assert "note: rank 1 [slow]\n" in text
    assert "step 120/640  epoch 1.5  loss 0.0712  mae 0.199  lr 1.0e-02  412 samples/s  ETA 0:00:40\n" not in text


# ---------------------------------------------------------------------------------------------------------- reports


def test_only_the_first_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        with log.open_reports(tmp_path / f"{rank}", ["terminal"], rank == 0) as reports:
            reports.emit("start", **START)
            reports.emit("train", step=120, **TRAIN)
        assert (tmp_path / f"{rank}" / "metrics.jsonl").exists() == (rank == 0)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["small:", "step"]


@pytest.mark.parametrize("rank, tracker", [(0, "tensorboard"), (0, "mlflow"), (1, "wandb")])
def test_invalid_report_settings_are_an_error_on_every_rank(
    rank: int, tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=rf"'{tracker}', which writes files, but report.directory is not set"):
        log.open_reports(None, [tracker], rank == 0)
    with pytest.raises(ConfigError, match=r"report.sinks has 'mlperf', but this app has no benchmark of MLPerf"):
        log.open_reports(tmp_path, ["mlperf"], rank == 0)
    folder = ModuleSpec(tracker, None)                     # of ./wandb or ./mlflow, which the packages create
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: folder if rank else None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'hpcai-suite\[{tracker}\]'"):
        log.open_reports(tmp_path, [tracker], rank == 0)


def test_tensorboard_has_the_scalars_and_hides_repeated_ones_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_from, points in ((None, (10, 20, 30)), (20, (30, 40))):
        with log.open_reports(tmp_path, ["tensorboard"], True) as reports:
            reports.emit("start", **START | {"resumed_from": resumed_from})
            for step in points:
                reports.emit("train", step=step, **TRAIN)
            reports.emit("evaluate", step=points[-1], epoch=1, samples=9, seconds=1.0, mae=0.25)
            written = sum(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())
        assert written == sum(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())      # no wait for the end
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = {"train/loss", "train/mae", "train/lr", "train/samples_per_second", "train/epoch", "evaluate/mae"}
    assert set(events.Tags()["scalars"]) == names
    assert [point.step for point in events.Scalars("train/loss")] == [10, 20, 30, 40]
    assert events.Scalars("train/loss")[0].value == pytest.approx(0.0712)


# ---------------------------------------------------------------------------------------------------------- logging


def test_every_rank_warns_and_the_first_informs(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        for rank, world in ((0, 1), (0, 4), (3, 4)):
            log.setup(rank, world)
            logging.getLogger("hpcai.test").info("hello")
            logging.getLogger("hpcai.test").warning("careful: %d %%", 7)
        host = socket.gethostname()
        assert capsys.readouterr().err.splitlines() == [
            "INFO: hello", "WARNING: careful: 7 %",
            f"INFO rank 0 on {host}: hello", f"WARNING rank 0 on {host}: careful: 7 %",
            f"WARNING rank 3 on {host}: careful: 7 %",
        ]
    finally:
        root.handlers[:], root.level = before


def test_reports_cost_no_heavy_import() -> None:
    heavy = "torch", "numpy", "rich", "tensorboard", "wandb", "mlflow", "yaml"
    code = f"import sys, hpcai.log, hpcai.mllog, hpcai.trackers; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
