"""`hpcai report`: the page says what the run's files say, asks no network, and copes with what is missing."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from hpcai import cli
from hpcai.cli import report
from hpcai.cli.report import document, pictures
from hpcai.cli.report.run import Predictions
from hpcai.cli.report.theme import DARK, LIGHT
from hpcai.errors import DataError

SETTINGS = {"train": {"metric": "mae", "target": 0.124, "better": "lower"}, "model": {"note": "<script>alert(1)</script>"}}
START = {
    "kind": "start", "time": 1.79e9, "name": "cosmoflow <small> & co", "world": 4, "device": "NVIDIA H200", "parameters": 8907556,
    "steps": 640, "steps_per_epoch": 80, "epochs": 8, "global_batch": 32, "train_samples": 2560, "validation_samples": 320,
    "resumed_from": None,
}


def events(last: int = 640, end: str | None = "target") -> Iterator[dict[str, Any]]:
    """A run that was stopped at step 320 and resumed there."""
    yield START
    for step in range(10, last + 1, 10):
        if step == 330:
            yield START | {"time": 1.79e9 + 320, "resumed_from": 320}
            yield {"kind": "note", "time": 1.79e9 + 320, "step": 320, "text": "resumed <b>here</b>"}
        clock = (step if step <= 320 else step - 320) / 10
        loss = "NaN" if step == 200 else 0.02 + math.exp(-step / 100)
        yield {"kind": "train", "time": 1.79e9 + step, "step": step, "epoch": step / 80, "samples": 32 * step, "seconds": clock,
               "samples_per_second": 412.0 if step > 10 else 30.0, "lr": 0.004, "loss": loss, "mae": 0.3}
        if step % 80 == 0:
            error = 0.1231 if step == 560 else 0.125 + 1 / step
            yield {"kind": "evaluate", "time": 1.79e9 + step, "step": step, "epoch": step / 80, "seconds": 2.0, "mae": error,
                   "accuracy": step / 1000}
            yield {"kind": "checkpoint", "time": 1.79e9 + step, "step": step, "path": f"ckpt/{step}", "seconds": .4, "bytes": 107e6}
    if end:
        yield {"kind": "stop", "time": 1.79e9 + last, "step": last, "epoch": last / 80, "samples": 32 * last, "reason": end,
               "seconds": 32.0, "target_reached": end == "target"}


def written(run: Path, lines: Any) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def text(page: str) -> str:
    """What a reader sees, without pictures and marks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.split("<body>")[1]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = written(tmp_path_factory.mktemp("runs") / "whole", events())
    (run / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    rng = np.random.default_rng(0)
    true = rng.uniform(-1, 1, (200, 3))
    predicted = np.stack([true[:, 0], np.full(200, true[:, 1].mean()), -true[:, 2]], axis=1)
    predicted[7, 0] = np.nan
    np.savez(run / "predictions.npz", names=np.array(["Omega_m", "$\\sigma{$", "H_0"]), units=np.array(["", "", "km/s/Mpc"]),
             predicted=predicted, true=true)
    assert cli.main(["report", str(run)]) == 0
    return run


def test_the_page_says_what_the_run_did(run: Path) -> None:
    found = text((run / "report.html").read_text())
    for words in ("cosmoflow &lt;small&gt; &amp; co target reached", "best validation mae 0.1231 at step 560, target 0.124",
                  "412 samples/s median; 103 samples/s per process", "training time 0:01:04 20,480 samples seen",
                  "640 / 640", "4 x NVIDIA H200",
                  "8,907,556", "8 of 8, 80 steps each", "2, resumed from step 320", "mae 0.1231 560 0.1266 640 0.124",
                  "accuracy 0.64 640 0.64 640", "ckpt/640 640 107 MB 0.40 s", "320 resumed &lt;b&gt;here&lt;/b&gt;", "metric: mae"):
        assert words in found, words
    assert "Left out" not in found


def test_the_page_measures_every_parameter_against_the_mean(run: Path) -> None:
    found = text((run / "report.html").read_text())
    assert "Omega_m 1.0000 0 0.5" in found
    assert re.search(r"\$\\sigma\{\$ -?0\.000\d (0\.\d{3,4}) \1 0\.", found)        # RMSE of a network that says the mean
    assert re.search(r"H_0 \[km/s/Mpc\] -[23]\.\d+ ", found)
    assert "199 validation samples" in found                                   # one prediction is NaN


def test_the_page_needs_no_network_and_runs_no_text(run: Path) -> None:
    page = (run / "report.html").read_text()
    sources = re.findall(r'(?:src|srcset|href|url)[=(]"?([^">)]*)', page)
    assert len(sources) == 12
    for source in sources:
        assert source.startswith("data:image/png;base64,")
        page = page.replace(source, "")
    assert not re.search(r"://|<script|<link|<iframe|@import|<b>here", page)


def test_the_plots_are_kept_and_show_something(run: Path) -> None:
    names = {"loss", "evaluate_mae", "evaluate_accuracy", "learning_rate", "throughput", "predictions"}
    assert {path.stem for path in (run / "plots").iterdir()} == names
    for path in (run / "plots").iterdir():
        picture = imread(path)
        assert picture.shape[0] > 400 and picture.shape[1] > 1000
        assert picture[..., :3].std() > 0.02, f"{path.name} is blank"


def test_an_axis_over_decades_has_powers_of_ten_and_a_metric_may_be_called_anything(tmp_path: Path) -> None:
    odd = "$\\frac{$ <mae>"
    lines = [START, *({"kind": "evaluate", "time": 0.0, "step": n, "epoch": n, "seconds": 1.0, odd: 10.0**-n} for n in range(4))]
    run = written(tmp_path, lines)
    figure = pictures._metric(report.read(run), odd, [], LIGHT)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_yscale() == "log" and axes.get_ylabel() == odd.replace("$", r"\$")
    assert any(label.get_text() == r"$\mathdefault{10^{-2}}$" and label.get_parse_math() for label in axes.get_yticklabels())
    assert "Validation $\\frac{$ &lt;mae&gt;" in report.draw(run).read_text()


def test_the_target_is_drawn_only_for_the_metric_it_is_for(run: Path) -> None:
    found = report.read(run)
    labels = {}
    for name in ("mae", "accuracy"):
        (axes,) = pictures._metric(found, name, [], LIGHT).axes
        labels[name] = axes.get_legend_handles_labels()[1]
    assert "target 0.124" in labels["mae"] and "best 0.1231" in labels["mae"]
    assert not any("target" in label for label in labels["accuracy"]) and "best 0.64" in labels["accuracy"]
    assert found.best("mae") == (560, 0.1231)


def test_the_best_of_a_metric_is_the_highest_where_the_settings_say_so(tmp_path: Path) -> None:
    """Also of its parts, whatever they are called; its axis stays linear and its parts have no picture of their own."""
    values = [(0.01, 0.02, 9.0), (0.9, 0.8, 3.0), (0.6, 0.7, 5.0)]
    about = {"kind": "evaluate", "time": 0.0, "seconds": 1.0}
    lines = [about | {"step": n, "epoch": n, "skill_of_rain": part, "skill": skill, "bias": bias}
             for n, (skill, part, bias) in enumerate(values, 1)]
    run = written(tmp_path, [START, *lines])
    (run / "settings.yaml").write_text(yaml.safe_dump({"train": {"metric": "skill", "target": 0.95, "better": "higher"}}))
    found = report.read(run)
    assert [found.best(name) for name in ("skill", "skill_of_rain", "bias")] == [(2, 0.9), (2, 0.8), (2, 3.0)]
    words = text(report.draw(run).read_text())
    assert "best validation skill 0.9 at step 2, target 0.95" in words and "skill_of_rain 0.8 2 0.7 3" in words
    assert {path.stem for path in (run / "plots").iterdir()} == {"evaluate_skill", "evaluate_bias"}
    (axes,) = pictures._metric(found, "skill", ["skill_of_rain"], LIGHT).axes
    assert axes.get_legend_handles_labels()[1] == ["skill", "of rain", "target 0.95", "best 0.9"]
    assert axes.get_yscale() == "linear" and axes.get_ylim()[1] > 0.95
    (run / "settings.yaml").write_text(yaml.safe_dump({"train": {"metric": "skill", "target": 0.95, "better": "lower"}}))
    found = report.read(run)
    assert [found.best(name) for name in ("skill", "skill_of_rain")] == [(1, 0.01), (1, 0.02)]
    assert pictures._metric(found, "skill", [], LIGHT).axes[0].get_yscale() == "log"


def test_parts_belong_to_the_shortest_metric_that_begins_their_names(tmp_path: Path) -> None:
    names = ["iou_river_deep", "iou", "iou_river", "loss", "loss_ce", "mae", "maerz_1", "iouu"]
    event = {"kind": "evaluate", "time": 0.0, "step": 1, "epoch": 1, "seconds": 1.0}
    run = written(tmp_path, [START, event | dict.fromkeys(names, 1.0)])
    parts = {"iou": ["iou_river_deep", "iou_river"], "loss_ce": [], "mae": [], "maerz_1": [], "iouu": []}
    assert report.read(run).families() == parts


def test_a_young_run_is_drawn_with_what_it_has(tmp_path: Path) -> None:
    run = written(tmp_path / "young", events(last=40, end=None))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "ti')              # the line that is being written
    found = text(report.draw(run).read_text())
    for words in ("still running, last heard of 2026-09-21", "evaluations: none so far", "40 / 640",
                  "predicted against true: there is no predictions.npz, no maps.npz, no pairs.npz and no structures.npz",
                  "settings.yaml: there is no settings.yaml"):
        assert words in found, words
    assert {path.stem for path in (run / "plots").iterdir()} == {"loss", "learning_rate", "throughput"}


def test_a_run_that_has_only_started_is_drawn(tmp_path: Path) -> None:
    found = text(report.draw(written(tmp_path, [START])).read_text())
    assert "loss: the run has no finite value of it yet" in found and "still running" in found


ENDS = [("signal", "stopped by a signal"), ("diverged", ">diverged<"), ("finished", ">finished<")]


@pytest.mark.parametrize(("end", "words"), ENDS)
def test_the_page_says_how_the_run_ended(end: str, words: str, tmp_path: Path) -> None:
    lines = list(events(last=20, end=end))
    run = report.read(written(tmp_path, lines))
    assert words in document._header(run)
    assert "still running" in document._header(report.read(written(tmp_path, [*lines, START | {"resumed_from": 20}])))


@pytest.mark.parametrize("arrays", [
    {"names": ["a"], "units": [""], "predicted": np.zeros((3, 2)), "true": np.zeros((3, 2))},
    {"names": ["a", "b"], "units": [""], "predicted": np.zeros((3, 2)), "true": np.zeros((3, 2))},
    {"names": ["a"], "units": [""], "predicted": np.zeros((3, 1))},
    {"names": ["a"], "units": [""], "predicted": np.full((3, 1), np.nan), "true": np.zeros((3, 1))},
    {"names": np.array(["a"], dtype=object), "units": [""], "predicted": np.zeros((3, 1)), "true": np.zeros((3, 1))},
    b"PK\x03\x04 torn",
    b"",
])
def test_unusable_predictions_are_left_out_with_a_reason(arrays: Any, tmp_path: Path) -> None:
    run = written(tmp_path, events(last=20))
    if isinstance(arrays, bytes):
        (run / "predictions.npz").write_bytes(arrays)
    else:
        np.savez(run / "predictions.npz", **arrays)
    found = report.read(run)
    assert found.predictions is None
    assert len([line for line in found.left_out if line.startswith("predicted against true: ") and len(line) > 30]) == 1


def test_many_parameters_and_samples_fill_rows_of_panels() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=(5000, 5))
    found = Predictions([f"p{p}" for p in range(5)], [""] * 5, true + 0.5 * rng.normal(size=true.shape), true)
    figure = pictures._scatter(found, LIGHT)
    assert len(figure.axes) == 5
    assert found.r2(0) == pytest.approx(0.75, abs=0.03)
    constant = Predictions(["p"], [""], np.zeros((4, 1)), np.ones((4, 1)))
    assert math.isnan(constant.r2(0)) and pictures._scatter(constant, DARK).axes


def test_a_smoothed_curve_keeps_a_constant_and_passes_over_nan() -> None:
    values = np.full(100, 3.0)
    values[[0, 50, 99]] = math.nan
    assert np.allclose(pictures.smooth(values), 3.0)
    line = np.arange(100.0)
    assert np.allclose(pictures.smooth(line)[10:-10], line[10:-10])              # it does not lag
    assert pictures.smooth(np.array([5.0])).tolist() == [5.0] and pictures.smooth(np.array([])).size == 0


def test_where_there_is_no_run_the_error_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert re.fullmatch(r"hpcai report: .*nowhere is not a directory; expected .*\n", capsys.readouterr().err)
    with pytest.raises(DataError, match="No such file"):
        report.draw(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no event"):
        report.draw(tmp_path)
