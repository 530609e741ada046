"""`make gpu`: what only a GPU can prove and measure, one process after another, on a machine that may have little else.

    python3 tests/gpu/run.py [--rung R1 ...] [--wheels DIR] [--out DIR] [--resume DIR] [--pack]
    python3 tests/gpu/run.py [--part tests kernels apps data training ncu] [--only NAME ...] [--budget SECONDS] ...
    python3 tests/gpu/run.py --collect DIR      # on a machine with a network: the wheels that another one may lack

First it looks at the machine. What is missing there is told with what to do about it, and what needs it is skipped by name.
Then each file of tests, each case of `hpcai bench gpu`, each part of `hpcai bench data` and each training is a process with a time
limit: one that fails or hangs ends nothing but itself. OUT/results.json is written after each of them, so that another call goes
on where this one stopped, was stopped, or ran out of its ``--budget``; OUT/index.md is the page to read. A row says which commit
it is of: another commit runs again what failed, and keeps what passed.

A rung is a list of jobs for a GPU that is lent for minutes. With ``--pack`` OUT has four files, whenever the call is cut off:
results, page, logs, and the caches of torch's and Triton's compilers. ``--resume OUT`` gives them to the next machine.
HPCAI_TEST_DEVICE=cpu runs the same jobs without a GPU, at tiny sizes.

The exit code is 0 when all that could run has passed. This file needs nothing but Python's own library, and never installs torch.
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
NEEDED = ("pytest", "hypothesis", "numpy", "pydantic", "h5py", "yaml", "rich", "safetensors")  # what tests and benches import
QUIET = ("-q", "--disable-pip-version-check")
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:",
          *(word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")))  # fmt: skip
THEIRS = re.compile(r"(torch|triton|numpy|mpich|nvidia-(?!ml-py).*|cuda-.*)$")  # what a machine with a GPU has in its own form
_LOG = 200_000  # bytes of a log that are kept: its end
_TEXT = 1500  # characters of a failure that results hold
_SPARE = 8.0  # seconds of a budget that are kept for what is written at the end
_WORDS = {"gpu": "no GPU", "compiler": "Triton's compiler", "nccl": "NCCL", "several": "one GPU", "ncu": "Nsight Compute"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Rung:
    """The question of a few minutes on a GPU; the jobs by part and by words of their names; seconds of one process."""

    question: str
    jobs: Mapping[str, tuple[str, ...]]
    limit: float = 150.0


_KERNELS = "test_kernels", "test_capture", "test_one_rank", "test_doctor"
_RUNTIME = "test_step", "test_together", "test_data", "test_float8", "timing"
_MODELS = "test_cosmoflow", "test_deepcam", "test_unet3d", "test_dimenet", "test_openfold", "test_llm", "test_diffusion"
_SCIENCE = "cosmoflow", "deepcam", "opencatalyst", "openfold-crop-256", "unet3d"
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
_BUDGET = 330.0  # seconds of a rung
_TIMED = ("--variants", "eager", "captured", "compiled-captured", "--seconds", "4", "--repeats", "3")


@dataclass(frozen=True)
class Job:
    """One process: what it is called, what it runs, what of the machine it needs, and for how many seconds it may."""

    name: str
    part: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    limit: float
    usual: float
    """seconds that such a process takes: it is begun only where so many are left of a budget"""

    @property
    def file(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name)


# Files of tests that need more than a GPU. Those of one test are skipped by the test.
MORE: dict[str, tuple[str, ...]] = {
    "test_kernels.py": ("compiler",), "test_one_rank.py": ("nccl",), "test_several.py": ("nccl", "several"),
}  # fmt: skip
EXCLUSIVE = "test_full.py", "test_several.py", "timing"  # they fill a GPU, or take times
LONGER = {"test_full.py": 500.0, "test_several.py": 500.0}
LONGER |= dict.fromkeys(("test_step.py", "test_dimenet.py", "test_openfold.py"), 400.0)  # they compile
DATA = ("direct", "peers")
TRAINING = ("cosmoflow-small", "llm-small", "cosmoflow-128")
_WHEELS, _CACHES = 16e6, 12e6  # bytes of wheels that travel to another machine, and of an archive of caches that comes back


# ---- the machine

_LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hpcai.kernels import triton_support
from importlib.util import find_spec
found = {"compiler": triton_support.MISSING, "absent": [name for name in sys.argv[2:] if find_spec(name) is None], "gpus": []}
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    found["gpus"] = [{"name": p.name, "gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
                     for p in (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))]
    if found["gpus"]:
        found["answer"] = (torch.arange(1000, device="cuda").sum() == 499500).item()
        found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
try:
    import triton
    found["triton"] = triton.__version__
except Exception as error:
    pass
print("found:" + json.dumps(found))
"""
_COMPILE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from hpcai.kernels import philox
assert torch.equal(philox.bits(7, 0, 999, device="cuda").cpu(), philox.bits(7, 0, 999)), "a kernel computed other bits than the CPU"
print("found:true")
"""
_SMI = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit",
        "power.max_limit", "temperature.gpu", "compute_mode", "mig.mode.current", "utilization.gpu")  # fmt: skip


def look(python: str, environ: Mapping[str, str], out: Path) -> Row:
    """What the machine has; ``missing`` says, for what parts may need, what is not there and what to do."""
    found: Row = {"machine": platform.node(), "system": platform.platform(), "cores": len(os.sched_getaffinity(0)),
                  "python": f"{platform.python_version()} in {sys.prefix}", "driver": driver(),
                  "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
                  "disk_gib": round(shutil.disk_usage(out).free / 2**30, 1)}  # fmt: skip
    found |= _ask([python, "-c", _LOOK, str(ROOT), *NEEDED], environ)
    found["missing"] = _missing(found, out, lambda: _ask([python, "-c", _COMPILE, str(ROOT)], environ, "kernel"))
    return found


def _missing(seen: Row, out: Path, compile_one: Callable[[], Any]) -> dict[str, str]:
    """What jobs may need and is not there, with what to do."""
    missing: dict[str, str] = {}
    driver, disk = seen["driver"], seen["disk_gib"]
    if absent := seen.get("absent", [] if "torch" in seen else list(NEEDED)):
        what = "cannot be imported; make install, or carry wheels along (make wheels) and give --wheels"
        missing["packages"] = f"{', '.join(absent)} {what}"
    if shutil.which("ncu") is None:
        missing["ncu"] = "there is no ncu here; it is a package of CUDA's toolkit (nsight-compute)"
    if disk < 8:
        missing["disk"] = f"{out} has {disk} GiB free, and the benchmark of reading makes files of 2; give --out on a larger disk"
    if ON_CPU:
        return missing
    why, cuda = seen.get("error"), seen.get("cuda")
    if not seen.get("gpus"):
        why = why or (driver if isinstance(driver, str) else "torch sees none; is this torch built for CUDA?")
        missing["gpu"] = f"{why} (torch {seen.get('torch', 'cannot be imported')}, CUDA {cuda})"
    elif not seen.get("answer"):
        missing["gpu"] = f"a first sum on the GPU fails: {why or 'a wrong number'}; is the driver as new as CUDA {cuda}?"
    if "gpu" in missing:
        return missing | dict.fromkeys(("compiler", "nccl", "several"), missing["gpu"])
    if seen.get("compiler"):
        missing["compiler"] = seen["compiler"]
    elif (tried := compile_one()) is not True:
        missing["compiler"] = f"a first kernel cannot be made: {tried.get('error')}"
    if not seen.get("nccl"):
        missing["nccl"] = "this torch has no NCCL; install the build for CUDA on Linux"
    if len(seen["gpus"]) < 2:
        missing["several"] = "there is one GPU, and this needs two or more"
    return missing


def _ask(command: Sequence[str], environ: Mapping[str, str], what: str = "torch") -> Any:
    """What a process prints behind ``found:``, or an error: a library that does not load may take its process down."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=dict(environ), check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer about {what} within three minutes: a file system or the driver hangs"}
    for line in done.stdout.splitlines():
        if line.startswith("found:"):
            return json.loads(line.removeprefix("found:"))
    return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:_TEXT]}


@functools.cache
def driver() -> Any:
    """A row of what nvidia-smi says for each GPU, or why it says nothing."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi: there is no NVIDIA driver here"
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer within a minute: the driver hangs"
    if done.returncode:
        return f"nvidia-smi: {(done.stdout + done.stderr).strip()[:_TEXT]}"
    return [dict(zip(_SMI, map(str.strip, line.split(",")))) for line in done.stdout.splitlines() if line.strip()]


# ---- an environment, and the wheels for it


def prepare(folder: Path, wheels: Path | None) -> dict[str, str]:
    """The environment of all processes: this Python's packages and, from ``wheels``, those that it lacks."""
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
        if not _installed(_canonical(path.name.split("-")[0])):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
    return environ


def requirements(pyproject: Path) -> list[str]:
    """What library, readings of a GPU, neighbour lists and tests ask for, but what a machine with a GPU has in its own form."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["gpu"], *(line for line in extras["opencatalyst"] if line.startswith("vesin")),
             *(line for line in extras["dev"] if line.startswith(("pytest", "hypothesis")))]  # fmt: skip
    lines = [line for line in lines if not line.startswith(("matplotlib", "pytest-xdist"))]  # no report, and one test at a time
    return [line for line in lines if not THEIRS.match(_canonical(re.split(r"[^\w.-]", line)[0]))]


def collect(folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> list[str]:
    """Put the wheels into ``folder`` for Python 3.12 on Linux, x86-64, whatever this machine is, but those that the other machine
    has by itself -> their names and versions."""
    shutil.rmtree(folder, ignore_errors=True)  # of two versions of one package the wrong one might be taken
    asked = [*pip, "download", *QUIET, "-d", str(folder), *TARGET, *requirements(ROOT / "pyproject.toml")]
    subprocess.run(asked, check=True, capture_output=True, text=True, timeout=600)
    found = {path: path.name.split("-")[:2] for path in sorted(folder.glob("*.whl"))}
    for path, (name, _) in found.items():
        if THEIRS.match(_canonical(name)):
            path.unlink()
    return [f"{_canonical(name)}=={version}" for path, (name, version) in found.items() if path.exists()]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# ---- what there is to do


def jobs(parts: Sequence[str], place: "Place", results: Row | None = None, timed: Sequence[str] = ()) -> Iterator[Job]:
    """All processes of the parts; ``timed``: more words for those that take times. A part whose cases cannot be listed is one job
    by its name, which says why."""
    sizes = ("--seconds", "1", "--repeats", "2") if ON_CPU else ()
    command: tuple[str, ...]
    for part in parts:
        if part == "tests":
            files = sorted(place.tests.glob("test_*.py"))
            timings = [path for path in files if "mark.timing" in path.read_text()]
            for name, paths in [*((path.name, [path]) for path in files), *([("timing", timings)] if timings else [])]:
                xml = place.work / "junit" / f"{Path(name).stem}.xml"
                limit = LONGER.get(name, place.limit or 300.0)
                command = (sys.executable, "-m", "pytest", "-q", "--color=no", f"--junitxml={xml}", "-o", "junit_logging=no",
                           "-o", f"faulthandler_timeout={0.8 * limit:.0f}", f"--rootdir={ROOT}",
                           "-m", "timing" if name == "timing" else "not timing", *map(str, paths))  # fmt: skip
                yield Job(f"tests/{name}", part, command, ("packages", "gpu", *MORE.get(name, ())), place.limit or limit, 60.0)
        elif part == "data":
            little = ("--gib", "0.25", "--repeats", "1") if ON_CPU else ()
            for name in DATA:
                command = (*place.hpcai, "bench", "data", name, "--json", "--directory", str(place.scratch), *little)
                yield Job(f"data/{name}", part, command, ("packages", "disk"), place.limit or 400.0, 120.0)
        elif part == "training":
            for name in TRAINING:
                command = (sys.executable, str(ROOT / "tests/gpu/programs/training.py"), name, str(place.scratch / name))
                command += ("--tiny",) if ON_CPU else ()
                yield Job(f"training/{name}", part, command, ("packages", "gpu", "disk"), place.limit or 300.0, 200.0)
        elif part == "ncu":
            case, variant, kernels = slowest(results or {"jobs": {}})
            # Kernels that run once a step are past their warm-up after forty of all five.
            command = ("ncu", "--csv", "--clock-control", "none", "--section", "SpeedOfLight", "--section", "LaunchStats",
                       "--section", "Occupancy", "--kernel-name", f"regex:^({'|'.join(kernels)})",
                       "--launch-skip", "40", "--launch-count", "20",
                       *place.hpcai, "bench", "gpu", "apps", "--case", case, "--variants", variant, "--json", "--seconds", "1",
                       "--repeats", "1")  # fmt: skip
            yield Job(f"ncu/{case}", part, command, ("packages", "gpu", "ncu"), place.limit or 250.0, 120.0)
        else:
            needs = ("packages", "gpu", *(("compiler",) if part == "kernels" else ()))
            command = (*place.hpcai, "bench", "gpu")
            cases = _cases((*command, "--list", part), place, needs)
            if ON_CPU and part == "kernels" and isinstance(cases, list):  # the tiny sizes of a kernel are all the same
                cases = list({case.partition("-")[0]: case for case in cases}.values())
            for case in cases if isinstance(cases, list) else ():
                more = (*(timed if part == "apps" else ()), *sizes)
                words = (*command, part, "--case", case, "--json", *more)
                yield Job(f"{part}/{case}", part, words, needs, place.limit or 300.0, 60.0)
            if isinstance(cases, str):
                yield Job(part, part, (), (*needs, f"list: {cases}"), 0.0, 0.0)


def slowest(results: Row) -> tuple[str, str, list[str]]:
    """Of the measured cases of apps the slowest against what is published, or against this GPU's rate; the variant that launches
    its kernels one by one, for a graph hides them; its five longest kernels."""
    rows = [row for job in results["jobs"].values() if job["part"] == "apps" for row in job.get("found", {}).get("rows", ())]
    rows = [row for row in rows if row.get("costly")]
    if not rows:
        return "cosmoflow-batch-4", "eager", [".*"]
    row = min(rows, key=lambda row: row.get("over") or row.get("of_rate") or 1.0)
    names = (re.sub(r"\(anonymous namespace\)::|^void ", "", name) for name, *_ in row["costly"])
    bases = dict.fromkeys(re.split(r"[<(]", name)[0].rpartition("::")[2] for name in names)
    variant = "compiled" if row["variant"].startswith("compiled") else "eager"
    return row["case"], variant, [base for base in bases if base.isidentifier()][:5] or [".*"]


def _cases(command: Sequence[str], place: "Place", needs: Sequence[str]) -> list[str] | str:
    if any(need in place.missing for need in needs):
        return "the cases cannot be listed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=place.environ, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return "the cases were not listed within two minutes"
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return names if done.returncode == 0 and names else (done.stderr.strip().splitlines() or ["no case is listed"])[-1]


@dataclass
class Place:
    """Where and by what all of it runs."""

    out: Path
    work: Path
    """logs, reports of pytest, and files that last as long as the call"""
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
        """End all processes, and begin no other."""
        self.stopped = True
        for process in tuple(self.running):
            _kill(process)


# ---- doing it


def act(job: Job, place: Place, seconds: float) -> Row:
    """Run the process for so many seconds at most -> what became of it. Its whole process group ends with it."""
    log, xml = place.work / "logs" / f"{job.file}.txt", place.work / "junit" / f"{Path(job.name).stem}.xml"
    xml.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+b") as said, tempfile.TemporaryFile("w+b") as errors:
        about: Any = {"stdin": subprocess.DEVNULL, "env": place.environ, "cwd": ROOT, "process_group": 0}
        process = subprocess.Popen(job.command, stdout=said, stderr=errors, **about)
        place.running.add(process)
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            with suppress(subprocess.TimeoutExpired):
                process.send_signal(signal.SIGABRT)  # on which Python writes the stacks of its threads
                process.wait(3)
        finally:
            _kill(process)
            process.wait()
            place.running.discard(process)
        spent = time.monotonic() - began
        lines, texts = _end(said), _end(errors)
    log.write_text(lines + (f"\n---- stderr\n{texts}" if texts.strip() else ""))
    found: Row = {"part": job.part, "seconds": round(spent, 1), "code": process.returncode, "log": str(log.relative_to(place.work))}
    if late:
        found |= {"state": "failed", "late": True, "why": f"did not end within {seconds:.0f} s, and was killed"}
    if job.part == "tests":
        return found | _of_tests(xml, found)
    return found | (_of_counters(lines, texts, found) if job.part == "ncu" else _of_bench(lines, texts, found))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process, and all that it may have left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LOG))
    return ("[...]\n" if size > _LOG else "") + file.read().decode(errors="replace")


def _of_tests(xml: Path, found: Row) -> Row:
    """State, counts, first lines of the failures and reasons of what was skipped, by pytest's own report."""
    counts, failures, skips = Counter[str](), [], Counter[str]()
    with suppress(OSError, ElementTree.ParseError):  # a process that was killed leaves none
        for case in ElementTree.parse(xml).iter("testcase"):
            bad, skip = [child for kind in ("failure", "error") for child in case.iter(kind)], case.find("skipped")
            counts["failed" if bad else "passed" if skip is None else "skipped"] += 1
            if bad:
                text, message = bad[0].text or "", bad[0].get("message") or ""
                lines = [line for line in (text or message).splitlines() if line.startswith(("E ", ">"))]
                failures.append({"name": case.get("name"), "text": ("\n".join(lines) or message)[:_TEXT]})
            if skip is not None:
                skips[(skip.get("message") or "")[:300]] += 1
    more = {"tests": dict(counts), "failures": failures, "skips": dict(skips)}
    if "state" in found:
        return more
    if found["code"] not in (0, 5) or counts["failed"]:
        why = f"{counts['failed']} failed" if counts["failed"] else f"pytest ended with code {found['code']}"
        return more | {"state": "failed", "why": why}
    return more | ({"state": "passed"} if counts["passed"] else {"state": "skipped", "why": "; ".join(skips) or "it has no test"})


def _of_bench(lines: str, errors: str, found: Row) -> Row:
    """State, and what the last line of JSON says: a bench prints all that it knows after every row."""
    rows = {"found": told} if (told := _last_object(lines)) else {}
    if "state" in found:
        return rows
    last = _last_line(lines, errors)
    if found["code"]:
        return {"state": "failed", "why": last, **rows}
    if not rows or not lines.rstrip().endswith("}"):
        return {"state": "failed", "why": f"the last line is no JSON: {last}", **rows}
    return {"state": "passed", **rows}


def _last_object(lines: str) -> Row | None:
    for line in reversed(lines.splitlines()):
        with suppress(ValueError):
            if isinstance(told := json.loads(line), dict):
                return told
    return None


def _last_line(lines: str, errors: str) -> str:
    return (errors.strip().splitlines() or lines.strip().splitlines() or ["it said nothing"])[-1][:_TEXT]


_METRICS = ("Duration", "Compute (SM) Throughput", "DRAM Throughput", "L2 Cache Throughput", "Achieved Occupancy",
            "Registers Per Thread")  # fmt: skip


def _of_counters(lines: str, errors: str, found: Row) -> Row:
    """A row for each kernel that Nsight Compute has measured: means over its launches."""
    table = [line for line in lines.splitlines() if line.startswith('"')]
    values: dict[str, dict[str, list[float]]] = {}
    for row in csv.DictReader(table):
        if row.get("Metric Name") in _METRICS:
            label = f"{row['Metric Name']} {row['Metric Unit']}".strip()
            with suppress(ValueError):
                value = float(row["Metric Value"].replace(",", ""))
                values.setdefault(row["Kernel Name"][:120], {}).setdefault(label, []).append(value)
    rows = [{"kernel": kernel, **{label: round(sum(each) / len(each), 3) for label, each in every.items()}}
            for kernel, every in values.items()]  # fmt: skip
    told = {"found": {"bench": "ncu", "rows": rows}} if rows else {}
    if "state" in found:
        return told
    refused = [line for line in lines.splitlines() if "==ERROR==" in line]
    if found["code"] or not rows:
        return {"state": "failed", "why": refused[0][:_TEXT] if refused else _last_line(lines, errors), **told}
    return {"state": "passed", **told}


# ---- what is told


def save(place: Place, results: Row) -> None:
    """All that is known so far, in the folder that comes back."""
    for name, text in (("results.json", json.dumps(results, indent=1)), ("index.md", page(results))):
        (place.out / f".{name}").write_text(text)
        os.replace(place.out / f".{name}", place.out / name)
    if place.pack:
        _pack(place.out / "logs.tar.gz", place.work, [place.work / "logs", place.work / "junit"])
        pack_caches(place.out / "caches.tar.gz", place.work.parent)


def pack_caches(archive: Path, folder: Path) -> None:
    """Entries of the compilers' caches, the newest first, as many as an archive of 12 MB takes; nothing where none is new."""
    entries = {path.parent for name in ("triton", "inductor") for path in (folder / name).rglob("*") if path.is_file()}
    newest = sorted(entries, key=lambda entry: entry.stat().st_mtime, reverse=True)
    if newest and not (archive.exists() and archive.stat().st_mtime > newest[0].stat().st_mtime):
        _pack(archive, folder, newest, _CACHES)


def _pack(archive: Path, folder: Path, entries: Sequence[Path], most: float = float("inf")) -> None:
    """Files below the ``entries`` of a folder, to about so many bytes."""
    part = archive.with_name(f".{archive.name}")
    with part.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=4) as packed:
        for entry in entries:
            if raw.tell() > 0.9 * most:
                print(f"{archive.name} is full: it holds the newest entries", flush=True)
                break
            for path in sorted(entry.glob("*")):
                if path.is_file():
                    packed.add(path, str(path.relative_to(folder)))
    os.replace(part, archive)


def page(results: Row) -> str:
    """All of it as Markdown."""
    machine, entries = results["machine"], results["jobs"]
    gpus = machine.get("gpus") or []
    lines = [f"# {gpus[0]['name'] if gpus else 'No GPU'}: {_sums(entries)}", "",
             f"commit {results['commit']}, {results['date']}", "",
             *_table([{"what": name, "found": value} for name, value in machine.items() if name != "missing"]), ""]  # fmt: skip
    if machine["missing"]:
        told = (f"- **{_WORDS.get(name, name)}**: {why}" for name, why in machine["missing"].items())
        lines += ["## Missing here", "", *told, ""]
    if results.get("left"):
        lines += ["## Left for another call", "", ", ".join(results["left"]), ""]
    for part in PARTS:
        mine = {name: entry for name, entry in entries.items() if entry["part"] == part}
        if not mine:
            continue
        rows = [{"name": name.removeprefix(f"{part}/"), "state": entry["state"], **entry.get("tests", {}),
                 "seconds": entry.get("seconds", ""), "commit": entry.get("commit", ""), "why": entry.get("why", "")}
                for name, entry in mine.items()]  # fmt: skip
        lines += [f"## {part}", "", *_table(rows), ""]
        for name, entry in mine.items():
            for failure in entry.get("failures", ()):
                lines += [f"`{name}` **{failure['name']}**", "", "```", *failure["text"].splitlines()[:12], "```", ""]
            if entry["state"] == "failed" and not entry.get("failures"):
                lines += [f"`{name}`: {entry['why']} ({entry.get('log', 'no log')})", ""]
            if entry.get("skips") and entry["state"] != "skipped":
                lines += [f"`{name}` skipped: " + "; ".join(f"{count} x {why}" for why, count in entry["skips"].items()), ""]
        lines += _figures([entry["found"] for entry in mine.values() if "found" in entry])
    return "\n".join(lines) + "\n"


def _sums(entries: Row) -> str:
    counts = Counter(entry["state"] for entry in entries.values())
    told = [f"{counts[state]} {state}" for state in ("passed", "failed", "cut", "skipped") if counts[state]]
    return ", ".join(told) or "nothing was run"


def _figures(every: Sequence[Row]) -> list[str]:
    """Tables of benches: rows of one name stand together."""
    tables: dict[str, list[Row]] = {}
    for found in every:
        for name, rows in found.items():
            if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                tables.setdefault(str(rows[0].get("table", found.get("part", name) if name == "rows" else name)), []).extend(rows)
    return [line for name, rows in tables.items() for line in (f"### {name}", "", *_table(rows), "")]


def _table(rows: Sequence[Row]) -> list[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "table"]
    written = [[str(row.get(key, "")).replace("|", "/").replace("\n", " ") for key in keys] for row in rows]
    return ["| " + " | ".join(cells) + " |" for cells in ([key.replace("_", " ") for key in keys], ["---"] * len(keys), *written)]


# ---- the command


def main(argv: Sequence[str] | None = None, tests: Path = ROOT / "tests/gpu", hpcai: Sequence[str] = ()) -> int:
    """``tests`` and ``hpcai``: a folder of test files, and a command, other than the repository's."""
    began = time.monotonic()
    words = _words(argv)
    if words.collect:
        try:
            chosen = collect(words.collect)
        except subprocess.CalledProcessError as problem:
            raise SystemExit(f"pip cannot collect the wheels: {_last_line('', problem.stderr)}") from problem
        size = sum(path.stat().st_size for path in words.collect.glob("*.whl"))
        print(f"{len(chosen)} wheels, {size / 1e6:.0f} MB in {words.collect}: {', '.join(chosen)}")
        if size > _WHEELS:
            raise SystemExit(f"they are more than the {_WHEELS / 1e6:.0f} MB that may travel to another machine")
        return 0
    place, results = _prepared(words, tests, hpcai)
    for name, why in place.missing.items():
        print(f"missing: {_WORDS.get(name, name)}: {why}", flush=True)
    try:
        timed = _TIMED if words.rung else ()
        _go(list(jobs(words.part, place, results, timed)), place, results, words, began)
    finally:
        shutil.rmtree(place.scratch, ignore_errors=True)
        save(place, results)
    entries = [entry for name, entry in results["jobs"].items() if entry["part"] in words.part and _in_rung(name, words)]
    print(f"{_sums(results['jobs'])}; {place.out / 'index.md'}")
    return int(any(entry["state"] in ("failed", "cut") for entry in entries) or bool(results["left"]))


def _prepared(words: Any, tests: Path, hpcai: Sequence[str]) -> tuple[Place, Row]:
    """The folders, the environment, and the results of earlier calls; says at once what machine this is."""
    print(f"{platform.node()}: {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}", flush=True)
    print(said if isinstance(said := driver(), str) else "; ".join(" ".join(gpu.values()) for gpu in said), flush=True)
    out = words.out.resolve()
    folder = Path(tempfile.gettempdir(), f"hpcai-gpu-{os.getuid()}") if words.pack else out / "environment"
    work = folder / "work" if words.pack else out
    out.mkdir(parents=True, exist_ok=True)
    if words.pack:
        shutil.rmtree(work, ignore_errors=True)
    for name in ("logs", "junit", "scratch"):
        (work / name).mkdir(parents=True, exist_ok=True)
        if words.pack and (out / name).exists():  # of a call without it
            shutil.copytree(out / name, work / name, dirs_exist_ok=True)
            shutil.rmtree(out / name)
    earlier = next((path for path in (out, words.resume) if path and (path / "results.json").exists()), out)
    for name, where in (("logs.tar.gz", work), ("caches.tar.gz", folder)):
        if (earlier / name).exists():
            with tarfile.open(earlier / name) as archive:
                archive.extractall(where, filter="data")
    environ = prepare(folder, words.wheels)
    machine = look(sys.executable, environ, out)
    hpcai = tuple(hpcai) or (sys.executable, *HPCAI)
    place = Place(out, work, environ, machine["missing"], tests, hpcai, words.limit, words.pack)
    return place, _begun(earlier, machine, words.commit)


def _words(argv: Sequence[str] | None) -> Any:
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="tests/gpu/run.py", description=__doc__, formatter_class=form)
    questions = "; ".join(f"{name}: {rung.question}" for name, rung in RUNGS.items())
    made.add_argument("--rung", nargs="+", choices=RUNGS, help=questions)
    made.add_argument("--part", nargs="+", choices=PARTS, help="whole parts; all of them without --rung and --part")
    made.add_argument("--only", nargs="+", metavar="NAME", help="processes with one of these in their name, such as test_step")
    made.add_argument("--wheels", type=Path, metavar="DIR", help="packages that may be missing here")
    made.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    made.add_argument("--resume", type=Path, metavar="DIR", help="the OUT of an earlier call: its results and its caches")
    made.add_argument("--budget", type=float, metavar="SECONDS",
                      help=f"end within so many (with rungs {_BUDGET:.0f} each); another call does what is left")  # fmt: skip
    made.add_argument("--limit", type=float, metavar="SECONDS", help="of one process, in place of its own")
    made.add_argument("--workers", type=int, metavar="N", help="files of tests in parallel; one for each four cores, four at most")
    made.add_argument("--again", nargs="?", const="all", choices=("all", "failed"), help="once more what was done, or what failed")
    made.add_argument("--pack", action="store_true", help="leave four files: results, the page, all logs, caches of compilers")
    made.add_argument("--collect", type=Path, metavar="DIR", help="download the wheels, and nothing else")
    made.add_argument("--commit", metavar="NAME", help="what the rows are of, where this copy has no history")
    words = made.parse_args(argv)
    if words.rung and words.part:
        made.error("--rung names its parts; give one of --rung and --part")
    rungs = [RUNGS[name] for name in words.rung or ()]
    words.part = words.part or [part for part in PARTS if not rungs or any(part in rung.jobs for rung in rungs)]
    if rungs:
        words.budget = words.budget or _BUDGET * len(rungs)
        words.limit = words.limit or max(rung.limit for rung in rungs)
    return words


def _in_rung(name: str, words: Any) -> bool:
    part = name.partition("/")[0]
    return not words.rung or any(one in name for rung in words.rung for one in RUNGS[rung].jobs.get(part, ()))


def _begun(earlier: Path, machine: Row, commit: str | None) -> Row:
    """Results so far. Each says which commit it is of."""
    if commit is None:
        commit = "unknown"
        with suppress(OSError, subprocess.CalledProcessError):  # no git, or a copy without its history
            command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    kept: Row = {}
    with suppress(OSError, ValueError):
        kept = json.loads((earlier / "results.json").read_text())["jobs"]
    return {"commit": commit, "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "left": [], "jobs": kept}


def _go(every: Sequence[Job], place: Place, results: Row, words: Any, began: float) -> None:
    done, started, left = results["jobs"], 0, []
    stamp = {"commit": results["commit"], "date": results["date"]}

    def asked(job: Job) -> bool:
        """Neither passed nor failed, or failed at another commit, or to be done again."""
        before = done.get(job.name, {})
        mended = before.get("state") == "failed" and before.get("commit") != results["commit"]
        again = words.again == "all" or (words.again == "failed" and before.get("state") == "failed")
        return before.get("state") not in ("passed", "failed") or mended or again

    chosen = [job for job in every if not words.only or any(name in job.name for name in words.only)]
    chosen = [job for job in chosen if _in_rung(job.name, words) and asked(job)]
    if part_names := {job.name for job in every}:
        for name in [name for name in done if name in PARTS and name not in part_names]:
            del done[name]  # a part that could not be listed before
    lock, workers = Lock(), words.workers or max(1, min(4, len(os.sched_getaffinity(0)) // 4))

    def do(job: Job) -> None:
        nonlocal started
        with lock:
            lacks = [place.missing[need] for need in job.needs if need in place.missing]
            if lacks:
                done[job.name] = {"part": job.part, "state": "skipped", "why": lacks[0], **stamp}
                print(f"{job.name}: skipped: {lacks[0]}", flush=True)
                return
            if not job.command:
                done[job.name] = {"part": job.part, "state": "failed", "why": job.needs[-1].removeprefix("list: "), **stamp}
                return
            rest = words.budget - _SPARE - (time.monotonic() - began) if words.budget else float("inf")
            before = done.get(job.name, {})
            need = job.limit if before.get("state") == "cut" else min(job.limit, 1.5 * before.get("seconds", job.usual))
            if place.stopped or (rest < need and (started or rest <= 0)):
                left.append(job.name)
                return
            started += 1
            print(f"{job.name} ...", flush=True)
        found = act(job, place, min(job.limit, rest))
        with lock:
            if place.stopped:
                return
            if found.pop("late", False) and rest < job.limit and before.get("state") != "cut":
                found |= {"state": "cut", "why": f"the budget ended after {found['seconds']} s of it; the next call begins with it"}
                left.append(job.name)
            done[job.name] = found | stamp
            why = f": {found['why']}" if found.get("why") else ""
            print(f"{job.name}: {found['state']} in {found['seconds']} s{why}", flush=True)
            results["left"] = left
            save(place, results)

    def in_parallel(job: Job) -> bool:
        return job.part == "tests" and Path(job.name).name not in EXCLUSIVE

    chosen = sorted(chosen, key=lambda job: (done.get(job.name, {}).get("state") != "cut", not in_parallel(job)))
    for parallel, some in itertools.groupby(chosen, in_parallel):
        with ThreadPoolExecutor(workers if parallel else 1) as pool:
            try:
                list(pool.map(do, some))
            except BaseException:
                place.stop()
                raise
    results["left"] = left
    if left:
        print(f"left for another call: {', '.join(left)}", flush=True)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # a stopped process leaves gigabytes
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
