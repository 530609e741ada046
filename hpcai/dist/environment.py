"""Rank and world size from the launcher's environment variables, without torch, network, MPI or GPU."""

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from hpcai.errors import LaunchError


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, from environment variables. None: known only to MPI."""

    launcher: str
    rank: int
    world: int | None
    local_rank: int | None
    local_world: int | None
    mpi: bool = False
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class _Launcher:
    """Environment variables of a launcher. It matches if ``rank`` and all of ``required`` are set. Of several names the first that
    is set counts."""

    name: str
    rank: str
    world: str = ""
    local_rank: str = ""
    local_world: str = ""
    required: str = ""
    mpi: bool = True
    needs_step: bool = False  # only in a Slurm job step: in a batch shell these variables describe the job, not the process
    aliases: str = ""  # other variables of the rank; a different value is inherited from another launcher


_TABLE = tomllib.loads(Path(__file__).with_name("launchers.toml").read_text(encoding="utf-8"))
_LAUNCHERS = tuple(_Launcher(**fields) for fields in _TABLE["launcher"])
_TORCHRUN, _BY_HAND = _LAUNCHERS[:2]
SINGLE_PROCESS = RankInfo("alone", 0, 1, 0, 1)
INTERACTIVE_SHELL = RankInfo("a shell of srun --pty", 0, 1, 0, 1)
BATCH_SHELL = RankInfo("the shell of a Slurm job, whose WORLD_SIZE is for srun", 0, 1, 0, 1)
_SHELLS = {"bash", "sh", "dash", "zsh", "ksh", "csh", "tcsh", "fish"}
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # the batch shell (…fb) and salloc's interactive shell (…fa) have step ids above this


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the rank from the variables of launchers, without network, MPI or GPU.

    Raises LaunchError if they are inconsistent, or if the same job would start several times.
    """
    matching = [launcher for launcher in _LAUNCHERS if _matches(launcher, environ)]
    if not matching:
        if (_read_int(environ, "WORLD_SIZE", "no launcher") or 1) == 1:
            return SINGLE_PROCESS
        if environ.get("SLURM_JOB_ID"):
            return BATCH_SHELL
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}, but no {', no '.join(missing)}: each process would train a copy; start them by "
            "srun, mpirun or torchrun, set RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or unset WORLD_SIZE"
        )
    launcher = matching[0]
    if launcher.needs_step and _in_interactive_shell(environ):
        return INTERACTIVE_SHELL
    variables = launcher.rank, launcher.world, launcher.local_rank, launcher.local_world
    rank, world, local_rank, local_world = (_read_int(environ, names, launcher.name) for names in variables)
    assert rank is not None  # otherwise the launcher would not match
    if not launcher.mpi:
        for value, names in ((world, launcher.world), (local_rank, launcher.local_rank)):
            if value is None:
                raise LaunchError(f"{launcher.name}: {launcher.rank}={rank}, but {' or '.join(names.split())} is not set; set it")
    _check_consistency(environ, launcher, rank, world, local_rank, local_world)
    if launcher in (_TORCHRUN, _BY_HAND):
        _check_one_job(environ, launcher, world or 1, matching)
    if launcher is _BY_HAND:
        _check_outer_rank(environ, rank, world or 1)
    address, port = _find_rendezvous(environ, launcher, rank)
    return RankInfo(launcher.name, rank, world, local_rank, local_world, launcher.mpi, address, port)


def expand_hostlist(hosts: str) -> list[str]:
    """Expand a Slurm list such as ``nid[001-003,7],gpu[1-2]-ib[0-1],login``, in order. Containers seldom have scontrol."""
    names = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", hosts):
        choices: list[list[str]] = []
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
            choices.append([] if part.startswith("[") else [part])
            for numbers in part[1:-1].split(",") if part.startswith("[") else ():
                first, _, last = numbers.partition("-")
                choices[-1] += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _matches(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    in_step = step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    return all(environ.get(name) for name in (launcher.rank, *launcher.required.split())) and (in_step or not launcher.needs_step)


def _in_interactive_shell(environ: Mapping[str, str]) -> bool:
    """Return whether a user has started this process in a shell of ``srun --pty``, whose variables are those of all its tasks."""
    command = [""]
    if environ.get("SLURM_PTY_PORT"):
        with suppress(OSError):
            command = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")[:-1]
    is_script = any(not arg.startswith("-") or arg == "-c" for arg in command[1:])
    return Path(command[0]).name.lstrip("-") in _SHELLS and not is_script


def _read_int(environ: Mapping[str, str], names: str, launcher: str) -> int | None:
    for name in names.split():
        value = environ.get(name)
        if not value:
            continue
        if name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            node = int(environ.get("SLURM_NODEID", "0"))
            for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", value):  # 4(x2),3: 4 on each of two nodes, 3 on the third
                if (node := node - int(nodes or 1)) < 0:
                    return int(count)
        elif value.isdigit():
            return int(value)
        else:
            raise LaunchError(f"{launcher}: {name}={value} is not an integer")
    return None


def _check_consistency(
    environ: Mapping[str, str], launcher: _Launcher, rank: int, world: int | None, local_rank: int | None, local_world: int | None
) -> None:
    text = f"{launcher.name}: {launcher.rank}={rank}"
    if world is not None and rank >= world:
        raise LaunchError(f"{text}, but the world has {world} ranks; unset the variable that another launcher left")
    if local_rank is not None and local_world is not None and local_rank >= local_world:
        raise LaunchError(f"{text}: local rank {local_rank}, but {local_world} ranks on the node; unset other launchers' variables")
    for name in launcher.aliases.split():
        if environ.get(name, str(rank)) != str(rank):
            raise LaunchError(f"{text}, but {name}={environ[name]}, of another launcher; unset {name}")


def _check_one_job(environ: Mapping[str, str], inner: _Launcher, world: int, matching: list[_Launcher]) -> None:
    groups = int(environ.get("GROUP_WORLD_SIZE", "1")) if inner is _TORCHRUN else world
    for outer in matching:
        tasks = None if outer in (_TORCHRUN, _BY_HAND) else _read_int(environ, outer.world, outer.name)
        if tasks is not None and tasks > groups:
            advice = "give torchrun --nnodes and --rdzv-endpoint" if inner is _TORCHRUN else "unset RANK and WORLD_SIZE"
            size = f"{groups} node" if inner is _TORCHRUN else f"WORLD_SIZE={world}"
            raise LaunchError(f"{outer.name} started {tasks} tasks, each with {inner.name} of {size}: copies of one job; {advice}")


def _check_outer_rank(environ: Mapping[str, str], rank: int, world: int) -> None:
    """Raise LaunchError if RANK is not that of the innermost launcher, which has as many ranks: a batch script exported it for all.
    A task of a smaller world may start several processes by hand, whose ranks are at least its own."""
    for outer in [launcher for launcher in _LAUNCHERS[2:] if _matches(replace(launcher, required=""), environ)][:1]:
        own, tasks = _read_int(environ, outer.rank, outer.name), _read_int(environ, outer.world, outer.name)
        if own is not None and own != rank and (tasks == world or rank < own):
            advice = f"unset RANK, or export it inside each task: RANK=${outer.rank}"
            raise LaunchError(f"{_BY_HAND.name}: RANK={rank}, but {outer.rank}={own}: another rank of the same job; {advice}")


def _find_rendezvous(environ: Mapping[str, str], launcher: _Launcher, rank: int) -> tuple[str | None, int | None]:
    port = _read_int(environ, "MASTER_PORT", launcher.name)
    address = environ.get("MASTER_ADDR") or None
    if launcher.name == "srun":
        # Consecutive steps and jobs get different ports: 20000 + (8 job + step) mod 12768
        ids = [int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        port = port or 20000 + (8 * ids[0] + ids[1]) % 12768
        hosts = expand_hostlist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
        address = address or environ.get("HPCAI_ADDRESS") or ("127.0.0.1" if len(hosts) == 1 else next(iter(hosts), None))
        if rank == 0 and environ.get("SLURM_NODEID", "0") != "0" and address in hosts:
            raise LaunchError(f"srun: rank 0 is not on {address}, the first node of the step; set HPCAI_ADDRESS to its node")
    if not launcher.mpi and (address is None or port is None):
        advice = "set MASTER_ADDR and MASTER_PORT, the same for all ranks"
        raise LaunchError(f"{launcher.name}: the address of rank 0 is unknown; {advice}")
    return address, port
