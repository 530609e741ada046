"""A system as ReFrame's configuration: scheduler, launcher, options and shell lines of a site file, or this machine ("local").

Names of scales are those of the EESSI test suite (https://www.eessi.io/docs/test-suite): a part of a node, a node, several nodes.
A process computes on one GPU, or on a CPU core of this machine.
"""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter

import hpcai
from hpcai.cli.script import Site, assign, find_site, template_folder
from hpcai.config import YamlReader
from hpcai.durable import replace_file
from hpcai.errors import ConfigError
from hpcai.host_limits import count_cpus
from hpcai.json_file import read_regular

SCALES: Mapping[str, float] = {
    "1_8_node": 1 / 8, "1_4_node": 1 / 4, "1_2_node": 1 / 2, "1_node": 1, **{f"{2**n}_nodes": 2**n for n in range(1, 11)},
}  # fmt: skip
"""Nodes by the name of a scale."""
LOCAL = "local"
_PLACED = re.compile(r"--(ntasks-per-node|cpus-per-task|nodes)=(\d+)")

Limit = Annotated[float, Field(ge=-1)]
Figures = dict[str, dict[str, tuple[float, Limit | None, Limit | None]]]
"""Figures by test and name: the value, and its lower and upper limit as fractions of it; None for no limit."""


def describe_system(args: Namespace, output: Path) -> dict[str, Any]:
    """Return ReFrame's configuration of the site ``args.site``. Raises ConfigError with every mistake, one per line."""
    site = None if args.site == LOCAL else find_site(args.site)
    access = [] if site is None else _access(site, args)
    placed = {name: int(value) for name, value in _PLACED.findall("\n".join(site.options if site else []))}
    cpus = int(site.facts.get("cpus", 0)) if site else 0  # of a node
    per_node = args.per_node or (_local_ranks() if site is None else site.per_node)
    shell = _shell_lines(site, args)
    gpus = (site is not None and "gpu" in site.facts) or any("--gpu" in line or "--gres=gpu" in line for line in (*access, *shell))
    scales = [name for name, nodes in SCALES.items() if nodes <= args.nodes and (per_node * nodes) % 1 == 0]
    features = ["gpu" if gpus else "cpu", *(f"scale_{name}" for name in scales)]
    extras = {
        "per_node": per_node, "cpus_per_task": placed.get("cpus-per-task") or cpus // per_node or None,
        "pbs": bool(site and site.pbs), "python": "python" if args.container else sys.executable, "pending": args.pending,
    }  # fmt: skip
    partition = {
        "name": "default", "environs": ["default"], "access": access, "features": features, "extras": extras,
        "scheduler": _scheduler(site, args.list), "max_jobs": 1 if site is None else args.jobs,
        "launcher": "srun" if site and not site.pbs else "mpiexec", "prepare_cmds": shell,
        "sched_options": {"use_nodes_option": True},
    }  # fmt: skip
    form = "%(asctime)s %(levelname)s %(message)s"
    handlers = [{"type": "stream", "name": "stdout", "level": "info", "format": "%(message)s"},
                {"type": "file", "name": str(output / "reframe.log"), "level": "debug2", "format": form}]  # fmt: skip
    reports = {"trap_job_errors": False, "report_file": str(output / "report.json"), "report_junit": str(output / "report.xml")}
    name = "slurm" if args.site == "generic" else site.name if site else LOCAL  # ReFrame has a system "generic" of its own
    return {
        "systems": [{"name": name, "hostnames": [".*"], "prefix": str(output), "partitions": [partition]}],
        "environments": [{"name": "default"}], "logging": [{"handlers": handlers}], "general": [reports],
    }  # fmt: skip


def _scheduler(site: Site | None, listing: bool) -> str:
    """Return ReFrame's name of the scheduler: for Slurm without accounting that which asks squeue alone."""
    if site is None or listing:
        return LOCAL
    program = "qsub" if site.pbs else "sbatch"
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not installed here; call this on a login node of {site.name}, or --site local")
    if site.pbs:
        return "pbs"
    accounting = shutil.which("sacct") and subprocess.run(["sacct", "--noheader"], capture_output=True).returncode == 0
    return "slurm" if accounting else "squeue"


def _local_ranks() -> int:
    """Return the largest power of two of processes for which this machine has cores, at most 8."""
    return 2 ** (min(count_cpus(), 8).bit_length() - 1)


def _access(site: Site, args: Namespace) -> list[str]:
    """Return the scheduler's options of all jobs. Raises ConfigError for what the site requires and ``args`` lacks."""
    if problems := site.check_options({name: getattr(args, name) for name in ("account", "queue", "container")}):
        raise ConfigError("\n".join(problems))
    options = [option for option in site.options if not _PLACED.fullmatch(option)] + site.access_options(args.account, args.queue)
    return [*options, *args.option, *([site.facts["select"]] if site.pbs and "select" in site.facts else [])]


def _shell_lines(site: Site | None, args: Namespace) -> list[str]:
    """Return the lines of a job before all others: Python's path, and those of the site."""
    root = Path(hpcai.__file__).parents[1].resolve()
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    lines = ["srun=() mpiexec=() container=()"]
    if args.container:
        lines += ["export PYTHONSAFEPATH=1  # the image's hpcai, not that of this folder"]
    else:
        lines += [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
        lines += [f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}"] if root not in installed else []
    lines += [r"export HPCAI_TOKEN=${HPCAI_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"]
    if site is None:
        return [*lines, f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{max(1, count_cpus() // _local_ranks())}}}"]
    lines += [assign("HPCAI_IMAGE", site.image(args.container) if args.container else "")]
    return [*lines, *(line for line in site.lines.splitlines() if line.strip() and not line.startswith("#"))]


def references_file(site: str) -> Path:
    """Return the file of the figures of systems: beside a site file of your own, or that of slurm/sites."""
    own = Path(site).parent if "/" in site or site.endswith(".sh") else template_folder() / "sites"
    return own / "references.yaml"


def read_references(file: Path, system: str) -> Figures:
    """Return the figures of ``system``. Raises ConfigError for a file of another form."""
    try:
        tables = yaml.load(read_regular(file), YamlReader) if file.is_file() else {}
        return TypeAdapter(dict[str, Figures]).validate_python(tables or {}).get(system, {})
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; expected SYSTEM: {{TEST: {{FIGURE: [value, lower, upper]}}}}") from None


def write_references(file: Path, system: str, figures: Figures) -> None:
    """Replace the figures of the tests in ``figures``. Those of other tests and systems, and the comment at the top, are kept."""
    text = file.read_text() if file.is_file() else "# Figures of systems by test: value, lower and upper limit as fractions.\n"
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    tables = yaml.load(text, YamlReader) or {}
    tables[system] = tables.get(system, {}) | {test: {k: list(v) for k, v in table.items()} for test, table in figures.items()}
    replace_file(file, (comment + yaml.safe_dump(tables, default_flow_style=None, width=130)).encode())
