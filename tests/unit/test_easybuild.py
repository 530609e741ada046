"""The recipe of EasyBuild: its name and version, the minimum versions of pyproject.toml; and EasyBuild itself, where installed."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hpcai import __version__
from tests.reference_data import ROOT

(RECIPE,) = (ROOT / "containers/easybuild").glob("*.eb")
BUNDLED = {"numpy": "scipy-bundle", "rich": "python-bundle-pypi"}
"""Packages that are in a bundle of EasyBuild, whose version says nothing of theirs."""


def test_the_recipe_has_the_version_and_satisfies_pyproject() -> None:
    recipe: dict[str, Any] = {"SYSTEM": {}, "ARCH": "x86_64"}
    exec(compile(RECIPE.read_text(), RECIPE.name, "exec"), recipe)
    provided = {name.lower(): version for name, version, *_ in (*recipe["dependencies"], *recipe["exts_list"])}
    name = f"hpcai-suite-{__version__}-{'-'.join(recipe['toolchain'].values())}-CUDA-{provided['cuda']}.eb"
    assert RECIPE.name == name and name in RECIPE.read_text() and name in (ROOT / "docs/install.md").read_text()
    assert provided["hpcai-suite"] == recipe["version"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, [*project["dependencies"], f"python{project['requires-python']}"]):
        package = requirement.name.lower()
        assert BUNDLED[package] in provided if package in BUNDLED else provided[package] in requirement.specifier, requirement
    assert f"\nTORCH  ?= {provided['torch']}\n" in (ROOT / "Makefile").read_text(), "the version that the tests use"


def test_easybuild_resolves_the_recipe_and_accepts_its_style(tmp_path: Path) -> None:
    eb = shutil.which("eb")
    if eb is None:
        pytest.skip("EasyBuild is not installed: pip install easybuild pycodestyle, and a module command (Lmod)")
    env = os.environ | {"PATH": f"{Path(eb).parent}:{os.environ['PATH']}", "EASYBUILD_PREFIX": str(tmp_path)}
    env["EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES"] = "1"
    commands = {"--dry-run": "(module: hpcai-suite/", "--check-contrib": "contribution checks PASSed!"}
    for option, expected in commands.items():
        process = subprocess.run([eb, "--robot", option, str(RECIPE)], env=env, capture_output=True, text=True, cwd=tmp_path)
        assert process.returncode == 0 and expected in process.stdout, process.stdout + process.stderr
