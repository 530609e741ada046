"""`make gpu`: what only a GPU can prove and measure, one process after another, on a machine that may have little else.

    python3 tests/gpu/run.py [--part tests kernels apps data] [--wheels DIR] [--out DIR] [--only NAME ...] [--budget SECONDS]
    python3 tests/gpu/run.py --collect DIR      # on a machine with a network: the wheels that another one may lack

First it looks at the machine. What is missing there is told with what to do about it, and what needs it is skipped by name.
Then each file of tests, each case of `hpcai bench gpu` and each part of `hpcai bench data` is a process with a time limit: one
that fails or hangs ends nothing but itself. OUT/results.json is written after each of them, so that another call goes on where
this one stopped, was stopped, or ran out of its ``--budget``; OUT/index.md is the page to read.

The exit code is 0 when all that could run has passed. This file needs nothing but Python's own library, and never installs torch.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "kernels", "apps", "data")
HPCAI = ("-c", "import sys; from hpcai.cli import main; sys.exit(main())")
NEEDED = (
    "pytest",
    "hypothesis",
    "numpy",
    "pydantic",
    "h5py",
    "yaml",
    "rich",
    "safetensors",
)  # modules that tests and benches import
QUIET = ("-q", "--disable-pip-version-check")
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:",
          *(word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")))  # fmt: skip
THEIRS = re.compile(r"(torch|triton|numpy|mpich|nvidia-(?!ml-py).*|cuda-.*)$")  # what a machine with a GPU has in its own form
_LOG = 200_000  # bytes of a log that are kept: its end
_TEXT = 1500  # characters of a failure that results hold
_SPARE = 8.0  # seconds of a budget that are kept for what is written at the end
_WORDS = {
    "gpu": "no GPU",
    "packages": "packages",
    "compiler": "Triton's compiler",
    "nccl": "NCCL",
    "several": "one GPU",
    "disk": "disk",
}
Row = dict[str, Any]


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
LONGER = {"test_full.py": 500.0, "test_several.py": 500.0}
LONGER |= dict.fromkeys(("test_step.py", "test_dimenet.py", "test_openfold.py"), 400.0)  # they compile
DATA = ("direct", "late", "cut", "utilisation", "larger", "peers")


# ---- the machine

_LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hpcai.kernels import compiler
from importlib.util import find_spec
found = {"compiler": compiler.MISSING, "absent": [name for name in sys.argv[2:] if find_spec(name) is None], "gpus": []}
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
                  "python": f"{platform.python_version()} in {sys.prefix}", "memory_gib": _memory(), "driver": _driver(),
                  "disk_gib": round(shutil.disk_usage(out).free / 2**30, 1), "shm_gib": _shm()}  # fmt: skip
    seen = _ask([python, "-c", _LOOK, str(ROOT), *NEEDED], environ)
    found |= seen
    missing: dict[str, str] = {}
    if absent := seen.get("absent", [] if "torch" in seen else list(NEEDED)):
        missing["packages"] = (
            f"{', '.join(absent)} cannot be imported; make install, or carry wheels along (make wheels) and give --wheels"
        )
    if not seen.get("gpus"):
        why = seen.get("error") or (
            found["driver"] if isinstance(found["driver"], str) else "torch sees none; is this torch built for CUDA?"
        )
        missing["gpu"] = f"{why} (torch {seen.get('torch', 'cannot be imported')}, CUDA {seen.get('cuda')})"
    elif not seen.get("answer"):
        missing["gpu"] = (
            f"a first sum on the GPU fails: {seen.get('error', 'a wrong number')}; is the driver as new as CUDA {seen.get('cuda')}?"
        )
    if "gpu" in missing:
        missing["compiler"] = missing["nccl"] = missing["several"] = missing["gpu"]
    else:
        if seen.get("compiler"):
            missing["compiler"] = seen["compiler"]
        elif (tried := _ask([python, "-c", _COMPILE, str(ROOT)], environ, "kernel")) is not True:
            missing["compiler"] = f"a first kernel cannot be made: {tried.get('error')}"
        if not seen.get("nccl"):
            missing["nccl"] = "this torch has no NCCL; install the build for CUDA on Linux"
        if len(seen["gpus"]) < 2:
            missing["several"] = "there is one GPU, and this needs two or more"
    if found["disk_gib"] < 8:
        missing["disk"] = (
            f"{out} has {found['disk_gib']} GiB free, and the benchmark of reading makes files of 2; give --out on a larger disk"
        )
    return found | {"missing": missing}


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


def _driver() -> Any:
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


def _memory() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _shm() -> float | None:
    return round(shutil.disk_usage("/dev/shm").free / 2**30, 1) if Path("/dev/shm").is_dir() else None


# ---- an environment, and the wheels for it


def prepare(folder: Path, wheels: Path | None) -> tuple[str, dict[str, str]]:
    """The Python to use and its environment: this one's packages and, from ``wheels``, those of pyproject.toml that it lacks."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
               "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
               "TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if wheels is None:
        return sys.executable, environ
    if not any(wheels.glob("*.whl")):
        raise SystemExit(
            f"--wheels {wheels}: no wheel lies there; make wheels OUT={wheels} collects them on a machine with a network"
        )
    python, pip = folder / "venv/bin/python", ["-m", "pip", "install", *QUIET, "--no-index"]
    try:
        if not (folder / "venv/made").exists():
            _venv(folder / "venv")
            _run([str(python), *pip, "--find-links", str(wheels), *requirements(ROOT / "pyproject.toml")], environ)
            (folder / "venv/made").touch()
        return str(python), environ
    except (OSError, subprocess.SubprocessError) as problem:
        print(f"no virtual environment: {_said(problem)}; what is missing goes into {folder / 'site'}", flush=True)
    names = {path: _canonical(path.name.split("-")[0]) for path in wheels.glob("*.whl")}
    chosen = [str(path) for path, name in names.items() if not _installed(name)]
    shutil.rmtree(folder / "site", ignore_errors=True)
    if chosen:
        _run([sys.executable, *pip, "--no-deps", "--target", str(folder / "site"), *chosen], environ)
    environ["PYTHONPATH"] = os.pathsep.join((environ["PYTHONPATH"], str(folder / "site")))
    return sys.executable, environ


def _venv(folder: Path) -> None:
    """One that also sees the packages of this Python, which may itself be a virtual environment; pip is this one's, if there is."""
    venv.EnvBuilder(system_site_packages=True, clear=True, symlinks=True, with_pip=not _installed("pip")).create(folder)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    lines = (f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages() if Path(path).is_dir())
    (own / "parent.pth").write_text("".join(lines))


def requirements(pyproject: Path) -> list[str]:
    """What the library, its readings of a GPU and its tests ask for, without what a machine with a GPU has in its own form."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *extras["gpu"],
        *(line for line in extras["dev"] if line.startswith(("pytest", "hypothesis"))),
    ]
    lines = [line for line in lines if not line.startswith(("matplotlib", "pytest-xdist"))]  # no report, and one test at a time
    return [line for line in lines if not THEIRS.match(_canonical(re.split(r"[^\w.-]", line)[0]))]


def collect(folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> list[str]:
    """Put the wheels into ``folder`` for Python 3.12 on Linux, x86-64, whatever this machine is -> their names and versions.

    pip resolves all that is needed, and says what it would install; what the other machine has by itself is then left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.whl"):
        path.unlink()  # two versions of one package stop an installation
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        asked = [*QUIET, "--dry-run", "--ignore-installed", "--report", str(report), "--target", scratch, *TARGET]
        _run([*pip, "install", *asked, *requirements(ROOT / "pyproject.toml")], os.environ)
        every = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    chosen = sorted(f"{one['name']}=={one['version']}" for one in every if not THEIRS.match(_canonical(one["name"])))
    _run([*pip, "download", *QUIET, "--no-deps", "-d", str(folder), *TARGET, *chosen], os.environ)
    found = {_canonical(path.name.split("-")[0]) for path in folder.glob("*.whl")}
    if lost := sorted(one for one in chosen if _canonical(one.split("==")[0]) not in found):
        raise SystemExit(f"pip downloaded no wheel of {', '.join(lost)}; look at what {' '.join(pip)} download says")
    return chosen


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, env=dict(environ), timeout=600)


def _said(problem: Exception) -> str:
    said = getattr(problem, "stderr", None)
    said = said.decode() if isinstance(said, bytes) else said
    return (said.strip().splitlines() or [str(problem)])[-1] if said else str(problem)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# ---- what there is to do


def jobs(parts: Sequence[str], place: "Place") -> Iterator[Job]:
    """All processes of the parts. A part whose cases cannot be listed is one job by its name, which says why."""
    for part in parts:
        if part == "tests":
            for path in sorted(place.tests.glob("test_*.py")):
                xml = place.out / "junit" / f"{path.stem}.xml"
                limit = LONGER.get(path.name, place.limit or 300.0)
                command = (place.python, "-m", "pytest", "-q", "--color=no", f"--junitxml={xml}", "-o", "junit_logging=no",
                           "-o", f"faulthandler_timeout={0.8 * limit:.0f}", f"--rootdir={ROOT}", str(path))  # fmt: skip
                yield Job(
                    f"tests/{path.name}", part, command, ("packages", "gpu", *MORE.get(path.name, ())), place.limit or limit, 60.0
                )
        elif part == "data":
            scratch = place.out / "scratch"
            for name in DATA:
                command = (*place.hpcai, "bench", "data", name, "--json", "--directory", str(scratch))
                yield Job(f"data/{name}", part, command, ("packages", "disk"), place.limit or 400.0, 120.0)
        else:
            needs = ("packages", "gpu", *(("compiler",) if part == "kernels" else ()))
            command = (*place.hpcai, "bench", "gpu")
            cases = _cases((*command, "--list", part), place, needs)
            for case in cases if isinstance(cases, list) else ():
                yield Job(f"{part}/{case}", part, (*command, part, "--case", case, "--json"), needs, place.limit or 300.0, 60.0)
            if isinstance(cases, str):
                yield Job(part, part, (), (*needs, f"list: {cases}"), 0.0, 0.0)


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
    python: str
    environ: dict[str, str]
    missing: Mapping[str, str]
    tests: Path
    hpcai: tuple[str, ...]
    limit: float | None = None


# ---- doing it


def act(job: Job, place: Place, seconds: float) -> Row:
    """Run the process for so many seconds at most -> what became of it. Its whole process group ends with it."""
    log, xml = place.out / "logs" / f"{job.file}.txt", place.out / "junit" / f"{Path(job.name).stem}.xml"
    xml.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+b") as said, tempfile.TemporaryFile("w+b") as errors:
        process = subprocess.Popen(
            job.command, stdout=said, stderr=errors, stdin=subprocess.DEVNULL, env=place.environ, cwd=ROOT, process_group=0
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            with suppress(subprocess.TimeoutExpired):
                process.send_signal(signal.SIGABRT)  # on which Python writes the stacks of its threads
                process.wait(3)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it may have left behind
            process.wait()
        spent = time.monotonic() - began
        lines, texts = _end(said), _end(errors)
    log.write_text(lines + (f"\n---- stderr\n{texts}" if texts.strip() else ""))
    found: Row = {"part": job.part, "seconds": round(spent, 1), "code": process.returncode, "log": str(log.relative_to(place.out))}
    if late:
        found |= {"state": "failed", "late": True, "why": f"did not end within {seconds:.0f} s, and was killed"}
    found |= _of_tests(xml, found) if job.part == "tests" else _of_bench(lines, texts, found)
    return found


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
                text = "\n".join(
                    line for line in (bad[0].text or bad[0].get("message") or "").splitlines() if line.startswith(("E ", ">"))
                )
                failures.append({"name": case.get("name"), "text": (text or bad[0].get("message") or "")[:_TEXT]})
            if skip is not None:
                skips[(skip.get("message") or "")[:300]] += 1
    more = {"tests": dict(counts), "failures": failures, "skips": dict(skips)}
    if "state" in found:
        return more
    if found["code"] not in (0, 5) or counts["failed"]:
        return more | {
            "state": "failed",
            "why": f"{counts['failed']} failed" if counts["failed"] else f"pytest ended with code {found['code']}",
        }
    return more | ({"state": "passed"} if counts["passed"] else {"state": "skipped", "why": "; ".join(skips) or "it has no test"})


def _of_bench(lines: str, errors: str, found: Row) -> Row:
    if "state" in found:
        return {}
    last = (errors.strip().splitlines() or lines.strip().splitlines() or ["it said nothing"])[-1][:_TEXT]
    if found["code"]:
        return {"state": "failed", "why": last}
    try:
        told = json.loads(lines.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"state": "failed", "why": f"the last line is no JSON: {last}"}
    return {"state": "passed", "found": told}


# ---- what is told


def save(out: Path, results: Row, pack: bool = False) -> None:
    for name, text in (("results.json", json.dumps(results, indent=1)), ("index.md", page(results))):
        (out / f".{name}").write_text(text)
        os.replace(out / f".{name}", out / name)
    if pack:
        with tarfile.open(out / ".logs.tar.gz", "w:gz") as archive:
            for name in ("logs", "junit"):
                archive.add(out / name, name)
        os.replace(out / ".logs.tar.gz", out / "logs.tar.gz")
        for name in ("logs", "junit"):
            shutil.rmtree(out / name)


def page(results: Row) -> str:
    """All of it as Markdown."""
    machine, entries = results["machine"], results["jobs"]
    gpus = machine.get("gpus") or []
    lines = [f"# {gpus[0]['name'] if gpus else 'No GPU'}: {_sums(entries)}", "",
             f"{machine['machine']}, {machine['system']}, commit {results['commit']}, {results['date']}", "", *_table(
                 [{"what": name, "found": value} for name, value in _facts(machine)]), ""]  # fmt: skip
    if machine["missing"]:
        lines += [
            "## Missing here",
            "",
            *(f"- **{_WORDS.get(name, name)}**: {why}" for name, why in machine["missing"].items()),
            "",
        ]
    if results.get("left"):
        lines += ["## Left for another call", "", ", ".join(results["left"]), ""]
    for part in PARTS:
        mine = {name: entry for name, entry in entries.items() if entry["part"] == part}
        if not mine:
            continue
        rows = [{"name": name.removeprefix(f"{part}/"), "state": entry["state"], **entry.get("tests", {}),
                 "seconds": entry.get("seconds", ""), "why": entry.get("why", "")} for name, entry in mine.items()]  # fmt: skip
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
    return (
        ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "cut", "skipped") if counts[state])
        or "nothing was run"
    )


def _facts(machine: Row) -> Iterator[tuple[str, Any]]:
    for name in ("python", "torch", "cuda", "cudnn", "nccl", "triton", "cores", "memory_gib", "disk_gib", "shm_gib"):
        yield name, machine.get(name) or "none"
    drivers = machine["driver"] if isinstance(machine["driver"], list) else []
    for number, gpu in enumerate(machine.get("gpus") or ()):
        told = ", ".join(
            f"{name} {value}" for name, value in (drivers[number] if number < len(drivers) else {}).items() if name != "name"
        )
        yield f"GPU {number}", f"{gpu['name']}, {gpu['gib']} GiB, capability {gpu['capability']}; {told}"


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
            raise SystemExit(f"pip cannot collect the wheels: {_said(problem)}") from problem
        size = sum(path.stat().st_size for path in words.collect.glob("*.whl"))
        print(f"{len(chosen)} wheels, {size / 1e6:.0f} MB in {words.collect}: {', '.join(chosen)}")
        return 0
    out = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if (out / "logs.tar.gz").exists():
        with tarfile.open(out / "logs.tar.gz") as archive:
            archive.extractall(out, filter="data")
    for name in ("logs", "junit", "scratch"):
        (out / name).mkdir(exist_ok=True)
    folder = Path(tempfile.gettempdir(), f"hpcai-gpu-{os.getuid()}") if words.pack else out / "environment"
    try:
        python, environ = prepare(folder, words.wheels)
    except subprocess.CalledProcessError as problem:
        raise SystemExit(f"the wheels of {words.wheels} cannot be installed: {_said(problem)}") from problem
    machine = look(python, environ, out)
    place = Place(out, python, environ, machine["missing"], tests, tuple(hpcai) or (python, *HPCAI), words.limit)
    results = _begun(out, machine)
    for name, why in machine["missing"].items():
        print(f"missing: {_WORDS.get(name, name)}: {why}", flush=True)
    try:
        _go(list(jobs(words.part, place)), place, results, words, began)
    finally:
        shutil.rmtree(out / "scratch", ignore_errors=True)
        save(out, results, words.pack)
    entries = [entry for entry in results["jobs"].values() if entry["part"] in words.part]
    print(f"{_sums(results['jobs'])}; {out / 'index.md'}")
    return int(any(entry["state"] in ("failed", "cut") for entry in entries) or bool(results["left"]))


def _words(argv: Sequence[str] | None) -> Any:
    made = argparse.ArgumentParser(
        prog="tests/gpu/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument(
        "--only", nargs="+", metavar="NAME", help="processes with one of these in their name, such as test_step or kernels/"
    )
    made.add_argument("--wheels", type=Path, metavar="DIR", help="packages that may be missing here")
    made.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    made.add_argument("--budget", type=float, metavar="SECONDS", help="end within so many; another call does what is left")
    made.add_argument("--limit", type=float, metavar="SECONDS", help="of one process, in place of its own")
    made.add_argument("--again", nargs="?", const="all", choices=("all", "failed"), help="once more what was done, or what failed")
    made.add_argument("--pack", action="store_true", help="leave three files: results.json, index.md, and logs.tar.gz of all logs")
    made.add_argument("--collect", type=Path, metavar="DIR", help="download the wheels, and nothing else")
    return made.parse_args(argv)


def _begun(out: Path, machine: Row) -> Row:
    """Results so far, of the same commit."""
    commit = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):  # no git, or a copy without its history
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    before: Row = {}
    with suppress(OSError, ValueError):
        before = json.loads((out / "results.json").read_text())
    kept = before.get("jobs", {}) if before.get("commit") == commit else {}
    return {"commit": commit, "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "left": [], "jobs": kept}


def _go(every: Sequence[Job], place: Place, results: Row, words: Any, began: float) -> None:
    done, started, left = results["jobs"], 0, []
    chosen = [job for job in every if not words.only or any(name in job.name for name in words.only)]
    repeated = {None: (), "failed": ("failed",), "all": ("passed", "failed")}[words.again]
    chosen = [job for job in chosen if done.get(job.name, {}).get("state") not in {"passed", "failed"}.difference(repeated)]
    if part_names := {job.name for job in every}:
        for name in [name for name in done if name in PARTS and name not in part_names]:
            del done[name]  # a part that could not be listed before
    for job in sorted(chosen, key=lambda job: done.get(job.name, {}).get("state") != "cut"):
        lacks = [place.missing[need] for need in job.needs if need in place.missing]
        if lacks:
            done[job.name] = {"part": job.part, "state": "skipped", "why": lacks[0]}
            print(f"{job.name}: skipped: {lacks[0]}", flush=True)
            continue
        if not job.command:
            done[job.name] = {"part": job.part, "state": "failed", "why": job.needs[-1].removeprefix("list: ")}
            continue
        rest = words.budget - _SPARE - (time.monotonic() - began) if words.budget else float("inf")
        before = done.get(job.name, {})
        need = job.limit if before.get("state") == "cut" else min(job.limit, 1.5 * before.get("seconds", job.usual))
        if rest < need and (started or rest <= 0):
            left.append(job.name)
            continue
        print(f"{job.name} ...", end=" ", flush=True)
        found, started = act(job, place, min(job.limit, rest)), started + 1
        if found.pop("late", False) and rest < job.limit and before.get("state") != "cut":
            found |= {"state": "cut", "why": f"the budget ended after {found['seconds']} s of it; the next call begins with it"}
            left.append(job.name)
        done[job.name] = found
        print(f"{found['state']} in {found['seconds']} s" + (f": {found['why']}" if found.get("why") else ""), flush=True)
        results["left"] = left
        save(place.out, results)
    results["left"] = left
    if left:
        print(f"left for another call: {', '.join(left)}", flush=True)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # a stopped process leaves gigabytes
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
