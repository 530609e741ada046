"""What one rank of a job says of itself: its place, cores and GPU, versions, limits and surroundings. It asks no other rank."""

import os
import platform
import re
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

import hpcai
from hpcai.dist.environment import Place
from hpcai.dist.host import cpu_list, ranges
from hpcai.dist.launch import communicator, device
from hpcai.errors import LaunchError
from hpcai.kernels import compiler
from hpcai.stop import SIGNALS

PACKAGES = ("numpy", "h5py", "mpi4py", "pydantic", "safetensors")
SHOWN = re.compile(r"^(HF_|TRANSFORMERS_|PIP_NO_INDEX|(http|https|all|no)_proxy$)", re.IGNORECASE)
"""Variables by which programs are kept from the network, or sent through a proxy."""
SHARED = re.compile(r"^(NCCL_|FI_|UCX_|OMP_|TORCH_|PYTORCH_|HPCAI_)(?!.*(DEVICE|IFNAME|HCA|TOKEN|TORCHELASTIC))")
"""Variables that should be alike on all ranks: none that names a rank's own network card, and no secret."""


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank; ``node`` is the NUMA node beside it, where the kernel tells."""

    index: int
    name: str
    uuid: str
    pci: str
    gib: float
    node: int | None = None


@dataclass(frozen=True)
class Member:
    """One rank. ``machine`` tells computers apart where containers have host names of their own; ``cpus`` are those of ``online``
    ones that it may use, as the launcher left them."""

    rank: int
    node: str
    machine: str
    launcher: str = "alone"
    local_rank: int | None = 0
    cpus: tuple[int, ...] = ()
    online: int = 0
    numa: tuple[int, ...] = ()
    threads: int = 1
    gpu: Gpu | None = None
    gpu_problem: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    network: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)
    """folder of each cache that cannot be written, by the variable that moves it"""
    files: int = 1 << 20
    locked: int | None = None
    """bytes; None is no limit"""
    rdma: bool = False
    shm: tuple[int, int] = (1 << 40, 1 << 40)
    """bytes of /dev/shm, and free ones"""
    compiler: str | None = None
    deaf: tuple[str, ...] = ()
    """signals of a scheduler that do not reach this process"""
    imports: float = 0.0
    app: "Needs | None" = None


@dataclass(frozen=True)
class Needs:
    """What an app asks for, as a rank finds it: packages that are ``missing``; the data folder and how many entries it has."""

    name: str
    extras: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    data: str = ""
    entries: int | None = None


def look(here: Place, imports: float = 0.0, app: Needs | None = None, root: Path = Path("/")) -> Member:
    """This process; the kernel's files are read below ``root``."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    gpu, problem = find_gpu(here, root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Member(
        rank=here.rank, node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(), machine=machine(root),
        launcher=here.launcher, local_rank=local_rank(here), cpus=tuple(sorted(cpus)),
        online=len(cpu_list(root / "sys/devices/system/cpu/online")) or os.cpu_count() or 1, numa=numa(cpus, root),
        threads=torch.get_num_threads(), gpu=gpu, gpu_problem=problem, versions=versions(gpu, root),
        shared={name: value for name, value in sorted(os.environ.items()) if SHARED.match(name)},
        network={name: value for name, value in sorted(os.environ.items()) if SHOWN.match(name) and "TOKEN" not in name},
        caches=unwritable_caches(os.environ), files=most if most != resource.RLIM_INFINITY else 1 << 30,
        locked=None if soft == resource.RLIM_INFINITY else soft, rdma=any((root / "sys/class/infiniband").glob("*")),
        shm=shm(root), compiler=compiler.MISSING, deaf=deaf(), imports=imports, app=app,
    )  # fmt: skip


def local_rank(here: Place) -> int | None:
    """Some launchers tell it by MPI alone."""
    comm = communicator()
    if here.local_rank is not None or comm is None:
        return here.local_rank
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    found = int(node.rank)
    node.Free()
    return found


def machine(root: Path = Path("/")) -> str:
    """The same for all containers of a computer, and for no two computers: the kernel's mark of its start."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def numa(cpus: set[int], root: Path) -> tuple[int, ...]:
    """The NUMA nodes that some of ``cpus`` belong to."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return tuple(sorted(int(path.name[4:]) for path in nodes if cpu_list(path / "cpulist") & cpus))


def find_gpu(here: Place, root: Path) -> tuple[Gpu | None, str]:
    """This rank's GPU, and what is wrong with it, if anything is."""
    driver = (root / "proc/driver/nvidia/version").exists()
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
        return None, "the NVIDIA driver is there, but torch finds no GPU" if driver and not hidden else ""
    try:
        where = device(here)
        known = torch.cuda.get_device_properties(where)
    except (LaunchError, RuntimeError) as problem:  # of a driver that does not start the GPU
        return None, str(problem).splitlines()[0]
    domain, bus, slot = (getattr(known, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    pci = f"{domain:04x}:{bus:02x}:{slot:02x}.0" if slot >= 0 else ""
    node = None
    with suppress(OSError, ValueError):
        told = int((root / "sys/bus/pci/devices" / (pci or "none") / "numa_node").read_text())
        node = told if told >= 0 else None
    return Gpu(where.index or 0, known.name, str(getattr(known, "uuid", "")), pci, known.total_memory / 2**30, node), ""


def versions(gpu: Gpu | None, root: Path = Path("/")) -> dict[str, str]:
    """What has to be alike on all ranks. What is not there is left out."""
    found = {"Python": platform.python_version(), "torch": torch.__version__, "hpcai": hpcai.__version__}
    found["hpcai's commit"] = commit(Path(hpcai.__file__).parents[1])
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if communicator() is not None:
        from mpi4py import MPI

        found["MPI library"] = " ".join(MPI.Get_library_version().splitlines()[0].split()).strip("\0 ")
    found["CUDA of torch"] = str(torch.version.cuda or torch.version.hip or "")
    if gpu is not None and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["NVIDIA driver"] = driver(root)
    found["C library"] = " ".join(platform.libc_ver())
    return {name: value for name, value in found.items() if value}


def driver(root: Path) -> str:
    """``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...`` -> 550.54.15."""
    with suppress(OSError):
        found = re.search(r"Module(?: for \S+)?\s+([\d.]+)", (root / "proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    return ""


def commit(checkout: Path) -> str:
    """The commit that a checkout of git is at, read from its files: git itself may be missing, and may refuse another's folder."""
    try:
        folder = checkout / ".git"
        if folder.is_file():  # a second work tree
            folder = checkout / folder.read_text().removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name, common = head.removeprefix("ref: "), folder
        if (folder / "commondir").is_file():
            common = folder / (folder / "commondir").read_text().strip()
        if (common / name).is_file():
            return (common / name).read_text().strip()
        packed = (line.split() for line in (common / "packed-refs").read_text().splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), "")
    except OSError:
        return ""


def unwritable_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Folders in which torch, Triton and matplotlib keep what they compile or draw with, and which cannot be written."""
    home = Path(environ.get("HOME") or "/")
    own, settings = environ.get("TRITON_HOME") or home, environ.get("XDG_CONFIG_HOME") or home / ".config"
    places = {
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_CACHE_DIR") or Path(own, ".triton/cache")),
        "TORCHINDUCTOR_CACHE_DIR": Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()),
        "MPLCONFIGDIR": Path(environ.get("MPLCONFIGDIR") or Path(settings, "matplotlib")),
    }
    return {name: str(place) for name, place in places.items() if not _can_be_written(place)}


def _can_be_written(folder: Path) -> bool:
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def shm(root: Path) -> tuple[int, int]:
    try:
        found = shutil.disk_usage(root / "dev/shm")
        return found.total, found.free
    except OSError:
        return 0, 0


def deaf() -> tuple[str, ...]:
    """Signals of a scheduler that are blocked, which a process takes over from who started it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return tuple(number.name for number in SIGNALS if number in blocked)


def signal_names() -> str:
    return ", ".join(number.name for number in SIGNALS)


def needs(name: str, words: list[str]) -> Needs:
    """What the app ``name`` asks for with its settings ``words``: packages of its extra and of those that its settings name, and
    the data. Raises ConfigError where there is no such app, or a setting is wrong."""
    from hpcai import config
    from hpcai.cli import apps
    from hpcai.errors import ConfigError

    module = apps.find(name, "settings")
    if module is None:
        raise ConfigError(f"--app {name}: there is no such app; expected one of {', '.join(apps.names('settings'))}")
    files = [word for word in words if word.endswith((".yaml", ".yml"))][:1]
    cfg = config.load(module.Config, files[0] if files else None, [word for word in words if word not in files])
    extras = [name.replace("_", "-"), *(getattr(cfg.data, "reader", ""), *cfg.report.sinks)]
    offered = metadata.metadata("hpcai-suite").get_all("Provides-Extra") or [] if _installed("hpcai-suite") else []
    extras = [extra for extra in extras if extra in offered]
    data = Path(cfg.data.directory)
    entries = None
    with suppress(OSError):
        entries = sum(len(os.listdir(folder)) for folder in (data, *(place for place in data.iterdir() if place.is_dir())))
    return Needs(name, tuple(extras), tuple(_absent(extras)), str(data.absolute()), entries)


def _absent(extras: list[str]) -> list[str]:
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in metadata.requires("hpcai-suite") or []] if extras else []
    asked = [need for need in wanted if need.marker is not None and any(need.marker.evaluate({"extra": extra}) for extra in extras)]
    plain = {need.name for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})}
    return sorted({need.name for need in asked if need.name not in plain and not _installed(need.name)})


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def told(member: Member) -> str:
    """The cores and GPU of a rank, on a line."""
    text = f"{len(member.cpus)} of {member.online} CPUs ({ranges(set(member.cpus))})"
    if member.numa:
        text += f", NUMA {ranges(set(member.numa))}"
    text += f", {member.threads} thread{'s' if member.threads > 1 else ''}"
    if member.gpu is not None:
        text += f", GPU {member.gpu.index} {member.gpu.name} {member.gpu.pci or member.gpu.uuid}"
    return text
