"""Small breaks of hpcai/cli and data_prep: each is caught by the test that tests/data/breaks.toml names for it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.reference_data import ROOT

BREAKS = tomllib.loads((ROOT / "tests/data/breaks.toml").read_text())["breaks"]


def run_tests(root: Path, files: set[str], words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", *sorted(files), "-k", words]
    return subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)


@pytest.mark.claim
@pytest.mark.timeout(1800)
def test_every_break_is_caught_and_the_code_as_it_is_passes(tmp_path: Path) -> None:
    packages = {case["file"].partition("/")[0] for case in BREAKS}
    for entry in ROOT.iterdir():
        if entry.name in packages:
            shutil.copytree(entry, tmp_path / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    unbroken = run_tests(tmp_path, {case["test"] for case in BREAKS}, " or ".join(case["words"] for case in BREAKS))
    assert unbroken.returncode == 0, unbroken.stdout
    for number, case in enumerate(BREAKS):
        text = (ROOT / case["file"]).read_text()
        assert text.count(case["old"]) == 1, case
        (tmp_path / case["file"]).write_text(text.replace(case["old"], case["new"]))
        broken = run_tests(tmp_path, {case["test"]}, case["words"])
        (tmp_path / case["file"]).write_text(text)
        print(f"{number}: {case['file']}: {broken.stdout.splitlines()[-1]}")
        assert broken.returncode == pytest.ExitCode.TESTS_FAILED, f"{case} {broken.stdout}"
