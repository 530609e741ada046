"""Who am I, and how do I reach the others: alone, mpiexec, srun, PALS and torchrun give the same rank, world and device.

A person may set, alike for all ranks:

    MASTER_ADDR, MASTER_PORT   where rank 0 listens
    HPCAI_ADDRESS              rank 0's name on the network to be used, where its host name is unknown to the others or slow
    HPCAI_TIMEOUT              seconds that ranks wait for one another, when they meet and in every collective (600)
    HPCAI_SHARE_GPU=1          several ranks may use one GPU, over gloo: for tests
"""

import os
import re
import resource
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.dist.mesh import Mesh
from hpcai.dist.watch import Watch, leave_now, shout
from hpcai.errors import LaunchError


@dataclass(frozen=True)
class Place:
    """This process among the processes of its job, as the environment tells it. None is what only MPI can tell."""

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
    """How one launcher names things. It fits where ``rank`` and all of ``signs`` are set; of several names the first set counts."""

    name: str
    rank: str
    world: str = ""
    local_rank: str = ""
    local_world: str = ""
    signs: str = ""
    mpi: bool = True
    step: bool = False  # only in a Slurm job step; in a batch shell the same variables describe the job, not this process
    same: str = ""  # other names for the rank; one that differs was inherited from somewhere else


def _srun(name: str, rank: str = "") -> _Launcher:
    return _Launcher(
        name,
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE",
        signs=rank,
        mpi=bool(rank),
        step=True,
        same=rank,
    )


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", mpi=False)
_BY_HAND = _Launcher(
    "RANK and WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK SLURM_LOCALID MPI_LOCALRANKID PALS_LOCAL_RANKID",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE MASTER_ADDR MASTER_PORT",
    mpi=False,
)
_OMPI, _MV2 = "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"
# The first that fits counts, the innermost first: torchrun may run inside srun, and in a Slurm job mpiexec starts its proxies
# with srun, whose SLURM_PROCID then numbers nodes. HPE's PALS gives no world size under PMIx; Slurm's Cray plugin sets
# PALS_RANKID but nothing local.
_LAUNCHERS = (
    _TORCHRUN,
    _BY_HAND,
    _Launcher("mpirun (Open MPI)", _OMPI + "RANK", _OMPI + "SIZE", _OMPI + "LOCAL_RANK", _OMPI + "LOCAL_SIZE"),
    _Launcher("mpiexec (MVAPICH)", _MV2 + "RANK", _MV2 + "SIZE", _MV2 + "LOCAL_RANK", _MV2 + "LOCAL_SIZE"),
    _Launcher("mpiexec (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    _Launcher(
        "mpiexec (PALS)",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        "PALS_LOCAL_RANKID",
        same="PMI_RANK PMIX_RANK",
    ),
    _srun("srun (Cray MPI)", "PALS_RANKID"),
    _srun("srun (PMIx)", "PMIX_RANK"),
    _srun("srun (PMI2)", "PMI_RANK"),
    _srun("srun"),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMI_SIZE"),
    _Launcher("PMIx", "PMIX_RANK", signs="PMIX_NAMESPACE"),
)
_ALONE = Place("alone", 0, 1, 0, 1)
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # the batch shell (…fb) and salloc's interactive shell (…fa) have step ids above this


def place(environ: Mapping[str, str] = os.environ) -> Place:
    """Read this process' place from the variables that launchers set; touches neither network nor MPI nor GPU.

    Raises LaunchError when they contradict one another, or when several copies of a job would start side by side.
    """
    found = [launcher for launcher in _LAUNCHERS if _fits(launcher, environ)]
    if not found:
        return _ALONE
    launcher = found[0]
    rank = _number(environ, launcher.rank, launcher.name)
    world = _number(environ, launcher.world, launcher.name)
    local_rank = _number(environ, launcher.local_rank, launcher.name)
    local_world = _number(environ, launcher.local_world, launcher.name)
    assert rank is not None  # else the launcher would not fit
    if not launcher.mpi:
        for value, names in ((world, launcher.world), (local_rank, launcher.local_rank)):
            if value is None:
                raise LaunchError(f"{launcher.name}: {launcher.rank}={rank}, but {' or '.join(names.split())} is not set; set it")
    _check(environ, launcher, rank, world, local_rank, local_world)
    if launcher in (_TORCHRUN, _BY_HAND):
        _check_copies(environ, launcher, world or 1, found)
    address, port = _meeting_point(environ, launcher, rank)
    return Place(launcher.name, rank, world, local_rank, local_world, launcher.mpi, address, port)


def device(place: Place, visible: int | None = None) -> torch.device:
    """The device of this process: the CPU without a GPU, the only visible one, or the one with the number of its local rank.

    Sites that bind one GPU to each task show it to the task as number 0, whatever the local rank. Raises LaunchError when more
    tasks than GPUs were started on the node.
    """
    if visible is None:
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return torch.device("cpu")
    if visible == 1:
        return torch.device("cuda", 0)
    if place.local_rank is None:
        raise LaunchError(f"{place.launcher} tells no local rank before MPI starts, so none of {visible} GPUs can be chosen")
    if place.local_rank < visible:
        return torch.device("cuda", place.local_rank)
    if _share_gpu():
        return torch.device("cuda", place.local_rank % visible)
    raise LaunchError(
        f"local rank {place.local_rank} finds only {visible} visible GPUs; start {visible} tasks on each node, or bind one GPU to "
        "each task (srun --gpus-per-task=1)"
    )


def alone(device: torch.device | None = None) -> Mesh:
    """A mesh of one process, all axes of size 1: for a notebook or a script. Uses the first visible GPU, where there is one."""
    return Mesh({}, 1, 0, device if device is not None else _device(_ALONE))


@contextmanager
def start(axes: Any) -> Iterator[Mesh]:
    """Meet the other processes of the job and give the mesh; ``axes`` maps names to sizes or is a settings object.

    An exception on one rank ends all ranks within seconds (see hpcai.dist.watch). With one process there is neither process
    group nor watch, and exceptions pass through. Raises LaunchError, and MeshError when the axes do not fit the processes.
    """
    sizes: Mapping[str, int] = axes.model_dump() if hasattr(axes, "model_dump") else dict(axes)
    here = place()
    _check_unannounced(here)
    if torch_dist.is_initialized():
        raise LaunchError("torch.distributed is initialised already; start() makes the process group itself")
    here, job = (here, None) if here.world == 1 else _meet(here)
    if job is None or here.world is None:
        yield Mesh(sizes, 1, 0, _device(here))
        return
    with job.watch:
        where = _device(here)
        backend = "gloo"
        if where.type == "cuda":
            _claim(where, here, job.store)
            backend = "cpu:gloo,cuda:" + ("gloo" if _share_gpu() else "nccl")
        group = torch_dist.PrefixStore("group", job.store)
        torch_dist.init_process_group(backend, store=group, rank=here.rank, world_size=here.world, timeout=_timeout())
        yield Mesh(sizes, here.world, here.rank, where)


def expand(hosts: str) -> list[str]:
    """The hosts of a Slurm list, in order: ``nid[001-003,7],gpu[1-2]-ib[0-1],login``. Containers seldom hold scontrol."""
    names = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", hosts):
        parts = [_range(part[1:-1]) if part.startswith("[") else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)]
        names += ["".join(choice) for choice in product(*parts)]
    return names


def _range(numbers: str) -> list[str]:
    every = []
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        every += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return every


def _per_node(counts: str) -> list[int]:
    """``4(x2),3``: four tasks on each of two nodes, three on the third."""
    every: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        every += [int(count)] * int(times or 1)
    return every


def _fits(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    in_step = step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    return all(environ.get(sign) for sign in (launcher.rank, *launcher.signs.split())) and (in_step or not launcher.step)


def _number(environ: Mapping[str, str], names: str, launcher: str) -> int | None:
    for name in names.split():
        value = environ.get(name)
        if not value:
            continue
        if name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            counts, node = _per_node(value), int(environ.get("SLURM_NODEID", "0"))
            if node < len(counts):
                return counts[node]
        elif value.isdigit():
            return int(value)
        else:
            raise LaunchError(f"{launcher}: {name}={value} is not a whole number")
    return None


def _check(
    environ: Mapping[str, str], launcher: _Launcher, rank: int, world: int | None, local_rank: int | None, local_world: int | None
) -> None:
    said = f"{launcher.name}: {launcher.rank}={rank}"
    if world is not None and rank >= world:
        raise LaunchError(f"{said}, but the world has {world} ranks; a variable of another launcher is left over, unset it")
    if local_rank is not None and local_world is not None and local_rank >= local_world:
        raise LaunchError(f"{said}: local rank {local_rank}, but {local_world} ranks on the node; unset what another launcher left")
    for name in launcher.same.split():
        if environ.get(name, str(rank)) != str(rank):
            raise LaunchError(f"{said}, but {name}={environ[name]}, left over from another launcher; unset {name}")


def _check_copies(environ: Mapping[str, str], inner: _Launcher, world: int, found: list[_Launcher]) -> None:
    groups = int(environ.get("GROUP_WORLD_SIZE", "1")) if inner is _TORCHRUN else world
    for outer in found:
        tasks = None if outer in (_TORCHRUN, _BY_HAND) else _number(environ, outer.world, outer.name)
        if tasks is not None and tasks > groups:
            todo = "give torchrun --nnodes and --rdzv-endpoint" if inner is _TORCHRUN else "unset RANK and WORLD_SIZE"
            what = f"{groups} node" if inner is _TORCHRUN else f"WORLD_SIZE={world}"
            raise LaunchError(f"{outer.name} started {tasks} tasks, each with {inner.name} of {what}: copies of one job; {todo}")


def _check_unannounced(here: Place) -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if here.world == 1 and mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        raise LaunchError(
            f"this process looks alone ({here.launcher}), but MPI has {mpi.COMM_WORLD.size} ranks; set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT for this launcher"
        )


def _meeting_point(environ: Mapping[str, str], launcher: _Launcher, rank: int) -> tuple[str | None, int | None]:
    port = _number(environ, "MASTER_PORT", launcher.name)
    address = environ.get("MASTER_ADDR") or None
    if launcher.name == "srun":
        # Steps of one job and jobs that follow one another get ports of their own: 20000 + (8 job + step) mod 12768
        ids = [int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        port = port or 20000 + (8 * ids[0] + ids[1]) % 12768
        hosts = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
        address = address or environ.get("HPCAI_ADDRESS") or ("127.0.0.1" if len(hosts) == 1 else next(iter(hosts), None))
        if rank == 0 and environ.get("SLURM_NODEID", "0") != "0" and address in hosts:
            raise LaunchError(f"srun: rank 0 is not on {address}, the first node of the step; set HPCAI_ADDRESS to its node")
    if not launcher.mpi and (address is None or port is None):
        raise LaunchError(
            f"{launcher.name}: where rank 0 listens is not known; set MASTER_ADDR and MASTER_PORT, alike for all ranks"
        )
    return address, port


@dataclass(frozen=True)
class _Job:
    store: torch_dist.Store
    watch: Watch


class _MPIError(LaunchError):
    """No MPI library, or that of another launcher: the same on every rank of a node."""


def _meet(here: Place) -> tuple[Place, _Job | None]:
    """Reach the other ranks. Until then they cannot hear one another, so a refusal must end this process by itself."""
    comm = None
    try:
        if here.mpi:
            if here.local_rank is not None:
                with suppress(LaunchError):  # repeated below, once the ranks hear one another
                    _device(here)  # before MPI, which may else open a context on the first GPU for every rank
            here, comm = _join_mpi(here)
        if here.world == 1:
            return here, None
        address, store = _open_store(here, comm)
        assert here.world is not None
        abort = os._exit if comm is None else comm.Abort
        return here, _Job(store, Watch(here.rank, here.world, address, store, abort))
    except (LaunchError, OSError, RuntimeError) as error:
        if here.rank > 0:
            time.sleep(2)  # it is mostly the same everywhere: rank 0 speaks first, and at its end most launchers stop the rest
        if here.local_rank in (0, None) or not isinstance(error, _MPIError):
            shout(f"rank {here.rank} on {socket.gethostname()}: LaunchError: {error}")
        if comm is not None and comm.size > 1:
            comm.Abort(2)
        leave_now(2)


def _join_mpi(here: Place) -> tuple[Place, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)  # from every rank; the check below says it once
            from mpi4py import MPI  # importing it starts MPI
    except (ImportError, RuntimeError) as error:
        raise _MPIError(
            f"{here.launcher} started this process as rank {here.rank}, but MPI cannot be loaded: {error}; set MPI4PY_LIBMPI to "
            "the libmpi.so that belongs to the launcher, or install one (pip install mpich)"
        ) from error
    comm = MPI.COMM_WORLD
    announced = here.world or here.local_world or 1
    if comm.size < announced or (here.world, here.rank) not in ((comm.size, comm.rank), (None, comm.rank)):
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise _MPIError(
            f"{here.launcher} announced rank {here.rank} of {here.world or 'several'}, but MPI sees rank {comm.rank} of "
            f"{comm.size}; the library is {library}: use the launcher that belongs to it (its own mpiexec; srun --mpi=pmi2 for "
            "MPICH, srun --mpi=pmix for Open MPI), or set MPI4PY_LIBMPI to the library of the launcher"
        )
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if here.local_rank is None or here.local_world is None:
        here = replace(here, local_rank=node.rank, local_world=node.size)
    name = "127.0.0.1" if node.size == comm.size else socket.gethostname()
    node.Free()
    address, port = comm.bcast((here.address or os.environ.get("HPCAI_ADDRESS") or name, here.port))
    return replace(here, world=comm.size, address=address, port=port), comm


_opened: list[tuple[str, torch_dist.Store]] = []  # kept for a further start() in the same processes


def _open_store(here: Place, comm: Any) -> tuple[str, torch_dist.Store]:
    """The key-value store on rank 0, where the process group is arranged. torchrun brings one."""
    from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port, timeout = here.port, _timeout()
    assert here.address is not None and here.world is not None
    address, world = here.address, here.world

    began = time.monotonic()
    try:
        if not _opened:
            if here.rank == 0:
                _allow_sockets(8 * world + 1024)
            serves = here.rank == 0 and not from_torchrun
            store = torch_dist.TCPStore(address, port or 0, None, True, timeout, wait_for_workers=False) if serves else None
            if comm is not None:
                port = comm.bcast(store.port if store else None)
            assert port is not None
            store = store or torch_dist.TCPStore(address, port, None, False, timeout)
            _opened.append((address, store))
    except (RuntimeError, ValueError) as error:
        waited = f"after {time.monotonic() - began:.0f} s"
        todo = "set MASTER_PORT to a free port" if here.rank == 0 else "did rank 0 start, and is the name right? Set HPCAI_ADDRESS"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LaunchError(f"cannot reach rank 0 at {address}:{port} {waited}: {reason}; {todo}") from error
    address, opened = _opened[0]
    attempt = f"hpcai {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {len(_opened)}"
    _opened.append(_opened[0])
    return address, torch_dist.PrefixStore(attempt, opened)


def _allow_sockets(count: int) -> None:
    """Rank 0 holds a few sockets for every rank, and many systems allow 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard))


def _device(here: Place) -> torch.device:
    where = device(here)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        torch.cuda.init()  # DeviceMesh chooses a device of its own for a process that has not begun to use one
    return where


def _claim(where: torch.device, here: Place, store: torch_dist.Store) -> None:
    """Raise LaunchError when another rank uses the same physical GPU, which NCCL reports late and obscurely."""
    gpu = str(torch.cuda.get_device_properties(where).uuid)
    me = f"rank {here.rank}"
    owner = store.compare_set(f"gpu {gpu}", "", me).decode()
    if owner != me and not _share_gpu():
        raise LaunchError(
            f"{me} and {owner} both use GPU {gpu}; {me} has local rank {here.local_rank} and sees {torch.cuda.device_count()} GPU; "
            "give each task its own (srun --gpus-per-task=1), start fewer tasks on a node, or set HPCAI_SHARE_GPU=1 for a test"
        )


def _share_gpu() -> bool:
    return os.environ.get("HPCAI_SHARE_GPU") == "1"


def _timeout() -> timedelta:
    text = os.environ.get("HPCAI_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"HPCAI_TIMEOUT={text} is not a number of seconds above 0")
    return timedelta(seconds=seconds)
