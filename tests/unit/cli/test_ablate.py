"""`hpcai ablate` on an app whose training steps only sleep: statistics, order, table, JSON and errors."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apps
from hpcai.cli import ablate, ablation, benchmarks
from hpcai.cli import apps as declared
from hpcai.cli.bench import timing
from hpcai.errors import ConfigError

APP = """
import time
from contextlib import contextmanager, nullcontext
import torch
from hpcai.config import Settings
from hpcai.cli.benchmarks import Switch, Workload
from hpcai.settings import MeshConfig
executed, ALIVE, counts = [], [], []
class CONFIG(Settings):
    mesh: MeshConfig = MeshConfig()
    wrong: str = ""
    "switch that fails"
    late: bool = False
    "it fails after its first run"
def switches():
    return [Switch("half", "takes half the time"), Switch("warp drive", "faster than light", "there is no dilithium"),
            Switch("rounded", "computes roughly"), Switch("brake", "takes longer")]
class Training:
    samples = 6
    def __init__(self, cfg, on):
        self.cfg, self.on, self.runs = cfg, on, 0
        if cfg.wrong in on and not cfg.late:
            raise RuntimeError("no room [for it]\\nsecond line")
    def loss_and_gradient(self):
        assert not self.runs, "before any step"
        far = "rounded" in self.on
        return 2.0 + 0.02 * far, torch.tensor([3.0, 4.0 + 0.5 * far])
    def context(self):
        time.sleep(0.01)
        return nullcontext()
    def run(self, steps):
        self.runs += 1
        if self.cfg.wrong in self.on and self.runs > 1:
            raise ValueError("later")
        executed.append(self.on)
        time.sleep(steps * (0.004 if "half" in self.on else 0.008) + steps * 0.002 * ("brake" in self.on))
class Benchmark(Workload):
    settings = CONFIG
    def all_switches(self, cfg, mesh):
        return switches()
    @contextmanager
    def training(self, cfg, mesh, on):
        training = Training(cfg, on)
        ALIVE.append(on)
        counts.append(len(ALIVE))
        try:
            yield training
        finally:
            ALIVE.remove(on)
"""
PLAIN, ALL = frozenset[str](), frozenset({"half", "rounded", "brake"})
SETS = [PLAIN, {"half"}, {"half", "rounded"}, ALL, ALL - {"half"}, ALL - {"rounded"}]  # ALL - {"brake"} equals the third


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, text in (("fake", APP), ("bare", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        if text:
            (tmp_path / name / "benchmarks.py").write_text(text)
    monkeypatch.setattr(apps, "__path__", [*apps.__path__, str(tmp_path)])
    benchmarks.find_workload("fake")
    yield sys.modules["apps.fake.benchmarks"]
    for name in [name for name in sys.modules if name.startswith(("apps.fake", "apps.bare"))]:
        del sys.modules[name]


def run_ablation(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert ablate.main(["fake", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_a_bootstrap_interval_covers_the_true_ratio_and_is_deterministic() -> None:
    rng = np.random.default_rng(7)
    rows = [1.5 * np.exp(0.1 * rng.standard_normal(15)) for _ in range(300)]
    intervals = [timing.bootstrap_interval(row) for row in rows]
    assert 0.9 <= np.mean([interval["low"] <= 1.5 <= interval["high"] for interval in intervals]) < 1, "about 95 % of them"
    assert all(each["low"] < each["median"] < each["high"] for each in intervals) and intervals[0]["median"] == np.median(rows[0])
    assert timing.bootstrap_interval(rows[0]) == intervals[0]
    assert timing.bootstrap_interval([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_each_repeat_starts_with_another_arrangement() -> None:
    assert timing.rotated_orders(4, 2) == [[0, 1, 2, 3], [2, 3, 0, 1]]
    orders = timing.rotated_orders(7, 5)
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert [order[0] for order in orders] == [0, 1, 2, 4, 5]


def test_arrangements_are_interleaved_warmed_up_and_released(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_ablation(capsys, "--repeats", "2", "--steps", "1")
    expected = [SETS[i] for i in (*range(6), *range(6), 3, 4, 5, 0, 1, 2)]
    assert fake.executed == expected and fake.ALIVE == [] and result["kept"]
    assert all(len(row["each"]) == 2 for row in result["cumulative"] + result["left_out"]), "the first run is not counted"


def test_seconds_are_those_of_the_slowest_rank(fake: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "all_gather_object", lambda value, axis: [value, 7.0 if isinstance(value, float) else value])
    assert {row["seconds"] for row in run_ablation(capsys, "--repeats", "1", "--steps", "1")["cumulative"]} == {7.0}


def test_arrangements_that_do_not_fit_together_are_rebuilt(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation.Ablation, "_free_bytes", lambda self: 100 - 20 * len(fake.ALIVE))
    result = run_ablation(capsys, "--repeats", "1", "--steps", "1")
    assert fake.counts == [1, 2, 3] + [1] * 9 and not result["kept"] and fake.ALIVE == []
    assert fake.executed == [*SETS, *(names for names in SETS for _ in range(2))], "each with a warmup run"


def test_rows_have_the_gain_of_each_switch(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_ablation(capsys, "--repeats", "5", "--steps", "3")
    rows = {row["name"]: row for row in result["cumulative"]}
    assert list(rows) == ["plain", "half", "rounded", "brake"] and rows["rounded"]["on"] == ["half", "rounded"]
    assert 0.008 < rows["plain"]["seconds"] < 0.012, "context() is not counted"
    assert rows["plain"]["samples_per_second"] == pytest.approx(6 / rows["plain"]["seconds"])
    assert 1.6 < rows["half"]["factor"]["median"] < 2.2 and 1.1 < rows["brake"]["factor"]["median"] < 1.5, "relative to plain"
    assert rows["half"]["loss_difference"] == rows["half"]["gradient_difference"] == 0
    assert rows["brake"]["loss_difference"] == pytest.approx(0.01) and rows["brake"]["gradient_difference"] == pytest.approx(0.1)
    alone = {row["name"]: row for row in result["left_out"]}
    assert list(alone) == ["half", "rounded", "brake"] and alone["half"]["on"] == ["rounded", "brake"]
    assert 1.4 < alone["half"]["factor"]["median"] < 1.9 and alone["brake"]["factor"]["median"] < 0.85, "relative to all"
    assert alone["half"]["each"] != rows["plain"]["each"] and alone["brake"]["each"] == rows["rounded"]["each"]


def test_the_table_has_all_switches_and_failures(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["fake", "wrong=rounded", "--repeats", "3", "--steps", "6"]) == 0
    stdout = capsys.readouterr().out
    for text in ("plain", "+ half", "- brake", "NOT AVAILABLE: there is no dilithium", "RuntimeError: no room [for it]", "failed"):
        assert text in stdout
    assert "warp drive" in stdout and "+ warp drive" not in stdout and "…" not in stdout


@pytest.mark.parametrize("late", [False, True])
def test_a_training_that_raises_is_a_row(fake: Any, capsys: pytest.CaptureFixture[str], late: bool) -> None:
    result = run_ablation(capsys, "wrong=rounded", f"late={str(late).lower()}", "--repeats", "2", "--steps", "1")
    reason = "ValueError: later" if late else "RuntimeError: no room [for it]"
    errors = [row["error"] for row in result["cumulative"]]
    assert errors == [None, None, reason, reason] and fake.ALIVE == []
    assert result["cumulative"][1]["factor"] and "factor" not in result["cumulative"][2]
    alone = {row["name"]: row for row in result["left_out"]}
    assert alone["half"]["error"] == reason and alone["rounded"]["error"] is None
    assert alone["rounded"]["factor"] is None, "no full set to compare with"


def test_only_some_switches(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_ablation(capsys, "--repeats", "1", "--steps", "1", "--only", "Brake", "half")
    assert [row["name"] for row in result["cumulative"]] == ["plain", "half", "brake"], "in their own order"
    assert [s["name"] for s in result["switches"] if s["on"]] == ["half", "brake"] and len(result["switches"]) == 4
    with pytest.raises(ConfigError, match="no switch 'quarter'; expected some of half, warp-drive, rounded, brake"):
        ablate.main(["fake", "--only", "quarter"])
    with pytest.raises(ConfigError, match="'warp_drive' cannot be switched on here: there is no dilithium"):
        ablate.main(["fake", "--only", "warp_drive"])


def test_apps_without_benchmarks_are_refused(fake: Any) -> None:
    names = ", ".join(sorted(["fake", *(name for name in declared.with_part("benchmarks") if name != "fake")]))
    with pytest.raises(ConfigError, match=rf"there is no app 'cosmo'; expected one of {names}"):
        ablate.main(["cosmo"])
    with pytest.raises(ConfigError, match=r"apps/bare has no file benchmarks.py; expected one of .*cosmoflow, .*, fake, .*"):
        ablate.main(["bare"])
    with pytest.raises(ConfigError, match="wrnog: no such key"):
        ablate.main(["fake", "wrnog=half"])
    with pytest.raises(SystemExit):
        ablate.main(["fake", "--repeats", "0"])
