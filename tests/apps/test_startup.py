"""A run says once where the time went up to the end of its first step, and the parts add up."""

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
from tests.apps.small_apps import OPENFOLD, prepared

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE = {"imports", "processes", "data", "network", "checkpoint", "first batch", "first step"}


def starts(run: Path) -> list[dict[str, Any]]:
    return [event for event in log.read_metrics(run / "metrics.jsonl") if event["kind"] == "startup"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_a_start_add_up_to_the_time_since_the_processes_began(data: Path, tmp_path: Path, ranks: int) -> None:
    run, began = tmp_path / "run", time.time()
    said = APP.on_ranks(ranks, data, run, "train.epochs=1")
    (told,) = starts(run)
    parts, took = told["parts"], told["time"] - began
    assert told["step"] == 1 and sum(parts.values()) == pytest.approx(told["seconds"])
    assert told["seconds"] == pytest.approx(took, abs=0.25 + 0.2 * took), "the processes were forked after `began`"
    assert all(parts[name] > 0 for name in ALONE) and (parts["connections"] > 0.001) == (ranks > 1) and parts["compile"] == 0
    assert parts["other"] < 0.1 + 0.1 * told["seconds"]
    assert len(re.findall(r"first step after \d+\.\d s", said)) == 1
    assert APP.run(data, run, "train.epochs=2") == 0
    assert [event["step"] for event in starts(run)] == [1, 4], "each life tells its own"
    assert ranks == 2 or draw_run(run).read_text().count("first step after") == 1, "the last life's"


def test_what_is_slow_is_the_part_that_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"network": (cosmoflow, "parallelize"), "first batch": (Loader, "epoch"), "checkpoint": (Checkpoints, "resume")}
    for place, name in slow.values():
        inner = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *words, inner=inner, **more: (time.sleep(0.3), inner(*words, **more))[1])
    assert APP.run(data, tmp_path / "run", "train.epochs=1") == 0
    (told,) = starts(tmp_path / "run")
    assert all(told["parts"][name] > 0.3 for name in slow) and told["seconds"] - 0.9 < 0.9
    assert sum(seconds for name, seconds in told["parts"].items() if name not in slow) < 0.8


@pytest.mark.claim
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_takes_at_most_a_fifth_of_the_first(tmp_path: Path, ranks: int) -> None:
    """OpenFold, compiled by blocks, alone and cut over two processes; each start has a node's disk of its own."""
    small = "--chains 12 --families 4 --each 1 --length 34 34 --rows 60 --validation 0.5"
    prepared("openfold", small)(tmp_path / "data")
    words = [
        "features={crop: 32, clusters: 16, extra: 32}", "data.batch=1", "data.epoch=2", "data.pictures=0", "train.steps=1",
        "train.report_every=1", "step.compile=blocks", f"step.compile_cache={tmp_path / 'kept'}", f"mesh.axial={ranks}",
    ]  # fmt: skip
    every = [in_new_processes(OPENFOLD, ranks, tmp_path / number, tmp_path / "data", words) for number in ("first", "second")]
    first, second = (starts(tmp_path / number / "run")[0] for number in ("first", "second"))
    for name, said, told in zip(("first", "second"), every, (first, second)):
        compiled = re.findall(r"compiled \d+ graphs[^;\n]*", said)[0]
        print(f"\n{ranks} processes, {name} start: {startup.format_parts(told['parts'])}; {compiled}")
    ready = [re.findall(r"(\d+) of (\d+) parts found ready", said) for said in every]
    assert ready[1] and all(found == of for found, of in ready[1]), "nothing is made again"
    assert all(int(found) < int(of) / 2 for found, of in ready[0]), "of graphs that are alike within a job"
    assert second["parts"]["compile"] <= first["parts"]["compile"] / 5 and second["seconds"] <= first["seconds"] / 5


def in_new_processes(app: App, ranks: int, folder: Path, data: Path, words: list[str]) -> str:
    """What a run said that began with Python itself, on a node with an empty disk."""
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environ |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    given = [str(app.small), *FAST, f"data.directory={data}", f"report.directory={folder / 'run'}", *words]
    command = [*before, sys.executable, "-m", f"apps.{app.name}", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
