"""What every app promises: its files of settings load, a run leaves what its users want, several processes train as one, a resumed
run is an uninterrupted one, samples are the same however they are read, its MLPerf log keeps the rules, and bad input is told in
one line and loses nothing."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcai import config
from tests.apps.app_runs import ROOT, App, check_equal_weights, metric_by_step, resumed_from

Log = tuple[list[str], list[str]]
Refused = tuple[str, Sequence[str], str]


@pytest.mark.usefixtures("one_thread")
class AppContract:
    configs: list[str]
    ways: list[str]
    short: list[str] = ["train.epochs=1"]
    """words for a run that reads whole batches and ends early"""
    leaves: list[str]
    """files of a run beside its settings, weights, metrics and checkpoints"""
    shows: str
    """what its report says"""
    exactly: list[str] = ["step.precision=fp64", "train.epochs=1"]
    """words for a run whose curve does not depend on the number of processes but by ``close``"""
    jobs: list[str]
    """numbers of processes, each with the words that say how they share the work"""
    close: float = 1e-9
    compared: dict[str, tuple[str, ...]] = {"train": ("loss",)}
    """what is compared beside the metric: kinds of events and names"""
    rules: tuple[str, str] = ("hpc", "3.0.0")
    """of MLPerf's checker"""
    logs: list[Log]
    """words, and the rules that a run of this size cannot keep"""
    refused: list[Refused]
    """how the data is spoiled ("" not at all), words, and what is told"""
    spoil: Callable[[Path, str], None]
    stop = 2

    def test_every_yaml_loads(self, app: App) -> None:
        files = sorted((ROOT / f"apps/{app.name}/configs").glob("*.yaml"))
        assert [file.stem for file in files] == self.configs
        for path in files:
            cfg = config.load(app.settings, path)
            assert cfg != app.settings() and cfg.report.directory is not None, f"{path.name} sets nothing"
            self.check(path.stem, cfg)

    def check(self, name: str, cfg: Any) -> None:
        """What a file of settings must say."""

    def test_a_run_leaves_everything_that_its_users_want(self, app: App, data: Path) -> None:
        from hpcai.cli.report import draw_run

        run = app.cached_run(data)
        usual = ["checkpoints", "metrics.jsonl", "model.safetensors", "settings.yaml"]
        assert {path.name for path in run.iterdir()} - {"report.html", "plots"} == {*usual, *self.leaves}
        expected = config.load(app.settings, app.small, app.overrides(data, run)[1:])
        assert config.load(app.settings, run / "settings.yaml") == expected
        page = draw_run(run).read_text()
        assert self.shows in page and "no picture" not in page and "http" not in page.replace("http://www.w3.org", "")

    def test_several_processes_train_as_one(self, app: App, data: Path, tmp_path: Path, job: str) -> None:
        count, *words = job.split()
        one, run = app.cached_run(data, *self.exactly), tmp_path / "run"
        app.on_ranks(int(count), data, run, *self.exactly, *words)
        metric = config.load(app.settings, app.small).train.metric
        for kind, names in {**self.compared, "evaluate": (metric, *self.compared.get("evaluate", ()))}.items():
            for name in names:
                assert metric_by_step(run, kind, name) == pytest.approx(metric_by_step(one, kind, name), rel=self.close), name
        check_equal_weights(one, run, rtol=1e-2, atol=1e-4)

    def test_resumed_is_uninterrupted(self, app: App, data: Path, tmp_path: Path) -> None:
        run = tmp_path / "cut"
        assert app.run(data, run, "train.epochs=null", f"train.steps={self.stop}") == 0 and max(metric_by_step(run)) == self.stop
        assert app.run(data, run) == 0 and resumed_from(run) == self.stop
        check_equal_weights(app.cached_run(data), run)
        assert metric_by_step(run) == metric_by_step(app.cached_run(data)) and len(metric_by_step(run)) == 6

    def test_however_samples_are_read_the_loss_is_the_same(
        self, app: App, data: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if way == "data.reader=dali":
            pytest.importorskip("nvidia.dali", reason="DALI is not installed: data.reader=dali is NOT tested")
        monkeypatch.setenv("OWN_DISK", str(tmp_path / "own"))
        assert app.run(data, tmp_path / "run", *way.split(), *self.short) == 0
        found, scores = metric_by_step(tmp_path / "run"), metric_by_step(tmp_path / "run", "evaluate", "step")
        whole = metric_by_step(app.cached_run(data))
        assert found == {step: whole[step] for step in found} and len(found) == 6 // 2 and set(scores) == {3}
        metric = config.load(app.settings, app.small).train.metric
        scores, expected = (metric_by_step(path, "evaluate", metric) for path in (tmp_path / "run", app.cached_run(data)))
        assert scores[3] == expected[3]
        if "OWN_DISK" in way:
            assert len(list((tmp_path / "own/data/train").glob("*.h5"))) == len(list((data / "train").glob("*.h5")))

    def test_the_mlperf_log_of_a_run_keeps_the_rules(self, app: App, data: Path, tmp_path: Path, log: Log) -> None:
        pytest.importorskip("mlperf_logging")
        words, cannot = log
        assert app.run(self.for_log(data, tmp_path), tmp_path / "run", "report.sinks=[mlperf]", *words) == 0
        checker = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", self.rules[0], "--ruleset", self.rules[1]]
        done = subprocess.run([*checker, str(tmp_path / "run" / "mlperf.log")], capture_output=True, text=True, cwd=tmp_path)
        text = done.stdout + done.stderr
        failed = re.findall(r"(?:CHECK for '|Failed checks for |Required \w+ occurrence of '|Required )(\w+)", text)
        assert sorted({*failed}) == sorted(cannot), text

    def for_log(self, data: Path, folder: Path) -> Path:
        """The data of a run that keeps a log."""
        return data

    def test_bad_input_is_told_in_one_line(
        self, app: App, data: Path, tmp_path: Path, wrong: Refused, capsys: pytest.CaptureFixture[str]
    ) -> None:
        kind, more, text = wrong
        if kind:
            data = Path(shutil.copytree(data, tmp_path / "data"))
            type(self).spoil(data, kind)
        app.check_refused(data, tmp_path / "run", more, text, capsys)
