"""Tests that every app passes: its configs load, a run writes its artifacts, several ranks train as one, a resumed run equals an
uninterrupted one, all readers give the same samples, its MLPerf log conforms, and bad input is reported in one line."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcai import config
from tests.apps.app_runs import ROOT, App, check_equal_weights, metric_by_step, resumed_from
from tests.reference_data import DATA

Log = tuple[list[str], list[str]]
Refusal = tuple[str, Sequence[str], str]
"""a kind of damage to the data ("" for none), overrides, and a part of the message"""


class AppContract:
    configs: list[str]
    data_settings: list[str]
    """overrides that change how samples are read, but not the samples"""
    one_epoch: list[str] = ["train.epochs=1"]
    """overrides of a run that ends after three steps"""
    artifacts: list[str]
    """files of a run besides its settings, weights, metrics and checkpoints"""
    report_text: str
    """a text of its report"""
    exact: list[str] = ["step.precision=fp64", "train.epochs=1"]
    """overrides of a run whose loss curve depends on the number of ranks by less than ``rtol``"""
    jobs: list[str]
    """the number of ranks and the overrides of each job, separated by spaces"""
    rtol: float = 1e-9
    compared: dict[str, tuple[str, ...]] = {"train": ("loss",)}
    """names to compare besides the metric, by kind of event"""
    rules: tuple[str, str] = ("hpc", "3.0.0")
    """``--usage`` and ``--ruleset`` of MLPerf's compliance checker"""
    logs: list[Log]
    """overrides of a run, and the rules that a run of this size cannot satisfy"""
    damage_data: Callable[[Path, str], None]
    stop = 2
    """the last step before the resume"""

    def __init_subclass__(cls) -> None:
        """Set the attributes of the app of the module from ``tests/data/app_contracts.toml``."""
        contracts = tomllib.loads((DATA / "app_contracts.toml").read_text())
        for name, value in contracts[cls.__module__.rpartition("test_")[2]].items():
            setattr(cls, name, value)

    def test_every_yaml_loads(self, app: App) -> None:
        files = sorted((ROOT / f"apps/{app.name}/configs").glob("*.yaml"))
        assert [file.stem for file in files] == self.configs
        for path in files:
            cfg = config.load(app.settings, path)
            assert cfg != app.settings() and cfg.report.directory is not None, f"{path.name} sets nothing"
            self.check_config(path.stem, cfg)

    def check_config(self, name: str, cfg: Any) -> None:
        """Assert values of the config ``name``."""

    def test_a_run_writes_weights_settings_metrics_and_a_report(
        self, app: App, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from hpcai.cli.report import draw_run, read_run, theme

        monkeypatch.setattr(theme, "DPI", 30)
        run = app.cached_run(data)
        common = ["checkpoints", "metrics.jsonl", "model.safetensors", "settings.yaml"]
        assert {path.name for path in run.iterdir()} - {"report.html", "plots"} == {*common, *self.artifacts}
        expected = config.load(app.settings, app.small_config, app.overrides(data, run)[1:])
        assert config.load(app.settings, run / "settings.yaml") == expected
        page = draw_run(run).read_text()
        assert read_run(run).found is not None and "Where the time of a step went" in page
        assert any((run / "plots").iterdir()), "plots are drawn"
        assert self.report_text in page and "no picture" not in page and "://" not in page.replace("http://www.w3.org", "")

    def test_several_ranks_train_as_one(self, app: App, data: Path, tmp_path: Path, job: str) -> None:
        ranks, *overrides = job.split()
        single, run = app.cached_run(data, *self.exact), tmp_path / "run"
        app.on_ranks(int(ranks), data, run, *self.exact, *overrides)
        metric = config.load(app.settings, app.small_config).train.metric
        for kind, names in {**self.compared, "evaluate": (metric, *self.compared.get("evaluate", ()))}.items():
            for name in names:
                assert metric_by_step(run, kind, name) == pytest.approx(metric_by_step(single, kind, name), rel=self.rtol), name
        check_equal_weights(single, run, rtol=1e-2, atol=1e-4)

    def test_a_resumed_run_equals_an_uninterrupted_one(self, app: App, data: Path, tmp_path: Path) -> None:
        run = tmp_path / "resumed"
        assert app.run(data, run, "train.epochs=null", f"train.steps={self.stop}") == 0 and max(metric_by_step(run)) == self.stop
        assert app.run(data, run) == 0 and resumed_from(run) == self.stop
        check_equal_weights(app.cached_run(data), run)
        assert metric_by_step(run) == metric_by_step(app.cached_run(data)) and len(metric_by_step(run)) == 6

    def test_data_settings_do_not_change_the_loss(
        self, app: App, data: Path, tmp_path: Path, data_setting: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if data_setting == "data.reader=dali":
            pytest.importorskip("nvidia.dali", reason="DALI is not installed: data.reader=dali is NOT tested")
        monkeypatch.setenv("OWN_DISK", str(tmp_path / "own"))
        assert app.run(data, tmp_path / "run", *data_setting.split(), *self.one_epoch) == 0
        losses, scores = metric_by_step(tmp_path / "run"), metric_by_step(tmp_path / "run", "evaluate", "step")
        expected_losses = metric_by_step(app.cached_run(data))
        assert losses == {step: expected_losses[step] for step in losses} and len(losses) == 6 // 2 and set(scores) == {3}
        metric = config.load(app.settings, app.small_config).train.metric
        scores, expected = (metric_by_step(path, "evaluate", metric) for path in (tmp_path / "run", app.cached_run(data)))
        assert scores[3] == expected[3]
        if "OWN_DISK" in data_setting:
            assert len(list((tmp_path / "own/data/train").glob("*.h5"))) == len(list((data / "train").glob("*.h5")))

    def test_the_mlperf_log_of_a_run_passes_the_checker(self, app: App, data: Path, tmp_path: Path, log: Log) -> None:
        pytest.importorskip("mlperf_logging")
        overrides, violated = log
        assert app.run(self.data_for_log(data, tmp_path), tmp_path / "run", "report.sinks=[mlperf]", *overrides) == 0
        checker = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", self.rules[0], "--ruleset", self.rules[1]]
        result = subprocess.run([*checker, str(tmp_path / "run" / "mlperf.log")], capture_output=True, text=True, cwd=tmp_path)
        text = result.stdout + result.stderr
        failed = re.findall(r"(?:CHECK for '|Failed checks for |Required \w+ occurrence of '|Required )(\w+)", text)
        assert sorted({*failed}) == sorted(violated), text

    def data_for_log(self, data: Path, folder: Path) -> Path:
        """Return the data of a run with an MLPerf log."""
        return data

    def test_bad_input_is_reported_in_one_line(
        self, app: App, data: Path, tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]
    ) -> None:
        kind, overrides, text = refusal
        if kind:
            data = Path(shutil.copytree(data, tmp_path / "data"))
            type(self).damage_data(data, kind)
        app.check_refused(data, tmp_path / "run", overrides, text, capsys)
