"""The `hpcai` command and its doctor: help imports nothing heavy, and a broken library is reported."""

import errno
import os
import runpy
import subprocess
import sys

import pytest

from hpcai import cli
from hpcai.cli import doctor
from hpcai.cli.apps import list_apps
from tests.reference_data import ROOT

# ---------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_lists_the_commands_and_imports_nothing_heavy(args: list[str]) -> None:
    commands = ("report", "doctor", "bench", "data", "ablate", "verify_resume")
    heavy = "torch", "numpy", "matplotlib", "rich", "yaml", *(f"hpcai.cli.{name}" for name in commands)
    code = f"import sys, hpcai.cli; hpcai.cli.main({args}); print([name for name in {heavy} if name in sys.modules])"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*cli.COMMANDS]
    assert lines[-1] == "[]"


PROGRAMS = [
    *(f"hpcai.cli {name}" for name in (*cli.COMMANDS, "data check", "data stage")),
    *(f"apps.{name}" for name in list_apps()), "apps.llm chat", "apps.llm generate", "apps.llm score", "apps.diffusion score",
    "apps.openfold fold",
    *(f"data_prep.{path.stem}" for path in sorted((ROOT / "data_prep").glob("*.py")) if "__main__" in path.read_text()),
]  # fmt: skip
HELP = """
import contextlib, io, os, pydantic, runpy, sys, yaml
for program in PROGRAMS:
    if program.startswith("data_prep"):
        import h5py
    if os.fork():
        os.wait()
        continue
    module, *words = program.split()
    settings = {"hpcai.schema", "hpcai.data.entry", "hpcai.cli.check.findings"}  # with pydantic
    heavy = {"torch", "scipy", "matplotlib", "mpi4py.MPI"}
    heavy |= settings if module.startswith("data_prep") else {"numpy", "h5py", "rich"}
    sys.argv = [module, *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    print(program, len(text.getvalue()) > 200, sorted(heavy & sys.modules.keys()), flush=True)
    os._exit(0)
"""


def test_the_help_of_a_command_imports_nothing_that_takes_long() -> None:
    """It takes about 0.2 CPU seconds: torch, SciPy and matplotlib take one or two more each, pydantic 0.1."""
    process = subprocess.run([sys.executable, "-c", f"{PROGRAMS = }\n{HELP}"], capture_output=True, text=True, cwd=ROOT)
    assert process.stdout.splitlines() == [f"{program} True []" for program in PROGRAMS], process.stderr


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == f"hpcai: there is no command 'train'; expected one of {', '.join(cli.COMMANDS)}\n"


def test_a_full_or_read_only_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number), "run/plots")

    monkeypatch.setattr(cli, "run_command", fail)
    cases = {errno.ENOSPC: "make room, or name a folder on another disk", errno.EROFS: "name a folder that can be written"}
    for number, advice in cases.items():
        assert cli.main(["report", "run"]) == 2
        assert capsys.readouterr().err == f"hpcai report: run/plots: {os.strerror(number)}; {advice}\n"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        cli.main(["report", "run"])


def test_an_older_python_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match="^hpcai needs Python 3.11 to 3.14, but .* is 3[.0-9]*; use another one$"):
        runpy.run_path(str(ROOT / "hpcai/__init__.py"))


@pytest.mark.parametrize("args", [["doctor"], ["--help"]])
def test_a_closed_pipe_is_no_error(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from hpcai import cli; from hpcai.cli import doctor; doctor.PROBES.clear(); sys.exit(cli.main({args}))"
    process = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (process.returncode, "Broken" in process.stderr) == (0, False), process.stderr


# --------------------------------------------------------------------------------------------------------- probes


def test_a_library_that_kills_its_process_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PROBES, "MPI", "import os, sys; sys.stderr.write('libmpi.so: cannot open\\n'); os.abort()")
    assert doctor.probe("MPI") == {"MPI": f"not usable: libmpi.so: cannot open; {doctor.HINTS['MPI']}"}
    monkeypatch.setitem(doctor.PROBES, "HDF5", "import h5py_that_is_not_there")
    assert doctor.probe("HDF5")["HDF5"].startswith("not usable: ModuleNotFoundError: No module named 'h5py_that_is_not_there'; ")
    monkeypatch.setitem(doctor.PROBES, "torch", "found = {'torch': '2'}")
    assert doctor.probe("torch") == {"torch": "2"}


def test_probing_the_mpi_library_does_not_initialize_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setitem(doctor.PROBES, "MPI", doctor.PROBES["MPI"] + "\nfound['started'] = str(MPI.Is_initialized())")
    result = doctor.probe("MPI")
    assert result.get("started") == "False" or "not usable" in result["MPI"]       # without an MPI library the probe fails


def test_the_doctor_shows_this_installation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda name: {name: f"{name} is here"})
    monkeypatch.setattr(doctor, "count_cpus", lambda: 2)
    monkeypatch.setattr(doctor, "allowed_cpus", lambda: set(range(64)))
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "secret")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert "2 cores to use (a quota of CPU time; 64 without it)" in out
    assert lines[0][:2] == ["Python", sys.version.split()[0]] and ["HDF5", "HDF5", "is", "here"] in lines
    (launcher,) = [columns for columns in lines if columns[0] == "launcher"]
    assert "SLURM_PROCID=3" in launcher and not any("secret" in column for column in launcher)
