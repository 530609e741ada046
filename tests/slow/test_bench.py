"""What docs/benchmarks.md and the README claim of speed and memory, measured here."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcai import log
from hpcai.cli import apps
from hpcai.train.choices import fast_bf16
from tests.apps.universes import make
from tests.slow.trying import ROOT, bench, until

pytestmark = pytest.mark.timing
Rows = list[dict[str, Any]]
UNET = "model.window=[64, 64, 64]"
ANGLES = ("detached", "conservative")
STEPS = [  # how many times as fast as the plain form a step is at least, and where
    *(("cosmoflow", 1.3, [f"model.size={size}", f"data.batch={batch}"]) for size, batch in ((64, 1), (64, 4), (128, 1))),
    ("deepcam", 1.0, ["model.divide=1", "height=384", "width=576"]),
    ("unet3d", 1 / 1.05, [UNET]),
    *(("opencatalyst", 2.0, [f"model.angles={angles}", "data.batch=4"]) for angles in ANGLES),
    ("openfold", 1.0, ["model.blocks=4", "features.crop=64"]),
]
MEMORY = [  # the part of the plain form's memory that training needs at most
    ("cosmoflow", 1.0, ["model.size=128"]),
    ("deepcam", 1.01, ["model.divide=1", "height=384", "width=576"]),
    ("unet3d", 1.15, [UNET]),
    *(("opencatalyst", 0.75, [f"model.angles={angles}", "data.batch=4"]) for angles in ANGLES),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("app", "least", "words"), STEPS)
def test_a_step_is_faster_than_that_of_the_plain_form(app: str, least: float, words: list[str]) -> None:
    def good(row: dict[str, Any]) -> bool:
        return min(value for name, value in row.items() if name.endswith("_over_ours")) >= least

    until(good, lambda: bench(app, "steps", *words)["steps"][0])


def test_with_the_precision_that_an_app_takes_deepcam_is_much_faster() -> None:
    if not fast_bf16(torch.device("cpu")):
        pytest.skip("this CPU does not compute in bfloat16 at full speed")
    words = ("deepcam", "steps", "model.divide=1", "data.batch=2", "--precision", "auto")
    until(lambda row: row["plain_over_ours"] >= 1.3, lambda: bench(*words)["steps"][0])


@pytest.mark.parametrize(("app", "most", "words"), MEMORY)
def test_training_needs_no_more_memory_than_the_plain_form(app: str, most: float, words: list[str]) -> None:
    row = bench(app, "memory", *words)["memory"][0]
    assert row["ours_over_plain"] <= most, row


def test_the_loop_costs_less_than_2_percent() -> None:
    words = ("cosmoflow", "loop", "model.size=64", "--repeats", "5")
    until(lambda row: row["overhead_percent"] < 2.0, lambda: bench(*words)["loop"][0])


def test_auto_precision_is_no_slower_than_a_plain_loop() -> None:
    until(lambda row: row["auto_over_plain"] >= 1.0, lambda: bench("cosmoflow", "precision", "model.size=32")["precision"][0])


def test_the_network_of_opencatalyst_is_there_in_a_second() -> None:
    until(lambda row: row["ours_s"] < 1, lambda: bench("opencatalyst", "build", "model.angles=detached")["build"][0])


# ---- the parts of a step


def tries(part: str, good: Callable[[Rows], bool], *words: str) -> None:
    until(good, lambda: bench("step", part, *words)[part])


def test_update_and_average_in_one_pass_are_twice_as_fast_as_one_after_the_other() -> None:
    tries("optimizer", lambda rows: rows[0]["ratio"] >= 2.0)


def test_a_divided_update_takes_a_third_of_the_time_on_four_ranks_and_sends_what_an_all_reduce_would() -> None:
    tries("sharded", lambda rows: rows[0]["ratio"] <= 0.35 and abs(rows[0]["sent_over_parameters"] - 1.5) < 0.03)


def test_steps_are_as_long_as_without_any_evaluation() -> None:
    tries("evaluation", lambda rows: all(row["over_none"] <= 1.02 for row in rows if row["evaluation"] != "wait"))


# ---- reading samples: CPU seconds and refaults hold on any machine


def read(folder: Path, part: str, *words: str) -> Rows:
    found: Rows = bench("data", "--directory", str(folder), part, *words)[part]
    assert list(folder.iterdir()) == [], "nothing is left behind"
    return found


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio (make fio)")
def test_the_direct_reader_gives_what_the_disk_gives_to_fio(tmp_path: Path) -> None:
    until(lambda rows: all(row["ours_over_fio"] >= 0.95 for row in rows), lambda: read(tmp_path, "direct", "--gib", "1"))


def test_a_set_larger_than_the_memory_is_read_faster_than_through_the_page_cache(tmp_path: Path) -> None:
    rows = read(tmp_path, "larger", "--gib", "1")
    if "left out" in rows[0]:
        pytest.skip(rows[0]["left out"])
    torch, ours = rows
    assert ours["refaults"] == 0 < torch["refaults"]
    assert ours["cpu_ratio"] <= 1 / 3 and ours["ratio"] >= 1.8, rows


def test_a_late_sample_costs_nothing(tmp_path: Path) -> None:
    words = ("late", "--repeats", "1", "--gib", "0.5")
    until(lambda rows: rows[0]["throughput_kept"] >= 0.98, lambda: read(tmp_path, *words))


def test_samples_come_no_slower_than_by_anything_else(tmp_path: Path) -> None:
    """On a disk as fast as memory h5py alone, which hands over no batches, reaches the disk's rate too: then equal to a fifth."""

    def good(rows: Rows) -> bool:
        return all(row["ours_over_it"] >= (0.8 if row["loader"] == "h5py alone" else 1) for row in rows if row["loader"] != "ours")

    until(good, lambda: read(tmp_path, "peers", "--gib", "0.5", "--repeats", "3"))


# ---- what costs a person time


@pytest.mark.parametrize(
    "code, limit", [("import hpcai", 0.3), ("import hpcai.settings, hpcai.models.cosmoflow, hpcai.train, hpcai.dist", 0.6)]
)
def test_importing_costs_little(code: str, limit: float) -> None:
    best = 9.0
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        best = min(best, time.perf_counter() - began)
    assert best < limit


@pytest.mark.parametrize("app", apps.names("settings"))
def test_help_is_there_within_a_second(app: str) -> None:
    best = 9.0
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", f"apps.{app}", "--help"], cwd=ROOT, capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0 and "step.lr" in done.stdout
    assert best < 1.0


def test_four_processes_make_their_first_step_within_fifteen_seconds(tmp_path: Path) -> None:
    words = [f"data.directory={make(tmp_path / 'data')}", "data.batch=8", "train.epochs=null", "train.steps=2"]
    words += ["apps/cosmoflow/configs/small.yaml", f"report.directory={tmp_path / 'run'}"]
    program = [Path(sys.executable).with_name("mpiexec"), "-n", "4", sys.executable, "-m", "apps.cosmoflow", *words]
    subprocess.run(program, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (start,) = [event for event in log.read_metrics(tmp_path / "run/metrics.jsonl") if event["kind"] == "startup"]
    assert start["step"] == 1 and start["seconds"] < 15, start
