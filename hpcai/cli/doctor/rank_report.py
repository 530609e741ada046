"""One rank of a job: its node, cores and GPU, versions and limits, without communication."""

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

import hpcai
from hpcai.dist.environment import RankInfo
from hpcai.dist.host import find_numa_node, read_cpu_list
from hpcai.dist.launch import mpi_communicator, select_device
from hpcai.errors import LaunchError
from hpcai.host_limits import allowed_cpus, count_cpus

PACKAGES = ("numpy", "h5py", "mpi4py", "pydantic", "safetensors")
SHARED = re.compile(r"^(NCCL_|FI_|UCX_|OMP_|TORCH_|PYTORCH_|HPCAI_)(?!.*(DEVICE|IFNAME|HCA|TOKEN|TORCHELASTIC))")
"""Environment variables that should be equal on all ranks; excludes secrets and those that name a rank's own network card."""


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank; ``node`` is its NUMA node, if the kernel exposes it."""

    index: int
    name: str
    uuid: str
    pci: str
    gib: float
    node: int | None = None


@dataclass(frozen=True)
class RankReport:
    """One rank. ``machine`` identifies the computer, even if containers have their own host names; ``cpus`` are the CPUs of its
    affinity mask out of ``online`` ones, ``usable`` of them within quotas of CPU time. ``files`` is the limit of open files;
    ``locked`` the limit of locked memory in bytes, None for no limit; ``shm`` is the size of /dev/shm."""

    rank: int
    node: str
    machine: str
    launcher: str = "alone"
    cpus: tuple[int, ...] = ()
    usable: int = 1 << 20
    online: int = 0
    numa: tuple[int, ...] = ()
    threads: int = 1
    gpu: Gpu | None = None
    gpu_problem: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    files: int = 1 << 20
    locked: int | None = None
    rdma: bool = False
    shm: int = 1 << 40


def inspect_rank(rank_info: RankInfo, root: Path = Path("/")) -> RankReport:
    """Return the report of this process; the kernel's files are read below ``root``."""
    cpus = allowed_cpus()
    numa = {int(path.name[4:]): read_cpu_list(path / "cpulist") for path in (root / "sys/devices/system/node").glob("node[0-9]*")}
    gpu, problem = find_gpu(rank_info, root)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    machine, shm = socket.gethostname(), 0
    with suppress(OSError):  # the kernel's boot id, the same for all containers of a computer
        machine = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        shm = shutil.disk_usage(root / "dev/shm").total
    return RankReport(
        rank=rank_info.rank, node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(), machine=machine,
        launcher=rank_info.launcher, cpus=tuple(sorted(cpus)), usable=count_cpus(root),
        online=len(read_cpu_list(root / "sys/devices/system/cpu/online")) or os.cpu_count() or 1,
        numa=tuple(sorted(node for node, node_cpus in numa.items() if node_cpus & cpus)), threads=torch.get_num_threads(),
        gpu=gpu, gpu_problem=problem, versions=versions(gpu, root), shm=shm,
        variables={name: value for name, value in sorted(os.environ.items()) if SHARED.match(name)},
        files=files if files != resource.RLIM_INFINITY else 1 << 30, locked=None if locked == resource.RLIM_INFINITY else locked,
        rdma=any((root / "sys/class/infiniband").glob("*")),
    )  # fmt: skip


def find_gpu(rank_info: RankInfo, root: Path) -> tuple[Gpu | None, str]:
    """Return this rank's GPU, and an error message or ""."""
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
        driver = (root / "proc/driver/nvidia/version").exists()
        return None, "the NVIDIA driver is there, but torch finds no GPU" if driver and not hidden else ""
    try:
        where = select_device(rank_info)
        properties = torch.cuda.get_device_properties(where)
    except (LaunchError, RuntimeError) as error:  # from a driver that fails to initialize the GPU
        return None, str(error).splitlines()[0]
    (pci, node), gib = find_numa_node(where, root), properties.total_memory / 2**30
    return Gpu(where.index or 0, properties.name, str(getattr(properties, "uuid", "")), pci, gib, node if node >= 0 else None), ""


def versions(gpu: Gpu | None, root: Path = Path("/")) -> dict[str, str]:
    """Return the versions that must be equal on all ranks, without missing ones."""
    result = {"Python": platform.python_version(), "torch": torch.__version__, "hpcai": hpcai.__version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    if mpi_communicator() is not None:
        from mpi4py import MPI

        result["MPI library"] = " ".join(MPI.Get_library_version().splitlines()[0].split()).strip("\0 ")
    result["CUDA of torch"] = str(torch.version.cuda or torch.version.hip or "")
    if gpu is not None and torch.distributed.is_nccl_available():
        result["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(OSError):  # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...
        text = (root / "proc/driver/nvidia/version").read_text()
        result["NVIDIA driver"] = "".join(re.findall(r"Module(?: for \S+)?\s+([\d.]+)", text)[:1])
    result["C library"] = " ".join(platform.libc_ver())
    return {name: value for name, value in result.items() if value}
