"""The CosmoFlow app from its command line: on one process, on ranks, stopped, killed, resumed, and with bad input."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.torch import load_file

from hpcai import log
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.models.cosmoflow import CosmoFlow
from hpcai.train.step import Step
from tests.apps import universes
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import metric_by_step, resumed_from
from tests.apps.small_apps import COSMOFLOW as APP

ENDLESS = ["train.epochs=300", "checkpoint.every_steps=100000"]
# 24 universes in batches of 8: three steps an epoch.


def damage_data(data: Path, kind: str) -> None:
    for split in ("train", "validation"):
        (data / split / "index.json").unlink()  # it would not match a changed file
    if kind == "no folder":
        shutil.rmtree(data)
    elif kind == "truncated":
        path = data / "train/universe_00003.h5"
        path.write_bytes(path.read_bytes()[:3000])
    elif kind == "NaN":
        for path in (data / "train").glob("*.h5"):
            with h5py.File(path, "r+") as file:
                file["target"][1, 2] = np.nan


class TestContract(AppContract):
    test_several_ranks_train_as_one = None  # below, with a resume on one process
    damage_data = staticmethod(damage_data)


def test_predictions_and_weights_are_in_physical_units(data: Path) -> None:
    run = APP.cached_run(data)
    pairs = np.load(run / "predictions.npz", allow_pickle=False)
    assert pairs["names"].tolist() == ["Omega_m", "sigma_8", "n_s", "H_0"]
    assert pairs["predicted"].shape == pairs["true"].shape == (12, 4)
    assert (pairs["true"][:, 3] >= 63).all() and (pairs["true"][:, 3] <= 77).all()
    model = CosmoFlow.load(run / "model.safetensors")
    with h5py.File(data / "validation/universe_00000.h5") as file:
        prediction = model.predict(file["counts"][0])
        predictions = model.predict(file["counts"][:2])
    assert list(prediction) == ["Omega_m", "sigma_8", "n_s", "H_0"] and 55 < prediction["H_0"] < 85
    assert predictions["sigma_8"].shape == (2,) and predictions["sigma_8"][0] == pytest.approx(prediction["sigma_8"], rel=1e-5)


# ---- stopped and killed


def wait_for(condition: Callable[[], bool], alive: Callable[[], bool], output: Path, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert alive(), f"the run ended first:\n{output.read_text()}"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.0005)


def has_begun(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and len(metric_by_step(run)) >= 2


def test_a_signal_to_one_rank_saves_and_requests_a_requeue(data: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "run.out"
    with ForkedProcesses(APP.command(data, run, *ENDLESS), output, 2) as forks:
        wait_for(lambda: has_begun(run), forks.processes[0].is_alive, output)
        os.kill(forks.processes[-1].pid or 0, signal.SIGTERM)
        codes, text = forks.wait()
    assert codes == [85] * 2 and "stopped by SIGTERM" in text, text
    saved = [p.name for p in (run / "checkpoints").iterdir()]
    assert saved == [f"step-{max(metric_by_step(run)):08d}"], "no completed step is lost"
    assert not (run / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["removed", "renamed", "replaced"])
def test_a_run_whose_directory_is_gone_says_so_and_does_not_succeed(
    data: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints would go on in a new directory without the settings, the history and the lock of the run."""
    run, original = tmp_path / "run", Step.__call__

    def call(step: Step, batch: Any, lr: float | None = None) -> Any:
        if step.count == 3:
            while kind == "replaced" and not (run / "checkpoints/step-00000003").exists():  # a save that is under way
                time.sleep(0.01)
            run.rename(tmp_path / "elsewhere")
            if kind == "removed":
                shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)  # a save may be under way
            elif kind == "replaced":
                (run / "checkpoints").mkdir(parents=True)
        return original(step, batch, lr)

    monkeypatch.setattr(Step, "__call__", call)
    assert APP.run(data, run, "checkpoint.every_steps=1") == 1
    stderr = capfd.readouterr().err
    assert "the directory of the run was removed, renamed or replaced since its start" in stderr and "Traceback" not in stderr
    assert not [*run.glob("checkpoints/*")] and not (run / "model.safetensors").exists(), "nothing goes to another directory"


def test_a_run_on_another_data_set_is_refused_unless_allowed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", universes.write_universes(tmp_path / "other", size=16, train=5)
    assert APP.run(data, run) == 0
    assert APP.run(other, run, "train.epochs=4") == 1 and "another data set (6 files, 24 rows" in capsys.readouterr().err
    copied = Path(shutil.copytree(data, tmp_path / "copied"))
    with h5py.File(min((copied / "train").glob("*.h5")), "r+") as file:  # in place, of the same size
        file["target"][...] *= 1000
    assert APP.run(copied, run, "train.epochs=3") == 0 and resumed_from(run) == 6
    assert APP.run(other, run, "train.epochs=4", "checkpoint.other_data=true") == 0 and resumed_from(run) == 9
    notes = [event["text"] for event in log.read_metrics(run / "metrics.jsonl") if event["kind"] == "note"]
    assert any("train.epochs: 2 then, 3 now" in text for text in notes) and any("another data set" in text for text in notes)
    (changed,) = (text for text in notes if "data may have changed since step-00000006" in text)
    assert "1 of 6 files in" in changed and "'target' of" in changed and "statistics.json has -" in changed


# ---- on ranks


@pytest.mark.parametrize("axes", [["mesh.replicate=4"], ["mesh.depth=2"], ["mesh.depth=2", "mesh.height=2"]], ids=" ".join)
def test_four_ranks_give_the_loss_curve_of_one_which_resumes_their_run(data: Path, tmp_path: Path, axes: list[str]) -> None:
    """Replicas, also sharded ones, where each rank reads its part of a turned universe. They stop in the middle of an epoch."""
    overrides, run = ["step.precision=fp64", "model.dropout=0"], tmp_path / "run"
    single = APP.cached_run(data, *overrides)
    output = APP.on_ranks(4, data, run, *overrides, *axes, "train.epochs=null", "train.steps=4")
    assert output.count("finished at step") == 1, "only one rank logs"
    for kind, name in (("train", "loss"), ("train", "mae"), ("evaluate", "mae")):
        expected, actual = metric_by_step(single, kind, name), metric_by_step(run, kind, name)
        assert set(actual) == ({1, 2, 3, 4} if kind == "train" else {3, 4})
        assert all(value == pytest.approx(expected.get(step, value), rel=1e-10) for step, value in actual.items()), (kind, name)
    assert APP.run(data, run, *overrides) == 0 and resumed_from(run) == 4
    assert metric_by_step(run) == pytest.approx(metric_by_step(single), rel=1e-9) and len(metric_by_step(run)) == 6


FAST_CASES = [
    "step.precision=bf16-params step.moments=bf16 step.ema_decay=0.9 train.evaluate=background train.keep_validation=true",
    "step.optimizer=lamb step.precision=auto step.capture=auto train.collect_every=2 train.profile=[2,3]",
]


@pytest.mark.parametrize("case", FAST_CASES)
def test_every_fast_setting_trains_as_the_reference(data: Path, tmp_path: Path, case: str) -> None:
    settings = case.split()
    reference = APP.cached_run(data, *(setting for setting in settings if setting.startswith(("step.optimizer", "step.ema_decay"))))
    run = tmp_path / "run"
    assert APP.run(data, run, *settings) == 0
    expected, actual = metric_by_step(reference), metric_by_step(run)
    assert list(actual) == list(expected) and actual == pytest.approx(expected, rel=8e-2)
    scores = metric_by_step(run, "evaluate", "mae")
    assert list(scores) == [3, 6] and scores == pytest.approx(metric_by_step(reference, "evaluate", "mae"), rel=8e-2)
    names = load_file(reference / "model.safetensors").keys()
    assert load_file(run / "model.safetensors").keys() == names, "no setting changes the names of the weights"
    if "train.profile=[2,3]" in settings:
        assert (run / "profile/rank-0000.json.gz").stat().st_size > 1000
