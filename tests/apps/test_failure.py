"""A run that fails (NaN, hang, crash) leaves a bundle; `hpcai replay` repeats the step from it and names the module."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from hpcai.cli import replay
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.data.sampler import Shuffled
from hpcai.train.flight_recorder import LAST_FAILURE, read_bundle
from hpcai.train.step import Step
from tests.apps.app_runs import metric_by_step, run_on_ranks
from tests.apps.small_apps import COSMOFLOW as APP

INVALID_COUNT = -2  # of particles: its logarithm, an input of the network, is NaN


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Universes with an invalid count in row 1 of universe_00003.h5."""
    folder = tmp_path_factory.mktemp("poisoned") / "data"
    APP.make_data(folder)
    with h5py.File(folder / "train" / "universe_00003.h5", "r+") as file:
        file["counts"][1, 3, 3, 3, 0] = INVALID_COUNT
    return folder


def find_bundle(run: Path) -> Path:
    (path,) = run.glob("failure-*")
    assert path == (run / LAST_FAILURE).resolve()
    return path


def test_a_nan_leaves_its_step_and_samples_and_is_reproduced(poisoned: Path, tmp_path: Path) -> None:
    run, bad = tmp_path / "run", 3 * 4 + 1
    seed = next(seed for seed in range(99) if list(Shuffled(24, seed).order(0)).index(bad) // 8 == 1)
    overrides = [f"train.seed={seed}", "checkpoint.every_steps=1"]
    codes, log = run_on_ranks(APP.command(poisoned, run, *overrides), tmp_path / "log", 2)
    assert codes == [1, 1] and "step 2: the loss is not finite" in log, log
    records = read_bundle(find_bundle(run))
    assert [record["rank"] for record in records] == [0, 1] and find_bundle(run).name.startswith("failure-00000002-")
    for record in records:
        assert (record["kind"], record["step"], record["position"]) == ("nan", 2, {"epoch": 0, "sample": 8, "of": 24})
        assert record["error"]["type"] == "DivergedError" and "check" in record["error"]["traceback"]
        assert [event["step"] for event in record["events"] if event["kind"] == "train"] == [1]
        assert record["settings"]["data"]["batch"] == 8 and record["versions"]["torch"] and record["folder"] == os.getcwd()
        assert (find_bundle(run) / f"rank-{record['rank']:05d}.safetensors").exists()
    samples = [sample for record in records for sample in record["samples"]]
    assert len(samples) == 8 and {"index": bad, "text": "train/universe_00003.h5 row 1"} in samples
    (saved,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(saved, saved.with_name(f"{saved.name[:-1]}2"))  # a checkpoint of the step itself is too late
    codes, log = run_on_ranks(lambda: replay.main([str(run / LAST_FAILURE)]), tmp_path / "replayed", 1)
    assert codes == [0] and "repeated from step 1" in log, log
    assert "conv_seq.0.conv (Conv3d) is the first module with a non-finite output; its input was non-finite too" in log
    assert "13 (train/universe_00003.h5 row 1)" in log and log.count("is the first") == 1 and "backward: " not in log, log
    assert not (run / LAST_FAILURE / "replay").exists() and len(list(run.glob("failure-*"))) == 1
    with h5py.File(poisoned / "train" / "universe_00003.h5", "r+") as file:
        before, file["counts"][1, 3, 3, 3, 0] = file["counts"][1, 3, 3, 3, 0], 0
    codes, log = run_on_ranks(lambda: replay.main([str(run / LAST_FAILURE)]), tmp_path / "well", 1)
    with h5py.File(poisoned / "train" / "universe_00003.h5", "r+") as file:
        file["counts"][1, 3, 3, 3, 0] = before
    assert codes == [1] and "succeeded" in log, log


def call_in_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], Any]) -> None:
    """Call ``act`` on rank 1, or on the only process, at the start of step ``number``, counted from 1."""
    original = Step.__call__

    def call(step: Step, batch: Any, lr: float | None = None) -> Any:
        if step.count + 1 == number and os.environ.get("RANK", "1") == "1":
            act()
        return original(step, batch, lr)

    monkeypatch.setattr(Step, "__call__", call)


def sleep_forever() -> None:
    time.sleep(1000)


def hold_the_interpreter() -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def crash() -> None:
    raise RuntimeError("a cable was pulled")


def test_a_hang_ends_the_job_and_reports_the_step_of_each_rank(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call_in_step(monkeypatch, 3, sleep_forever)
    start = time.monotonic()
    codes, output = run_on_ranks(APP.command(data, tmp_path / "run", "train.hang_after=2"), tmp_path / "output", 2)
    assert codes == [1, 1] and time.monotonic() - start < 20, output
    assert "no step was finished for 2 s (train.hang_after); all stacks are in" in output
    assert "  rank 1: step 3, in sleep_forever (" in output and "time.sleep(1000)), called by call (" in output, output
    assert output.count("in sleep_forever") == 1 and "failed as well" not in output, "once, not by each rank"
    records = read_bundle(find_bundle(tmp_path / "run"))
    assert [(record["kind"], record["step"], len(record["samples"])) for record in records] == [("hang", 3, 4)] * 2
    assert [any("sleep_forever" in line for line in record["threads"][0]["stack"]) for record in records] == [False, True]
    assert any("hpcai/train/loop.py" in line for line in records[0]["threads"][0]["stack"])


def test_a_call_that_holds_the_interpreter_is_reported_by_the_other_rank(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_in_step(monkeypatch, 3, hold_the_interpreter)
    with ForkedProcesses(APP.command(data, tmp_path / "run", "train.hang_after=2"), tmp_path / "output", 2) as forks:
        forks.processes[0].join(30)
        codes, output = [process.exitcode for process in forks.processes], (tmp_path / "output").read_text()
    assert codes == [1, None] and "rank 1: wrote nothing" in output and "in hold_the_interpreter" in output, output


def test_a_crash_leaves_a_bundle_of_every_rank(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call_in_step(monkeypatch, 2, crash)
    codes, output = run_on_ranks(APP.command(data, tmp_path / "run"), tmp_path / "output", 2)
    assert codes == [1, 1] and "a cable was pulled" in output, output
    other, cause = read_bundle(find_bundle(tmp_path / "run"))
    assert (cause["kind"], cause["step"], len(cause["samples"])) == ("crash", 2, 4) and "in crash" in cause["error"]["traceback"]
    assert other["kind"] == "stopped" and "a cable was pulled" in other["error"]["text"] and other["step"] in (1, 2)
    codes, output = run_on_ranks(lambda: replay.main([str(tmp_path / "run" / LAST_FAILURE)]), tmp_path / "replayed", 1)
    assert codes == [0] and "a cable was pulled" in output and "from the beginning" in output and "failed again" in output, output


def test_a_run_that_succeeds_leaves_no_bundle_and_removes_the_link_of_an_earlier_failure(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LAST_FAILURE).symlink_to("failure-00000001-19700101-000000")
    assert APP.run(data, run, "train.hang_after=60") == 0
    assert not list(run.glob("*failure*")) and not (run / LAST_FAILURE).is_symlink() and metric_by_step(run)


def test_invalid_bundles_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hpcai.cli import main

    assert main(["replay", str(tmp_path)]) == 2 and "holds no rank-*.json" in capsys.readouterr().err
    (tmp_path / "rank-00000.json").write_text("[")
    assert main(["replay", str(tmp_path)]) == 2 and "rank-00000.json: not JSON (" in capsys.readouterr().err
    record = {"kind": "crash", "run": "../x", "rank": 0, "world": 1, "time": 0, "step": 1, "where": "", "settings": {"mesh": {}}}
    (tmp_path / "rank-00000.json").write_text(json.dumps(record))
    stopped = {"kind": "stopped", "run": "../y", "rank": 1, "time": -1}  # earliest by a clock that is behind, but never the cause
    (tmp_path / "rank-00001.json").write_text(json.dumps(record | stopped))
    assert main(["replay", str(tmp_path)]) == 2 and "the run was of '../x'; expected one of the apps" in capsys.readouterr().err
