"""The repository as a clone and as a wheel: reference data are included, small and documented."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.offline import run_offline
from tests.reference_data import DATA, ROOT, check_subsample, subsample
from tests.tracked import tracked_files

BUILT = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "docs/new_model.md")
SUITE = ("apps", "data_prep", "slurm")


def test_reference_data_are_small_and_each_folder_has_a_readme() -> None:
    sizes = {path: path.stat().st_size for path in DATA.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 30e6 and max(sizes.values()) < 3e6, sorted(sizes.items(), key=lambda pair: -pair[1])[:5]
    assert all((folder / "README.md").is_file() for folder in (DATA, *DATA.iterdir()) if folder.is_dir())


def test_community_files_agree_with_the_repository() -> None:
    from hpcai import __version__

    pages = {name: (ROOT / name).read_text() for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/install.md")}
    for name, text in pages.items():
        for path in re.findall(r"`((?:tests|apps|hpcai|docs)/[a-z_./-]*)[` ]", text):
            assert (ROOT / path).exists(), f"{name} names {path}"
        for target in re.findall(r"make ([a-z]+)", text):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), f"{name} names make {target}"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.search(r"^lint:.*?\n\n", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert lint is not None
    for entry in (hook["entry"].removeprefix(".venv/bin/") for hook in hooks):
        assert f"$(BIN)/{entry}" in lint[0]
    assert len(hooks) == lint[0].count("$(BIN)/")
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}


def test_make_test_oldest_names_forms_that_exist() -> None:
    forms = re.findall(r"foreach form,([\w ]+),tests/ranks/test_", (ROOT / "Makefile").read_text())[0].split()
    assert len(forms) > 9 and all((ROOT / f"tests/ranks/test_{form}.py").is_file() for form in forms)


def test_lines_stay_within_their_budget() -> None:
    packages: Counter[str] = Counter()
    names = ("hpcai", "apps", "data_prep", "tests")
    for path in sorted(path.relative_to(ROOT) for name in names for path in ROOT.glob(f"{name}/**/*.py")):
        packages["/".join(path.parent.parts[:2])] += len((ROOT / path).read_bytes().splitlines())
    print(*(f"{number:7,} {name}" for name, number in packages.items()), sep="\n")
    tests = sum(number for name, number in packages.items() if name.startswith("tests"))
    totals = {"code": packages.total() - tests, "tests": tests}
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hpcai"]["lines"]
    assert all(totals[name] <= cap for name, cap in budget.items()), f"{totals} lines, expected at most {budget}; make room first"


def test_folders_written_by_commands_do_not_change_the_linter(tmp_path: Path) -> None:
    """Once the linter of `make test` took runs/, written by `make train`, for a package that a test imports."""
    folders = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip("/").isidentifier()]
    assert {"runs", "datasets", "build"} <= set(folders)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    imports = (f"from {name} import it\n" for name in sorted((*folders, "numpy")))
    (tmp_path / "test_it.py").write_text(f"{''.join(imports)}\nfrom hpcai import log\nfrom tests import atoms\n")
    for name in ("", *folders):
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=I"]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, f"with a folder {name}: {process.stdout}"


def test_binary_files_are_declared_in_gitattributes() -> None:
    text = {".json", ".jsonl", ".md", ".toml", ".txt", ".yaml", ".a3m", ".sto", ".hhr", ".cif"}
    binary = {line.split()[0].removeprefix("*") for line in (ROOT / ".gitattributes").read_text().splitlines()}
    assert {path.suffix for path in DATA.rglob("*") if path.is_file()} - text <= binary


# A user's app: its worker process imports it and the apps of the wheel from the ``sys.path`` of the parent.
USER_APP = """
import subprocess, sys
code = "import sys; sys.path[:] = sys.argv[1:]; import apps.mine, apps.cosmoflow as app; print(app.__file__.split('/')[-4])"
sys.stdout.write(subprocess.run([sys.executable, "-P", "-c", code, *sys.path], check=True, capture_output=True, text=True).stdout)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of this checkout, built by setuptools without a network."""
    from setuptools.build_meta import build_wheel

    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "docs").mkdir()
    for name in BUILT:
        shutil.copy(ROOT / name, checkout / name)
    for name in ("hpcai", *SUITE):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "apps/cosmoflow/__pycache__").mkdir()
    (checkout / "apps/cosmoflow/__pycache__/old.pyc").touch()
    (checkout / "build/lib/hpcai/suite/apps/gone").mkdir(parents=True)
    (checkout / "build/lib/hpcai/suite/apps/gone/__init__.py").touch()
    with contextlib.chdir(checkout):
        return checkout / build_wheel(str(checkout))


def test_the_wheel_contains_the_library_and_suite_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hpcai", "hpcai_suite"}
    members = {name.removeprefix("hpcai/suite/") for name in names}
    assert members >= set(tracked_files("hpcai", *SUITE))
    assert not [name for name in members if name.endswith(".pyc") or name.startswith("apps/gone/")]
    assert wheel.stat().st_size < 2e6


def test_a_source_distribution_contains_the_sources_of_a_wheel(tmp_path: Path, wheel: Path) -> None:
    from setuptools.build_meta import build_sdist

    with contextlib.chdir(wheel.parent):
        archive = tmp_path / build_sdist(str(tmp_path))
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert names >= {*BUILT, "apps/cosmoflow/configs/small.yaml", "apps/cosmoflow/data.py", "data_prep/store.py", "slurm/job.sh",
                      "hpcai/cli/report/page.css"}  # fmt: skip
    assert not [name for name in names if name.endswith(".pyc")]


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.slow
def test_a_wheel_prepares_data_and_trains_outside_of_a_checkout_and_without_a_network(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "apps/mine").mkdir(parents=True)  # an app of the user's
    for name in ("apps/__init__.py", "apps/mine/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "apps/mine/__main__.py").write_text(USER_APP)

    def run_hpcai(*args: str) -> str:
        code = "import sys; from hpcai.cli import main; sys.exit(main())"
        process = run_offline(code, *args, cwd=tmp_path, path=unpacked)
        output = (process.stdout + process.stderr).replace(str(Path(sys.executable).parent), "PATH")
        assert process.returncode == 0 and str(ROOT) not in output, output
        return process.stdout

    assert run_hpcai("run", "mine") == "suite\n"
    assert "\n  hpcai prepare of_mine datasets/of_mine\n  hpcai run of_mine small\n" in run_hpcai("new", "of_mine")
    run_hpcai("prepare", "of_mine", "datasets/of_mine", "--signals", "64")
    run_hpcai("run", "of_mine", "small", "train.epochs=1", "report.sinks=[]")
    assert (tmp_path / "runs/of_mine-small/model.safetensors").is_file() and (tmp_path / "of_mine/model.py").is_file()
    assert "step.lr" in run_hpcai("run", "cosmoflow", "--help") and "simulate" in run_hpcai("prepare", "cosmoflow", "--help")
    assert "directory: datasets/cosmoflow-small" in run_hpcai("run", "cosmoflow", "small", "--show")
    args = ["--universes", "6", "--size", "32", "--validation", "0.34", "--test", "0", "--workers", "1", "--no-check"]
    assert "next: hpcai run cosmoflow small data.directory=data" in run_hpcai("prepare", "cosmoflow", "simulate", "data", *args)
    args = ["data.directory=data", "data.batch=2", "data.workers=1", "train.epochs=null", "train.steps=2", "report.sinks=[]"]
    run_hpcai("run", "cosmoflow", "small.yaml", "report.directory=run", "model.filters=2", *args)
    assert (tmp_path / "run/model.safetensors").is_file()


def test_errors_of_hpcai_run_and_prepare_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from hpcai.cli import apps, main

    for args, expected in (
        (["run", "cosmoflwo", "small"], "there is no app 'cosmoflwo'; expected one of align, bert, cosmoflow"),
        (["run", "cosmoflow", "smal.yaml"], "there is no file smal.yaml, and cosmoflow has none of that name; its own are"),
        (["prepare", "store"], "there is no command 'store'; expected one of alignment, bert, coco"),
    ):
        assert main(args) == 2
        stderr = capsys.readouterr().err
        assert expected in stderr and stderr.count("\n") == 1
    assert set(apps.list_apps()) <= set(os.listdir(ROOT / "apps"))


def test_a_subsample_detects_one_outlier_and_a_small_error_of_a_region() -> None:
    full = np.random.default_rng(0).normal(size=(3, 40, 50)).astype(np.float32)
    stored = {f"out.{part}": array for part, array in subsample(full).items()}
    check_subsample(full, stored, "out", 1e-5)
    for index, error in ((5999, 1e-3), (slice(1000, 1300), 1e-5), (610, 2e-5)):
        changed = full.copy()
        changed.reshape(-1)[index] += error
        with pytest.raises(AssertionError):
            check_subsample(changed, stored, "out", 1e-5)
    with pytest.raises(AssertionError):
        check_subsample(full.reshape(3, 50, 40), stored, "out", 1e-5)
