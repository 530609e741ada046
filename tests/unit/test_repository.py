"""The repository as a clone and as a wheel: what tests compare with is in it, small and explained."""

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.stored import DATA, check_thinned, thinned

ROOT = DATA.parents[1]


def test_what_tests_compare_with_is_small_and_each_folder_explains_itself() -> None:
    sizes = {path: path.stat().st_size for path in DATA.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 30e6 and max(sizes.values()) < 3e6, sorted(sizes.items(), key=lambda pair: -pair[1])[:5]
    assert all((folder / "README.md").is_file() for folder in (DATA, *DATA.iterdir()) if folder.is_dir())


def test_git_takes_what_is_binary_as_such() -> None:
    binary = {line.split()[0].removeprefix("*") for line in (ROOT / ".gitattributes").read_text().splitlines()}
    assert {path.suffix for path in DATA.rglob("*") if path.is_file()} - {".json", ".md"} <= binary


def test_the_wheel_holds_the_library_alone(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from setuptools.build_meta import build_wheel

    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("hpcai", "apps", "data_prep"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    wheel = tmp_path / build_wheel(str(tmp_path))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hpcai", "hpcai_suite"}
    assert wheel.stat().st_size < 1e6


def test_what_is_stored_thinned_finds_one_value_far_off_and_a_region_slightly_off() -> None:
    whole = np.random.default_rng(0).normal(size=(3, 40, 50)).astype(np.float32)
    stored = {f"out.{part}": array for part, array in thinned(whole).items()}
    check_thinned(whole, stored, "out", 1e-5)
    for where, off in ((5999, 1e-3), (slice(1000, 1300), 1e-5), (610, 2e-5)):
        other = whole.copy()
        other.reshape(-1)[where] += off
        with pytest.raises(AssertionError):
            check_thinned(other, stored, "out", 1e-5)
    with pytest.raises(AssertionError):
        check_thinned(whole.reshape(3, 50, 40), stored, "out", 1e-5)
