"""The files of docs/new_model.md, in a folder of their own, make an app with all the features of the others."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import apps
import data_prep
import hpcai.models
from hpcai import config, log
from hpcai.cli import main as hpcai_command
from tests.ranks.launch import on_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/new_model.md").read_text()
FILES = dict(re.findall(r"^`([\w/.]+\.(?:py|yaml))`\n\n```(?:python|yaml)\n(.*?)^```", PAGE, re.M | re.S))


@pytest.fixture
def ringdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "apps/ringdown/__init__.py").write_text('"""Train Ringdown."""\n')
    for package in (apps, data_prep, hpcai.models):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / package.__name__.replace(".", "/"))])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if ".ringdown" in name]:
        del sys.modules[name]


def run(*overrides: str) -> int:
    from apps.ringdown.__main__ import main  # type: ignore[import-not-found]
    from apps.ringdown.settings import Config  # type: ignore[import-not-found]

    with pytest.raises(SystemExit) as error:
        config.run(Config, main, ["apps/ringdown/configs/small.yaml", "data.workers=1", *overrides])
    return int(error.value.code or 0)


def _score(mesh: object, folder: str, *overrides: str) -> float:
    from apps.ringdown.data import build_loaders  # type: ignore[import-not-found]
    from apps.ringdown.settings import Config
    from hpcai import train
    from hpcai.models import ringdown  # type: ignore[attr-defined]

    cfg = config.load(Config, None, [f"data.directory={folder}", "train.steps=3", "train.epochs=null", *overrides])
    with build_loaders(cfg, mesh) as (training, validation), train.seeds(0):  # type: ignore[arg-type]
        step = train.Step(ringdown.parallelize(ringdown.Ringdown(cfg.model), mesh), ringdown.loss, cfg.step, mesh)  # type: ignore[arg-type]
        result = train.fit(step, training, cfg.train, validation=validation, evaluate=ringdown.error)
    return result.evaluations[-1]["mae"]


def test_the_app_of_the_page_trains_and_has_report_bench_ablation_and_log(
    ringdown: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(FILES) == 13
    from data_prep.ringdown import main as simulate  # type: ignore[import-not-found]

    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    prepare, fit, two, report, bench, ablate = (shlex.split(line, comments=True) for line in block.splitlines())
    assert prepare[:3] == ["python", "-m", "data_prep.ringdown"] and [*fit[:4], "report.directory=runs/two"] == two[3:]
    simulate(*prepare[3:])
    assert run(*fit[4:]) == 0
    folder = ringdown / "runs/ringdown-small"
    pairs = np.load(folder / "pairs.npz")
    mae, mean = (np.abs(each - pairs["true"]).mean() for each in (pairs["predicted"], pairs["true"].mean(0)))
    assert mae < 0.5 * mean, "the model learns"
    assert '"submission_benchmark", "value": "ringdown"' in (folder / "mlperf.log").read_text()
    assert (folder / "model.safetensors").exists()

    assert hpcai_command(report[1:]) == 0
    page = (folder / "report.html").read_text()
    assert "Predicted against true" in page and "Prediction per quantity" in page and (folder / "plots").is_dir()

    assert hpcai_command([*bench[1:], "--repeats", "1", "--json"]) == 0
    timings = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert timings["steps"][0]["plain_s"] > 0
    assert hpcai_command([*ablate[1:], "--steps", "1", "--json"]) == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in table["cumulative"]] == ["plain", "fused optimizer"] and table["left_out"][0]["error"] is None

    single, pair = on_ranks({"replicate": 1}, _score, "datasets/ringdown"), on_ranks({"replicate": 2}, _score, "datasets/ringdown")
    assert pair == pytest.approx([single[0]] * 2, rel=1e-5), "two ranks give the same"

    assert run("report.directory=runs/resumed", "train.steps=8", "train.epochs=null") == 0
    assert run("report.directory=runs/resumed", "train.steps=16", "train.epochs=null") == 0
    events = log.read_metrics(ringdown / "runs/resumed/metrics.jsonl")
    starts = [event["resumed_from"] for event in events if event["kind"] == "start"]
    assert starts == [None, 8], "the second run resumes"


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp64"])
def test_the_app_of_the_page_trains_in_each_precision(ringdown: Path, precision: str) -> None:
    from data_prep.ringdown import main as simulate

    simulate("datasets/ringdown")
    assert run("train.steps=2", "train.epochs=null", f"step.precision={precision}", "report.sinks=[]") == 0
    assert np.isfinite(np.load(ringdown / "runs/ringdown-small/pairs.npz")["predicted"]).all()
    pair = on_ranks({"replicate": 2}, _score, "datasets/ringdown", f"step.precision={precision}", "step.shard=weights", fresh=True)
    assert pair[0] == pair[1] and np.isfinite(pair[0])
