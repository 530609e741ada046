"""The `hpcai` command and its doctor: help imports nothing heavy, and a broken library is reported."""

import os
import subprocess
import sys
import time

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
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys, hpcai.cli; sys.exit(hpcai.cli.main({words}))"
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, "Broken" in ended.stderr) == (0, False), ended.stderr


# --------------------------------------------------------------------------------------------------------- probes


def test_a_library_that_kills_its_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PROBES, "MPI", "import os, sys; sys.stderr.write('libmpi.so: cannot open\\n'); os.abort()")
    assert doctor.probe("MPI") == {"MPI": f"not usable: libmpi.so: cannot open; {doctor.HINTS['MPI']}"}
    monkeypatch.setitem(doctor.PROBES, "HDF5", "import h5py_that_is_not_there")
    assert doctor.probe("HDF5")["HDF5"].startswith("not usable: ModuleNotFoundError: No module named 'h5py_that_is_not_there'; ")
    monkeypatch.setitem(doctor.PROBES, "torch", "found = {'torch': '2'}")
    assert doctor.probe("torch") == {"torch": "2"}


def test_probing_the_mpi_library_does_not_initialize_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setitem(doctor.PROBES, "MPI", doctor.PROBES["MPI"] + "\nfound['started'] = str(MPI.Is_initialized())")
    found = doctor.probe("MPI")
    assert found.get("started") == "False" or "not usable" in found["MPI"]       # a machine without any MPI says so


def test_the_doctor_shows_this_installation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda name: {name: f"{name} is here"})
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "secret")
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["Python", sys.version.split()[0]] and ["HDF5", "HDF5", "is", "here"] in lines
    (launcher,) = [words for words in lines if words[0] == "launcher"]
    assert "SLURM_PROCID=3" in launcher and not any("secret" in word for word in launcher)
