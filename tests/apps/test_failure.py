"""A run that fails leaves a bundle: NaN, hang and crash; and `hpcai replay` makes the step again and names the module."""

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
from hpcai.cli.subprocesses import fork_processes
from hpcai.data.sampler import Shuffled
from hpcai.train.flight_recorder import LAST_FAILURE, read_bundle
from hpcai.train.step import Step
from tests.apps.app_runs import metric_by_step
from tests.apps.small_apps import COSMOFLOW

APP = COSMOFLOW
NO_COUNT = -2  # of particles: the logarithm that the network sees is NaN


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Universes of which one, row 1 of universe_00003.h5, has an impossible cell."""
    folder = tmp_path_factory.mktemp("poisoned") / "data"
    APP.make(folder)
    with h5py.File(folder / "train" / "universe_00003.h5", "r+") as file:
        file["counts"][1, 3, 3, 3, 0] = NO_COUNT
    return folder


def ended(call: Callable[[], object], output: Path, ranks: int) -> tuple[list[int | None], str]:
    with fork_processes(call, output, ranks) as forks:
        return forks.wait(60)


def bundle(run: Path) -> Path:
    (found,) = run.glob("failure-*")
    assert found == (run / LAST_FAILURE).resolve()
    return found


def test_a_nan_leaves_its_step_and_samples_and_is_found_again(poisoned: Path, tmp_path: Path) -> None:
    run, bad = tmp_path / "run", 3 * 4 + 1
    seed = next(seed for seed in range(99) if list(Shuffled(24, seed).order(0)).index(bad) // 8 == 1)
    words = [f"train.seed={seed}", "checkpoint.every_steps=1"]
    codes, said = ended(APP.command(poisoned, run, *words), tmp_path / "said", 2)
    assert codes == [1, 1] and "step 2: the loss is not finite" in said, said
    files = read_bundle(bundle(run))
    assert [one["rank"] for one in files] == [0, 1] and bundle(run).name.startswith("failure-00000002-")
    for one in files:
        assert (one["kind"], one["step"], one["position"]) == ("nan", 2, {"epoch": 0, "sample": 8, "of": 24})
        assert one["error"]["type"] == "DivergedError" and "check" in one["error"]["traceback"]
        assert [event["step"] for event in one["events"] if event["kind"] == "train"] == [1]
        assert one["settings"]["data"]["batch"] == 8 and one["versions"]["torch"] and one["folder"] == os.getcwd()
        assert (bundle(run) / f"rank-{one['rank']:05d}.safetensors").exists()
    samples = [sample for one in files for sample in one["samples"]]
    assert len(samples) == 8 and {"index": bad, "text": "train/universe_00003.h5 row 1"} in samples
    (saved,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(saved, saved.with_name(f"{saved.name[:-1]}2"))  # one of the step itself is too late
    codes, said = ended(lambda: replay.main([str(run / LAST_FAILURE)]), tmp_path / "replayed", 1)
    assert codes == [0] and "repeated from step 1" in said, said
    assert "conv_seq.0.conv (Conv3d) is the first module with a non-finite output; its input was non-finite too" in said
    assert "13 (train/universe_00003.h5 row 1)" in said and said.count("is the first") == 1 and "backward: " not in said, said
    assert not (run / LAST_FAILURE / "replay").exists() and len(list(run.glob("failure-*"))) == 1
    with h5py.File(poisoned / "train" / "universe_00003.h5", "r+") as file:
        before, file["counts"][1, 3, 3, 3, 0] = file["counts"][1, 3, 3, 3, 0], 0
    codes, said = ended(lambda: replay.main([str(run / LAST_FAILURE)]), tmp_path / "well", 1)
    with h5py.File(poisoned / "train" / "universe_00003.h5", "r+") as file:
        file["counts"][1, 3, 3, 3, 0] = before
    assert codes == [1] and "succeeded" in said, said


def in_a_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], Any]) -> None:
    """Rank 1 (or the only process) does so at the begin of the step with this number from 1."""
    usual = Step.__call__

    def call(step: Step, batch: Any, lr: float | None = None) -> Any:
        if step.count + 1 == number and os.environ.get("RANK", "1") == "1":
            act()
        return usual(step, batch, lr)

    monkeypatch.setattr(Step, "__call__", call)


def sleeps_for_ever() -> None:
    time.sleep(1000)


def holds_the_interpreter() -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def breaks() -> None:
    raise RuntimeError("a cable was pulled")


def test_a_hang_ends_the_job_and_says_where_each_rank_stands(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_step(monkeypatch, 3, sleeps_for_ever)
    began = time.monotonic()
    codes, said = ended(APP.command(data, tmp_path / "run", "train.hang_after=2"), tmp_path / "said", 2)
    assert codes == [1, 1] and time.monotonic() - began < 20, said
    assert "no step was finished for 2 s (train.hang_after); all stacks are in" in said
    assert "  rank 1: step 3, in sleeps_for_ever (" in said and "time.sleep(1000)), called by call (" in said, said
    assert said.count("in sleeps_for_ever") == 1 and "failed as well" not in said, "once, not by each rank"
    files = read_bundle(bundle(tmp_path / "run"))
    assert [(one["kind"], one["step"], len(one["samples"])) for one in files] == [("hang", 3, 4)] * 2
    assert [any("sleeps_for_ever" in line for line in one["threads"][0]["stack"]) for one in files] == [False, True]
    assert any("hpcai/train/loop.py" in line for line in files[0]["threads"][0]["stack"])


def test_a_call_that_holds_the_interpreter_is_told_by_the_other_rank(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_step(monkeypatch, 3, holds_the_interpreter)
    with fork_processes(APP.command(data, tmp_path / "run", "train.hang_after=2"), tmp_path / "said", 2) as forks:
        forks.processes[0].join(30)
        codes, said = [process.exitcode for process in forks.processes], (tmp_path / "said").read_text()
    assert codes == [1, None] and "rank 1: wrote nothing" in said and "in holds_the_interpreter" in said, said


def test_a_crash_leaves_a_bundle_of_every_rank(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_step(monkeypatch, 2, breaks)
    codes, said = ended(APP.command(data, tmp_path / "run"), tmp_path / "said", 2)
    assert codes == [1, 1] and "a cable was pulled" in said, said
    other, cause = read_bundle(bundle(tmp_path / "run"))
    assert (cause["kind"], cause["step"], len(cause["samples"])) == ("crash", 2, 4) and "in breaks" in cause["error"]["traceback"]
    assert other["kind"] == "stopped" and "a cable was pulled" in other["error"]["text"] and other["step"] in (1, 2)
    codes, said = ended(lambda: replay.main([str(tmp_path / "run" / LAST_FAILURE)]), tmp_path / "replayed", 1)
    assert codes == [0] and "a cable was pulled" in said and "from the beginning" in said and "failed again" in said, said


def test_a_run_that_ends_well_leaves_none_and_takes_the_link_of_an_earlier_failure(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LAST_FAILURE).symlink_to("failure-00000001-19700101-000000")
    assert APP.run(data, run, "train.hang_after=60") == 0
    assert not list(run.glob("*failure*")) and not (run / LAST_FAILURE).is_symlink() and metric_by_step(run)


def test_what_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hpcai.cli import main

    assert main(["replay", str(tmp_path)]) == 2 and "holds no rank-*.json" in capsys.readouterr().err
    (tmp_path / "rank-00000.json").write_text("[")
    assert main(["replay", str(tmp_path)]) == 2 and "rank-00000.json: cannot be read" in capsys.readouterr().err
    whole = {"kind": "crash", "run": "../x", "rank": 0, "world": 1, "time": 0, "step": 1, "where": "", "settings": {"mesh": {}}}
    (tmp_path / "rank-00000.json").write_text(json.dumps(whole))
    stopped = {"kind": "stopped", "run": "../y", "rank": 1, "time": -1}  # by a clock that is behind, and never the cause
    (tmp_path / "rank-00001.json").write_text(json.dumps(whole | stopped))
    assert main(["replay", str(tmp_path)]) == 2 and "the run was of '../x'; expected one of the apps" in capsys.readouterr().err
