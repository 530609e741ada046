"""Host work beside the training: garbage collection, freed memory, NUMA binding, GPU counters, first collectives."""

import ctypes
import gc
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.host_limits import allowed_cpus, count_cpus

_FULL_EVERY = 10  # every tenth collection is a full one; frozen objects are not scanned, so it is cheap


class ManualGC:
    """Context manager: Python's garbage collector runs after every ``every``-th step only; None leaves it automatic.

    A collection on one rank makes all others wait at the next collective. Here all ranks collect at the same step.
    """

    blocks = 0  # of this process that have frozen objects: gc.get_freeze_count() visits each object

    def __init__(self, every: int | None) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"garbage collection every {every} steps; expected at least 1, or null to leave it to Python")
        self.every = every

    def __enter__(self) -> "ManualGC":
        if self.every is not None:
            self._was_enabled, ManualGC.blocks = gc.isenabled(), ManualGC.blocks + 1
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def collect_at(self, step: int) -> None:
        if self.every is not None and step % self.every == 0:
            gc.collect(2 if step // self.every % _FULL_EVERY == 0 else 1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.every is not None:
            ManualGC.blocks -= 1
            if not ManualGC.blocks:
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Context manager without Python's garbage collector, for work that creates many objects and no cycles: it would scan all of
    them repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of the GNU C library


def retain_freed_memory() -> bool:
    """Let malloc retain freed memory for the next tensors, and return whether the C library supports it.

    By default the GNU C library returns every large tensor to the system, which clears the pages of the next one: up to a third of
    the wall time of a step on a CPU. A set ``GLIBC_TUNABLES`` or ``MALLOC_`` variable takes precedence.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent in other C libraries, ignored by other allocators
    # No mmap for large tensors, and no trim of the heap.
    return bool(mallopt and mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def bind_to_numa_node(device: torch.device, local_world: int = 1, root: str | Path = "/") -> str | None:
    """Bind all threads of this process to the allowed CPUs of the NUMA node of its GPU, read from sysfs below ``root``.

    Return a line for the log, or None if the node is unknown (-1 in most virtual machines), or has none or all of these CPUs.
    """
    if device.type != "cuda" or not hasattr(os, "sched_getaffinity"):
        return None
    (gpu, node), allowed, count = find_numa_node(device, root), allowed_cpus(), count_cpus(Path(root))
    cpus = read_cpu_list(Path(root, f"sys/devices/system/node/node{node}/cpulist")) & allowed
    if not cpus or cpus == allowed:
        return None
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended, or one of the driver's
            os.sched_setaffinity(int(thread), cpus)
    if "OMP_NUM_THREADS" not in os.environ:  # torch counted all cores of the machine
        torch.set_num_threads(max(1, min(torch.get_num_threads(), len(cpus), count // local_world)))
    return f"bound to {len(cpus)} CPUs of NUMA node {node}, next to GPU {gpu}: {format_ranges(cpus)}"


def find_numa_node(device: torch.device, root: str | Path = "/") -> tuple[str, int]:
    """Return the PCI address of a GPU as in sysfs, such as ``0000:c1:00.0``, or "", and its NUMA node, or -1 if it is unknown."""
    properties, node = torch.cuda.get_device_properties(device), -1
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0" if slot >= 0 else ""
    with suppress(OSError, ValueError):
        node = int((Path(root, "sys/bus/pci/devices") / (address or "none") / "numa_node").read_text())
    return address, node


def read_cpu_list(path: Path) -> set[int]:
    """Parse a file such as ``0-3,8`` to {0, 1, 2, 3, 8}; empty if there is no such file."""
    text = path.read_text() if path.exists() else ""
    return {cpu for first, last in re.findall(r"(\d+)(?:-(\d+))?", text) for cpu in range(int(first), int(last or first) + 1)}


def format_ranges(numbers: Iterable[int]) -> str:
    """Format {0, 1, 2, 3, 8} as ``0-3,8``."""
    unique = set(numbers)
    starts, ends = ([n for n in sorted(unique) if n + step not in unique] for step in (-1, 1))
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends))


_THROTTLED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80  # power cap, slowdown, heat (driver), heat (hardware), power brake: nvml.h


def open_nvml(device: torch.device) -> tuple[Any, Any, str]:
    """Return NVML, its handle of the GPU ``device``, and the UUID of the GPU.

    NVML ignores CUDA_VISIBLE_DEVICES and torch's device numbers, hence the UUID. Raises ImportError without the package, NVMLError
    without a driver, and LookupError if there is no such GPU.
    """
    if device.type != "cuda":
        raise LookupError(f"this process computes on {device.type}")
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        if (gpu := _try_read(pynvml.nvmlDeviceGetHandleByUUID, name)) is not None:
            return pynvml, gpu, name
    raise LookupError(f"NVML knows no GPU {uuid}")


def check_power_cap(device: torch.device, watts: float | None) -> None:
    """Raise ConfigError unless the power limit enforced on the GPU ``device`` is readable and ``watts``. None: any limit."""
    if watts is None:
        return
    try:
        nvml, gpu, name = open_nvml(device)
        enforced = nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    except Exception as error:  # no GPU, no package, no driver, or a GPU that is not NVIDIA's
        advice = "it needs an NVIDIA GPU, its driver and pip install 'hpcai-suite[gpu]'; or set train.power_cap to null"
        raise ConfigError(f"train.power_cap is {watts:g} W, but NVML cannot read the enforced limit: {error}; {advice}") from None
    if abs(enforced - watts) >= 0.5:
        raise ConfigError(
            f"train.power_cap is {watts:g} W, but {name} is limited to {enforced:g} W; set the limit by the scheduler's option or "
            f"'nvidia-smi -pl {watts:g}' (docs/cluster.md), or train.power_cap to null"
        )


class GpuCounters:
    """NVML's counters of one GPU, read without synchronization. Counters that the driver does not support are omitted, and all of
    them without NVML."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml: Any = None
        self._handle: Any = None
        self._joules = 0.0  # integral of the power, if the GPU has no energy counter
        self._last_power: tuple[float, float] | None = None
        with suppress(Exception):  # without GPU, package, driver or permission a run goes on without these numbers
            self._nvml, self._handle, _ = open_nvml(device)
        self._start_energy = self._read_meter()
        self.read()

    def read(self) -> dict[str, float]:
        """Return the counters: power_w, power_limit_w (as enforced), energy_j since construction, sm_clock_mhz, temperature_c,
        memory_gb (peak of this process), memory_used_gb (of all processes), throttled (1.0 while heat or power limit clocks)."""
        if self._handle is None:
            return {}
        nvml, gpu = self._nvml, self._handle
        mask = _try_read(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        if mask is None:  # drivers before 535
            mask = _try_read(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        power = _try_read(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)
        counters = {
            "power_w": power,
            "power_limit_w": _try_read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
            "energy_j": self._energy(power),
            "sm_clock_mhz": _try_read(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "temperature_c": _try_read(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "memory_gb": _try_read(lambda: torch.cuda.max_memory_allocated(self.device) / 1e9),
            "memory_used_gb": _try_read(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9),
            "throttled": None if mask is None else bool(mask & _THROTTLED),
        }
        return {name: float(value) for name, value in counters.items() if value is not None}

    def _read_meter(self) -> float | None:
        return _try_read(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)

    def _energy(self, power: float | None) -> float | None:
        meter = self._read_meter()
        if meter is not None and self._start_energy is not None:
            return meter - self._start_energy
        if power is None:
            return None
        now = time.monotonic()
        then, before = self._last_power or (now, power)
        self._joules += (now - then) * (power + before) / 2
        self._last_power = (now, power)
        return self._joules


def _try_read(read: Callable[..., Any], *args: Any) -> Any:
    try:
        return read(*args)
    except Exception:  # such as NVMLError_NotSupported: by this GPU, this driver or in MIG
        return None


def warm_up_collectives(mesh: Mesh, repeats: int = 20) -> None:
    """All-reduce a small tensor over every axis in use and every existing group: a collective of ``peers``. Groups and connections
    then exist before the clock starts and before a graph is captured."""
    if mesh.world == 1:
        return
    for axis in (*mesh.used, mesh.peers):
        axis.init_group()
    small = torch.zeros(1, device=mesh.device)
    for dimension in mesh.created:
        for _ in range(repeats):
            torch_dist.all_reduce(small, group=dimension.group)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
