"""The host's work beside the training: garbage collection, freed memory, CPU binding, the GPU's counters, first collectives."""

import ctypes
import gc
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError

_FULL = 10  # every tenth collection takes in what survived two others; frozen objects are not looked at, so it costs little


class Collector:
    """Within its ``with`` block Python's garbage collector runs after every ``every``-th step only; None leaves Python alone.

    A collection on one rank makes all others wait at the next collective; here all ranks collect at the same step.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"garbage collection every {every} steps; expected at least 1, or null to leave it to Python")
        self.every = every

    def __enter__(self) -> "Collector":
        if self.every is not None:
            self._was_on, self._frozen = gc.isenabled(), gc.get_freeze_count()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def at(self, step: int) -> None:
        if self.every is not None and step % self.every == 0:
            gc.collect(2 if step // self.every % _FULL == 0 else 1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.every is not None:
            if not self._frozen:  # a block around this one keeps what it has frozen
                gc.unfreeze()
            if self._was_on:
                gc.enable()


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it Python's garbage collector rests, for work that makes many objects and no cycles: it would look at all that there
    is, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of the GNU C library


def keep_memory() -> bool:
    """Have this process keep the memory that it frees, for its next tensors. Returns whether the C library took the request.

    By default the GNU C library gives every large tensor back to the system, which clears the pages of the next one: up to a third
    of the wall time of a step on a CPU. A ``GLIBC_TUNABLES`` or ``MALLOC_`` variable that is set is respected instead.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it, other allocators ignore it
    # No tensor gets a mapping of its own, and the top of the heap is never given back.
    return bool(mallopt and mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def bind(device: torch.device, local_rank: int = 0, local_world: int = 1, root: str | Path = "/") -> str | None:
    """Bind all threads of this process to the CPUs next to its GPU, or without a GPU to its share of the machine's CPUs.

    Processes next to the same GPUs divide the physical cores among them. The kernel's map is read below ``root``. Returns what
    was done, for the log, or None where a launcher has bound the process already or there is nothing to choose.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    rank, peers = _peers(Path(root), device, local_rank, local_world)
    plan = plan_cpus(Path(root), os.sched_getaffinity(0), rank, peers)
    if plan is None:
        return None
    cpus, cores, where = plan
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended, or one of the driver's
            os.sched_setaffinity(int(thread), cpus)
    if "OMP_NUM_THREADS" not in os.environ:  # torch counted the cores of the whole machine
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    gpu = f", next to GPU {peers[rank]}" if peers[rank] else ""
    return f"bound to {len(cpus)} CPUs ({cores} cores) of {where}{gpu}: {ranges(cpus)}"


def plan_cpus(root: Path, allowed: set[int], rank: int, peers: Sequence[str | None]) -> tuple[set[int], int, str] | None:
    """The CPUs, number of physical cores and NUMA nodes for process ``rank`` of ``peers``, or None to leave it alone.

    ``peers`` has one entry per process of the machine: the PCI address of its GPU, or None. ``allowed`` is what the process may
    use now. Hyper-threads of a core stay together; no CPU goes to two peers, unless a node has more peers than cores.
    """
    system = root / "sys/devices/system"
    every = {int(p.name[4:]): cpu_list(p / "cpulist") for p in system.glob("node/node*") if p.name[4:].isdigit()}
    nodes = {node: cpus & allowed for node, cpus in sorted(every.items()) if cpus & allowed}
    if not nodes or (allowed < set().union(*every.values()) and len(nodes) == 1):
        return None
    homes = [_home(root, gpu, nodes) for gpu in peers]
    if None in homes:  # a GPU without a known place could be anywhere: count processes instead
        n, h = len(nodes), len(peers)
        parts = [range(i * n // h, max((i + 1) * n // h, i * n // h + 1)) for i in range(h)]
        homes = [tuple(list(nodes)[i] for i in part) for part in parts]
    home = homes[rank] or ()
    sharing = [i for i, other in enumerate(homes) if other == home]
    cpus = set().union(*(nodes[node] for node in home))
    siblings = {cpu: cpu_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & cpus or {cpu} for cpu in cpus}
    cores = sorted({tuple(sorted(threads)) for threads in siblings.values()})
    if len(cores) >= len(sharing):
        i, n = sharing.index(rank), len(sharing)
        cores = cores[i * len(cores) // n : (i + 1) * len(cores) // n]
    cpus = {cpu for core in cores for cpu in core}
    return None if cpus == allowed else (cpus, len(cores), f"NUMA node {ranges(set(home))}")


def _home(root: Path, gpu: str | None, nodes: dict[int, set[int]]) -> tuple[int, ...] | None:
    """The NUMA node of a GPU; None where the kernel says -1 (most virtual machines) or none of the node's CPUs is allowed."""
    try:
        node = int((root / "sys/bus/pci/devices" / (gpu or "none") / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return (node,) if node in nodes else None


def _peers(root: Path, device: torch.device, local_rank: int, local_world: int) -> tuple[int, list[str | None]]:
    """This process's number among its peers on the machine, and the PCI address of each peer's GPU.

    Peers take the visible GPUs in turn. A process that sees only one of several cannot know those of its peers: then every NVIDIA
    GPU of the machine stands for a peer.
    """
    if device.type != "cuda":
        return local_rank, [None] * local_world
    mine, visible = _address(device), torch.cuda.device_count()
    if visible > 1 or local_world == 1:
        gpus = [_address(torch.device("cuda", i % visible)) for i in range(local_world)]
        return local_rank, [*gpus[:local_rank], mine, *gpus[local_rank + 1 :]]
    found: list[str | None] = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*")):
        with suppress(OSError):
            if (path / "vendor").read_text().strip() == "0x10de" and (path / "class").read_text().startswith("0x03"):
                found.append(path.name)
    return (found.index(mine), found) if mine in found else (local_rank, [None] * local_world)


def _address(device: torch.device) -> str | None:
    """The PCI address as the kernel writes it, such as ``0000:c1:00.0``."""
    known = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(known, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0" if slot >= 0 else None


def cpu_list(path: Path) -> set[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}; empty where there is no such file."""
    text = path.read_text() if path.exists() else ""
    return {cpu for first, last in re.findall(r"(\d+)(?:-(\d+))?", text) for cpu in range(int(first), int(last or first) + 1)}


def ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 3, 8} -> ``0-3,8``."""
    starts = [n for n in sorted(numbers) if n - 1 not in numbers]
    ends = [n for n in sorted(numbers) if n + 1 not in numbers]
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends))


_HELD_BACK = 0x04 | 0x08 | 0x20 | 0x40 | 0x80  # power cap, slowdown, heat (driver), heat (hardware), power brake: nvml.h


def nvml_gpu(device: torch.device) -> tuple[Any, Any, str]:
    """NVML, its handle of the GPU ``device``, and the name by which it is found.

    That is its UUID, because NVML knows neither CUDA_VISIBLE_DEVICES nor torch's numbers. Raises ImportError without the package,
    NVMLError without a driver, and LookupError.
    """
    if device.type != "cuda":
        raise LookupError(f"this process computes on {device.type}")
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        if (gpu := _try(pynvml.nvmlDeviceGetHandleByUUID, name)) is not None:
            return pynvml, gpu, name
    raise LookupError(f"NVML knows no GPU {uuid}")


class Gpu:
    """NVML's counters of one GPU, read without waiting for it. What the driver does not tell is left out; without NVML that is
    all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml: Any = None
        self._handle: Any = None
        self._joules = 0.0  # the integral of the power, where the GPU has no meter
        self._before: tuple[float, float] | None = None
        if device.type != "cuda":
            return
        with suppress(Exception):  # without package, driver or permission a run goes on without these numbers
            self._nvml, self._handle, _ = nvml_gpu(device)
        self._began = self._meter()
        self.readings()

    def readings(self) -> dict[str, float]:
        """The counters now: power_w, power_limit_w (as enforced, whoever has set it), energy_j since construction, sm_clock_mhz,
        temperature_c, memory_gb (this process's peak), memory_used_gb (by all processes), throttled (1.0 while heat or power hold
        the clocks back)."""
        if self._handle is None:
            return {}
        nvml, gpu = self._nvml, self._handle
        mask = _try(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        if mask is None:  # drivers before 535
            mask = _try(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        power = _try(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)
        found = {
            "power_w": power,
            "power_limit_w": _try(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
            "energy_j": self._energy(power),
            "sm_clock_mhz": _try(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "temperature_c": _try(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "memory_gb": _try(lambda: torch.cuda.max_memory_allocated(self.device) / 1e9),
            "memory_used_gb": _try(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9),
            "throttled": None if mask is None else bool(mask & _HELD_BACK),
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _meter(self) -> float | None:
        gpu = self._handle
        return None if gpu is None else _try(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3)

    def _energy(self, power: float | None) -> float | None:
        meter = self._meter()
        if meter is not None and self._began is not None:
            return meter - self._began
        if power is None:
            return None
        now = time.monotonic()
        then, before = self._before or (now, power)
        self._joules += (now - then) * (power + before) / 2
        self._before = (now, power)
        return self._joules


def _try(read: Callable[..., Any], *given: Any) -> Any:
    try:
        return read(*given)
    except Exception:  # NVMLError_NotSupported and its kin: not on this GPU, this driver or in MIG
        return None


def warm_collectives(mesh: Mesh, times: int = 20) -> None:
    """Make a few small sums over every axis in use, and over what else has a group, so that groups and connections exist before the
    clock runs and before anything is captured. Every process that trains calls it."""
    if mesh.world == 1:
        return
    for axis in (*mesh.used, mesh.everyone):
        axis.meet()
    small = torch.zeros(1, device=mesh.device)
    for line in mesh.made:
        for _ in range(times):
            torch_dist.all_reduce(small, group=line.group)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
