"""`hpcai new` writes the files of docs/new_model.md, which make an app with all the features of the others."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import apps
import data_prep
import hpcai.models
from hpcai import log
from hpcai.cli import main as hpcai_command
from hpcai.cli import new

ROOT = Path(__file__).resolve().parents[2]
NAME, LONGEST = "app_of_the_page", "a_name_of_24_characters_"
SYNTAX = "expected 1 to 24 lower-case letters"
Write = Callable[[str], str]


@pytest.fixture
def write_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Write:
    """Return a function that runs ``hpcai new`` in the temporary folder, as in a checkout, and returns its output."""
    monkeypatch.setattr(new, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda name: capsys.readouterr().out if hpcai_command(["new", name]) == 0 else pytest.fail(name)


@pytest.fixture
def folder(tmp_path: Path, write_new: Write, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_new(NAME)
    for package in (apps, data_prep, hpcai.models):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / package.__name__.replace(".", "/"))])
    yield tmp_path
    for name in [name for name in sys.modules if NAME in name]:
        del sys.modules[name]


def test_the_printed_commands_simulate_train_and_pass_the_test_in_fp32_and_bf16(tmp_path: Path, write_new: Write) -> None:
    for name in ("hpcai", "apps", "data_prep"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files, commands = write_new(NAME).split("\n\n")[:2]
    assert len(files.splitlines()) == 18 and all((tmp_path / file.strip()).is_file() for file in files.splitlines()[1:])
    write_new(LONGEST)
    lines = [*commands.splitlines()[1:], "ruff check --no-cache ."]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": path}
    process = subprocess.run(["bash", "-euc", "\n".join(lines)], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert process.returncode == 0 and f"tests/apps/test_{NAME}.py ..." in process.stdout, process.stdout + process.stderr
    assert (tmp_path / f"runs/{NAME}-small/model.safetensors").exists()


@pytest.mark.parametrize(("name", "part"), [
    ("Two", SYNTAX), ("2d", SYNTAX), ("two-body", SYNTAX), ("lambda", "no keyword of Python"), (LONGEST + "2", SYNTAX),
    ("cosmoflow", "apps/cosmoflow"), ("store", "data_prep/store.py"), ("numpy", "the module numpy of Python"),
    ("mesh", "the word Mesh"), ("data", "the word DataConfig"), ("kept", "apps/kept"), ("free", "apps/free: Not a"),
])  # fmt: skip
def test_a_name_that_is_taken_and_a_folder_that_fails_leave_no_file(
    name: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / ("apps" if name == "free" else "apps/kept/notes.txt")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
    before = {*tmp_path.rglob("*")}
    assert hpcai_command(["new", name, "--into", str(tmp_path)]) == 2 and part in capsys.readouterr().err
    assert {*tmp_path.rglob("*")} == before


def run(*overrides: str) -> None:
    with pytest.raises(SystemExit) as error:
        hpcai_command(["run", NAME, "small", "data.workers=1", *overrides])
    assert error.value.code == 0


def test_the_app_of_the_page_has_report_bench_ablation_log_and_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcai_command(["prepare", NAME, f"datasets/{NAME}"]) == 0
    run("report.sinks=[terminal, mlperf]", "train.epochs=2")
    done = folder / f"runs/{NAME}-small"
    assert f'"submission_benchmark", "value": "{NAME}"' in (done / "mlperf.log").read_text()

    assert hpcai_command(["report", str(done)]) == 0
    page = (done / "report.html").read_text()
    assert "Predicted against true" in page and "Prediction per quantity" in page and (done / "plots").is_dir()

    assert hpcai_command(["bench", NAME, "steps", "--repeats", "1", "--json"]) == 0
    timings = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert timings["steps"][0]["plain_s"] > 0
    assert hpcai_command(["ablate", NAME, "--only", "fused-optimizer", "--repeats", "1", "--steps", "1", "--json"]) == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in table["cumulative"]] == ["plain", "fused optimizer"] and table["left_out"][0]["error"] is None

    run("report.directory=runs/resumed", "train.steps=8", "train.epochs=null")
    run("report.directory=runs/resumed", "train.steps=16", "train.epochs=null")
    events = log.read_metrics(folder / "runs/resumed/metrics.jsonl")
    starts = [event["resumed_from"] for event in events if event["kind"] == "start"]
    assert starts == [None, 8], "the second run resumes"
