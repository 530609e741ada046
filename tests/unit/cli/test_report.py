"""`hpcai report`: the page shows a run's files and its app's picture, is self-contained, and copes with missing parts."""

import importlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

import apps
from hpcai import cli
from hpcai.cli import report
from hpcai.cli.report import curves, document, step_time, theme
from hpcai.cli.report.theme import LIGHT
from hpcai.errors import DataError
from tests.reference_data import load_json
from tests.report_runs import page_text, visible_text, write_arrays, write_run

PICTURE = """
from matplotlib.figure import Figure
from hpcai.cli.report.picture import Finding, Table, arrays

FILE, TITLE, PALETTE, HIGHER = "toy.npz", "Guesses <of> the toy", ("#112233",), ("luck",)

def read(path):
    return arrays(path, {"guess": "real N", "kinds": "text K"})

def classes(data):
    return data["kinds"].tolist()

def caption(data):
    return f"{len(data['guess'])} guesses."

def finding(data):
    return Finding("The toy guesses <well>.", "4 guesses", "at most")

def draw(data, theme):
    figure = Figure(figsize=(6.4, 3.5))
    figure.subplots().plot(data["guess"], color=theme.main)
    return figure

def table(data):
    return Table("Guesses counted", "all of <them>", ("guess", "times"), [(f"{data['guess'].max():g}", "1")])
"""
TOY = {"guess": [1.0, 4.0, 2.0], "kinds": ["none", "lucky", "wrong"]}
SETTINGS = {"train": {"metric": "mae", "target": 0.124, "better": "lower"}, "model": {"note": "<script>alert(1)</script>"}}
START = {
    "kind": "start", "time": 1.79e9, "name": "toy", "world": 4, "device": "NVIDIA H200", "parameters": 8907556,
    "steps": 640, "steps_per_epoch": 80, "epochs": 8, "global_batch": 32, "train_samples": 2560, "validation_samples": 320,
    "resumed_from": None,
}


PARTS = {"data": 0.0004, "forward": 0.03, "backward": 0.05, "update": 0.0096, "evaluate": 0.008}


def events(last: int = 640, end: str | None = "target") -> Iterator[dict[str, Any]]:
    """Yield the events of a run that was stopped at step 320 and resumed."""
    yield START
    for step in range(10, last + 1, 10):
        if step == 330:
            yield START | {"time": 1.79e9 + 320, "resumed_from": 320}
            yield {"kind": "note", "time": 1.79e9 + 320, "step": 320, "text": "resumed <b>here</b>"}
        clock = (step if step <= 320 else step - 320) / 10
        parts = PARTS | {"forward": 9.0 if step in (10, 330) else 0.03}
        loss = "NaN" if step == 200 else 0.02 + math.exp(-step / 100)
        yield {"kind": "train", "time": 1.79e9 + step, "step": step, "epoch": step / 80, "samples": 32 * step, "seconds": clock,
               "samples_per_second": 412.0 if step > 10 else 30.0, "lr": 0.004, "loss": loss, "mae": 0.3, "parts": parts}
        if step % 80 == 0:
            error = 0.1231 if step == 560 else 0.125 + 1 / step
            yield {"kind": "evaluate", "time": 1.79e9 + step, "step": step, "epoch": step / 80, "seconds": 2.0, "mae": error,
                   "accuracy": step / 1000}
            yield {"kind": "checkpoint", "time": 1.79e9 + step, "step": step, "path": f"ckpt/{step}", "seconds": .4, "bytes": 107e6}
    if end:
        yield {"kind": "stop", "time": 1.79e9 + last, "step": last, "epoch": last / 80, "samples": 32 * last, "reason": end,
               "seconds": 32.0, "target_reached": end == "target", "parts": {"save": 1.28}}


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An app with a picture, and one whose file is broken; all pictures have a low resolution."""
    root = tmp_path_factory.mktemp("elsewhere")
    for name, code in (("toy", PICTURE), ("broken", "FILE = 'toy.npz'\nraise RuntimeError('not\\nyet')")):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
        (root / name / "picture.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apps, "__path__", [*apps.__path__, str(root)])
        patch.setattr(theme, "DPI", 50)
        importlib.invalidate_caches()
        yield root
    for name in [name for name in sys.modules if name.startswith(("apps.toy", "apps.broken"))]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "complete", events(), SETTINGS)
    write_arrays(run / "toy.npz", TOY)
    assert cli.main(["report", str(run)]) == 0
    return run


def test_the_page_describes_the_run(run: Path) -> None:
    page = visible_text((run / "report.html").read_text())
    for text in load_json("settings/report_page"):
        assert text in page, text
    assert "Left out" not in page


def test_what_was_learnt_comes_first_and_details_are_folded(run: Path) -> None:
    page = (run / "report.html").read_text()
    titles = re.findall("<(h1|p|h2|summary)>([^<]*)", page)
    assert [title for _, title in titles] == [
        "toy", "The toy guesses &lt;well&gt;.", "Guesses &lt;of&gt; the toy", "Loss", "Validation mae", "Validation accuracy",
        "Learning rate", "Throughput", "Where the time of a step went", "Guesses counted", "Evaluations", "The run", "Checkpoints",
        "Notes", "Settings"]  # fmt: skip
    assert [kind for kind, _ in titles] == ["h1", "p", *["h2"] * 7, *["summary"] * 6] and "<details open" not in page
    assert page.index("4 guesses") < page.index("best validation mae") < page.index("Loss")


def test_the_bar_has_the_parts_of_a_step_without_the_first_report_of_a_start(run: Path, tmp_path: Path) -> None:
    record = report.read_run(run)
    expected = {"data": 0.0004, "forward": 0.03, "backward": 0.05, "update": 0.0096, "evaluate": 0.008, "save": 0.002}
    assert step_time.mean_parts(record) == pytest.approx(expected)
    text = visible_text("<body>" + step_time.bars({"toy": record}))
    assert "100 ms for each step 30 % 50 % waiting for data &lt;1 % 400 µs forward 30 % 30 ms backward 50 % 50 ms" in text
    assert text.count("ms for each step") == 1 and "toy" not in text
    widths = re.findall('flex-grow:([0-9.]+)', step_time.bars({"a": record, "b": record}))
    assert sum(map(float, widths)) == pytest.approx(200, abs=0.1), "two bars of 100 %"
    first = report.read_run(write_run(tmp_path, events(last=10, end=None)))
    assert step_time.mean_parts(first)["forward"] == 9, "the only report"
    old = [{key: value for key, value in event.items() if key != "parts"} for event in events(last=20)]
    assert step_time.bars({"old": report.read_run(write_run(tmp_path, old))}) == "", "a run of an earlier version"


def test_a_run_without_a_finding_begins_with_its_metric(tmp_path: Path) -> None:
    """The words hold for a network that learns nothing, too."""
    def sentence(*values: float, name: str = "mae", **train: Any) -> str:
        event = {"kind": "evaluate", "time": 0.0, "seconds": 1.0, "recall": 0}
        lines = [START, *(event | {"step": n, name: value} for n, value in enumerate(values, 1))]
        return report.read_run(write_run(tmp_path, lines, {"train": {"metric": name, "better": "lower"} | train})).finding.sentence

    assert sentence(3.0, 1.0, 2.0) == "mae of unseen samples is 1 at step 2, from 3 at step 1."
    assert sentence(1.0, 2.0, target=0.5) == (
        "mae of unseen samples is 1 at step 1, and did not get better after step 1; the target 0.5 is not reached.")
    assert sentence(0.7, better="higher", target=0.5) == "mae of unseen samples is 0.7 at step 1; the target 0.5 is reached."
    assert sentence(math.nan) == "No report has a finite mae."
    assert sentence(1.0, 1.0, name="precision", better="higher") == "No report has a finite precision.", "nothing was found"
    losses = [{"kind": "train", "time": 0.0, "step": n, "loss": n} for n in (1, 2)]
    finding = report.read_run(write_run(tmp_path, [START, *losses])).finding
    assert finding.sentence == "The training loss is 2 at step 2, and did not get better after step 1."


def test_numbers_have_the_digits_that_they_have_and_nothing_found_is_not_the_best(tmp_path: Path) -> None:
    event = {"kind": "evaluate", "time": 0.0, "seconds": 1.0, "recall": 0.25, "precision": 0.75}
    lines = [START | {"epochs": 6.4171122994652405}, {"kind": "train", "time": 0.0, "step": 2, "epoch": 6.417112, "loss": 1.0},
             event | {"step": 1, "recall_rain": 0.0, "precision_rain": 1.0, "recall_snow": 0.5, "precision_snow": 0.5},
             event | {"step": 2, "recall_rain": 0.0, "precision_rain": 1.0, "recall_snow": 0.4, "precision_snow": 0.4}]
    text = page_text(record := report.read_run(write_run(tmp_path, lines)))
    assert "6.42 of 6.42" in text and "best 1" not in text
    assert "precision none found none found 2" in text and "precision_rain none found none found 2" in text
    assert "precision_snow 0.5 1 0.4 2" in text and record.best("precision") is None and record.best("recall") == (1, 0.25)


def test_an_app_elsewhere_has_its_picture_on_the_page(run: Path) -> None:
    page = visible_text((run / "report.html").read_text())
    assert "Guesses &lt;of&gt; the toy 3 guesses." in page
    assert "Guesses counted all of &lt;them&gt; guess times 4 1 " in page
    record = report.read_run(run)
    assert record.higher_is_better("luck_of_rain") and not record.higher_is_better("bad_weather")
    scores = {"mean_luck": 0.5, "luck_lucky": 0.4, "luck_wrong": 0.3, "luck_none": 0.2}
    record.events.append({"kind": "evaluate", "time": 1.79e9, "step": 640} | scores)
    (members,) = [members for name, members in record.metric_families().items() if name == "mean_luck"]
    for predictions in (record.predictions, None):  # None: classes from the settings
        record.predictions = predictions
        (axes,) = curves._draw_metric(record, "mean_luck", members, LIGHT).axes
        colors = {line.get_label(): (line.get_color(), line.get_marker()) for line in axes.lines}
        assert colors["lucky"] == ("#112233", "s") and colors["wrong"] == ("#112233", "^") and colors["none"] == (LIGHT.faint, "o")
        record.settings["model"] = {"classes": TOY["kinds"]}


def test_a_failed_picture_is_left_out(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left_out(name: Any = "toy", **change: Any) -> list[str]:
        write_run(tmp_path, [START | {"name": name}, *list(events(last=20))[1:]], SETTINGS)
        write_arrays(tmp_path / "toy.npz", b"PK\x03\x04 torn" if change.pop("torn", False) else TOY | change)
        return [line for line in report.read_run(tmp_path).left_out if "evaluations" not in line]

    assert left_out() == []
    (line,) = left_out(torn=True)
    assert re.match("Guesses <of> the toy: toy.npz: .*zip", line)
    assert left_out(guess=np.zeros((2, 2))) == ["Guesses <of> the toy: toy.npz: guess is float64 (2, 2), expected real [N]"]
    assert left_out(guess=np.array([None])) != [] and left_out(kinds=None) == ["Guesses <of> the toy: toy.npz: has no array kinds"]
    assert left_out("broken")[0] == "apps/broken/picture.py: not yet"
    for name in ("unknown", "../toy", "toy.picture", "os", 5, None):
        assert left_out(name) == [f"toy.npz: no picture is made of it; expected one in apps/{name}/picture.py"]
    (tmp_path / "toy.npz").unlink()
    write_run(tmp_path, [START | {"name": "unknown"}])
    assert not report.read_run(tmp_path).left_out
    # A picture that fails when drawn is noted too, and the page has the curves.
    write_arrays(write_run(tmp_path, events(last=20), SETTINGS) / "toy.npz", TOY)
    record = report.read_run(tmp_path)
    assert record.picture is not None
    monkeypatch.setattr(record.picture, "draw", lambda data, theme: 1 / 0)
    assert "Guesses &lt;of&gt; the toy: division by zero" in visible_text(report.draw_run(tmp_path).read_text())
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {"loss", "learning_rate", "throughput"}


def test_the_page_is_self_contained_and_escapes_text(run: Path) -> None:
    page = (run / "report.html").read_text()
    sources = re.findall(r'(?:src|srcset|href|url)[=(]"?([^">)]*)', page)
    assert len(sources) == 12
    for source in sources:
        assert source.startswith("data:image/png;base64,")
        page = page.replace(source, "")
    assert not re.search(r"://|<script|<link|<iframe|@import|<b>here", page)


def test_the_plots_are_written_and_not_blank(run: Path) -> None:
    names = {"loss", "evaluate_mae", "evaluate_accuracy", "learning_rate", "throughput", "toy"}
    assert {path.stem for path in (run / "plots").iterdir()} == names
    for path in (run / "plots").iterdir():
        picture = imread(path)
        assert picture.shape[:2] == ((175, 320) if path.stem == "toy" else (150, 240))
        assert picture[..., :3].std() > 0.02, f"{path.name} is blank"


def test_an_axis_over_decades_has_powers_of_ten_and_a_metric_may_be_called_anything(tmp_path: Path) -> None:
    odd = "$\\frac{$ <mae>"
    lines = [START, *({"kind": "evaluate", "time": 0.0, "step": n, "epoch": n, "seconds": 1.0, odd: 10.0**-n} for n in range(4))]
    run = write_run(tmp_path, lines)
    figure = curves._draw_metric(report.read_run(run), odd, [], LIGHT)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_yscale() == "log" and axes.get_ylabel() == odd.replace("$", r"\$")
    assert any(label.get_text() == r"$\mathdefault{10^{-2}}$" and label.get_parse_math() for label in axes.get_yticklabels())
    assert "Validation $\\frac{$ &lt;mae&gt;" in page_text(report.read_run(run))


def test_the_target_is_drawn_only_for_the_metric_it_is_for(run: Path) -> None:
    record = report.read_run(run)
    labels = {}
    for name in ("mae", "accuracy"):
        (axes,) = curves._draw_metric(record, name, [], LIGHT).axes
        labels[name] = axes.get_legend_handles_labels()[1]
    assert "target 0.124" in labels["mae"] and "best 0.1231" in labels["mae"]
    assert not any("target" in label for label in labels["accuracy"]) and "best 0.64" in labels["accuracy"]
    assert record.best("mae") == (560, 0.1231)
    (throughput,) = [plot for plot in curves.plots(record) if plot.name == "throughput"]
    assert throughput.draw(LIGHT).axes[0].get_legend_handles_labels()[1] == ["median 412"]


def test_the_best_value_follows_train_better(tmp_path: Path) -> None:
    """Parts of a metric follow it, and have no plot of their own; the axis of a score to maximize stays linear."""
    values = [(0.01, 0.02, 9.0), (0.9, 0.8, 3.0), (0.6, 0.7, 5.0)]
    event = {"kind": "evaluate", "time": 0.0, "seconds": 1.0}
    lines = [event | {"step": n, "epoch": n, "skill_of_rain": part, "skill": skill, "bias": bias}
             for n, (skill, part, bias) in enumerate(values, 1)]
    run = write_run(tmp_path, [START, *lines])
    (run / "settings.yaml").write_text(yaml.safe_dump({"train": {"metric": "skill", "target": 0.95, "better": "higher"}}))
    record = report.read_run(run)
    assert [record.best(name) for name in ("skill", "skill_of_rain", "bias")] == [(2, 0.9), (2, 0.8), (2, 3.0)]
    text = page_text(record)
    assert "best validation skill 0.9 at step 2, target 0.95" in text and "skill_of_rain 0.8 2 0.7 3" in text
    assert [plot.name for plot in curves.plots(record)] == ["evaluate_skill", "evaluate_bias"]
    (axes,) = curves._draw_metric(record, "skill", ["skill_of_rain"], LIGHT).axes
    assert axes.get_legend_handles_labels()[1] == ["skill", "of rain", "target 0.95", "best 0.9"]
    assert axes.get_yscale() == "linear" and axes.get_ylim()[1] > 0.95
    (run / "settings.yaml").write_text(yaml.safe_dump({"train": {"metric": "skill", "target": 0.95, "better": "lower"}}))
    record = report.read_run(run)
    assert [record.best(name) for name in ("skill", "skill_of_rain")] == [(1, 0.01), (1, 0.02)]
    assert curves._draw_metric(record, "skill", [], LIGHT).axes[0].get_yscale() == "log"


def test_parts_belong_to_the_shortest_metric_that_begins_their_names(tmp_path: Path) -> None:
    names = ["iou_river_deep", "iou", "iou_river", "loss", "loss_ce", "mae", "maerz_1", "iouu"]
    event = {"kind": "evaluate", "time": 0.0, "step": 1, "epoch": 1, "seconds": 1.0}
    run = write_run(tmp_path, [START, event | dict.fromkeys(names, 1.0)])
    parts = {"iou": ["iou_river_deep", "iou_river"], "loss_ce": [], "mae": [], "maerz_1": [], "iouu": []}
    assert report.read_run(run).metric_families() == parts


def test_a_young_run_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "young", events(last=40, end=None))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "ti')              # an incomplete line, still being written
    page = page_text(record := report.read_run(run))
    for text in ("still running, last event 2026-09-21", "evaluations: none so far", "40 / 640",
                  "Guesses &lt;of&gt; the toy: there is no toy.npz",
                  "settings.yaml: there is no settings.yaml"):
        assert text in page, text
    assert {plot.name for plot in curves.plots(record)} == {"loss", "learning_rate", "throughput"}


def test_a_run_that_has_only_started_is_drawn(tmp_path: Path) -> None:
    page = page_text(report.read_run(write_run(tmp_path, [START])))
    assert "loss: the run has no finite value of it yet" in page and "still running" in page


ENDS = [("signal", "stopped by a signal"), ("diverged", ">diverged<"), ("finished", ">finished<")]


@pytest.mark.parametrize(("end", "text"), ENDS)
def test_the_page_shows_the_state_of_the_run(end: str, text: str, tmp_path: Path) -> None:
    lines = list(events(last=20, end=end))
    header = document._header(report.read_run(write_run(tmp_path, lines)))
    assert text in header
    odd = START | {"resumed_from": 20, "name": "toy <small> & co"}
    header = document._header(report.read_run(write_run(tmp_path, [*lines, odd])))
    assert "still running" in header and "toy &lt;small&gt; &amp; co" in header


def test_a_smoothed_curve_keeps_a_constant_and_passes_over_nan() -> None:
    values = np.full(100, 3.0)
    values[[0, 50, 99]] = math.nan
    assert np.allclose(curves.smooth(values), 3.0)
    line = np.arange(100.0)
    assert np.allclose(curves.smooth(line)[10:-10], line[10:-10])              # it does not lag
    assert curves.smooth(np.array([5.0])).tolist() == [5.0] and curves.smooth(np.array([])).size == 0


def test_folders_without_a_run_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert re.fullmatch(r"hpcai report: .*nowhere is not a directory; expected .*\n", capsys.readouterr().err)
    with pytest.raises(DataError, match="No such file"):
        report.draw_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no event"):
        report.draw_run(tmp_path)
