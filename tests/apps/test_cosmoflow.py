"""The CosmoFlow app as its users start it: alone, on ranks, stopped, killed, resumed, and with bad input."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from apps.cosmoflow.__main__ import main
from apps.cosmoflow.settings import Config
from hpcai import config, log
from tests.apps.running import App, told
from tests.apps.universes import make

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
# 24 universes in batches of 8: three steps an epoch.
QUICK = [
    "model.filters=2",
    "data.batch=8",
    "train.report_every=1",
    "train.epochs=2",
    "checkpoint.every_steps=1",
    "step.schedule.decay=none",
]
APP = App("cosmoflow", Config, main, QUICK)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("data") / "universes")


pytestmark = pytest.mark.usefixtures("one_thread")


def command(data: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "apps.cosmoflow", *APP.words(data, run, *more)]


def start(arguments: list[str]) -> subprocess.Popen:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_every_yaml_loads() -> None:
    files = sorted((ROOT / "apps/cosmoflow/configs").glob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        cfg = config.load(Config, path)
        assert cfg != Config() and cfg.report.directory is not None, f"{path.name} sets nothing"


def test_a_run_leaves_everything_that_its_users_want(data: Path, tmp_path: Path) -> None:
    assert APP.here(data, tmp_path / "run") == 0
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "model.safetensors",
        "predictions.npz",
        "settings.yaml",
    ]
    again = config.load(Config, run / "settings.yaml")
    assert again == config.load(Config, APP.small, APP.words(data, run)[1:])
    pairs = np.load(run / "predictions.npz", allow_pickle=False)
    assert pairs["names"].tolist() == ["Omega_m", "sigma_8", "n_s", "H_0"] and pairs["predicted"].shape == pairs["true"].shape == (
        12,
        4,
    )
    assert (pairs["true"][:, 3] >= 63).all() and (pairs["true"][:, 3] <= 77).all(), "in physical units"

    from hpcai.models.cosmoflow import CosmoFlow

    model = CosmoFlow.load(run / "model.safetensors")
    with h5py.File(data / "validation/universe_00000.h5") as file:
        guess = model.predict(file["counts"][0])
        several = model.predict(file["counts"][:2])
    assert list(guess) == ["Omega_m", "sigma_8", "n_s", "H_0"] and 55 < guess["H_0"] < 85
    assert several["sigma_8"].shape == (2,) and several["sigma_8"][0] == pytest.approx(guess["sigma_8"], rel=1e-5)

    from hpcai.cli.report import draw

    page = draw(run).read_text()
    assert "Omega_m" in page and "http" not in page.replace("http://www.w3.org", "")


def test_the_mlperf_log_of_a_run_keeps_the_rules(data: Path, tmp_path: Path) -> None:
    more = ["report.sinks=[mlperf]", "train.target=9", "step.optimizer=sgd", "model.dropout=0.5"]
    more += ["step.schedule={decay: steps, decay_at: [1], decay_to: [0.25], counted: cosmoflow-nvidia, warmup: 1, start: 1e-4}"]
    assert APP.here(data, tmp_path / "run", *more) == 0
    checker = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "hpc", "--ruleset", "3.0.0"]
    done = subprocess.run([*checker, str(tmp_path / "run" / "mlperf.log")], capture_output=True, text=True, cwd=tmp_path)
    # All rules but one are kept: three steps do not reach 0.124.
    failed = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line or "missing" in line.lower()]
    assert len(failed) == 1 and "Failed checks for eval_error" in failed[0], done.stdout + done.stderr


@pytest.mark.parametrize("stop", [2, 4])
def test_resumed_is_uninterrupted(data: Path, tmp_path: Path, stop: int) -> None:
    assert APP.here(data, tmp_path / "whole") == 0
    assert APP.here(data, tmp_path / "cut", "train.epochs=null", f"train.steps={stop}") == 0
    assert APP.here(data, tmp_path / "cut") == 0
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert told(tmp_path / "cut") == told(tmp_path / "whole")
    assert APP.here(data, tmp_path / "cut") == 0, "a finished run can be started again"


def test_the_measured_loss_falls(data: Path, tmp_path: Path) -> None:
    more = ["model.filters=4", "train.epochs=8", "step.lr=3e-3", "model.dropout=0", "checkpoint.every_steps=null"]
    assert APP.here(data, tmp_path / "run", *more) == 0
    found = list(told(tmp_path / "run").values())
    assert sum(found[-3:]) < 0.7 * sum(found[:3])


def ended(process: subprocess.Popen, timeout: float = 120) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"the run ended first:\n{process.communicate()[0]}"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.0005)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_saves_and_asks_to_be_requeued(data: Path, tmp_path: Path, name: str) -> None:
    run, more = tmp_path / "run", ["train.epochs=300", "checkpoint.every_steps=1000"]
    process = start(command(data, run, *more))
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(told(run)) >= 2, process)
    process.send_signal(signal.Signals[name])
    code, output = ended(process)
    assert code == 85, output
    assert f"stopped by {name}" in output
    saved = [p.name for p in (run / "checkpoints").iterdir()]
    assert saved == [f"step-{max(told(run)):08d}"], "nothing that was done is lost"
    assert not (run / "model.safetensors").exists()


@pytest.mark.slow
def test_killed_at_any_instant_also_while_saving_it_goes_on(data: Path, tmp_path: Path) -> None:
    more = ["train.epochs=8", "model.filters=4"]
    assert APP.here(data, tmp_path / "whole", *more) == 0
    run, checkpoints, lost = tmp_path / "run", tmp_path / "run" / "checkpoints", []
    for attempt in range(12):
        if attempt >= 4 and any(lost):
            break
        process = start(command(data, run, *more))
        known = set(checkpoints.glob("step-*"))
        if attempt % 2:  # in the middle of a save
            wait_for(
                lambda known=known: set(checkpoints.glob("step-*")) != known and any(checkpoints.glob(".step-*.partial")), process
            )
        else:
            wait_for(lambda known=known: set(checkpoints.glob("step-*")) != known, process)
            time.sleep(0.02 * attempt)
        process.kill()
        ended(process)
        lost.append(any(checkpoints.glob(".step-*.partial")))
    assert any(lost), "no kill hit a save"
    code, output = ended(start(command(data, run, *more)))
    assert code == 0, output
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert told(run) == told(tmp_path / "whole")


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python: install the extra 'mpi'")
@pytest.mark.parametrize("axes", [["mesh.replicate=4"], ["mesh.depth=2"], ["mesh.depth=2", "mesh.height=2"]], ids=" ".join)
def test_four_ranks_give_the_loss_curve_of_one(data: Path, tmp_path: Path, axes: list[str]) -> None:
    """Copies, cut ones too: each rank then reads its part of a turned universe."""
    more = ["step.precision=fp64", "model.dropout=0", "checkpoint.every_steps=null"]
    assert APP.here(data, tmp_path / "one", *more) == 0
    four = [str(MPIEXEC), "-n", "4", *command(data, tmp_path / "four", *more, *axes)]
    code, output = ended(start(four), 240)
    assert code == 0, output
    for kind, name in (("train", "loss"), ("train", "mae"), ("evaluate", "mae")):
        one, found = (told(tmp_path / folder, kind, name) for folder in ("one", "four"))
        assert found == pytest.approx(one, rel=1e-10), (kind, name)
    assert output.count("finished at step") == 1, "only one rank speaks"
    # A run of four is taken up by one, in the middle of an epoch.
    shutil.rmtree(tmp_path / "four" / "checkpoints" / "step-00000006")
    assert APP.here(data, tmp_path / "four", *more, "train.epochs=3") == 0
    assert APP.here(data, tmp_path / "one", *more, "train.epochs=3") == 0
    assert told(tmp_path / "four") == pytest.approx(told(tmp_path / "one"), rel=1e-9)


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python: install the extra 'mpi'")
def test_two_ranks_are_stopped_by_a_signal_to_one(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start([str(MPIEXEC), "-n", "2", *command(data, run, "train.epochs=300", "checkpoint.every_steps=1000")])
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(told(run)) >= 2, process, 240)
    ranks = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _is_rank(p, run, process.pid)]
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGTERM)
    code, output = ended(process)
    assert code == 85, output
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{max(told(run)):08d}"]


def _is_rank(process: Path, run: Path, launcher: int) -> bool:
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(run).encode() in b" ".join(arguments) and b"python" in arguments[0] and int(process.name) != launcher


@pytest.fixture(scope="module")
def curve(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = tmp_path_factory.mktemp("curve") / "run"
    assert APP.here(data, run, "data.reader=direct", "step.precision=fp64") == 0
    return told(run) | {-1: told(run, "evaluate", "mae")[6]}


@pytest.mark.parametrize(
    "more",
    [
        ["data.reader=auto"], ["data.reader=buffered"], ["data.reader=memory"], ["data.reader=hdf5"], ["data.reader=dali"],
        ["data.processes=true"], ["data.workers=5", "data.prefetch=0.0001"], ["data.stage=$OWN_DISK/data"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_however_samples_are_read_the_loss_is_the_same(
    data: Path, tmp_path: Path, curve: dict[int, float], more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "data.reader=dali" in more:
        pytest.importorskip("nvidia.dali")
    monkeypatch.setenv("OWN_DISK", str(tmp_path / "own"))
    assert APP.here(data, tmp_path / "run", "step.precision=fp64", *more) == 0
    assert told(tmp_path / "run") | {-1: told(tmp_path / "run", "evaluate", "mae")[6]} == curve
    if "data.stage=$OWN_DISK/data" in more:
        assert len(list((tmp_path / "own/data/train").glob("*.h5"))) == 6


def test_ready_order_and_skipped_samples(data: Path, tmp_path: Path) -> None:
    folder = copy(data, tmp_path / "data")
    _nan(folder)
    assert APP.here(folder, tmp_path / "run", "data.order=ready", "data.on_bad_sample=skip") == 0
    notes = [e["text"] for e in log.read_metrics(tmp_path / "run" / "metrics.jsonl") if e["kind"] == "note"]
    assert len(told(tmp_path / "run")) == 6
    assert any("is skipped" in text and "row 1 of 'target' holds NaN" in text for text in notes), notes
    assert any(text.endswith("samples skipped so far") for text in notes)


def copy(data: Path, to: Path) -> Path:
    shutil.copytree(data, to)
    for split in ("train", "validation"):
        (to / split / "index.json").unlink()
    return to


def _nan(folder: Path) -> None:
    for path in (folder / "train").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["target"][1, 2] = np.nan


BAD_DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda d: shutil.rmtree(d), "/train: no such folder; make data with: python -m data_prep.cosmoflow simulate"),
    "empty": (lambda d: [p.unlink() for p in (d / "train").iterdir()], "/train: holds no *.h5 file; make data with"),
    "truncated": (lambda d: _cut(d / "train/universe_00003.h5"), "universe_00003.h5: not a whole HDF5 file"),
    "NaN": (_nan, "row 1 of 'target' holds NaN or infinity"),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_files_are_named(data: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, text = BAD_DATA[kind]
    folder = copy(data, tmp_path / "data")
    spoil(folder)
    assert APP.here(folder, tmp_path / "run") == 1
    shown = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("INFO")]
    assert text in shown[0] and len(shown) == 1, shown


@pytest.mark.parametrize(
    "more, code, text",
    [
        (["model.size=64"], 1, "dataset 'counts' is (4, 32, 32, 32, 4), expected (rows, 64, 64, 64, 4); make data with"),
        (["model.channels=2"], 1, "expected (rows, 32, 32, 32, 2)"),
        (["data.batch=25"], 1, "train: 24 samples are fewer than one batch of 25"),
        (["step.accumulate=3"], 1, "a batch of 8 samples does not divide by 1 copies x 3 micro-batches"),
        (["mesh.depth=2"], 2, "mesh depth 2 needs a multiple of 2 processes, but 1 was started"),
        (["mesh.replicate=4"], 2, "mesh replicate 4 needs 4 processes, but 1 was started"),
        (["step.lr=1e25", "step.optimizer=sgd"], 1, "is not finite on rank 0 (train/universe_"),
        (["step.lrr=1"], 2, "step.lrr: no such key; did you mean step.lr?"),
        (["step.weight_decay=0.1", "model.dropout=0.5"], 2, "the MLPerf HPC rules allow one of them"),
        (["report.sinks=[tensorbord]"], 2, "'tensorboard'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_told_in_one_line(
    data: Path, tmp_path: Path, more: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert APP.here(data, tmp_path / "run", *more) == code
    shown = capsys.readouterr().err
    assert text in shown and "Traceback" not in shown, shown


def test_other_model_settings_do_not_overwrite_a_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert APP.here(data, tmp_path / "run", "train.epochs=1") == 0
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert APP.here(data, tmp_path / "run", "model.filters=3") == 1
    assert "model.filters: 2 then, 3 now" in capsys.readouterr().err
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == kept
    assert config.load(Config, tmp_path / "run" / "settings.yaml").model.filters == 2


def test_help_may_be_read_in_part() -> None:
    line = f"{sys.executable} -m apps.cosmoflow --help | head -n 1"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: ") and not done.stderr


def test_a_refused_setting_costs_less_than_a_second_and_no_torch() -> None:
    code = "import sys; sys.argv = ['x', 'step.lr=fast']\nfrom apps.cosmoflow import __main__ as m\n"
    code += (
        "try: m.config.run(m.Config, m.main)\nexcept SystemExit as e: print(e.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    best = 9.0
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
    assert done.stdout.split() == ["2", "False", "False"], done
    assert "command line: step.lr is 'fast', expected a number > 0" in done.stderr
    assert best < 1.0


FAST = [
    ("", "step.precision=bf16-params", "step.moments=bf16", "train.evaluate=background", "train.keep_validation=true"),
    ("", "step.optimizer=lamb", "step.precision=auto", "step.capture=auto", "train.collect_every=2", "train.profile=[2,3]"),
    ("2", "step.shard=optimizer", "train.evaluate=background"),
    ("4", "step.shard=optimizer", "step.shard_within=2", "step.optimizer=lamb"),
    ("2", "step.shard=weights", "step.average=0.9"),
    ("3", "mesh.evaluate=1", "step.shard=optimizer"),
]


@pytest.mark.mpi
@pytest.mark.parametrize("case", FAST, ids=lambda case: " ".join(case))
def test_every_fast_setting_trains_as_the_plain_one(data: Path, tmp_path: Path, case: tuple[str, ...]) -> None:
    ranks, *settings = case
    plain = [word for word in settings if word.startswith(("step.optimizer", "step.average"))]

    def train(run: Path, *more: str) -> None:
        prefix = [str(MPIEXEC), "-n", ranks] if ranks else []
        process = start([*prefix, *command(data, run, *settings, *more)])
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text

    train(tmp_path / "whole")
    assert APP.here(data, tmp_path / "plain", *plain) == 0
    expected, found = told(tmp_path / "plain"), told(tmp_path / "whole")
    narrow = "step.precision" in " ".join(case)  # auto is bf16 on some processors
    assert list(found) == list(expected) and found == pytest.approx(expected, rel=8e-2 if narrow else 1e-3)
    scores = told(tmp_path / "whole", "evaluate", "mae")
    assert list(scores) == [3, 6] and scores == pytest.approx(told(tmp_path / "plain", "evaluate", "mae"), rel=8e-2)
    names = load_file(tmp_path / "plain" / "model.safetensors").keys()
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == names, "no switch changes the names of the weights"
    if "train.profile=[2,3]" in settings:
        assert (tmp_path / "whole/profile/rank-0000.json.gz").stat().st_size > 1000


def test_staging_is_refused_where_some_only_evaluate(data: Path, tmp_path: Path) -> None:
    process = start(command(data, tmp_path / "run", "mesh.evaluate=1", "data.stage=/tmp/x"))
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "processes that only evaluate cannot take part in staging" in " ".join(text.split())
