"""Definitions of images are valid, equal except for torch, and name existing files. ``make containers`` builds and runs one."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.containers.definition import DefinitionError, read_stages

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {"cpu": "cpu", "cuda": "cu130", "rocm": "rocm7.2"}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_definition_is_complete(name: str) -> None:
    build, final = read_stages(ROOT / f"containers/{name}.def")
    for line in build.sections["files"].split("\n")[:-2]:
        source, target = line.split()
        assert (ROOT / source).exists() and target == "/opt/hpcai/src/", line
    assert final.source == "build" and {"environment", "runscript", "test", "help"} <= set(final.sections)
    assert all(re.fullmatch(r"debian:bookworm-\d{8}-slim", stage.header["from"]) for stage in (build, final)), "a dated image"
    assert "libibverbs1 ibverbs-providers librdmacm1" in final.sections["post"], "NCCL uses TCP without them"
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
