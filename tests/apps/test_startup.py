"""A run logs once the time up to the end of its first step, in parts that add up."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcai import log, startup
from hpcai.cli.report import draw_run
from hpcai.data.loader import Loader
from hpcai.models import cosmoflow
from hpcai.train.checkpoint import Checkpoints
from tests.apps.app_runs import FAST, ROOT, App
from tests.apps.small_apps import COSMOFLOW as APP
from tests.apps.small_apps import OPENFOLD, simulator

PARTS = {"imports", "processes", "data", "network", "checkpoint", "first batch", "first step"}


def startup_events(run: Path) -> list[dict[str, Any]]:
    return [event for event in log.read_metrics(run / "metrics.jsonl") if event["kind"] == "startup"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_a_start_add_up_to_the_time_since_the_processes_began(data: Path, tmp_path: Path, ranks: int) -> None:
    run, start = tmp_path / "run", time.time()
    output = APP.on_ranks(ranks, data, run, "train.epochs=1")
    (first,) = startup_events(run)
    parts, elapsed = first["parts"], first["time"] - start
    assert first["step"] == 1 and sum(parts.values()) == pytest.approx(first["seconds"])
    assert first["seconds"] == pytest.approx(elapsed, abs=0.25 + 0.2 * elapsed), "the processes were forked after `start`"
    assert all(parts[name] > 0 for name in PARTS) and (parts["connections"] > 0.001) == (ranks > 1) and parts["compile"] == 0
    assert parts["other"] < 0.1 + 0.1 * first["seconds"]
    assert len(re.findall(r"first step after \d+\.\d s", output)) == 1
    assert APP.run(data, run, "train.epochs=2") == 0
    assert [event["step"] for event in startup_events(run)] == [1, 4], "each start logs its own"
    assert ranks == 2 or draw_run(run).read_text().count("first step after") == 1, "that of the last start"


def test_slow_parts_are_reported_as_such(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"network": (cosmoflow, "parallelize"), "first batch": (Loader, "epoch"), "checkpoint": (Checkpoints, "resume")}
    for owner, name in slow.values():
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, inner=inner, **kwargs: (time.sleep(0.3), inner(*args, **kwargs))[1])
    assert APP.run(data, tmp_path / "run", "train.epochs=1") == 0
    (event,) = startup_events(tmp_path / "run")
    assert all(event["parts"][name] > 0.3 for name in slow) and event["seconds"] - 0.9 < 0.9
    assert sum(seconds for name, seconds in event["parts"].items() if name not in slow) < 0.8


@pytest.mark.claim
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_takes_at_most_a_fifth_of_the_first(tmp_path: Path, ranks: int) -> None:
    """OpenFold, compiled by blocks, on one rank and sharded over two; each start has a temporary folder of its own."""
    args = "--chains 12 --families 4 --each 1 --length 34 34 --rows 60 --validation 0.5"
    simulator("openfold", args)(tmp_path / "data")
    overrides = [
        "features={crop: 32, clusters: 16, extra: 32}", "data.batch=1", "data.epoch=2", "data.pictures=0", "train.steps=1",
        "train.report_every=1", "step.compile=blocks", f"step.compile_cache={tmp_path / 'cache'}", f"mesh.axial={ranks}",
    ]  # fmt: skip
    outputs = [run_in_new_processes(OPENFOLD, ranks, tmp_path / name, tmp_path / "data", overrides) for name in ("first", "second")]
    first, second = (startup_events(tmp_path / number / "run")[0] for number in ("first", "second"))
    for name, output, event in zip(("first", "second"), outputs, (first, second)):
        compiled = re.findall(r"compiled \d+ graphs[^;\n]*", output)[0]
        print(f"\n{ranks} processes, {name} start: {startup.format_parts(event['parts'])}; {compiled}")
    hits = [re.findall(r"(\d+) of (\d+) parts found ready", output) for output in outputs]
    assert hits[1] and all(hit == total for hit, total in hits[1]), "nothing is compiled again"
    assert all(int(hit) < int(total) / 2 for hit, total in hits[0]), "hits are equal graphs within a job"
    assert second["parts"]["compile"] <= first["parts"]["compile"] / 5 and second["seconds"] <= first["seconds"] / 5


def run_in_new_processes(app: App, ranks: int, folder: Path, data: Path, overrides: list[str]) -> str:
    """Run an app in new Python processes with an empty temporary folder, and return its output."""
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environ |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    args = [str(app.small_config), *FAST, f"data.directory={data}", f"report.directory={folder / 'run'}", *overrides]
    command = [*launcher, sys.executable, "-m", f"apps.{app.name}", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
