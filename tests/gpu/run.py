"""`make gpu`: run the GPU tests and benchmarks in sequential processes, on a machine that may lack other packages.

    python3 tests/gpu/run.py [--rung R1 ...] [--wheels DIR] [--out DIR] [--resume DIR] [--pack]
    python3 tests/gpu/run.py [--part tests kernels apps data training ncu] [--only NAME ...] [--budget SECONDS] ...
    python3 tests/gpu/run.py --collect DIR      # on a machine with a network: download wheels for one without

It inspects the machine, prints missing requirements with a remedy, and skips the jobs that need them. Each test file, each case of
`hpcai bench gpu`, each part of `hpcai bench data` and each training is then a process with a time limit, so that a failure or a
hang affects no other job. OUT/results.json is written after each job: the next call continues after an interruption or the end of
the ``--budget``. OUT/index.md is the report. Each row has its commit; another commit repeats failed jobs and keeps passed ones.

A rung is a list of jobs for a GPU that is available for minutes. With ``--pack`` OUT has four files, also after an interruption:
results, report, logs, and the caches of torch's and Triton's compilers. ``--resume OUT`` passes them to the next machine.
HPCAI_TEST_DEVICE=cpu runs the same jobs without a GPU, at tiny sizes.

The exit code is 0 if all jobs that could run have passed. This file needs only the standard library, and never installs torch.
"""

import argparse
import csv
import functools
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "kernels", "apps", "data", "training", "ncu")
ON_CPU = os.environ.get("HPCAI_TEST_DEVICE") == "cpu"
HPCAI = ("-c", "import sys; from hpcai.cli import main; sys.exit(main())")
REQUIRED = ("pytest", "hypothesis", "numpy", "pydantic", "h5py", "yaml", "rich", "safetensors")  # imports of tests and benchmarks
QUIET = ("-q", "--disable-pip-version-check")
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:",
          *(argument for tag in _TAGS for argument in ("--platform", f"{tag}_x86_64")))  # fmt: skip
PREINSTALLED = re.compile(r"(torch|triton|numpy|mpich|nvidia-(?!ml-py).*|cuda-.*)$")  # builds of the GPU machine
_MAX_LOG = 200_000  # bytes at the end of a log that are kept
_MAX_TEXT = 1500  # characters of a failure in the results
_RESERVE = 8.0  # seconds of a budget that are reserved for the final output
_LABELS = {"gpu": "no GPU", "compiler": "Triton's compiler", "nccl": "NCCL", "several": "one GPU", "ncu": "Nsight Compute"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Rung:
    """A question to answer in minutes on a GPU, its jobs (substrings of their names by part), and the time limit of a process."""

    question: str
    jobs: Mapping[str, tuple[str, ...]]
    limit: float = 150.0


_KERNELS = "test_kernels", "test_capture", "test_one_rank", "test_doctor"
_RUNTIME = "test_step", "test_together", "test_data", "test_float8", "timing"
_MODELS = (
    "test_bert", "test_cosmoflow", "test_deepcam", "test_unet3d", "test_dimenet", "test_openfold", "test_llm",
    "test_diffusion", "test_retinanet", "test_rgat", "test_dlrm",
)  # fmt: skip
_SCIENCE = "bert", "cosmoflow", "deepcam", "dlrm", "opencatalyst", "openfold-crop-256", "resnet", "retinanet", "rgat", "unet3d"
_FULL = {"tests": ("test_full",), "apps": ("cosmoflow-batch-4", "unet3d-batch-7")}
RUNGS = {
    "R1": Rung("do kernels compile, and can a step be captured?", {"tests": _KERNELS}),
    "R2": Rung("does the runtime do on a GPU what it does on a CPU?", {"tests": _RUNTIME}),
    "R3": Rung("is each model on a GPU what it is on a CPU?", {"tests": _MODELS}),
    "R4": Rung("is a step of each published size finite, and does it fit?", _FULL, 250.0),
    "R5": Rung("how fast are the scientific models?", {"apps": _SCIENCE}),
    "R6": Rung("how fast are language models and diffusion?", {"apps": ("llm", "diffusion")}),
    "R7": Rung("how fast are kernels beside their peers?", {"kernels": ("",)}, 60.0),
    "R8": Rung("what limits the longest kernels of the slowest step?", {"ncu": ("",)}, 250.0),
    "R9": Rung("do files feed the GPU?", {"data": ("",)}),
    "R10": Rung("does a training on a GPU learn as on a CPU?", {"training": ("",)}, 300.0),
}
_RUNG_BUDGET = 330.0  # seconds of a rung
_TIMING_ARGS = ("--variants", "eager", "captured", "compiled-captured", "--seconds", "4", "--repeats", "3")


@dataclass(frozen=True)
class Job:
    """A process: name, part, command, requirements of the machine, and time limit in seconds."""

    name: str
    part: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    limit: float
    typical: float
    """expected seconds: the job starts only if the budget has as many left"""

    @property
    def file(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name)


# Test files with requirements besides a GPU. Requirements of single tests are checked there.
EXTRA_NEEDS: dict[str, tuple[str, ...]] = {
    "test_kernels.py": ("compiler",), "test_one_rank.py": ("nccl",), "test_several.py": ("nccl", "several"),
}  # fmt: skip
EXCLUSIVE = "test_full.py", "test_several.py", "timing"  # they fill a GPU, or measure times
LONG_LIMITS = {"test_full.py": 500.0, "test_several.py": 500.0}
LONG_LIMITS |= dict.fromkeys(("test_step.py", "test_dimenet.py", "test_openfold.py"), 400.0)  # they compile
DATA = ("direct", "peers")
TRAINING = ("cosmoflow-small", "llm-small", "cosmoflow-128")
_MAX_WHEELS, _MAX_CACHES = 16e6, 12e6  # bytes of the wheels, and of an archive of caches


# ---- the machine

_PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hpcai.kernels import triton_support
from importlib.util import find_spec
result = {"compiler": triton_support.MISSING, "absent": [name for name in sys.argv[2:] if find_spec(name) is None], "gpus": []}
try:
    import torch
    result |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    result["gpus"] = [{"name": p.name, "gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
                      for p in (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))]
    if result["gpus"]:
        result["answer"] = (torch.arange(1000, device="cuda").sum() == 499500).item()
        result["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        if torch.distributed.is_nccl_available():
            result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    result["error"] = f"{type(error).__name__}: {error}"
try:
    import triton
    result["triton"] = triton.__version__
except Exception as error:
    pass
print("result:" + json.dumps(result))
"""
_KERNEL_PROBE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from hpcai.kernels import philox
assert torch.equal(philox.bits(7, 0, 999, device="cuda").cpu(), philox.bits(7, 0, 999)), "a kernel computed other bits than the CPU"
print("result:true")
"""
_SMI = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit",
        "power.max_limit", "temperature.gpu", "compute_mode", "mig.mode.current", "utilization.gpu")  # fmt: skip


def inspect_machine(python: str, environ: Mapping[str, str], out: Path) -> Row:
    """Return the properties of the machine; ``missing`` has a remedy for each missing requirement of jobs."""
    machine: Row = {"machine": platform.node(), "system": platform.platform(), "cores": len(os.sched_getaffinity(0)),
                    "python": f"{platform.python_version()} in {sys.prefix}", "driver": query_driver(),
                    "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
                    "disk_gib": round(shutil.disk_usage(out).free / 2**30, 1)}  # fmt: skip
    machine |= _query([python, "-c", _PROBE, str(ROOT), *REQUIRED], environ)
    machine["missing"] = _find_missing(machine, out, lambda: _query([python, "-c", _KERNEL_PROBE, str(ROOT)], environ, "kernel"))
    return machine


def _find_missing(machine: Row, out: Path, compile_kernel: Callable[[], Any]) -> dict[str, str]:
    """Return the missing requirements of jobs, each with a remedy."""
    missing: dict[str, str] = {}
    driver, disk = machine["driver"], machine["disk_gib"]
    if absent := machine.get("absent", [] if "torch" in machine else list(REQUIRED)):
        advice = "cannot be imported; make install, or carry wheels along (make wheels) and give --wheels"
        missing["packages"] = f"{', '.join(absent)} {advice}"
    if shutil.which("ncu") is None:
        missing["ncu"] = "there is no ncu here; it is a package of CUDA's toolkit (nsight-compute)"
    if disk < 8:
        missing["disk"] = f"{out} has {disk} GiB free, and the benchmark of reading makes files of 2; give --out on a larger disk"
    if ON_CPU:
        return missing
    reason, cuda = machine.get("error"), machine.get("cuda")
    if not machine.get("gpus"):
        reason = reason or (driver if isinstance(driver, str) else "torch sees none; is this torch built for CUDA?")
        missing["gpu"] = f"{reason} (torch {machine.get('torch', 'cannot be imported')}, CUDA {cuda})"
    elif not machine.get("answer"):
        missing["gpu"] = f"a first sum on the GPU fails: {reason or 'a wrong number'}; is the driver as new as CUDA {cuda}?"
    if "gpu" in missing:
        return missing | dict.fromkeys(("compiler", "nccl", "several"), missing["gpu"])
    if machine.get("compiler"):
        missing["compiler"] = machine["compiler"]
    elif (result := compile_kernel()) is not True:
        missing["compiler"] = f"a first kernel cannot be made: {result.get('error')}"
    if not machine.get("nccl"):
        missing["nccl"] = "this torch has no NCCL; install the build for CUDA on Linux"
    if len(machine["gpus"]) < 2:
        missing["several"] = "there is one GPU, and this needs two or more"
    return missing


def _query(command: Sequence[str], environ: Mapping[str, str], subject: str = "torch") -> Any:
    """Return the JSON that a process prints after ``result:``, or an error: a library that fails to load may end its process."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=180, env=dict(environ), check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result of the {subject} probe within three minutes: a file system or the driver hangs"}
    for line in completed.stdout.splitlines():
        if line.startswith("result:"):
            return json.loads(line.removeprefix("result:"))
    return {"error": (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1][:_MAX_TEXT]}


@functools.cache
def query_driver() -> Any:
    """Return the properties of each GPU by nvidia-smi, or the reason why there are none."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi: there is no NVIDIA driver here"
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "nvidia-smi did not end within a minute: the driver hangs"
    if completed.returncode:
        return f"nvidia-smi: {(completed.stdout + completed.stderr).strip()[:_MAX_TEXT]}"
    return [dict(zip(_SMI, map(str.strip, line.split(",")))) for line in completed.stdout.splitlines() if line.strip()]


# ---- environment and wheels


def prepare_environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Return the environment of all processes, with packages of ``wheels`` that this Python lacks."""
    site = folder / "site"
    paths = (str(ROOT), os.environ.get("PYTHONPATH"), str(site) if wheels else None)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
               "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
               "TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if wheels is None:
        return environ
    if not any(wheels.glob("*.whl")):
        raise SystemExit(f"--wheels {wheels}: no wheel lies there; make wheels OUT={wheels} collects them where there is a network")
    shutil.rmtree(site, ignore_errors=True)
    for path in wheels.glob("*.whl"):
        if not _is_installed(_canonical(path.name.split("-")[0])):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
    return environ


def read_requirements(pyproject: Path) -> list[str]:
    """Return the requirements of hpcai, GPU readings, neighbour lists and tests, without packages that a GPU machine has."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["gpu"], *(line for line in extras["opencatalyst"] if line.startswith("vesin")),
             *(line for line in extras["dev"] if line.startswith(("pytest", "hypothesis")))]  # fmt: skip
    lines = [line for line in lines if not line.startswith(("matplotlib", "pytest-xdist"))]  # no report, and tests are sequential
    return [line for line in lines if not PREINSTALLED.match(_canonical(re.split(r"[^\w.-]", line)[0]))]


def collect_wheels(folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> list[str]:
    """Download the wheels for Python 3.12 on Linux x86-64, without packages that a GPU machine has. Return names and versions."""
    shutil.rmtree(folder, ignore_errors=True)  # no older versions of a package
    command = [*pip, "download", *QUIET, "-d", str(folder), *TARGET, *read_requirements(ROOT / "pyproject.toml")]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    wheels = {path: path.name.split("-")[:2] for path in sorted(folder.glob("*.whl"))}
    for path, (name, _) in wheels.items():
        if PREINSTALLED.match(_canonical(name)):
            path.unlink()
    return [f"{_canonical(name)}=={version}" for path, (name, version) in wheels.items() if path.exists()]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# ---- jobs


def list_jobs(parts: Sequence[str], context: "Context", results: Row | None = None, timing: Sequence[str] = ()) -> Iterator[Job]:
    """Return the jobs of the parts; if cases cannot be listed, one job with the error. ``timing``: arguments of app benchmarks."""
    sizes = ("--seconds", "1", "--repeats", "2") if ON_CPU else ()
    command: tuple[str, ...]
    for part in parts:
        if part == "tests":
            files = sorted(context.tests.glob("test_*.py"))
            timings = [path for path in files if "mark.timing" in path.read_text()]
            for name, paths in [*((path.name, [path]) for path in files), *([("timing", timings)] if timings else [])]:
                xml = context.work / "junit" / f"{Path(name).stem}.xml"
                limit = LONG_LIMITS.get(name, context.limit or 300.0)
                command = (sys.executable, "-m", "pytest", "-q", "--color=no", f"--junitxml={xml}", "-o", "junit_logging=no",
                           "-o", f"faulthandler_timeout={0.8 * limit:.0f}", f"--rootdir={ROOT}",
                           "-m", "timing" if name == "timing" else "not timing", *map(str, paths))  # fmt: skip
                needs = ("packages", "gpu", *EXTRA_NEEDS.get(name, ()))
                yield Job(f"tests/{name}", part, command, needs, context.limit or limit, 60.0)
        elif part == "data":
            tiny = ("--gib", "0.25", "--repeats", "1") if ON_CPU else ()
            for name in DATA:
                command = (*context.hpcai, "bench", "data", name, "--json", "--directory", str(context.scratch), *tiny)
                yield Job(f"data/{name}", part, command, ("packages", "disk"), context.limit or 400.0, 120.0)
        elif part == "training":
            for name in TRAINING:
                command = (sys.executable, str(ROOT / "tests/gpu/programs/training.py"), name, str(context.scratch / name))
                command += ("--tiny",) if ON_CPU else ()
                yield Job(f"training/{name}", part, command, ("packages", "gpu", "disk"), context.limit or 300.0, 200.0)
        elif part == "ncu":
            case, variant, kernels = find_slowest(results or {"jobs": {}})
            # After 40 launches of these five kernels, those with one launch a step are past their warm-up.
            command = ("ncu", "--csv", "--clock-control", "none", "--section", "SpeedOfLight", "--section", "LaunchStats",
                       "--section", "Occupancy", "--kernel-name", f"regex:^({'|'.join(kernels)})",
                       "--launch-skip", "40", "--launch-count", "20",
                       *context.hpcai, "bench", "gpu", "apps", "--case", case, "--variants", variant, "--json", "--seconds", "1",
                       "--repeats", "1")  # fmt: skip
            yield Job(f"ncu/{case}", part, command, ("packages", "gpu", "ncu"), context.limit or 250.0, 120.0)
        else:
            needs = ("packages", "gpu", *(("compiler",) if part == "kernels" else ()))
            command = (*context.hpcai, "bench", "gpu")
            cases = _list_cases((*command, "--list", part), context, needs)
            if ON_CPU and part == "kernels" and isinstance(cases, list):  # the tiny sizes of a kernel are equal
                cases = list({case.partition("-")[0]: case for case in cases}.values())
            for case in cases if isinstance(cases, list) else ():
                extra = (*(timing if part == "apps" else ()), *sizes)
                arguments = (*command, part, "--case", case, "--json", *extra)
                yield Job(f"{part}/{case}", part, arguments, needs, context.limit or 300.0, 60.0)
            if isinstance(cases, str):
                yield Job(part, part, (), (*needs, f"list: {cases}"), 0.0, 0.0)


def find_slowest(results: Row) -> tuple[str, str, list[str]]:
    """Return the app case that is slowest relative to published times or to this GPU's peak rate, its variant without CUDA graph (a
    graph hides kernels), and its five longest kernels."""
    rows = [row for job in results["jobs"].values() if job["part"] == "apps" for row in job.get("found", {}).get("rows", ())]
    rows = [row for row in rows if row.get("costly")]
    if not rows:
        return "cosmoflow-batch-4", "eager", [".*"]
    row = min(rows, key=lambda row: row.get("over") or row.get("of_rate") or 1.0)
    names = (re.sub(r"\(anonymous namespace\)::|^void ", "", name) for name, *_ in row["costly"])
    bases = dict.fromkeys(re.split(r"[<(]", name)[0].rpartition("::")[2] for name in names)
    variant = "compiled" if row["variant"].startswith("compiled") else "eager"
    return row["case"], variant, [base for base in bases if base.isidentifier()][:5] or [".*"]


def _list_cases(command: Sequence[str], context: "Context", needs: Sequence[str]) -> list[str] | str:
    if any(need in context.missing for need in needs):
        return "the cases cannot be listed"
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=context.environ, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return "the cases were not listed within two minutes"
    names = [line.strip() for line in completed.stdout.splitlines() if line.strip()]
    return names if completed.returncode == 0 and names else (completed.stderr.strip().splitlines() or ["no case is listed"])[-1]


@dataclass
class Context:
    """Folders, environment and commands of a call, and its running processes."""

    out: Path
    work: Path
    """logs, reports of pytest, and temporary files"""
    environ: dict[str, str]
    missing: Mapping[str, str]
    tests: Path
    hpcai: tuple[str, ...]
    limit: float | None = None
    pack: bool = False
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopped: bool = False

    @property
    def scratch(self) -> Path:
        return self.work / "scratch"

    def stop(self) -> None:
        """Kill all processes, and start no other."""
        self.stopped = True
        for process in tuple(self.running):
            _kill(process)


# ---- running


def run_job(job: Job, context: Context, limit: float) -> Row:
    """Run the process for at most ``limit`` seconds, kill its process group, and return its result."""
    log, xml = context.work / "logs" / f"{job.file}.txt", context.work / "junit" / f"{Path(job.name).stem}.xml"
    xml.unlink(missing_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+b") as stdout, tempfile.TemporaryFile("w+b") as stderr:
        options: Any = {"stdin": subprocess.DEVNULL, "env": context.environ, "cwd": ROOT, "process_group": 0}
        process = subprocess.Popen(job.command, stdout=stdout, stderr=stderr, **options)
        context.running.add(process)
        timed_out = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            with suppress(subprocess.TimeoutExpired):
                process.send_signal(signal.SIGABRT)  # Python then writes the stacks of its threads
                process.wait(3)
        finally:
            _kill(process)
            process.wait()
            context.running.discard(process)
        elapsed = time.monotonic() - started
        output, errors = _read_tail(stdout), _read_tail(stderr)
    log.write_text(output + (f"\n---- stderr\n{errors}" if errors.strip() else ""))
    result: Row = {"part": job.part, "seconds": round(elapsed, 1), "code": process.returncode}
    result["log"] = str(log.relative_to(context.work))
    if timed_out:
        result |= {"state": "failed", "late": True, "why": f"did not end within {limit:.0f} s, and was killed"}
    if job.part == "tests":
        return result | _parse_tests(xml, result)
    return result | (_parse_counters(output, errors, result) if job.part == "ncu" else _parse_benchmark(output, errors, result))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_LOG))
    return ("[...]\n" if size > _MAX_LOG else "") + file.read().decode(errors="replace")


def _parse_tests(xml: Path, result: Row) -> Row:
    """Return state, counts, failures and skip reasons by the XML report of pytest."""
    counts, failures, skips = Counter[str](), [], Counter[str]()
    with suppress(OSError, ElementTree.ParseError):  # a killed process writes none
        for case in ElementTree.parse(xml).iter("testcase"):
            failures_, skip = [child for kind in ("failure", "error") for child in case.iter(kind)], case.find("skipped")
            counts["failed" if failures_ else "passed" if skip is None else "skipped"] += 1
            if failures_:
                text, message = failures_[0].text or "", failures_[0].get("message") or ""
                lines = [line for line in (text or message).splitlines() if line.startswith(("E ", ">"))]
                failures.append({"name": case.get("name"), "text": ("\n".join(lines) or message)[:_MAX_TEXT]})
            if skip is not None:
                skips[(skip.get("message") or "")[:300]] += 1
    details = {"tests": dict(counts), "failures": failures, "skips": dict(skips)}
    if "state" in result:
        return details
    if result["code"] not in (0, 5) or counts["failed"]:
        reason = f"{counts['failed']} failed" if counts["failed"] else f"pytest ended with code {result['code']}"
        return details | {"state": "failed", "why": reason}
    return details | ({"state": "passed"} if counts["passed"] else {"state": "skipped", "why": "; ".join(skips) or "no test"})


def _parse_benchmark(output: str, errors: str, result: Row) -> Row:
    """Return the state and the last JSON object of the output: a benchmark prints all its results after every row."""
    details = {"found": value} if (value := _last_object(output)) else {}
    if "state" in result:
        return details
    last_line = _last_line(output, errors)
    if result["code"]:
        return {"state": "failed", "why": last_line, **details}
    if not details or not output.rstrip().endswith("}"):
        return {"state": "failed", "why": f"the last line is no JSON: {last_line}", **details}
    return {"state": "passed", **details}


def _last_object(output: str) -> Row | None:
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                return value
    return None


def _last_line(output: str, errors: str) -> str:
    return (errors.strip().splitlines() or output.strip().splitlines() or ["no output"])[-1][:_MAX_TEXT]


_METRICS = ("Duration", "Compute (SM) Throughput", "DRAM Throughput", "L2 Cache Throughput", "Achieved Occupancy",
            "Registers Per Thread")  # fmt: skip


def _parse_counters(output: str, errors: str, result: Row) -> Row:
    """Return the mean metrics of Nsight Compute over the launches of each kernel."""
    table = [line for line in output.splitlines() if line.startswith('"')]
    values: dict[str, dict[str, list[float]]] = {}
    for row in csv.DictReader(table):
        if row.get("Metric Name") in _METRICS:
            label = f"{row['Metric Name']} {row['Metric Unit']}".strip()
            with suppress(ValueError):
                value = float(row["Metric Value"].replace(",", ""))
                values.setdefault(row["Kernel Name"][:120], {}).setdefault(label, []).append(value)
    rows = [{"kernel": kernel, **{label: round(sum(samples) / len(samples), 3) for label, samples in metrics.items()}}
            for kernel, metrics in values.items()]  # fmt: skip
    details = {"found": {"bench": "ncu", "rows": rows}} if rows else {}
    if "state" in result:
        return details
    errors_ = [line for line in output.splitlines() if "==ERROR==" in line]
    if result["code"] or not rows:
        return {"state": "failed", "why": errors_[0][:_MAX_TEXT] if errors_ else _last_line(output, errors), **details}
    return {"state": "passed", **details}


# ---- results


def save_results(context: Context, results: Row) -> None:
    """Write results and report to the output folder, with ``pack`` also archives of logs and caches."""
    for name, text in (("results.json", json.dumps(results, indent=1)), ("index.md", render_page(results))):
        (context.out / f".{name}").write_text(text)
        os.replace(context.out / f".{name}", context.out / name)
    if context.pack:
        _write_archive(context.out / "logs.tar.gz", context.work, [context.work / "logs", context.work / "junit"])
        pack_caches(context.out / "caches.tar.gz", context.work.parent)


def pack_caches(archive: Path, folder: Path) -> None:
    """Archive the newest entries of the compilers' caches, up to 12 MB, if one is newer than the archive."""
    entries = {path.parent for name in ("triton", "inductor") for path in (folder / name).rglob("*") if path.is_file()}
    newest = sorted(entries, key=lambda entry: entry.stat().st_mtime, reverse=True)
    if newest and not (archive.exists() and archive.stat().st_mtime > newest[0].stat().st_mtime):
        _write_archive(archive, folder, newest, _MAX_CACHES)


def _write_archive(archive: Path, folder: Path, entries: Sequence[Path], max_bytes: float = float("inf")) -> None:
    """Archive the files in the ``entries`` of a folder, up to about ``max_bytes``."""
    temporary = archive.with_name(f".{archive.name}")
    with temporary.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=4) as tar:
        for entry in entries:
            if raw.tell() > 0.9 * max_bytes:
                print(f"{archive.name} is full: it holds the newest entries", flush=True)
                break
            for path in sorted(entry.glob("*")):
                if path.is_file():
                    tar.add(path, str(path.relative_to(folder)))
    os.replace(temporary, archive)


def render_page(results: Row) -> str:
    """Return the results as Markdown."""
    machine, entries = results["machine"], results["jobs"]
    gpus = machine.get("gpus") or []
    lines = [f"# {gpus[0]['name'] if gpus else 'No GPU'}: {_summarize(entries)}", "",
             f"commit {results['commit']}, {results['date']}", "",
             *_render_table([{"property": key, "value": x} for key, x in machine.items() if key != "missing"]), ""]  # fmt: skip
    if machine["missing"]:
        items = (f"- **{_LABELS.get(name, name)}**: {why}" for name, why in machine["missing"].items())
        lines += ["## Missing", "", *items, ""]
    if results.get("left"):
        lines += ["## Remaining for the next call", "", ", ".join(results["left"]), ""]
    for part in PARTS:
        part_entries = {name: entry for name, entry in entries.items() if entry["part"] == part}
        if not part_entries:
            continue
        rows = [{"name": name.removeprefix(f"{part}/"), "state": entry["state"], **entry.get("tests", {}),
                 "seconds": entry.get("seconds", ""), "commit": entry.get("commit", ""), "why": entry.get("why", "")}
                for name, entry in part_entries.items()]  # fmt: skip
        lines += [f"## {part}", "", *_render_table(rows), ""]
        for name, entry in part_entries.items():
            for failure in entry.get("failures", ()):
                lines += [f"`{name}` **{failure['name']}**", "", "```", *failure["text"].splitlines()[:12], "```", ""]
            if entry["state"] == "failed" and not entry.get("failures"):
                lines += [f"`{name}`: {entry['why']} ({entry.get('log', 'no log')})", ""]
            if entry.get("skips") and entry["state"] != "skipped":
                lines += [f"`{name}` skipped: " + "; ".join(f"{count} x {why}" for why, count in entry["skips"].items()), ""]
        lines += _render_tables([entry["found"] for entry in part_entries.values() if "found" in entry])
    return "\n".join(lines) + "\n"


def _summarize(entries: Row) -> str:
    counts = Counter(entry["state"] for entry in entries.values())
    texts = [f"{counts[state]} {state}" for state in ("passed", "failed", "cut", "skipped") if counts[state]]
    return ", ".join(texts) or "nothing was run"


def _render_tables(benchmarks: Sequence[Row]) -> list[str]:
    """Return Markdown tables of benchmarks; rows with the same table name are joined."""
    tables: dict[str, list[Row]] = {}
    for result in benchmarks:
        for name, rows in result.items():
            if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                tables.setdefault(str(rows[0].get("table", result.get("part", name) if name == "rows" else name)), []).extend(rows)
    return [line for name, rows in tables.items() for line in (f"### {name}", "", *_render_table(rows), "")]


def _render_table(rows: Sequence[Row]) -> list[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "table"]
    body = [[str(row.get(key, "")).replace("|", "/").replace("\n", " ") for key in keys] for row in rows]
    return ["| " + " | ".join(cells) + " |" for cells in ([key.replace("_", " ") for key in keys], ["---"] * len(keys), *body)]


# ---- command


def main(argv: Sequence[str] | None = None, tests: Path = ROOT / "tests/gpu", hpcai: Sequence[str] = ()) -> int:
    """Run the command. Tests replace the folder ``tests`` of test files and the command ``hpcai``."""
    start_time = time.monotonic()
    args = _parse_args(argv)
    if args.collect:
        try:
            wheels = collect_wheels(args.collect)
        except subprocess.CalledProcessError as problem:
            raise SystemExit(f"pip cannot collect the wheels: {_last_line('', problem.stderr)}") from problem
        size = sum(path.stat().st_size for path in args.collect.glob("*.whl"))
        print(f"{len(wheels)} wheels, {size / 1e6:.0f} MB in {args.collect}: {', '.join(wheels)}")
        if size > _MAX_WHEELS:
            raise SystemExit(f"the wheels exceed the limit of {_MAX_WHEELS / 1e6:.0f} MB")
        return 0
    context, results = _prepare_run(args, tests, hpcai)
    for name, reason in context.missing.items():
        print(f"missing: {_LABELS.get(name, name)}: {reason}", flush=True)
    try:
        timing = _TIMING_ARGS if args.rung else ()
        _run_jobs(list(list_jobs(args.part, context, results, timing)), context, results, args, start_time)
    finally:
        shutil.rmtree(context.scratch, ignore_errors=True)
        save_results(context, results)
    entries = [entry for name, entry in results["jobs"].items() if entry["part"] in args.part and _is_in_rung(name, args)]
    print(f"{_summarize(results['jobs'])}; {context.out / 'index.md'}")
    return int(any(entry["state"] in ("failed", "cut") for entry in entries) or bool(results["left"]))


def _prepare_run(args: Any, tests: Path, hpcai: Sequence[str]) -> tuple[Context, Row]:
    """Print the machine, prepare folders and environment, and load the results of earlier calls."""
    print(f"{platform.node()}: {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}", flush=True)
    print(driver if isinstance(driver := query_driver(), str) else "; ".join(" ".join(gpu.values()) for gpu in driver), flush=True)
    out = args.out.resolve()
    folder = Path(tempfile.gettempdir(), f"hpcai-gpu-{os.getuid()}") if args.pack else out / "environment"
    work = folder / "work" if args.pack else out
    out.mkdir(parents=True, exist_ok=True)
    if args.pack:
        shutil.rmtree(work, ignore_errors=True)
    for name in ("logs", "junit", "scratch"):
        (work / name).mkdir(parents=True, exist_ok=True)
        if args.pack and (out / name).exists():  # written by a call without --pack
            shutil.copytree(out / name, work / name, dirs_exist_ok=True)
            shutil.rmtree(out / name)
    earlier = next((path for path in (out, args.resume) if path and (path / "results.json").exists()), out)
    for name, target in (("logs.tar.gz", work), ("caches.tar.gz", folder)):
        if (earlier / name).exists():
            with tarfile.open(earlier / name) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
                archive.extractall(target)
    environ = prepare_environment(folder, args.wheels)
    machine = inspect_machine(sys.executable, environ, out)
    hpcai = tuple(hpcai) or (sys.executable, *HPCAI)
    context = Context(out, work, environ, machine["missing"], tests, hpcai, args.limit, args.pack)
    return context, _load_results(earlier, machine, args.commit)


def _parse_args(argv: Sequence[str] | None) -> Any:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tests/gpu/run.py", description=__doc__, formatter_class=formatter)
    questions = "; ".join(f"{name}: {rung.question}" for name, rung in RUNGS.items())
    parser.add_argument("--rung", nargs="+", choices=RUNGS, help=questions)
    parser.add_argument("--part", nargs="+", choices=PARTS, help="complete parts (default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only jobs with one of these in their name, such as test_step")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of packages that may be missing")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="the OUT of an earlier call, for its results and caches")
    parser.add_argument("--budget", type=float, metavar="SECONDS",
                      help=f"total time (default with rungs: {_RUNG_BUDGET:.0f} each); the next call runs the rest")  # fmt: skip
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of each process, in place of its default")
    parser.add_argument("--workers", type=int, metavar="N", help="test files in parallel (default: one per four cores, up to 4)")
    parser.add_argument("--again", nargs="?", const="all", choices=("all", "failed"), help="repeat all jobs, or the failed ones")
    parser.add_argument("--pack", action="store_true", help="write four files: results, report, logs, caches of compilers")
    parser.add_argument("--collect", type=Path, metavar="DIR", help="only download the wheels")
    parser.add_argument("--commit", metavar="NAME", help="commit of the results, if this copy has no history")
    args = parser.parse_args(argv)
    if args.rung and args.part:
        parser.error("--rung names its parts; give one of --rung and --part")
    rungs = [RUNGS[name] for name in args.rung or ()]
    args.part = args.part or [part for part in PARTS if not rungs or any(part in rung.jobs for rung in rungs)]
    if rungs:
        args.budget = args.budget or _RUNG_BUDGET * len(rungs)
        args.limit = args.limit or max(rung.limit for rung in rungs)
    return args


def _is_in_rung(name: str, args: Any) -> bool:
    part = name.partition("/")[0]
    return not args.rung or any(pattern in name for rung in args.rung for pattern in RUNGS[rung].jobs.get(part, ()))


def _load_results(earlier: Path, machine: Row, commit: str | None) -> Row:
    """Return the results of earlier calls. Each entry has its commit."""
    if commit is None:
        commit = "unknown"
        with suppress(OSError, subprocess.CalledProcessError):  # no git, or a copy without its history
            command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    jobs: Row = {}
    with suppress(OSError, ValueError):
        jobs = json.loads((earlier / "results.json").read_text())["jobs"]
    return {"commit": commit, "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "left": [], "jobs": jobs}


def _run_jobs(jobs: Sequence[Job], context: Context, results: Row, args: Any, start_time: float) -> None:
    entries, num_started, remaining = results["jobs"], 0, []
    stamp = {"commit": results["commit"], "date": results["date"]}

    def is_due(job: Job) -> bool:
        """Return whether a job has no result, failed at another commit, or is to be repeated."""
        previous = entries.get(job.name, {})
        changed = previous.get("state") == "failed" and previous.get("commit") != results["commit"]
        repeat = args.again == "all" or (args.again == "failed" and previous.get("state") == "failed")
        return previous.get("state") not in ("passed", "failed") or changed or repeat

    selected = [job for job in jobs if not args.only or any(name in job.name for name in args.only)]
    selected = [job for job in selected if _is_in_rung(job.name, args) and is_due(job)]
    if part_names := {job.name for job in jobs}:
        for name in [name for name in entries if name in PARTS and name not in part_names]:
            del entries[name]  # its cases could not be listed before
    lock, workers = Lock(), args.workers or max(1, min(4, len(os.sched_getaffinity(0)) // 4))

    def run_one(job: Job) -> None:
        nonlocal num_started
        with lock:
            missing = [context.missing[need] for need in job.needs if need in context.missing]
            if missing:
                entries[job.name] = {"part": job.part, "state": "skipped", "why": missing[0], **stamp}
                print(f"{job.name}: skipped: {missing[0]}", flush=True)
                return
            if not job.command:
                entries[job.name] = {"part": job.part, "state": "failed", "why": job.needs[-1].removeprefix("list: "), **stamp}
                return
            available = args.budget - _RESERVE - (time.monotonic() - start_time) if args.budget else float("inf")
            previous = entries.get(job.name, {})
            needed = job.limit if previous.get("state") == "cut" else min(job.limit, 1.5 * previous.get("seconds", job.typical))
            if context.stopped or (available < needed and (num_started or available <= 0)):
                remaining.append(job.name)
                return
            num_started += 1
            print(f"{job.name} ...", flush=True)
        result = run_job(job, context, min(job.limit, available))
        with lock:
            if context.stopped:
                return
            if result.pop("late", False) and available < job.limit and previous.get("state") != "cut":
                result |= {"state": "cut", "why": f"the budget ended after {result['seconds']} s; the next call begins with it"}
                remaining.append(job.name)
            entries[job.name] = result | stamp
            reason = f": {result['why']}" if result.get("why") else ""
            print(f"{job.name}: {result['state']} in {result['seconds']} s{reason}", flush=True)
            results["left"] = remaining
            save_results(context, results)

    def in_parallel(job: Job) -> bool:
        return job.part == "tests" and Path(job.name).name not in EXCLUSIVE

    selected = sorted(selected, key=lambda job: (entries.get(job.name, {}).get("state") != "cut", not in_parallel(job)))
    for parallel, group in itertools.groupby(selected, in_parallel):
        with ThreadPoolExecutor(workers if parallel else 1) as pool:
            try:
                list(pool.map(run_one, group))
            except BaseException:
                context.stop()
                raise
    results["left"] = remaining
    if remaining:
        print(f"remaining for the next call: {', '.join(remaining)}", flush=True)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # a core dump has gigabytes
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
