"""The `hpcai` command and its doctor: help costs nothing, packages are counted right, a broken library is a line and no crash."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcai import cli
from hpcai.cli import doctor

# ---------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_the_commands_and_imports_nothing_heavy(words: list[str]) -> None:
    commands = ("report", "doctor", "bench", "data", "ablate", "verify_resume")
    heavy = "torch", "numpy", "matplotlib", "rich", "yaml", *(f"hpcai.cli.{name}" for name in commands)
    code = f"import sys, hpcai.cli; hpcai.cli.main({words}); print([name for name in {heavy} if name in sys.modules])"
    began = time.perf_counter()
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert time.perf_counter() - began < 3               # about 0.05 s; the list below is what keeps it so
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*cli.COMMANDS]
    assert lines[-1] == "[]"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == f"hpcai: there is no command 'train'; expected one of {', '.join(cli.COMMANDS)}\n"


@pytest.mark.parametrize("words", [["doctor"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys, hpcai.cli; sys.exit(hpcai.cli.main({words}))"
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, "Broken" in ended.stderr) == (0, False), ended.stderr


def test_a_refusal_is_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor.packages, "__defaults__", ("no-such-suite",))
    assert cli.main(["doctor", "--packages"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("hpcai doctor: no-such-suite is not installed in ")


# ------------------------------------------------------------------------------------------------------- packages


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Distributions with every kind of requirement: a cycle, extras, markers, an odd spelling and one that is not there."""
    requirements = {
        "fake-suite": ["alpha>=1", "Beta_Two[fast]", 'gamma; extra == "big"', 'delta; python_version < "3"', "zeta",
                       'fake-suite[big]; extra == "dev"'],
        "alpha": ["beta.two"],
        "beta-two": ["alpha", 'epsilon; extra == "fast"', 'eta; extra == "slow"',
                     'theta>=2; python_version >= "3" and extra == "fast"'],
        "gamma": [], "delta": [], "epsilon": ["iota"], "eta": [], "theta": [], "iota": [],
    }
    for name, lines in requirements.items():
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("big", "dev", "fast", "slow"))
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{extras}"
        (folder / "METADATA").write_text(head + "".join(f"Requires-Dist: {line}\n" for line in lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return "fake-suite"


def test_a_plain_install_is_counted_without_extras_nobody_asks_for(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"fake-suite", "alpha", "beta-two", "epsilon", "theta", "iota", "zeta"}
    assert doctor.closure(suite) == (names, {"zeta"})
    monkeypatch.setattr(doctor.packages, "__defaults__", (suite,))
    assert cli.main(["doctor", "--packages"]) == 0
    assert capsys.readouterr().out == ("a plain install of fake-suite resolves to 7 packages, itself included; "
                                       "not installed, so what they need is not counted: zeta\n")


# --------------------------------------------------------------------------------------------------------- probes


def test_a_library_that_kills_its_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PROBES, "MPI", "import os, sys; sys.stderr.write('libmpi.so: cannot open\\n'); os.abort()")
    assert doctor.probe("MPI") == {"MPI": f"not usable: libmpi.so: cannot open; {doctor.HINTS['MPI']}"}
    monkeypatch.setitem(doctor.PROBES, "HDF5", "import h5py_that_is_not_there")
    assert doctor.probe("HDF5")["HDF5"].startswith("not usable: ModuleNotFoundError: No module named 'h5py_that_is_not_there'; ")


def test_asking_for_the_mpi_library_does_not_start_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setitem(doctor.PROBES, "MPI", doctor.PROBES["MPI"] + "\nfound['started'] = MPI.Is_initialized()")
    found = doctor.probe("MPI")
    assert found.get("started") is False or "not usable" in found["MPI"]       # a machine without any MPI says so


def test_launchers_are_told_apart_by_what_they_leave() -> None:
    assert doctor.launcher({"HOME": "/root"}) == {}
    assert doctor.launcher({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "PMIX_RANK": "3"}) == {
        "Slurm": "SLURM_PROCID=3  SLURM_NTASKS=8", "PMIx": "PMIX_RANK=3"}


def test_the_doctor_shows_this_installation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda name: {name: ["first", "second"]})
    monkeypatch.setenv("RANK", "5")
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["Python", sys.version.split()[0]]
    for expected in (["torch", "first"], ["second"], ["MPI", "first"], ["HDF5", "first"]):
        assert expected in [line.split() for line in lines]
    assert any(line.startswith("torchrun ") and "RANK=5" in line for line in lines)
    assert any(line.startswith("packages ") for line in lines)
