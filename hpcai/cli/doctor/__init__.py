"""`hpcai doctor`: describe this installation and this machine. It neither initializes MPI nor reserves a GPU.

`srun hpcai doctor --ranks` (or behind mpiexec or torchrun) checks a whole job within a minute: placement of ranks, differences
between them, network links, file systems. Exit code 0: no errors; 1: errors, the same code on all ranks; 2: invalid arguments.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from hpcai.cli import make_parser, tables
from hpcai.errors import ConfigError
from hpcai.host_limits import allowed_cpus, count_cpus

EXTRAS = ("mpich", "tensorboard", "nvidia-dali-cuda130", "kvikio-cu13", "nvidia-ml-py", "triton", "mlperf-logging",
          "wandb", "mlflow-skinny", "lm-eval", "vllm")
MIN_LIMIT = 5.0
"""Minimum of --limit in seconds."""

_TABLE = tomllib.loads(Path(__file__).with_name("probes.toml").read_text(encoding="utf-8"))
PROBES: dict[str, str] = {name: entry["script"] for name, entry in _TABLE.items()}
"""Each runs in its own process, which a broken library may crash."""
HINTS: dict[str, str] = {name: entry["hint"] for name, entry in _TABLE.items()}
LAUNCHER_VARIABLES = re.compile(
    r"SLURM_(JOB_ID|PROCID|NTASKS|LOCALID|JOB_NUM_NODES|GPUS_ON_NODE)$|P(MI|ALS)_(RANK|RANKID|SIZE)$|PMIX_RANK$"
                      r"|OMPI_COMM_WORLD_|MPI_LOCALRANKID$|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|(CUDA|ROCR)_VISIBLE_DEVICES$|OMP_NUM")
"""Environment variables set by launchers, and those of devices and threads."""  # fmt: skip


def main(argv: Sequence[str]) -> int:
    args = make_parser("doctor", __doc__).parse_args(argv)
    if args.ranks:
        return _check_ranks(args)
    print(*tables.lines(installation()), sep="\n")
    return 0


def installation() -> Iterator[tuple[str, str]]:
    """Yield name and text of each installed component."""
    cores, allowed = count_cpus(), len(allowed_cpus())
    quota = f" (a quota of CPU time; {allowed} without it)" if cores < allowed else ""
    yield "Python", f"{platform.python_version()} in {sys.prefix}"
    yield "machine", f"{platform.platform()}, {cores} cores to use{quota}"
    for name in PROBES:
        yield from probe(name).items()
    from hpcai.kernels import triton_support  # imports torch

    yield "Triton kernels", triton_support.MISSING or "can be compiled"
    for name in EXTRAS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed (optional)"
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if LAUNCHER_VARIABLES.match(name)]
    yield "launcher", "  ".join(variables) or "none found: this process is alone"


def probe(name: str) -> dict[str, str]:
    """Return the results of ``PROBES[name]``, or one entry with the error."""
    code = PROBES[name] + "\nimport json; print('found:' + json.dumps(found))"
    try:
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {name: "no answer within two minutes; a file system or a driver hangs"}
    for line in process.stdout.splitlines():
        if line.startswith("found:"):
            return json.loads(line.removeprefix("found:"))
    last_line = next((line for line in reversed(process.stderr.splitlines()) if line.strip()), f"exit code {process.returncode}")
    return {name: f"not usable: {last_line.strip()}; {HINTS[name]}"}


def _check_ranks(args: argparse.Namespace) -> int:
    from hpcai.cli.doctor.deadline import Deadline
    from hpcai.dist.environment import read_rank_info

    if not args.limit >= MIN_LIMIT:
        raise ConfigError(f"--limit is {args.limit:g} s, expected {MIN_LIMIT:g} or more")
    start, rank_info = time.monotonic(), read_rank_info()
    args.directory = args.directory.absolute()
    os.environ.setdefault("HPCAI_TIMEOUT", f"{args.limit + 30:g}")
    deadline = Deadline(args.limit, rank_info.rank, f"rank {rank_info.rank} on {platform.node()}", rank_info.world)
    try:
        from hpcai.cli.doctor import job  # imports torch, which may be slow

        return job.check_job(args, deadline, rank_info, time.monotonic() - start)
    finally:
        deadline.cancel()
