"""Simulated universes: resumption, processes and ranks, parameters, and checks of their physics and files."""

import errno
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from data_prep import command, cosmoflow, spectrum_check, store, universe
from hpcai import host_limits
from hpcai.durable import lock_directory
from hpcai.errors import CheckpointError
from tests.data_prep.prep_contract import PrepContract, check_fails, check_resumes_if_killed, columns, content, read_json, runner

SMALL = ["--size", "8", "--cut", "2", "--universes", "8", "--no-check"]
run = runner(cosmoflow)


def test_files_have_the_format_that_the_loader_expects(dataset):
    files = [name for name in content(dataset) if name.endswith(".h5")]
    index = {split: read_json(dataset / split / "index.json") for split in ("train", "validation")}
    assert len(files) == 8 and [len(index[split]["files"]) for split in ("train", "validation")] == [7, 1]
    assert index["train"]["shape"] == [8, 8, 8, 4] and index["train"]["parameters"] == ["Omega_m", "sigma_8", "n_s", "H_0"]
    for split, name in (name.split("/") for name in files):
        with h5py.File(dataset / split / name) as file:
            counts, target = file["counts"], file["target"]
            assert counts.shape == (8, 8, 8, 8, 4) and counts.dtype == np.int16 and counts.chunks is None
            assert target.shape == (8, 4) and target.dtype == np.float32 and (target[...] == target[0]).all()
            physical = file.attrs["low"] + (target[0] + 1) / 2 * (file.attrs["high"] - file.attrs["low"])
            assert file.attrs["physical"] == pytest.approx(physical, rel=1e-6)
            assert list(file.attrs["redshifts"]) == [0, 0.5, 1.5, 3] and file.attrs["voxel_mpc_h"] == 8
            assert name == f"universe_{file.attrs['universe']:06d}.h5" and file.attrs["seed"] == 1
            assert counts[...].mean(axis=(0, 1, 2, 3)) == pytest.approx(np.full(4, 16.0), abs=6 * 0.5 / 64)
            assert (np.diff(counts[...].var(axis=(0, 1, 2, 3))) < 0).all()        # structure grows towards redshift 0
    assert not list(dataset.rglob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_command(tmp_path, number):
    """However it ended, no worker writes on."""
    options = ["simulate", str(tmp_path / "out"), "--size", "8", "--cut", "2", "--universes", "4000", "--workers", "2"]
    command = [sys.executable, "-m", "data_prep.cosmoflow", *options]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the command sets its own handler
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=Path(store.__file__).parents[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    records = lambda: [*tmp_path.glob("out/train/.records/*")]  # noqa: E731
    while not records() and process.poll() is None:
        time.sleep(0.05)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    with pytest.raises(CheckpointError, match=f"another run uses this directory .process {process.pid} on .*choose another OUT"):
        lock_directory(tmp_path / "out", "choose another OUT")
    process.send_signal(number)
    assert process.wait(60) == (143 if number == signal.SIGTERM else -9), (tmp_path / "output").read_text()
    if number == signal.SIGTERM:
        lines = (tmp_path / "output").read_text().splitlines()
        assert lines[1:] == ["python -m data_prep.cosmoflow simulate: interrupted by SIGTERM; the same command resumes after the "
                             "finished files"] and not [*tmp_path.rglob("*.partial")]  # fmt: skip
    until = time.monotonic() + 20
    while any(Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes() for child in children):
        assert time.monotonic() < until, "a worker goes on after the end of its command"
        time.sleep(0.05)


def test_blocks_are_in_row_major_order_and_can_be_assembled(dataset):
    path = dataset / "train" / "universe_000001.h5"
    with h5py.File(path) as file:
        settings = json.loads(file.attrs["recipe"])
        recipe = cosmoflow.Recipe(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})
        counts, full = file["counts"][...], spectrum_check.assemble(file)
    expected, _ = cosmoflow.simulate_counts(recipe, 1)
    assert (full == expected).all()
    assert (counts[5] == expected[8:, :8, 8:]).all()


def test_statistics_are_those_of_the_data(dataset):
    statistics = read_json(dataset / "statistics.json")["splits"]["train"]
    train = columns(dataset / "train")
    counts, target = train["counts"].reshape(-1, 4).astype(float), train["target"].astype(float)
    assert statistics["rows"] == len(target) == 56
    assert statistics["counts"]["mean"] == pytest.approx(counts.mean(0))
    assert statistics["counts"]["maximum"] == counts.max(0).tolist()
    assert statistics["log1p"]["mean"] == pytest.approx(np.log1p(counts).mean(0))
    assert np.array(statistics["log1p"]["covariance"]) == pytest.approx(np.cov(np.log1p(counts).T, bias=True))
    assert [*statistics["target"]["deviation"]] == pytest.approx(target.std(0))


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


def test_a_killed_run_resumes(dataset, tmp_path, monkeypatch):
    check_resumes_if_killed(run, SMALL, dataset, tmp_path, monkeypatch)


def test_a_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name))
    with store.create_file(tmp_path / "a.h5", 1, {"x": store.Field("int8")}, {}):
        assert not flushed
    assert flushed == [".a.h5.partial", tmp_path.name]


def test_new_processes_write_the_same_bytes(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "get_context", multiprocessing.get_context)       # as in use, not forked
    assert run("simulate", tmp_path, *SMALL, workers="2") == 0 and content(tmp_path) == content(dataset)


def test_ranks_of_a_job_step_share_the_work(dataset, tmp_path, monkeypatch):
    for name, value in {"ID": "0", "NUM_TASKS": "3", "NODELIST": "n1"}.items():
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    for rank, files in (("2", 2), ("1", 5), ("0", 8)):       # rank 0 waits for the others, so it comes last here
        monkeypatch.setenv("SLURM_PROCID", rank)
        assert run("simulate", tmp_path, *SMALL) == 0
        assert len(list(tmp_path.glob("*/*.h5"))) == files
        assert (tmp_path / "train" / "index.json").exists() == (rank == "0")
    assert content(tmp_path) == content(dataset)


def test_rank_0_does_not_wait_for_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(store, "TIMEOUT", 0.5)
    assert run("simulate", tmp_path, *SMALL) == 2
    assert "no file came from another rank" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "claim_folder", Mock(side_effect=OSError(errno.EROFS, "", "out/x")))
    assert run("simulate", tmp_path, *SMALL) == 2
    expected = "error: out/x: Read-only file system; name a folder that can be written; finished files are kept\n"
    assert capsys.readouterr().err == expected


def test_ranks_share_the_cores_of_their_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(host_limits, "cgroup_folders", lambda *args: [])
    assert store.count_cores() == 8
    for name, value in (("RANK", "1"), ("SIZE", "6"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "3")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert store.count_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(5)), raising=False)      # bound to cores of its own
    assert store.count_cores() == 5
    monkeypatch.setattr(store, "count_cpus", lambda: 3)         # a quota of all ranks
    assert store.count_cores() == 1


def test_a_batch_script_is_not_a_rank(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert store.rank_and_size() == (0, 1)


def test_too_many_counts_are_refused(tmp_path, capsys):
    options = ["--mean-count", "1000", "--particles-per-cell", "1", "--voxel", "0.5", "--size", "32"]
    assert run("simulate", tmp_path, *SMALL, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: universe ") and error.count("\n") == 1 and "int16" in error and "--mean-count" in error


@pytest.mark.parametrize(
    "args", ["simulate x --univrses 3", "simulate x --size b", "simulate x --size 0", "simulate x --mean-count 1001",
             "simulate x --ranges O=1:2", "simulate", "x"]
)
def test_a_mistyped_option_ends_with_2(args, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cosmoflow.main(args.split())
    assert exit_info.value.code == 2
    assert "error: " in capsys.readouterr().err


def new_recipe(**changes):
    settings = {"seed": 1, "size": 32, "cut": 1, "voxel": 8.0, "particles": 1, "mean_count": 16.0, "omega_b": 0.045}
    low, high = (tuple(cosmoflow.RANGES[name][i] for name in cosmoflow.PARAMETERS) for i in (0, 1))
    rest = {"redshifts": (0.0, 0.5, 1.5, 3.0), "validation": 0.125, "test": 0.1, "low": low, "high": high}
    return cosmoflow.Recipe(**{**settings, **rest, **changes})


@pytest.mark.parametrize("seed", [1, 2, 77])
def test_parameters_cover_their_ranges_evenly_and_splits_have_their_fractions(seed):
    recipe = new_recipe(seed=seed)
    physical = np.array([recipe.physical(i) for i in range(200)])
    low, high = np.array(recipe.low), np.array(recipe.high)
    assert (physical >= low).all() and (physical <= high).all()
    unit = (physical - low) / (high - low)
    for axis in range(4):
        assert np.histogram(unit[:, axis], 10, (0, 1))[0] == pytest.approx(20, abs=6)
    assert np.abs(np.corrcoef(unit.T) - np.eye(4)).max() < 0.1
    splits = [recipe.split(i) for i in range(200)]
    assert splits.count("validation") == pytest.approx(25, abs=1) and splits.count("test") == pytest.approx(20, abs=1)
    assert (recipe.physical(0) != new_recipe(seed=seed + 1).physical(0)).any()


CHECKED = ["--size", "16", "--cut", "2", "--voxel", "16", "--universes", "12", "--particles-per-cell", "1"]


def test_the_check_passes_and_draws(tmp_path, capsys):
    assert [list(command.subsample(range(7), count)) for count in (3, 4, 9, 0)] == [[0, 3, 6], [0, 2, 4, 6], [*range(7)], []]
    assert run("simulate", tmp_path, *CHECKED) == 0
    text = capsys.readouterr().out
    assert "12 files, 96 samples against index.json: equal" in text and "redshift 3: " in text and "next: python -m apps" in text
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


def larger_amplitude(mesh, spectrum, noise, linear_modes=universe.linear_modes):
    return 1.2 * linear_modes(mesh, spectrum, noise)


def without_h(mesh, spectrum, noise, linear_modes=universe.linear_modes):
    """Evaluate P(k) at k in 1/Mpc, without division by h^3."""
    return linear_modes(mesh, lambda k: spectrum(k * 0.7), noise)


@pytest.mark.parametrize("linear_modes", [larger_amplitude, without_h])
def test_the_check_fails_for_wrong_physics(tmp_path, capsys, monkeypatch, linear_modes):
    monkeypatch.setattr(universe, "linear_modes", linear_modes)
    assert run("simulate", tmp_path, *CHECKED) == 1
    text = capsys.readouterr().out
    assert "wrong: redshift 3: " in text and "next: " not in text


def test_the_check_fails_for_wrong_growth(tmp_path, capsys, monkeypatch):
    growth = universe.growth
    monkeypatch.setattr(universe, "growth", lambda z, omega_m: growth(z, omega_m) * (1.15 if z == 1.5 else 1.0))
    assert run("simulate", tmp_path, *CHECKED, "--no-check") == 0
    monkeypatch.setattr(universe, "growth", growth)
    assert cosmoflow.main(["check", str(tmp_path), "--no-picture"]) == 1
    text = capsys.readouterr().out
    assert "wrong: redshift 1.5: " in text and text.count("wrong: ") == 1


@pytest.mark.parametrize("change, message", [
    (lambda file: file["counts"].write_direct(file["counts"][...] + 9), "matter is not conserved"),
    (lambda file: file["target"].__setitem__(0, 2), "'target'"),
])  # fmt: skip
def test_the_check_finds_damage(dataset, tmp_path, change, message):
    assert check_fails(run, dataset, tmp_path / "damaged", change, message, "universe_000000.h5")


@pytest.mark.parametrize("damage, message", [
    (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "SHA-256"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is truncated"), (lambda path: path.unlink(), "not in the folder"),
])  # fmt: skip
def test_the_check_finds_files_that_are_not_those_of_the_index(dataset, tmp_path, capsys, damage, message):
    damage(shutil.copytree(dataset, tmp_path / "damaged") / "train" / "universe_000002.h5")
    assert run("check", tmp_path / "damaged") == 1
    text = capsys.readouterr().out
    assert message in text and "universe_000002.h5" in text and "mistakes: 1" in text


def test_the_check_of_no_data_fails(tmp_path, capsys):
    assert run("check", tmp_path) == 2
    (tmp_path / "train").mkdir()
    assert run("check", tmp_path) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_the_printed_next_command_can_be_pasted(tmp_path, capsys):
    assert run("simulate", tmp_path / "my data", *SMALL) == 0
    assert shlex.split(capsys.readouterr().out)[-1] == f"data.directory={tmp_path / 'my data'}"


def test_refusals_are_counted_by_their_commonest_reasons_and_listed(tmp_path, capsys):
    unusable = [("a: 1", "row 3 holds 7.5"), ("b", "no energy"), ("c: 9", "row 12 holds 0.1")]
    plan = command.Plan({}, [], {}, "", refused=unusable, filtered=[("x", "too old")], unlisted=2)
    command.report_refused(tmp_path, plan, [["d", "row 1 holds 2"]], 10)
    filtered, refused = capsys.readouterr().out.splitlines()
    assert filtered == "excluded by the options: 1, 1 such as x: too old"
    reasons = "3 such as a: 1: row 3 holds 7.5 | 1 such as b: no energy"
    assert refused == f"refused: 6 of 16 items: {reasons}; listed in {tmp_path / 'skipped.json'}"
    listed = read_json(tmp_path / "skipped.json")
    assert listed == {"unusable": {**dict(unusable), "d": "row 1 holds 2"}, "filtered": {"x": "too old"}}
    command.report_refused(tmp_path, command.Plan({}, [], {}, ""), [], 10)
    assert capsys.readouterr().out == "refused: none of 10 items\n"
