"""An environment, packed and unpacked somewhere else: nothing that it starts comes from the old place."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcai import cli
from hpcai.cli import pack
from hpcai.dist import relay
from hpcai.dist.environment import Place
from tests.apps.universes import make

ROOT = Path(__file__).parents[3]
ALONE = Place("alone", 0, 1, 0, 1)
LOOK = """
import json, re, ssl, sys, sysconfig, ctypes, sqlite3, mine, hpcai, apps, hpcai.cli.script
files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
maps = re.findall(r" (/\\S+)$", open("/proc/self/maps").read(), re.M)
cached = [m.__cached__ for m in (mine, json, hpcai)]
print(json.dumps({"prefix": sys.prefix, "base": sys.base_prefix, "path": sys.path, "files": files, "maps": maps, "cached": cached,
                  "include": sysconfig.get_path("include"), "mine": mine.ANSWER, "sites": hpcai.cli.script.sites()}))
"""

TRAIN = """
import atexit, json, runpy, sys
def look():
    print(json.dumps([m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]))
atexit.register(look)
runpy.run_module("apps.cosmoflow", run_name="__main__", alter_sys=True)
"""


def run(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    about = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environ}
    return subprocess.run(words, capture_output=True, text=True, env=about, cwd=ROOT)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with one package, one program and links that lead somewhere."""
    old = tmp_path_factory.mktemp("old") / "an env"
    assert run(sys.executable, "-m", "venv", "--without-pip", old).returncode == 0
    packages = next(old.glob("lib/python*/site-packages"))
    (packages / "mine").mkdir()
    (packages / "mine/__init__.py").write_text("ANSWER = 42\n")
    (packages / "mine/template.py").write_text("class {{ name }}:\n")
    (packages / "far.txt").symlink_to(ROOT / "LICENSE")
    (packages / "near.txt").symlink_to(packages / "mine/__init__.py")
    (packages / "nowhere").symlink_to("/nowhere/at/all")
    (old / "bin/mine").write_text(f"#!{old}/bin/python\nimport mine, sys; print(mine.ANSWER, sys.prefix, sys.argv[1:])\n")
    (old / "bin/mine").chmod(0o755)
    yield old
    shutil.rmtree(old)


def packed(old: Path, file: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    about = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    return run(old / "bin/python", "-m", "hpcai.cli", "environment", "pack", file, **about)


@pytest.fixture(scope="module")
def archive(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("archive") / "small.tar"
    done = packed(old, file)
    assert done.returncode == 0, done.stderr
    link = next(old.glob("lib/python*/site-packages")) / "nowhere"
    assert done.stderr == f"hpcai environment pack: left out: {link}, a link to /nowhere/at/all\n"
    assert done.stdout.startswith(f"{file}: 0.") and os.listdir(file.parent) == ["small.tar"]
    return file


def test_it_works_at_another_place_and_nothing_comes_from_the_old_one(old: Path, archive: Path, tmp_path: Path) -> None:
    new = tmp_path / "new place"
    relay.unpack_everywhere(archive, str(new), ALONE)
    hidden = old.rename(old.with_name("hidden"))
    try:
        done = run(new / "bin/python", "-c", LOOK, PYTHONSAFEPATH="1", PYTHONNOUSERSITE="1")
        program = run(new / "bin/mine", "a b", PYTHONNOUSERSITE="1")
    finally:
        hidden.rename(old)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    base = os.path.realpath(sys.base_prefix)
    assert (found["prefix"], found["base"], found["mine"]) == (str(new), str(new / "base"), 42) and "generic" in found["sites"]
    assert all(path.startswith(str(new)) for path in [*found["path"], *found["files"], *found["cached"], found["include"]])
    assert base == "/usr" or not any(path.startswith((base, str(old), str(ROOT))) for path in found["maps"])
    assert all(Path(path).is_file() for path in found["cached"])
    assert program.stdout == f"42 {new} ['a b']\n", program.stderr
    packages = next(new.glob("lib/python*/site-packages"))
    assert os.readlink(packages / "near.txt") == "mine/__init__.py" and not os.path.lexists(packages / "nowhere")
    assert (packages / "far.txt").read_bytes() == (ROOT / "LICENSE").read_bytes() and not (packages / "far.txt").is_symlink()
    stdlib = next((new / "base").glob("lib*/python3*"))
    assert not {"test", "idlelib", "site-packages"} & set(os.listdir(stdlib)) and (stdlib / "os.py").exists()


def test_the_same_environment_makes_the_same_archive(old: Path, archive: Path, tmp_path: Path) -> None:
    assert packed(old, tmp_path / "again.tar").returncode == 0
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()


def test_the_manifest_says_what_is_in_it(archive: Path) -> None:
    about = relay.manifest(archive)
    with tarfile.open(archive) as opened:
        members = opened.getmembers()[1:]
    files = [member for member in members if member.isreg()]
    assert (about["files"], about["bytes"]) == (len(files), sum(member.size for member in files))
    assert about["size"] == archive.stat().st_size and about["torch"] is None and about["python"].startswith("3.")
    assert {member.uid for member in members} == {0} and [m.name for m in members] == sorted(m.name for m in members)
    assert not [name for name in (m.name for m in members) if "/__pycache__/" in name and sys.implementation.cache_tag not in name]


def test_what_would_be_missing_is_refused_before_anything_is_written(old: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    packages = next(old.glob("lib/python*/site-packages"))
    about = packages / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "direct_url.json").write_text('{"url": "file:///home/theirs", "dir_info": {"editable": true}}')
    done = packed(old, tmp_path / "x.tar", PYTHONPATH=f"{ROOT}:{tmp_path}/elsewhere")
    shutil.rmtree(about)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2
    assert f"PYTHONPATH names {tmp_path}/elsewhere" in done.stderr
    assert "theirs is installed as editable from file:///home/theirs" in done.stderr
    done = packed(old, tmp_path / "x.tar.gz")
    assert done.returncode == 2 and "expected a name that ends in .tar" in done.stderr
    assert os.listdir(tmp_path) == ["elsewhere"]


def test_paths_of_libraries_move_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand in an ELF file of this Python, or of one that a compiler makes."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    prefix = tmp_path / "prefix"
    (prefix / "lib").mkdir(parents=True)
    (prefix / "bin").mkdir()
    build = ["cc", "-x", "c", "-", f"-Wl,-rpath,{prefix}/lib:/opt/other", "-o", str(prefix / "bin/program")]
    subprocess.run(build, input="int main() { return 0; }", text=True, check=True)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    with (prefix / "bin/program").open("rb") as source:
        ((at, new),) = pack._moved(source, prefix / "bin/program")
    old = (prefix / "bin/program").read_bytes()
    assert old[at : at + len(new)] == f"{prefix}/lib:/opt/other".encode()
    assert new.rstrip(b"\0") == b"$ORIGIN/../lib:/opt/other"


def test_help_and_unpacking_in_a_container(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["environment"]) == 0 and "unpack" in capsys.readouterr().out
    monkeypatch.setenv("SINGULARITY_CONTAINER", "x.sif")
    assert cli.main(["environment", "unpack", "x.tar", "/nowhere"]) == 0
    assert "nothing to do in a container" in capsys.readouterr().out


@pytest.mark.claim
@pytest.mark.timeout(900)
def test_this_environment_trains_at_another_place(tmp_path: Path) -> None:
    """torch and all. What the run reads of the old place is nothing."""
    file, new = tmp_path / "whole.tar", tmp_path / "whole"
    done = run(sys.executable, "-m", "hpcai.cli", "environment", "pack", file)
    assert done.returncode == 0, done.stderr
    print(done.stdout, relay.unpack_everywhere(file, str(new), ALONE))
    file.unlink()
    words = [f"data.directory={make(tmp_path / 'data')}", f"report.directory={tmp_path / 'run'}", "data.batch=8", "model.filters=2"]
    words += ["train.steps=3", "train.epochs=null", "step.schedule.decay=none"]
    config = ROOT / "apps/cosmoflow/configs/small.yaml"
    done = run(new / "bin/python", "-c", TRAIN, config, *words, PYTHONSAFEPATH="1", PYTHONNOUSERSITE="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    files = [path for path in json.loads(done.stdout.splitlines()[-1]) if path.startswith("/")]  # torch.ops calls itself _ops.py
    assert any(path.endswith("/torch/__init__.py") for path in files) and all(path.startswith(str(new)) for path in files)
