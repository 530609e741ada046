"""`make gpu` where there is no GPU: what the machine lacks is named, and stand-ins pass, fail, hang and go on."""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import run
from tests.gpu.programs import training

PASSES = "def test_it():\n    assert True\n"
FAILS = """
import pytest
def test_good():
    pass
def test_bad():
    assert 1 == 2
@pytest.mark.skip(reason="of no use")
def test_skipped(): ...
"""
HANGS = "import subprocess, time\ndef test_it():\n    subprocess.Popen(['sleep', '61.25'])\n    time.sleep(60)\n"
BENCH = """
import json, sys, time
words = sys.argv[1:]
if "--list" in words:
    print({"kernels": "attention-256\\nbroken", "apps": "slow"}[words[-1]])
elif "broken" in words:
    sys.exit("out of memory")
elif words[1] == "data" and words[2] != "direct":
    print("no JSON")
else:
    time.sleep(5 if "slow" in words else 0)
    print("a table")
    print(json.dumps({"bench": words[1], "rows": [{"case": words[-2], "ours_ms": 1.5}]}))
"""
GPU = {"name": "A GPU", "gib": 80, "capability": "9.0"}
FULL = {"machine": "here", "system": "Linux", "driver": [], "gpus": [GPU], "missing": {}}


class Stand:
    """A folder of test files, a command in place of hpcai's, and a machine that is as the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tests, self.out, self.machine = folder / "tests", folder / "out", dict(FULL)
        self.tests.mkdir()
        (folder / "bench.py").write_text(BENCH)
        self.hpcai = (sys.executable, str(folder / "bench.py"))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes half of each start
        monkeypatch.setattr(run, "look", lambda python, environ, out: self.machine)

    def __call__(self, *words: str) -> int:
        return run.main([*words, "--out", str(self.out)], self.tests, self.hpcai)

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())

    @property
    def states(self) -> dict[str, str]:
        return {name: entry["state"] for name, entry in self.results["jobs"].items()}

    def place(self) -> run.Place:
        environ = dict(os.environ)
        return run.Place(self.out, self.out, environ, self.machine["missing"], self.tests, self.hpcai)

    def file(self, name: str, text: str) -> None:
        (self.tests / name).write_text(text)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def test_what_passes_fails_and_hangs_is_told_and_the_rest_goes_on(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LONGER", {"test_a.py": 2.0})
    for name, text in (("test_a.py", HANGS), ("test_b.py", FAILS), ("test_c.py", PASSES)):
        stand.file(name, text)
    began = time.monotonic()
    assert stand("--part", "tests") == 1
    assert time.monotonic() - began < 30 and not alive("sleep", "61.25")
    assert stand.states == {"tests/test_a.py": "failed", "tests/test_b.py": "failed", "tests/test_c.py": "passed"}
    hung, failed, _ = stand.results["jobs"].values()
    assert hung["why"] == "did not end within 2 s, and was killed"
    assert "test_a.py" in (stand.out / hung["log"]).read_text(), "the stacks of what hangs are in its log"
    assert failed["tests"] == {"passed": 1, "failed": 1, "skipped": 1} and failed["skips"] == {"of no use": 1}
    assert failed["failures"][0]["name"] == "test_bad" and "assert 1 == 2" in failed["failures"][0]["text"]
    page = (stand.out / "index.md").read_text()
    assert all(text in page for text in ("A GPU: 1 passed, 2 failed", "assert 1 == 2", "of no use", "was killed"))
    # What failed is left alone until it is asked for
    stand.file("test_a.py", PASSES)
    stand.file("test_b.py", PASSES)
    assert stand("--part", "tests") == 1 and stand.states["tests/test_a.py"] == "failed"
    assert stand("--part", "tests", "--again", "failed", "--pack") == 0 and set(stand.states.values()) == {"passed"}
    assert {path.name for path in stand.out.iterdir()} - {"environment"} == {"index.md", "logs.tar.gz", "results.json"}


def alive(*words: str) -> bool:
    wanted = "\0".join(words).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in path.read_bytes():
                return True
        except OSError:
            continue  # it ended while we looked
    return False


def test_cases_of_the_benchmark_and_their_tables(stand: Stand) -> None:
    assert stand("--part", "kernels", "data") == 1
    told = {name: entry.get("why") for name, entry in stand.results["jobs"].items()}
    assert told["kernels/attention-256"] is told["data/direct"] is None
    assert told["kernels/broken"] == "out of memory" and told["data/peers"] == "the last line is no JSON: no JSON"
    assert "| attention-256 | 1.5 |" in (stand.out / "index.md").read_text()
    assert stand("--only", "direct") == 1, "what failed before still counts"
    assert stand("--only", "direct", "--part", "tests") == 0, "but not for another part"


def test_a_budget_ends_in_time_and_the_next_call_goes_on(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SPARE", 0.0)
    stand.file("test_a.py", PASSES)
    words = ("--part", "apps", "--budget", "1.5")
    began = time.monotonic()
    assert stand(*words) == 1 and time.monotonic() - began < 5
    assert stand.states == {"apps/slow": "cut"} and stand.results["left"] == ["apps/slow"]
    assert stand("--part", "tests", "--budget", "1e-9") == 1 and stand.results["left"] == ["tests/test_a.py"]
    assert "the next call begins with it" in (stand.out / "index.md").read_text()
    assert stand("--part", "tests") == 0 and stand.states["tests/test_a.py"] == "passed"
    assert stand(*words) == 1 and "did not end" in stand.results["jobs"]["apps/slow"]["why"], "not cut off for ever"
    before = stand.results["jobs"]["tests/test_a.py"]
    assert stand("--part", "tests") == 0 and stand.results["jobs"]["tests/test_a.py"] == before, "what is done is not done again"


def test_what_needs_something_missing_is_skipped_by_name(stand: Stand) -> None:
    for name in ("test_kernels.py", "test_step.py", "test_several.py"):
        stand.file(name, PASSES)
    stand.machine["missing"] = {"compiler": "there is no gcc (install gcc, or set CC)", "several": "there is one GPU"}
    assert stand("--part", "tests", "kernels") == 0
    skipped = {"tests/test_kernels.py", "tests/test_several.py", "kernels"}
    assert stand.states == {"tests/test_step.py": "passed", **dict.fromkeys(skipped, "skipped")}
    assert stand.results["jobs"]["kernels"]["why"] == "there is no gcc (install gcc, or set CC)"
    stand.machine["missing"] = {}  # gcc has been installed
    assert stand("--part", "tests", "kernels", "--only", "kernels") == 1
    assert stand.states["tests/test_kernels.py"] == "passed" and "kernels" not in stand.states


def test_another_commit_runs_again_what_failed_and_keeps_the_rest(stand: Stand) -> None:
    for name, text in (("test_a.py", PASSES), ("test_b.py", FAILS)):
        stand.file(name, text)
    assert stand("--part", "tests", "--commit", "one") == 1
    before = stand.results["jobs"]
    assert stand("--part", "tests", "--commit", "one") == 1 and stand.results["jobs"] == before
    stand.file("test_b.py", PASSES)
    assert stand("--part", "tests", "--commit", "two") == 0 and stand.results["commit"] == "two"
    jobs = stand.results["jobs"]
    assert jobs["tests/test_a.py"] == before["tests/test_a.py"] and jobs["tests/test_a.py"]["commit"] == "one"
    assert jobs["tests/test_b.py"]["commit"] == "two" and jobs["tests/test_b.py"]["state"] == "passed"
    assert "| test_a.py | passed | 1 |" in (page := (stand.out / "index.md").read_text()) and "| one |" in page


def test_what_a_lease_leaves_travels_to_the_next(stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, logs and what compilers have made come back whenever a call ends, and another machine goes on from them."""
    stand.file("test_a.py", CACHES)
    for name in ("test_b.py", "test_c.py"):
        stand.file(name, PASSES)
    assert stand("--part", "tests", "--only", "test_a", "--pack", "--commit", "one") == 0
    assert {path.name for path in stand.out.iterdir()} == {"index.md", "results.json", "logs.tar.gz", "caches.tar.gz"}
    shutil.rmtree(next(tmp_path.glob("hpcai-gpu-*")))
    first, stand.out = stand.out, tmp_path / "second"
    stand.file("test_b.py", KEPT)
    assert stand("--part", "tests", "--resume", str(first), "--pack", "--commit", "two") == 0
    assert stand.results["jobs"]["tests/test_a.py"]["commit"] == "one" and len(stand.states) == 3
    with tarfile.open(stand.out / "logs.tar.gz") as logs:
        assert {"logs/tests-test_a.py.txt", "logs/tests-test_b.py.txt"} <= set(logs.getnames())
    # A call that is killed has left what was known before
    monkeypatch.setattr(run, "_go", lambda every, place, results, words, began: (run.save(place, results), killed()))
    with pytest.raises(KeyboardInterrupt):
        stand("--part", "tests", "--pack")
    assert len(stand.states) == 3


CACHES = """
import os, pathlib
def test_it():
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folder = pathlib.Path(os.environ[name], "entry")
        folder.mkdir(parents=True)
        (folder / "kernel").write_text(name)
"""
KEPT = CACHES.replace("folder.mkdir(parents=True)", "").replace('write_text(name)', 'read_text() == name or 1 / 0')


def killed() -> None:
    raise KeyboardInterrupt


def test_caches_larger_than_what_comes_back_are_cut_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_CACHES", 3e5)
    for number in range(8):
        folder = tmp_path / f"triton/{number}"
        folder.mkdir(parents=True)
        (folder / "cubin").write_bytes(random.Random(number).randbytes(100_000))
        os.utime(folder, (number, number))
    run.pack_caches(archive := tmp_path / "caches.tar.gz", tmp_path)
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["triton/7/cubin", "triton/6/cubin", "triton/5/cubin"]
    assert archive.stat().st_size < 4e5


def test_the_rungs_name_every_file_of_tests_and_every_case() -> None:
    from hpcai.cli.bench import gpu_steps

    names = {"tests": [*(path.name for path in Path(run.__file__).parent.glob("test_*.py")), "timing"], "apps": gpu_steps.cases()}
    assert set(run.TRAINING) == set(training.TRAININGS)
    names |= {"kernels": ["kernels/"], "data": ["data/"], "training": ["training/"], "ncu": ["ncu/"]}
    for part, every in names.items():
        asked = [word for rung in run.RUNGS.values() for word in rung.jobs.get(part, ())]
        missed = {name for name in every if not any(word in name for word in asked)}
        assert missed <= {"test_several.py"}, "what needs several GPUs is on no rung"
        assert all(any(word in name for name in every) for word in asked)


def test_a_rung_is_its_jobs_with_its_limits(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("test_step.py", "test_data.py", "test_full.py"):
        stand.file(name, PASSES)
    assert stand("--rung", "R2") == 0 and set(stand.states) == {"tests/test_step.py", "tests/test_data.py"}
    assert stand("--rung", "R4") == 0, "this stand has none of R4's cases"
    words = run._words(["--rung", "R5"])
    assert (words.part, words.budget, words.limit) == (["apps"], 330.0, 150.0)
    with pytest.raises(SystemExit):
        run._words(["--rung", "R5", "--part", "tests"])
    jobs = list(run.jobs(["apps"], stand.place(), None, run._TIMED))
    assert all("--variants eager captured compiled-captured --seconds 4 --repeats 3" in " ".join(job.command) for job in jobs)


def test_rows_of_a_bench_that_is_killed_are_kept(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "print(json.dumps({'rows': [1]}), flush=True)"
    (stand.tests.parent / "bench.py").write_text(BENCH.replace("    time.sleep(5", f"    {first}\n    time.sleep(5"))
    assert stand("--part", "apps", "--limit", "2") == 1
    slow = stand.results["jobs"]["apps/slow"]
    assert slow["state"] == "failed" and "killed" in slow["why"] and slow["found"] == {"rows": [1]}


def test_the_longest_kernels_of_the_slowest_step_are_measured_by_nsight(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "void at::native::(anonymous namespace)::grid<float>(int)", "triton_poi_fused_add_0", "void b::b<4>()"
    costly = [[name, 1.0, 2] for name in names]
    both = {"variant": "compiled-captured", "costly": costly}
    rows: list[dict[str, Any]] = [{"case": "fast", "over": 2.0, **both}, {"case": "slow", "over": 0.5, **both}]
    rows.append({"case": "none", "left_out": "there is no GPU"})
    results = {"jobs": {"apps/it": {"part": "apps", "found": {"rows": rows}}}}
    assert run.slowest(results) == ("slow", "compiled", ["grid", "triton_poi_fused_add_0", "b"])
    assert run.slowest({"jobs": {}}) == ("cosmoflow-batch-4", "eager", [".*"])
    program = stand.tests.parent / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{NCU}END\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert stand("--part", "ncu") == 0
    assert stand.results["jobs"]["ncu/cosmoflow-batch-4"]["found"]["rows"] == [
        {"kernel": "grid", "Duration us": 1501.0, "DRAM Throughput %": 81.5}, {"kernel": "b", "Duration us": 2.0}]  # fmt: skip
    program.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1\n")
    assert stand("--part", "ncu", "--again") == 1 and "NVGPUCTRPERM" in stand.results["jobs"]["ncu/cosmoflow-batch-4"]["why"]


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","grid","GPU Speed Of Light Throughput","Duration","us","1,500.00"
"0","7","grid","GPU Speed Of Light Throughput","DRAM Throughput","%","81.5"
"0","7","grid","GPU Speed Of Light Throughput","SM Frequency","Ghz","1.5"
"1","7","grid","GPU Speed Of Light Throughput","Duration","us","1,502.00"
"2","7","b","GPU Speed Of Light Throughput","Duration","us","2.00"
==PROF== Disconnected
"""


def test_the_checkout_and_its_wheels_are_small_enough_to_travel() -> None:
    tracked = subprocess.run(["git", "-C", str(run.ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this copy has no history, and so no list of its files")
    size = sum(path.stat().st_size for name in tracked.stdout.split("\0") if name and (path := run.ROOT / name).is_file())
    assert size + run._WHEELS < 50e6


WHOLE = [pytest.param([name], marks=pytest.mark.claim) for name in run.RUNGS]


@pytest.mark.parametrize("rung", [["R2", "--only", "test_float8"], *WHOLE], ids=str)
def test_a_rung_runs_without_a_gpu(rung: list[str], tmp_path: Path) -> None:
    """At tiny sizes. `make test-oldest` climbs all of them, with the torch of machines that have GPUs."""
    command = [sys.executable, run.__file__, "--rung", *rung, "--out", str(tmp_path), "--budget", "1000"]
    environ = {**os.environ, "HPCAI_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {name: entry["state"] for name, entry in json.loads((tmp_path / "results.json").read_text())["jobs"].items()}
    assert set(states.values()) == ({"skipped"} if rung == ["R8"] and shutil.which("ncu") is None else {"passed"}), states


def test_this_machine_without_a_gpu_runs_to_the_end(tmp_path: Path) -> None:
    command = [sys.executable, run.__file__, "--part", "tests", "kernels", "apps", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    files = {f"tests/{path.name}" for path in Path(run.__file__).parent.glob("test_*.py")}
    assert set(results["jobs"]) == files | {"tests/timing", "kernels", "apps"}
    assert {entry["state"] for entry in results["jobs"].values()} == {"skipped"}
    assert all("no nvidia-smi" in entry["why"] for entry in results["jobs"].values())
    assert results["machine"]["torch"] and results["machine"]["absent"] == [] and results["machine"]["disk_gib"] > 0


def test_what_is_missing_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {"torch": "2.11.0", "cuda": "13.0", "gpus": [GPU], "answer": True, "nccl": "2.28", "compiler": None}
    monkeypatch.setattr(run, "driver", list)
    monkeypatch.setattr(run, "_ask", lambda command, environ, what="torch": True if what == "kernel" else dict(said))

    def missing(**changes: Any) -> dict[str, str]:
        said.update(changes)
        found: dict[str, str] = run.look("python", {}, tmp_path)["missing"]
        return {name: why for name, why in found.items() if name not in ("disk", "ncu")}

    assert set(missing()) == {"several"}
    assert set(missing(gpus=said["gpus"] * 2)) == set()
    assert missing(compiler="there is no gcc")["compiler"] == "there is no gcc"
    assert "has no NCCL" in missing(nccl=None)["nccl"]
    assert "h5py cannot be imported; make install, or carry wheels" in missing(absent=["h5py"])["packages"]
    assert "as new as CUDA 13.0" in missing(answer=False)["gpu"]
    assert set(missing(gpus=[], absent=[])) == {"gpu", "compiler", "nccl", "several"}
    monkeypatch.setattr(run, "_ask", lambda command, environ, what="torch": {"error": "no cc1"} if what == "kernel" else dict(said))
    assert missing(gpus=[GPU], answer=True, compiler=None)["compiler"] == "a first kernel cannot be made: no cc1"


def test_wheels_give_what_is_missing_and_leave_what_is_there(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("standin", "numpy"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}.py", "")
            file.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            file.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{name}-1.0.dist-info/RECORD", "")
    environ = run.prepare(tmp_path / "environment", wheels)
    code = "import numpy, standin; print(numpy.__version__, standin.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    version, file_ = done.stdout.split()
    assert version != "1.0" and file_ == str(tmp_path / "environment/site/standin.py")
    with pytest.raises(SystemExit, match="no wheel lies there; make wheels"):
        run.prepare(tmp_path, tmp_path)
