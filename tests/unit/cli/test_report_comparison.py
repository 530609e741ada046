"""`hpcai report RUN RUN ...`: differing settings, results, statistics over seeds, and overlaid curves."""

import base64
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from hpcai import cli
from hpcai.cli import report
from hpcai.cli.report import comparison, theme
from hpcai.cli.report.comparison import Comparison
from hpcai.cli.report.theme import DARK, LIGHT
from hpcai.errors import DataError
from tests.report_runs import visible_text, write_run

TRAIN = {"metric": "mae", "target": 0.2}


def new_run(
    folder: Path, seed: int = 0, lr: float = 1e-3, best: float = 0.1, rate: float = 100.0, app: str = "toy", metric: str = "mae",
    start: Any = (), joules: float | None = 50.0, steps: int = 40, better: str = "lower",
) -> Path:  # fmt: skip
    """Write a run of 40 one-second steps, resumed at step 20 with a new clock; its metric decreases evenly."""
    events: list[dict[str, Any]] = [{"kind": "start", "time": 0.0, "name": app, "world": 2, "device": "cpu",
                                     "versions": {"torch": "2.13"}, **dict(start)}]
    for step in range(1, steps + 1):
        values = {"seconds": step if step <= 20 else step - 20, "samples_per_second": rate, "loss": 2.0 / step}
        events.append({"kind": "train", "time": 0.0, "step": step} | values)
        if step % 10 == 0:
            events.append({"kind": "evaluate", "time": 0.0, "step": step, metric: best + (40 - step) / 100, "loss": 3.0 / step})
    if joules is not None:
        values = {"joules": joules * 10, "samples": 10, "gpu_limits_w": [300.0, 300.0]}
        events.append({"kind": "energy", "time": 0.0, "step": steps} | values)
    events.append({"kind": "stop", "time": 0.0, "step": steps, "reason": "finished", "seconds": 20, "target_reached": False})
    settings = {"train": TRAIN | {"metric": metric, "seed": seed, "better": better}, "step": {"lr": lr, "betas": [0.9, 0.99]},
                "report": {"directory": str(folder)}, "model": {"note": "<script>"}}  # fmt: skip
    return write_run(folder, events, settings)


@pytest.fixture(autouse=True)
def low_resolution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pictures at low resolution in the first test, and none in the others."""
    monkeypatch.setattr(theme, "DPI", 30)
    if "sweep" not in request.node.name:
        monkeypatch.setattr(theme.Plot, "png", lambda self, theme: [b""])


def comparison_text(*runs: Path) -> str:
    return visible_text(report.compare_runs(runs).read_text())


def test_a_sweep_with_seeds_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [new_run(tmp_path / f"lr-{lr:g}_seed-{seed}", seed, lr, best=lr * 100 + seed / 100, rate=100 + 10 * seed,
                    joules=40 + seed) for lr in (1e-3, 2e-3) for seed in (0, 1, 2)]  # fmt: skip
    (tmp_path / "job.sh").write_text("")
    assert cli.main(["report", *map(str, sorted(tmp_path.iterdir()))]) == 0  # as a shell expands *
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/comparison.html\n"
    assert err == f"hpcai report: skipped, since they are not folders of runs: {tmp_path}/job.sh\n"
    page = (tmp_path / "comparison.html").read_text()
    text = visible_text(page)
    assert "6 runs of toy" in text and "Left out" not in text
    head = "run state steps best mae best loss last training loss time to target training time samples/s J a sample W, limit of a"
    assert head in text
    assert "lr-0.001_seed-2 finished 40 0.12 0.075 0.05 0:00:40 0:00:40 120 42 300" in text, "0.2 is reached at the last step"
    assert "lr-0.002_seed-0 finished 40 0.2 0.075 0.05 0:00:40 0:00:40 100 40 300" in text
    assert "step.lr=0.001 3 0.11 ± 0.01 0.075 ± 0 0.05 ± 0 0:00:37 ± 0:00:06 0:00:40 ± 0:00:00 110 ± 10 41 ± 1 300 ± 0" in text
    assert "step.lr=0.002 3 0.21 ± 0.01" in text and "0.05 ± 0 – 0:00:40" in text, "only one has reached its target: no spread"
    differs = text.split("What differs")[1].split("Validation mae")[0]
    assert "lr-0.001_seed-0 has the best validation mae, 0.1; lr-0.002_seed-2 has the worst, 0.22. 0.1 " in text.split("Results")[0]
    assert "Settings of lr-0.001_seed-0" in text and "runs 6 6 ended training time 0:04:00 of all runs" in text
    single = report.draw_run(runs[0]).read_text()
    assert set(re.findall('class="([^"]*)"', page)) <= {*re.findall('class="([^"]*)"', single), "card wide"}, "one style"
    assert "step.lr 0.001 0.001 0.001 0.002 0.002 0.002 train.seed 0 1 2 0 1 2 Training loss" in differs
    for same in ("betas", "report.directory", "model.note", "torch"):
        assert same not in differs
    sources = re.findall(r'(?:src|srcset|href|url)[=(]"?([^">)]*)', page)
    assert len(sources) == 12 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"://|<script|<link|<iframe|@import", re.sub(r"base64,[^\"]*", "", page))
    for source in sources:
        assert imread(BytesIO(base64.b64decode(source.partition(",")[2])))[..., :3].std() > 0.02
    assert len(runs) == 6


def test_curves_are_overlaid_by_step_and_by_time(tmp_path: Path) -> None:
    runs = [report.read_run(new_run(tmp_path / name, seed, lr)) for name, seed, lr in (("a", 0, 1.0), ("b", 1, 1.0), ("c", 0, 2.0))]
    overlay = Comparison(runs)
    assert overlay.metrics() == ["mae", "loss"], "the run's own metric first"
    plots = list(comparison.plots(overlay, overlay.metrics()))
    assert [plot.title for plot in plots] == ["Training loss", "Validation mae", "Validation loss"]
    by_step, by_time = (figure.axes[0] for figure in plots[1].draw(LIGHT))
    assert [line.get_label() for line in by_step.lines[:3]] == ["a", "b", "c"] and len(by_step.lines) == 4, "and the target"
    assert by_step.lines[0].get_xdata().tolist() == by_time.lines[0].get_xdata().tolist() == [10, 20, 30, 40], "across the resume"
    colors = [line.get_color() for line in by_step.lines[:3]]
    assert colors[0] == colors[1] != colors[2], "runs that differ in the seed alone have one colour"
    assert by_step.lines[0].get_linestyle() != by_step.lines[1].get_linestyle() and by_time.get_xlabel() == "seconds"
    many = Comparison([report.read_run(new_run(tmp_path / f"{n}", n)) for n in range(16)])
    assert len(set(many.line_styles(DARK).values())) == 16


def test_runs_that_differ_in_the_seed_alone_are_averaged(tmp_path: Path) -> None:
    text = comparison_text(*(new_run(tmp_path / f"seed-{seed}", seed, best=0.1 + 0.02 * seed) for seed in range(2)))
    assert "all 2 0.11 ± 0.01414" in text
    text = comparison_text(*(new_run(tmp_path / name, 3) for name in ("again", "anew")))
    assert "Over seeds" not in text and "Nothing: settings, versions and processes are the same." in text


def test_the_time_to_target_is_that_of_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    for better, seconds in ("lower", 20.0), ("higher", 10.0):  # 0.3, 0.2, 0.1 and 0 after 10 s each
        assert comparison._time_to_target(report.read_run(new_run(tmp_path / better, best=0.0, better=better))) == seconds


def test_versions_processes_and_runs_with_few_steps_are_compared(tmp_path: Path) -> None:
    complete = new_run(tmp_path / "x/whole", joules=None)
    young = new_run(tmp_path / "y/young", start={"versions": {"torch": "2.11"}, "world": 4}, joules=None, steps=5)
    lines = (young / "metrics.jsonl").read_text().splitlines(keepends=True)
    (young / "metrics.jsonl").write_text("".join(lines[:-1]))
    page = report.compare_runs([complete, young])
    assert page == tmp_path / "comparison.html"
    text = visible_text(page.read_text())
    assert "What differs x/whole y/young processes 2 4 version of torch 2.13 2.11" in text
    assert "y/young still running 5 – – 0.4 – 0:00:05 100" in text and "J a sample" not in text
    assert "Validation mae: no finite value of it yet in y/young" in text


def test_only_common_metrics_of_several_apps_are_drawn(tmp_path: Path) -> None:
    runs = new_run(tmp_path / "a"), new_run(tmp_path / "b", app="other", metric="dice")
    text = comparison_text(*runs)
    assert "2 runs of toy, other" in text and "app toy other" in text and "train.metric mae dice" in text
    assert "Validation loss" in text and "Validation mae" not in text
    assert "mae: not a metric of all of toy, other" in text and "dice: not a metric of all of toy, other" in text


def test_paths_that_are_no_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = new_run(tmp_path / "a"), new_run(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(run), str(tmp_path / "empty")]) == 2
    assert "empty/metrics.jsonl: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "comparison.html").exists()
    file = run / "metrics.jsonl"
    assert cli.main(["report", str(file), str(file)]) == 2
    assert "none of 2 names is a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["report", str(run), "--output", "x.html"])
    with pytest.raises(DataError, match=r"no/page.html: No such file .* with --output"):
        report.compare_runs([run, other], tmp_path / "no/page.html")
    assert cli.main(["report", str(run), f"{run}/../a"]) == 0, "the same run is one run"
    assert (run / "report.html").exists()
    assert cli.main(["report", str(run), str(other), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()


def test_a_non_finite_curve_is_left_out(tmp_path: Path) -> None:
    runs = [new_run(tmp_path / name) for name in ("a", "b")]
    lines = (runs[1] / "metrics.jsonl").read_text().replace('"loss": 0.05}', '"loss": "NaN"}')
    (runs[1] / "metrics.jsonl").write_text(lines.replace('"mae": 0.1,', '"mae": "NaN",'))
    text = comparison_text(*runs)
    assert "b finished 40 0.2 0.075 nan" in text and np.isnan(report.read_run(runs[1]).series("train", "loss")[1][-1])
