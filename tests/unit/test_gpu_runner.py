"""`make gpu` without a GPU: missing requirements are named; replacement jobs pass, fail, hang and resume."""

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
from tests.reference_data import DATA
from tests.tracked import tracked_files

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
args = sys.argv[1:]
if "--list" in args:
    print({"kernels": "attention-256\\nbroken", "apps": "slow"}[args[-1]])
elif "broken" in args:
    sys.exit("out of memory")
elif args[1] == "data" and args[2] != "direct":
    print("no JSON")
else:
    time.sleep(5 if "slow" in args else 0)
    print("a table")
    print(json.dumps({"bench": args[1], "rows": [{"case": args[-2], "ours_ms": 1.5}]}))
"""
GPU = {"name": "A GPU", "gib": 80, "capability": "9.0"}
MACHINE = {"machine": "here", "system": "Linux", "driver": [], "gpus": [GPU], "missing": {}}


class Harness:
    """The runner with a folder of test files, a replacement of the hpcai command, and a machine that the test defines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tests, self.out, self.machine = folder / "tests", folder / "out", dict(MACHINE)
        self.tests.mkdir()
        (folder / "bench.py").write_text(BENCH)
        self.hpcai = (sys.executable, str(folder / "bench.py"))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of the startup time
        monkeypatch.setattr(run, "inspect_machine", lambda python, environ, out: self.machine)

    def __call__(self, *args: str) -> int:
        return run.main([*args, "--out", str(self.out)], self.tests, self.hpcai)

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())

    @property
    def states(self) -> dict[str, str]:
        return {name: entry["state"] for name, entry in self.results["jobs"].items()}

    def context(self) -> run.Context:
        environ = dict(os.environ)
        return run.Context(self.out, self.out, environ, self.machine["missing"], self.tests, self.hpcai)

    def file(self, name: str, text: str) -> None:
        (self.tests / name).write_text(text)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path, monkeypatch)


@pytest.mark.slow
def test_jobs_that_pass_fail_and_hang_are_reported(runner: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LONG_LIMITS", {"test_a.py": 5.0})
    for name, text in (("test_a.py", HANGS), ("test_b.py", FAILS), ("test_c.py", PASSES)):
        runner.file(name, text)
    started = time.monotonic()
    assert runner("--part", "tests") == 1
    assert time.monotonic() - started < 50 and not is_running("sleep", "61.25")
    assert runner.states == {"tests/test_a.py": "failed", "tests/test_b.py": "failed", "tests/test_c.py": "passed"}
    hung, failed, _ = runner.results["jobs"].values()
    assert hung["why"] == "did not end within 5 s, and was killed"
    assert "test_a.py" in (runner.out / hung["log"]).read_text(), "the stacks of a job that hangs are in its log"
    assert failed["tests"] == {"passed": 1, "failed": 1, "skipped": 1} and failed["skips"] == {"of no use": 1}
    assert failed["failures"][0]["name"] == "test_bad" and "assert 1 == 2" in failed["failures"][0]["text"]
    page = (runner.out / "index.md").read_text()
    assert all(text in page for text in ("A GPU: 1 passed, 2 failed", "assert 1 == 2", "of no use", "was killed"))
    # Failed jobs are repeated only on request
    runner.file("test_a.py", PASSES)
    runner.file("test_b.py", PASSES)
    assert runner("--part", "tests") == 1 and runner.states["tests/test_a.py"] == "failed"
    assert runner("--part", "tests", "--again", "failed", "--pack") == 0 and set(runner.states.values()) == {"passed"}
    assert {path.name for path in runner.out.iterdir()} - {"environment"} == {"index.md", "logs.tar.gz", "results.json"}


def is_running(*args: str) -> bool:
    command = "\0".join(args).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command in path.read_bytes():
                return True
        except OSError:
            continue  # the process has ended
    return False


def test_cases_of_the_benchmark_and_their_tables(runner: Harness) -> None:
    assert runner("--part", "kernels", "data") == 1
    reasons = {name: entry.get("why") for name, entry in runner.results["jobs"].items()}
    assert reasons["kernels/attention-256"] is reasons["data/direct"] is None
    assert reasons["kernels/broken"] == "out of memory" and reasons["data/peers"] == "the last line is no JSON: no JSON"
    assert "| attention-256 | 1.5 |" in (runner.out / "index.md").read_text()
    assert runner("--only", "direct") == 1, "earlier failures count"
    assert runner("--only", "direct", "--part", "tests") == 0, "not those of another part"


def test_a_budget_ends_in_time_and_the_next_call_continues(runner: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_RESERVE", 0.0)
    runner.file("test_a.py", PASSES)
    args = ("--part", "apps", "--budget", "1.5")
    started = time.monotonic()
    assert runner(*args) == 1 and time.monotonic() - started < 5
    assert runner.states == {"apps/slow": "cut"} and runner.results["left"] == ["apps/slow"]
    assert runner("--part", "tests", "--budget", "1e-9") == 1 and runner.results["left"] == ["tests/test_a.py"]
    assert "the next call begins with it" in (runner.out / "index.md").read_text()
    assert runner("--part", "tests") == 0 and runner.states["tests/test_a.py"] == "passed"
    assert runner(*args) == 1 and "did not end" in runner.results["jobs"]["apps/slow"]["why"], "the budget cuts a job only once"
    before = runner.results["jobs"]["tests/test_a.py"]
    assert runner("--part", "tests") == 0 and runner.results["jobs"]["tests/test_a.py"] == before, "passed jobs are not repeated"


def test_jobs_with_missing_requirements_are_skipped(runner: Harness) -> None:
    for name in ("test_kernels.py", "test_step.py", "test_several.py"):
        runner.file(name, PASSES)
    runner.machine["missing"] = {"compiler": "there is no gcc (install gcc, or set CC)", "several": "there is one GPU"}
    assert runner("--part", "tests", "kernels") == 0
    skipped = {"tests/test_kernels.py", "tests/test_several.py", "kernels"}
    assert runner.states == {"tests/test_step.py": "passed", **dict.fromkeys(skipped, "skipped")}
    assert runner.results["jobs"]["kernels"]["why"] == "there is no gcc (install gcc, or set CC)"
    runner.machine["missing"] = {}  # gcc has been installed
    assert runner("--part", "tests", "kernels", "--only", "kernels") == 1
    assert runner.states["tests/test_kernels.py"] == "passed" and "kernels" not in runner.states


def test_another_commit_repeats_failed_jobs_and_keeps_passed_ones(runner: Harness) -> None:
    for name, text in (("test_a.py", PASSES), ("test_b.py", FAILS)):
        runner.file(name, text)
    assert runner("--part", "tests", "--commit", "one") == 1
    before = runner.results["jobs"]
    assert runner("--part", "tests", "--commit", "one") == 1 and runner.results["jobs"] == before
    runner.file("test_b.py", PASSES)
    assert runner("--part", "tests", "--commit", "two") == 0 and runner.results["commit"] == "two"
    jobs = runner.results["jobs"]
    assert jobs["tests/test_a.py"] == before["tests/test_a.py"] and jobs["tests/test_a.py"]["commit"] == "one"
    assert jobs["tests/test_b.py"]["commit"] == "two" and jobs["tests/test_b.py"]["state"] == "passed"
    assert "| test_a.py | passed | 1 |" in (page := (runner.out / "index.md").read_text()) and "| one |" in page


def test_packed_results_resume_on_another_machine(runner: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, logs and compiler caches are packed at the end of each call, and another machine resumes from them."""
    runner.file("test_a.py", CACHES)
    for name in ("test_b.py", "test_c.py"):
        runner.file(name, PASSES)
    assert runner("--part", "tests", "--only", "test_a", "--pack", "--commit", "one") == 0
    assert {path.name for path in runner.out.iterdir()} == {"index.md", "results.json", "logs.tar.gz", "caches.tar.gz"}
    shutil.rmtree(next(tmp_path.glob("hpcai-gpu-*")))
    first, runner.out = runner.out, tmp_path / "second"
    runner.file("test_b.py", READS_CACHES)
    assert runner("--part", "tests", "--resume", str(first), "--pack", "--commit", "two") == 0
    assert runner.results["jobs"]["tests/test_a.py"]["commit"] == "one" and len(runner.states) == 3
    with tarfile.open(runner.out / "logs.tar.gz") as logs:
        assert {"logs/tests-test_a.py.txt", "logs/tests-test_b.py.txt"} <= set(logs.getnames())
    # An interrupted call keeps the earlier results
    monkeypatch.setattr(run, "_run_jobs", lambda jobs, context, results, *_: (run.save_results(context, results), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        runner("--part", "tests", "--pack")
    assert len(runner.states) == 3


CACHES = """
import os, pathlib
def test_it():
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folder = pathlib.Path(os.environ[name], "entry")
        folder.mkdir(parents=True)
        (folder / "kernel").write_text(name)
"""
READS_CACHES = CACHES.replace("folder.mkdir(parents=True)", "").replace('write_text(name)', 'read_text() == name or 1 / 0')


def interrupt() -> None:
    raise KeyboardInterrupt


def test_only_the_newest_caches_are_archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MAX_CACHES", 3e5)
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
    for part, part_names in names.items():
        patterns = [word for rung in run.RUNGS.values() for word in rung.jobs.get(part, ())]
        uncovered = {name for name in part_names if not any(word in name for word in patterns)}
        assert uncovered <= {"test_several.py"}, "tests of several GPUs are on no rung"
        assert all(any(word in name for name in part_names) for word in patterns)


def test_a_rung_is_its_jobs_with_its_limits(runner: Harness) -> None:
    for name in ("test_step.py", "test_data.py", "test_full.py"):
        runner.file(name, PASSES)
    assert runner("--rung", "R2") == 0 and set(runner.states) == {"tests/test_step.py", "tests/test_data.py"}
    assert runner("--rung", "R4") == 0, "the test has none of R4's cases"
    args = run._parse_args(["--rung", "R5"])
    assert (args.part, args.budget, args.limit) == (["apps"], 330.0, 150.0)
    with pytest.raises(SystemExit):
        run._parse_args(["--rung", "R5", "--part", "tests"])
    jobs = list(run.list_jobs(["apps"], runner.context(), None, run._TIMING_ARGS))
    assert all("--variants eager captured compiled-captured --seconds 4 --repeats 3" in " ".join(job.command) for job in jobs)


def test_results_of_a_killed_benchmark_are_kept(runner: Harness) -> None:
    first = "print(json.dumps({'rows': [1]}), flush=True)"
    (runner.tests.parent / "bench.py").write_text(BENCH.replace("    time.sleep(5", f"    {first}\n    time.sleep(5"))
    assert runner("--part", "apps", "--limit", "2") == 1
    slow = runner.results["jobs"]["apps/slow"]
    assert slow["state"] == "failed" and "killed" in slow["why"] and slow["found"] == {"rows": [1]}


def test_the_longest_kernels_of_the_slowest_step_are_measured_by_nsight(runner: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "void at::native::(anonymous namespace)::grid<float>(int)", "triton_poi_fused_add_0", "void b::b<4>()"
    costly = [[name, 1.0, 2] for name in names]
    common = {"variant": "compiled-captured", "costly": costly}
    rows: list[dict[str, Any]] = [{"case": "fast", "over": 2.0, **common}, {"case": "slow", "over": 0.5, **common}]
    rows.append({"case": "none", "left_out": "there is no GPU"})
    results = {"jobs": {"apps/it": {"part": "apps", "found": {"rows": rows}}}}
    assert run.find_slowest(results) == ("slow", "compiled", ["grid", "triton_poi_fused_add_0", "b"])
    assert run.find_slowest({"jobs": {}}) == ("cosmoflow-batch-4", "eager", [".*"])
    program = runner.tests.parent / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{(DATA / 'settings/ncu.txt').read_text()}END\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert runner("--part", "ncu") == 0
    assert runner.results["jobs"]["ncu/cosmoflow-batch-4"]["found"]["rows"] == [
        {"kernel": "grid", "Duration us": 1501.0, "DRAM Throughput %": 81.5}, {"kernel": "b", "Duration us": 2.0}]  # fmt: skip
    program.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1\n")
    assert runner("--part", "ncu", "--again") == 1 and "NVGPUCTRPERM" in runner.results["jobs"]["ncu/cosmoflow-batch-4"]["why"]


def test_checkout_and_wheels_are_smaller_than_50_mb() -> None:
    assert sum((run.ROOT / name).stat().st_size for name in tracked_files()) + run._MAX_WHEELS < 50e6


@pytest.mark.claim
@pytest.mark.parametrize("rung", run.RUNGS)
def test_a_rung_runs_without_a_gpu(rung: str, tmp_path: Path) -> None:
    """Sizes are tiny. `make test-oldest` runs all rungs, with the torch version of GPU machines."""
    command = [sys.executable, run.__file__, "--rung", rung, "--out", str(tmp_path), "--budget", "1000"]
    environ = {**os.environ, "HPCAI_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env=environ)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    states = {name: entry["state"] for name, entry in json.loads((tmp_path / "results.json").read_text())["jobs"].items()}
    assert states.pop("tests/timing", "skipped") == "skipped", "times of a GPU"
    assert set(states.values()) == ({"skipped"} if rung == "R8" and shutil.which("ncu") is None else {"passed"}), states


@pytest.mark.slow
def test_this_machine_without_a_gpu_runs_to_the_end(tmp_path: Path) -> None:
    command = [sys.executable, run.__file__, "--part", "tests", "kernels", "apps", "--out", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert completed.returncode == 0, completed.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    files = {f"tests/{path.name}" for path in Path(run.__file__).parent.glob("test_*.py")}
    assert set(results["jobs"]) == files | {"tests/timing", "kernels", "apps"}
    assert {entry["state"] for entry in results["jobs"].values()} == {"skipped"}
    assert all("no nvidia-smi" in entry["why"] for entry in results["jobs"].values())
    assert results["machine"]["torch"] and results["machine"]["absent"] == [] and results["machine"]["disk_gib"] > 0


def test_missing_requirements_have_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: dict[str, Any] = {"torch": "2.11.0", "cuda": "13.0", "gpus": [GPU], "answer": True, "nccl": "2.28", "compiler": None}
    monkeypatch.setattr(run, "query_driver", list)
    monkeypatch.setattr(run, "_query", lambda *args: True if "kernel" in args else dict(probed))

    def missing(**changes: Any) -> dict[str, str]:
        probed.update(changes)
        machine: dict[str, Any] = run.inspect_machine("python", {}, tmp_path)
        return {name: why for name, why in machine["missing"].items() if name not in ("disk", "ncu")}

    assert set(missing()) == {"several"}
    assert set(missing(gpus=probed["gpus"] * 2)) == set()
    assert missing(compiler="there is no gcc")["compiler"] == "there is no gcc"
    assert "has no NCCL" in missing(nccl=None)["nccl"]
    assert "h5py cannot be imported; make install, or carry wheels" in missing(absent=["h5py"])["packages"]
    assert "as new as CUDA 13.0" in missing(answer=False)["gpu"]
    assert set(missing(gpus=[], absent=[])) == {"gpu", "compiler", "nccl", "several"}
    monkeypatch.setattr(run, "_query", lambda *args: {"error": "no cc1"} if "kernel" in args else dict(probed))
    assert missing(gpus=[GPU], answer=True, compiler=None)["compiler"] == "a first kernel cannot be made: no cc1"


def test_wheels_are_unpacked_only_if_not_installed(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("standin", "numpy"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}.py", "")
            file.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            file.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{name}-1.0.dist-info/RECORD", "")
    environ = run.prepare_environment(tmp_path / "environment", wheels)
    code = "import numpy, standin; print(numpy.__version__, standin.__file__)"
    completed = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    version, path = completed.stdout.split()
    assert version != "1.0" and path == str(tmp_path / "environment/site/standin.py")
    with pytest.raises(SystemExit, match="no wheel lies there; make wheels"):
        run.prepare_environment(tmp_path, tmp_path)
