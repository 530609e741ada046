"""`hpcai doctor`: what this installation and this machine offer. It starts no MPI and reserves no GPU.

`srun hpcai doctor --ranks` (or behind mpiexec or torchrun) looks at a whole job within a minute: where its ranks are, what differs
between them, clocks, links, file systems. Exit code 0: nothing is wrong; 1: something is, on all ranks alike; 2: refused.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpcai.errors import ConfigError, DataError
from hpcai.kernels import compiler

DISTRIBUTION = "hpcai-suite"
EXTRAS = ("mpich", "tensorboard", "nvidia-dali-cuda130", "kvikio-cu13", "nvidia-ml-py", "triton", "mlperf-logging")

LEAST = 5.0
"""Seconds of a limit within which the ranks of a job can be looked at."""

# Each probe is a process of its own: a library that cannot be loaded may take its process down
PROBES = {
    "torch": """
import torch
found = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda or torch.version.hip or "none: this build is for CPUs"}
found["GPUs"] = [f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in
                 (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))]
if torch.cuda.is_available() and torch.distributed.is_nccl_available():
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
""",
    "MPI": """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
found = {"mpi4py": mpi4py.__version__}
from mpi4py import MPI
found["MPI library"] = " ".join(MPI.Get_library_version().split(chr(10))[0].split()).rstrip(chr(0))
found["MPI standard"] = ".".join(map(str, MPI.Get_version()))
""",
    "HDF5": """
import h5py
parallel = "with MPI" if h5py.get_config().mpi else "without MPI: one process opens a file for writing"
found = {"h5py": h5py.__version__, "HDF5": f"{h5py.version.hdf5_version}, {parallel}"}
""",
}

HINTS = {
    "torch": "install it for this machine: https://pytorch.org/get-started/locally",
    "MPI": f"load the centre's MPI module, or pip install '{DISTRIBUTION}[mpi]'",
    "HDF5": "pip install --force-reinstall h5py",
}

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE"),
    "MPICH, Intel MPI, Cray": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PALS_RANKID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PMIx": ("PMIX_RANK", "PMIX_NAMESPACE"),
    "devices and threads": ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
}


def probe(name: str) -> dict[str, Any]:
    """What ``PROBES[name]`` finds, or one entry that says why it does not."""
    code = PROBES[name] + "\nimport json; print('found:' + json.dumps(found))"
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {name: "no answer within two minutes; a file system or a driver hangs"}
    for line in run.stdout.splitlines():
        if line.startswith("found:"):
            return json.loads(line.removeprefix("found:"))
    last = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), f"exit code {run.returncode}")
    return {name: f"not usable: {last.strip()}; {HINTS[name]}"}


def launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that launchers leave in ``environment``, per launcher."""
    found = {}
    for name, variables in LAUNCHERS.items():
        if words := [f"{variable}={environment[variable]}" for variable in variables if variable in environment]:
            found[name] = "  ".join(words)
    return found


def closure(distribution: str) -> tuple[set[str], set[str]]:
    """Names of all that a plain install of ``distribution`` brings, itself included, and those of them that are not installed.

    Follows Requires-Dist of what is installed, for this Python and platform and without extras that nobody asks for. Raises
    DataError where ``distribution`` itself is not installed.
    """
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError as error:
        raise DataError(f"{distribution} is not installed in {sys.prefix}; pip install -e . in its checkout") from error
    todo = [(canonicalize_name(distribution), "")]
    missing = set[str]()
    for name, extra in todo:                             # which grows meanwhile
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            missing.add(name)
            continue
        found = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
        wanted = ((canonicalize_name(need.name), word) for need in found for word in ("", *sorted(need.extras)))
        todo += [entry for entry in dict.fromkeys(wanted) if entry not in todo]
    return {name for name, _ in todo}, missing


def packages(distribution: str = DISTRIBUTION) -> str:
    """One line: how many packages a plain install of ``distribution`` resolves to."""
    names, missing = closure(distribution)
    text = f"a plain install of {distribution} resolves to {len(names)} packages, itself included"
    if "torch" in names - missing:
        text += f" (with torch {metadata.version('torch')})"
    return text + (f"; not installed, so what they need is not counted: {', '.join(sorted(missing))}" if missing else "")


def main(argv: Sequence[str]) -> int:
    words = _parser().parse_intermixed_args(argv)
    if words.ranks:
        return _job(words)
    if words.packages:
        print(packages())
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    show({"Python": f"{platform.python_version()} in {sys.prefix}", "machine": f"{platform.platform()}, {cores} cores to use"})
    for name in PROBES:
        show(probe(name))
    show({"Triton kernels": compiler.MISSING or "can be compiled"})
    show({name: version(name) for name in EXTRAS})
    show(launcher(os.environ) or {"launcher": "none found: this process is alone"})
    try:
        show({"packages": packages()})
    except DataError as error:
        show({"packages": str(error)})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcai doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="store_true", help="print how many packages a plain install resolves to, and no more")
    parser.add_argument("--ranks", action="store_true", help="look at the job that this is a rank of")
    job = parser.add_argument_group("with --ranks")
    job.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="the folder of a run (the current one)")
    job.add_argument("--app", metavar="NAME", help="also what this app needs, with the settings that follow")
    job.add_argument("settings", nargs="*", metavar="CONFIG.yaml|key=value", help="settings of the app")
    job.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    job.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    job.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="end by then, whatever a rank does (60)")
    return parser


def _job(words: argparse.Namespace) -> int:
    from hpcai.cli.doctor.deadline import Deadline
    from hpcai.dist.environment import place

    if not words.limit >= LEAST:
        raise ConfigError(f"--limit is {words.limit:g} s, expected {LEAST:g} or more")
    if words.settings and not words.app:
        raise ConfigError(f"{words.settings[0]!r} is a setting, of which app? Add --app NAME")
    began, here = time.monotonic(), place()
    words.directory = words.directory.absolute()
    os.environ.setdefault("HPCAI_TIMEOUT", f"{words.limit + 30:g}")
    deadline = Deadline(words.limit, here.rank, f"rank {here.rank} on {platform.node()}", here.world)
    try:
        from hpcai.cli.doctor import job  # torch, which may take long

        return job.examine(words, deadline, here, time.monotonic() - began)
    finally:
        deadline.over()


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed (optional)"


def show(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        lines = value if isinstance(value, list) else [value]
        for number, line in enumerate(lines or ["none"]):
            print(f"{name if number == 0 else '':<24}{line}")
