"""`hpcai verify-resume`: ten kills of a short run lose nothing, and a run that loses state is reported."""

import time
from pathlib import Path

import pytest
import torch

from hpcai.cli import verify_resume
from hpcai.cli.verify_resume import Kill, Killer, Verdict
from hpcai.errors import ConfigError
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import list_checkpoints
from tests.apps import universes
from tests.apps.app_runs import ROOT


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = universes.write_universes(tmp_path_factory.mktemp("universes") / "data", size=16)
    return [
        str(ROOT / "apps/cosmoflow/configs/small.yaml"), "model.size=16", "model.blocks=4", "model.filters=2", "model.dropout=0",
        "data.batch=8", "step.schedule.decay=none", "train.report_every=1", "train.epochs=4", "train.collect_every=null",
        f"data.directory={data}",
    ]  # fmt: skip


@pytest.mark.slow
def test_ten_kills_lose_nothing(overrides: list[str], tmp_path: Path) -> None:
    check_nothing_lost(Killer("cosmoflow", overrides, tmp_path, [1]), 10)
    assert not list(tmp_path.glob("run-*/")), "runs that were compared are removed"


@pytest.mark.claim
@pytest.mark.timeout(1800)
def test_a_hundred_kills_on_one_two_and_four_processes_lose_nothing(overrides: list[str], tmp_path: Path) -> None:
    killer = Killer("cosmoflow", overrides, tmp_path, [1, 2, 4])
    check_nothing_lost(killer, 100)
    print(*killer.lines(), sep="\n")


def check_nothing_lost(killer: Killer, kills: int) -> None:
    killer.verify(kills)
    assert len(killer.kills) == kills and [run.problem for run in killer.runs if run.problem] == []
    assert any(kill.left_partial for kill in killer.kills), "no kill hit a save"
    assert not any(kill.hung for kill in killer.kills)


@pytest.mark.slow
def test_a_run_that_loses_state_is_reported(overrides: list[str], tmp_path: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A resume that resets the optimizer moments changes the weights."""
    load = Checkpoints._load

    def kill_after_first_save(self, run, ranks):  # type: ignore[no-untyped-def]
        with self.start(run, ranks) as forks:
            while not list_checkpoints(run / "checkpoints"):
                assert forks.processes[0].is_alive()
                time.sleep(0.001)
            forks.processes[0].kill()
            forks.wait()
        return Kill(ranks, False, True, False, False)

    def load_without_moments(self, reader, step):  # type: ignore[no-untyped-def]
        load(self, reader, step)
        for state in step.optimizer.states:
            for moment in state.moments.values():
                moment.zero_()

    monkeypatch.setattr(Checkpoints, "_load", load_without_moments)
    monkeypatch.setattr(Killer, "kill_once", kill_after_first_save)
    assert verify_resume.main(["cosmoflow", *overrides, "--kills", "1"]) == 1
    assert "tensors differ" in capsys.readouterr().out


def test_a_process_that_hangs_after_another_was_killed_fails(capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def verify(self, kills):  # type: ignore[no-untyped-def]
        self.kills, self.runs = [Kill(2, False, False, False, True), Kill(2, True, True, True, False)], [Verdict([2])]

    monkeypatch.setattr(Killer, "verify", verify)
    assert verify_resume.main(["cosmoflow"]) == 1
    stdout = capsys.readouterr().out
    assert "1 kills of all of 2 processes, in a save: 1 partial checkpoints left" in stdout and "after 1 kills" in stdout


def test_weights_of_changing_rank_counts_may_differ_by_ten_times_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    killer, problems = Killer("cosmoflow", [], Path(), [1, 2]), []
    killer.references[2] = {"model/w": torch.ones(3)}
    monkeypatch.setattr(verify_resume, "_last_checkpoint", lambda run: {"model/w": torch.tensor([1.0, 1.0, 0.75])})
    for used, killer.reference_difference in (([1, 2], 0.026), ([1, 2], 0.024), ([2, 2], 0.026)):
        problems.append(killer.compare(Path(), used).problem)
    assert problems == ["", "weights differ by 0.25, allowed 0.24", "1 tensors differ, first model/w"]


def test_invalid_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no app 'nothing'"):
        Killer("nothing", [], tmp_path, [1])
    with pytest.raises(ConfigError, match="exit codes .2."):
        Killer("cosmoflow", ["train.epochs=-1"], tmp_path, [1]).verify(1)
