"""Definitions of images are valid, equal except for torch, and name existing files (``make containers`` builds and runs one); the
recipe of EasyBuild has the versions of the project, and EasyBuild accepts it, where it is installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hpcai import __version__
from tests.containers.definition import DefinitionError, read_stages

ROOT = Path(__file__).resolve().parents[2]
(RECIPE,) = (ROOT / "containers/easybuild").glob("*.eb")
EB = shutil.which("eb")
BACKENDS = {"cpu": "cpu", "cuda": "cu130", "rocm": "rocm7.2"}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_definition_is_complete(name: str) -> None:
    build, final = read_stages(ROOT / f"containers/{name}.def")
    for line in build.sections["files"].split("\n")[:-2]:
        source, target = line.split()
        assert (ROOT / source).exists() and target == "/opt/hpcai/src/", line
    assert final.source == "build" and {"environment", "runscript", "test", "help"} <= set(final.sections)
    assert all(re.fullmatch(r"debian:bookworm-\d{8}-slim", stage.header["from"]) for stage in (build, final)), "a dated image"
    assert "libibverbs1 ibverbs-providers librdmacm1" in final.sections["post"], "UCX and NCCL use TCP without them"
    assert "pip install" not in "".join(build.sections.values()), "packages come by their hashes, from a lock"
    assert f"make -C /opt/hpcai/src container VENV=/opt/hpcai/venv BACKEND={BACKENDS[name]}\n" in build.sections["post"]


def test_definitions_differ_in_torch_alone() -> None:
    cpu, *others = ((ROOT / f"containers/{name}.def").read_text().splitlines() for name in BACKENDS)
    for other in others:
        differ = [line for line, own in zip(other, cpu, strict=True) if line != own]
        assert len(differ) == 3 and differ[0].startswith("# hpcai with torch for") and "BACKEND=" in differ[1], differ


def test_a_cache_folder_that_another_user_made_first_is_not_used(tmp_path: Path) -> None:
    """It holds code that will run, under a name that others can predict."""
    text = read_stages(ROOT / "containers/cpu.def")[-1].sections["environment"].partition("export HF_HUB_OFFLINE")[0]

    def cache(**environ: str) -> Path:
        script, path = text + "\necho $HPCAI_CACHE", {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
        return Path(subprocess.run(["sh", "-c", script], env=path | environ, capture_output=True, text=True).stdout.strip())

    name = tmp_path / f"hpcai-{os.getuid()}"
    assert cache() == cache() == name and name.stat().st_mode & 0o777 == 0o700
    assert cache(HPCAI_CACHE="/x") == Path("/x")
    name.chmod(0o777)
    other = cache()
    assert other != name and other.parent == tmp_path and other.stat().st_mode & 0o777 == 0o700
    name.rmdir()
    name.symlink_to(other)
    assert cache() not in (name, other)


def test_the_folder_of_the_nccl_plugin_is_searched_first_and_an_empty_one_is_reported(tmp_path: Path) -> None:
    text = read_stages(ROOT / "containers/cuda.def")[-1].sections["environment"].partition("HF_HUB_OFFLINE=1\n")[2]
    env = {"PATH": os.environ["PATH"], "HPCAI_NCCL_PLUGIN": str(tmp_path), "LD_LIBRARY_PATH": "/a"}
    for file, has_plugin in (("libnccl.so", False), ("libnccl-net.so", True), ("librccl-net-ofi.so", True)):
        (tmp_path / file).touch()
        process = subprocess.run(["sh", "-c", text + "\necho $LD_LIBRARY_PATH"], env=env, capture_output=True, text=True)
        assert process.stdout == f"{tmp_path}:/a\n"
        assert not process.stderr if has_plugin else f"={tmp_path}: found no lib*ccl-net*.so there" in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2])
def test_the_all_reduce_of_an_image_is_checked(factor: int, tmp_path: Path) -> None:
    """Two processes by gloo, with a stub of NCCL's log and, for 2, of wrong sums."""
    assert "all_reduce.py" in (test := read_stages(ROOT / "containers/cuda.def")[-1].sections["test"]) and "set -e" in test
    (tmp_path / "program.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT / 'containers')!r})\nimport all_reduce, torch.distributed as dist\n"
        f"reduce = dist.all_reduce\ndef scaled(x):\n    reduce(x)\n    x *= {factor}\n"
        "    open(os.environ['NCCL_DEBUG_FILE'], 'w').write('n1:7:7 [0] NCCL INFO Using network AWS Libfabric\\n' * 2)\n"
        "dist.all_reduce = scaled\nall_reduce.main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "program.py")]
    process = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    good = "Using network AWS Libfabric\ngloo: the all-reduce over 2 ranks is correct\n"
    assert (process.returncode, process.stdout) == ((0, good) if factor == 1 else (1, "")), process.stderr
    assert factor == 1 or "1048576 of 1048576 sums of ones over 2 ranks by gloo are not 2" in process.stderr


def test_the_recipe_has_the_version_and_satisfies_pyproject() -> None:
    recipe: dict[str, Any] = {"SYSTEM": {}, "ARCH": "x86_64"}
    exec(compile(RECIPE.read_text(), RECIPE.name, "exec"), recipe)
    provided = {name.lower(): version for name, version, *_ in (*recipe["dependencies"], *recipe["exts_list"])}
    name = f"hpcai-suite-{__version__}-{'-'.join(recipe['toolchain'].values())}-CUDA-{provided['cuda']}.eb"
    assert provided["hpcai-suite"] == recipe["version"] == __version__ and RECIPE.name == name in RECIPE.read_text()
    assert name in (ROOT / "docs/install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bundles = {"numpy": "scipy-bundle", "rich": "python-bundle-pypi"}  # whose versions say nothing of these packages'
    for requirement in map(Requirement, [*project["dependencies"], f"python{project['requires-python']}"]):
        package = requirement.name.lower()
        assert bundles[package] in provided if package in bundles else provided[package] in requirement.specifier, requirement
    assert f"\nTORCH  ?= {provided['torch']}\n" in (ROOT / "Makefile").read_text(), "the version that the tests use"


@pytest.mark.skipif(not EB, reason="EasyBuild is not installed: pip install easybuild pycodestyle, and a module command (Lmod)")
def test_easybuild_resolves_the_recipe_and_accepts_its_style(tmp_path: Path) -> None:
    env = os.environ | {"PATH": f"{Path(EB or '').parent}:{os.environ['PATH']}"}  # the Python that has EasyBuild
    env["EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES"] = "1"
    for option, message in {"--dry-run": "(module: hpcai-suite/", "--check-contrib": "contribution checks PASSed!"}.items():
        command = ["eb", "--robot", f"--prefix={tmp_path}", option, str(RECIPE)]
        process = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
        assert process.returncode == 0 and message in process.stdout, process.stdout + process.stderr


GOOD = "Bootstrap: docker\nFrom: a\nStage: one\n%post\n true\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("%post", "%psot"), "unknown section %psot"), (GOOD.replace("Stage: one\n", ""), "a stage has no stage"),
        (GOOD.replace("From: a", "From: {{ BASE }}"), "BASE }} is not among %arguments"), (GOOD + " if\n", "%post: "),
        (GOOD + GOOD.replace("one", "two") + "%files from three\n x /\n", r"expected 'from' and one of \['one'\]"),
        (GOOD + "%post\n", "%post occurs twice"), ("text\n" + GOOD, "'text' is neither a header"),
        (GOOD.replace("From", "Form"), "unknown header Form"),
    ],
)  # fmt: skip
def test_errors_that_apptainer_ignores_are_reported(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.def").write_text(text)
    with pytest.raises(DefinitionError, match=message):
        read_stages(tmp_path / "some.def")
