"""The start of a job: rank, world and device of a process, alone or under mpiexec, srun, PALS or torchrun.

The page docs/cluster.md ("Launchers") lists its environment variables.
"""

import atexit
import ctypes
import logging
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai import startup
from hpcai.dist.environment import BATCH_SHELL, INTERACTIVE_SHELL, SINGLE_PROCESS, RankInfo, read_rank_info
from hpcai.dist.host import bind_to_numa_node, retain_freed_memory
from hpcai.dist.mesh import Mesh
from hpcai.dist.watchdog import Watchdog, exit_now, report_failure, waiting_at
from hpcai.errors import LaunchError
from hpcai.host_limits import raise_file_limit

logger = logging.getLogger(__name__)

# With --gpus-per-task=1 the other GPUs of the node are hidden, and NCCL may not use NVLink.
_SHOW_ALL_GPUS = "srun --gpus-per-node=N --gpu-bind=none"


def select_device(info: RankInfo, visible: int | None = None) -> torch.device:
    """Return the device of this process: the GPU with the number of its local rank, the only visible one, or the CPU without GPU.

    Sites that bind one GPU to each task show it as number 0 to all local ranks. Raises LaunchError for more tasks than GPUs.
    """
    if visible is None:
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return torch.device("cpu")
    if visible == 1:
        return torch.device("cuda", 0)
    if info.local_rank is None:
        raise LaunchError(f"{info.launcher} sets no local rank before MPI starts, so none of {visible} GPUs can be chosen")
    if info.local_rank < visible or _may_share_gpu():
        return torch.device("cuda", info.local_rank % visible)
    advice = f"start {visible} tasks on each node, or show all GPUs of the node to each task ({_SHOW_ALL_GPUS})"
    raise LaunchError(f"local rank {info.local_rank} finds only {visible} visible GPUs; {advice}")


def mpi_communicator() -> Any:
    """Return mpi4py's world communicator if the job uses MPI, otherwise None. It is for bulk data between CPUs."""
    return _mpi[0] if _mpi else None


def single_process(device: torch.device | None = None) -> Mesh:
    """Return a mesh of one process, for a notebook or a script, with the first visible GPU if there is one."""
    return Mesh({}, 1, 0, device if device is not None else _set_device(SINGLE_PROCESS))


@contextmanager
def start(axes: Any, device: torch.device | None = None) -> Iterator[Mesh]:
    """Context manager: initialize the process group, and return the mesh. ``axes`` maps names to sizes or is a settings object.

    ``device``: Replaces the GPU of the local rank, for example by the CPU; no GPU is initialized then.

    An exception on one rank ends all ranks within seconds (``hpcai.dist.watchdog``). A single process has no process group and no
    watchdog, and exceptions propagate. Raises LaunchError, and MeshError if the axes do not match the number of processes.
    """
    startup.begin("processes")
    sizes: Mapping[str, int] = axes.model_dump() if hasattr(axes, "model_dump") else dict(axes)
    info = read_rank_info()
    mpi = sys.modules.get("mpi4py.MPI")
    if info.world == 1 and mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        advice = "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for this launcher"
        raise LaunchError(f"this process seems to be alone ({info.launcher}), but MPI has {mpi.COMM_WORLD.size} ranks; {advice}")
    if info in (INTERACTIVE_SHELL, BATCH_SHELL):
        logger.info("this is one process, in %s; to start one for each task, put srun before the command", info.launcher)
    if torch_dist.is_initialized():
        raise LaunchError("torch.distributed is initialized already; start() creates the process group itself")
    info, watchdog = (info, None) if info.world == 1 else _rendezvous(info, device)
    assert info.world is not None
    with watchdog or nullcontext(), waiting_at("", is_work=True):
        if watchdog is not None:
            watchdog.wait_for_ranks(_read_timeout().total_seconds())
        local_device = device if device is not None else _set_device(info)
        if local_device.type == "cpu":
            retain_freed_memory()
        elif os.environ.get("HPCAI_BIND") != "0" and (bound := bind_to_numa_node(local_device, info.local_world or 1)):
            logger.info("rank %d: %s", info.rank, bound)
        if device is None and info.rank == 0 and (missing := explain_missing_gpu(local_device)):
            logger.info("%s", missing)
        if watchdog is not None:
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # most pairs of hosts need no connection
            if info.local_world == info.world and any(name == "lo" for _, name in socket.if_nameindex()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks share the node: no interface to other hosts
            backend = "gloo"
            if local_device.type == "cuda":
                _claim_gpu(local_device, info, watchdog.store)
                # Communication kernels start at once, not behind convolutions that fill the GPU.
                os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
                backend = "cpu:gloo,cuda:" + ("gloo" if _may_share_gpu() else "nccl")
            group = torch_dist.PrefixStore("group", watchdog.store)
            # Without device_id: otherwise NCCL splits further groups off this one, and waits for ranks outside of them.
            torch_dist.init_process_group(backend, store=group, rank=info.rank, world_size=info.world, timeout=_read_timeout())
        mesh = Mesh(sizes, info.world, info.rank, local_device, _read_timeout())
        startup.begin("data")
        yield mesh


class _MPIError(LaunchError):
    """No MPI library, or one of another launcher: the same error on all ranks of a node."""


def _rendezvous(info: RankInfo, device: torch.device | None) -> tuple[RankInfo, Watchdog | None]:
    """Connect to the other ranks. Before that the watchdog cannot propagate errors, so an error exits this process directly."""
    comm = None
    try:
        if info.mpi:
            if info.local_rank is not None and device is None:
                with suppress(LaunchError):  # raised again once the watchdog runs
                    _set_device(info)  # before MPI, which may otherwise create a context of every rank on the first GPU
            info, comm = _init_mpi(info)
        if info.world == 1:
            return info, None
        with waiting_at(f"the rendezvous with rank 0 at {info.address}"):
            address, store, token = _open_store(info, comm)
            assert info.world is not None
            abort = os._exit if comm is None else comm.Abort
            return info, Watchdog(info.rank, info.world, address, store, abort, token)
    except (LaunchError, OSError, RuntimeError) as error:
        if info.rank > 0:
            time.sleep(2)  # usually all have the same error: rank 0 prints it, and most launchers end the others
        if info.local_rank in (0, None) or not isinstance(error, _MPIError):
            report_failure(f"rank {info.rank} on {socket.gethostname()}: LaunchError: {error}")
        if comm is not None and comm.size > 1:
            comm.Abort(2)
        exit_now(2)


def _init_mpi(info: RankInfo) -> tuple[RankInfo, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)  # on every rank; the check below raises once
            import mpi4py

            mpi4py.rc.initialize = False
            from mpi4py import MPI

            if not MPI.Is_initialized():
                _call_mpi(MPI, "MPI_Init_thread", None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
                for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
                    communicator.Set_errhandler(MPI.ERRORS_RETURN)
                atexit.register(_call_mpi, MPI, "MPI_Finalize")
    except (ImportError, RuntimeError) as error:
        fault = f"{info.launcher} started this process as rank {info.rank}, but MPI cannot be loaded: {error}"
        advice = "set MPI4PY_LIBMPI to the libmpi.so that belongs to the launcher, or install one (pip install mpich)"
        raise _MPIError(f"{fault}; {advice}") from error
    comm = MPI.COMM_WORLD
    expected = info.world or info.local_world or 1
    if comm.size < expected or (info.world, info.rank) not in ((comm.size, comm.rank), (None, comm.rank)):
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise _MPIError(
            f"{info.launcher} announced rank {info.rank} of {info.world or 'several'}, but MPI sees rank {comm.rank} of "
            f"{comm.size}; the library is {library}: use the launcher that belongs to it (its own mpiexec; srun --mpi=pmi2 for "
            "MPICH, srun --mpi=pmix for Open MPI), or set MPI4PY_LIBMPI to the library of the launcher"
        )
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if info.local_rank is None or info.local_world is None:
        info = replace(info, local_rank=node.rank, local_world=node.size)
    name = "127.0.0.1" if node.size == comm.size else socket.gethostname()
    node.Free()
    address, port = comm.bcast((info.address or os.environ.get("HPCAI_ADDRESS") or name, info.port))
    _mpi[:] = [comm]
    return replace(info, world=comm.size, address=address, port=port), comm


def _call_mpi(mpi: Any, name: str, *args: Any) -> None:
    """Call a function of MPI that waits for all ranks. mpi4py would hold the interpreter lock, and so stop all threads."""
    with waiting_at(f"{name} of all ranks"):
        if code := getattr(ctypes.CDLL(mpi.__file__), name)(*args):
            raise RuntimeError(f"{name} returned error {code}")


_mpi: list[Any] = []
_stores: list[tuple[str, torch_dist.Store]] = []  # for a further start() in the same processes


def _open_store(info: RankInfo, comm: Any) -> tuple[str, torch_dist.Store, str]:
    """Return the address of rank 0, its key-value store for the rendezvous, and the token of the job.

    torchrun has a store. Otherwise rank 0 serves one, on the loopback interface if all ranks share a node. The token is a prefix of
    all keys: without it they can be neither read nor set.
    """
    from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port, timeout = info.port, _read_timeout()
    assert info.address is not None and info.world is not None
    one_node = info.local_world == info.world
    address = info.address if from_torchrun or not one_node else "127.0.0.1"

    start_time = time.monotonic()
    try:
        if not _stores:
            if info.rank == 0:
                raise_file_limit()  # for a few sockets of every rank
            serves = info.rank == 0 and not from_torchrun
            store = _serve_store(address, port or 0, one_node) if serves else None
            if comm is not None:
                port = comm.bcast(store.port if store else None)
            assert port is not None
            store = store or torch_dist.TCPStore(address, port, None, False, timeout)
            _stores.append((address, store))
    except (RuntimeError, ValueError) as error:
        waited = f"after {time.monotonic() - start_time:.0f} s"
        advice = "set MASTER_PORT to a free port" if info.rank == 0 else "check that rank 0 runs and its name, or set HPCAI_ADDRESS"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LaunchError(f"cannot reach rank 0 at {address}:{port} {waited}: {reason}; {advice}") from error
    address, base = _stores[0]
    attempt = f"hpcai {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {len(_stores)}"
    _stores.append(_stores[0])
    job_store = torch_dist.PrefixStore(attempt, base)
    token = _share_token(info, comm, job_store)
    return "127.0.0.1" if one_node else address, torch_dist.PrefixStore(token, job_store), token


def _serve_store(address: str, port: int, one_node: bool) -> torch_dist.TCPStore:
    kwargs: dict[str, Any] = {"wait_for_workers": False}
    if one_node:  # torch would listen on every interface
        listener = socket.create_server((address, port), backlog=2048)
        port, kwargs["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    return torch_dist.TCPStore(address, port, None, True, _read_timeout(), **kwargs)


def _share_token(info: RankInfo, comm: Any, store: torch_dist.Store) -> str:
    """Return the secret of the job: HPCAI_TOKEN, or a random one of rank 0, broadcast by MPI. Without MPI it is sent by the store:
    this protects against stray connections, not against eavesdropping."""
    if token := os.environ.get("HPCAI_TOKEN"):
        return token
    token = secrets.token_hex(16) if info.rank == 0 else ""
    if comm is not None:
        return str(comm.bcast(token))
    if info.rank == 0:
        store.set("token", token)
    return store.get("token").decode()


def _set_device(info: RankInfo) -> torch.device:
    device = select_device(info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # otherwise DeviceMesh selects a device by itself
    return device


def _claim_gpu(device: torch.device, info: RankInfo, store: torch_dist.Store) -> None:
    """Raise LaunchError if another rank uses the same physical GPU, which NCCL reports late and obscurely."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    me = f"rank {info.rank}"
    owner = store.compare_set(f"gpu {gpu}", "", me).decode()
    if owner != me and not _may_share_gpu():
        raise LaunchError(
            f"{me} and {owner} both use GPU {gpu}; {me} has local rank {info.local_rank} and sees {torch.cuda.device_count()} GPU; "
            f"show all GPUs of the node to each task ({_SHOW_ALL_GPUS}), which uses that of its local rank, start fewer tasks on "
            "a node, or set HPCAI_SHARE_GPU=1 for a test"
        )


def explain_missing_gpu(device: torch.device) -> str | None:
    """Return a log line if torch is built for GPUs, finds none, and none are hidden by a variable."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else None
    hidden = any(os.environ.get(f"{name}_VISIBLE_DEVICES") == "" for name in ("CUDA", "ROCR", "HIP"))
    if device.type != "cpu" or build is None or hidden:
        return None
    flag = "--nv" if torch.version.cuda else "--rocm"
    return f"torch, built for {build}, finds no GPU: this runs on the CPU (a container needs {flag} to see the host's GPUs)"


def _may_share_gpu() -> bool:
    return os.environ.get("HPCAI_SHARE_GPU") == "1"


def _read_timeout() -> timedelta:
    text = os.environ.get("HPCAI_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"HPCAI_TIMEOUT={text} is not a number of seconds above 0")
    return timedelta(seconds=seconds)
