"""Host settings and GPU counters, with an artificial sysfs and a fake NVML."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hpcai import dist
from hpcai.dist import host
from hpcai.dist.host import GpuCounters, ManualGC, bind_to_numa_node, gc_disabled
from hpcai.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def write_sysfs(root: Path, *gpus: tuple[str, int]) -> None:
    """Create a sysfs of two NUMA nodes with 16 CPUs each, and the node of each GPU."""
    files = {f"sys/devices/system/node/node{node}/cpulist": cpus for node, cpus in enumerate(("0-7,16-23", "8-15,24-31"))}
    files |= {f"sys/bus/pci/devices/{address}/numa_node": str(node) for address, node in gpus}
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")


def set_gpus(monkeypatch: pytest.MonkeyPatch, *buses: int) -> None:
    gpus = [SimpleNamespace(pci_domain_id=0, pci_bus_id=b, pci_device_id=0, uuid="aaaa-bbbb") for b in buses]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[torch.device(device).index])


def test_bind_moves_every_thread_to_the_numa_node_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, set[int]] = {}
    write_sysfs(tmp_path, ("0000:07:00.0", 0), ("0000:87:00.0", 1), ("0000:8a:00.0", -1))
    allowed = set(range(32))
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: bound.__setitem__(-1, {n}))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_gpus(monkeypatch, 0x07, 0x87, 0x8A, 0x01)
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    text = bind_to_numa_node(torch.device("cuda", 1), 4, tmp_path)
    assert text == "bound to 16 CPUs of NUMA node 1, next to GPU 0000:87:00.0: 8-15,24-31"
    assert len(bound) > 1 and bound == {int(thread): {*range(8, 16), *range(24, 32)} for thread in os.listdir("/proc/self/task")}
    stop.set()
    monkeypatch.delenv("OMP_NUM_THREADS")
    allowed = {4, 5, 20, 8}  # CPUs of the cgroup
    assert str(bind_to_numa_node(CUDA, 2, tmp_path)).endswith(": 4-5,20") and bound[-1] == {2}, "threads of torch"
    bound.clear()
    allowed = {4, 5}
    results = [bind_to_numa_node(device, 2, tmp_path) for device in (CUDA, CPU, torch.device("cuda", 2), torch.device("cuda", 3))]
    assert results == [None] * 4 and not bound, "already bound, no GPU, numa_node -1, no entry in sysfs"


class Cycle:  # freed by the garbage collector only
    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_gc_is_disabled_in_the_block_and_restored_after_an_error(nothing_frozen: None) -> None:
    before = Cycle.alive
    with pytest.raises(KeyError), gc_disabled():
        with gc_disabled():
            Cycle()
        assert not gc.isenabled() and Cycle.alive > before
        raise KeyError
    assert gc.isenabled()
    gc.collect()
    assert Cycle.alive == before
    gc.disable()
    with gc_disabled():
        pass
    assert not gc.isenabled(), "disabled before, disabled after"
    gc.enable()


FAULTS = """
import resource, torch
from hpcai import dist
with dist.start({}):
    before = torch.ones(12_500_000).sum()
    for _ in range(24):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(12_000_000).sum()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="GNU C library")
def test_pages_of_freed_tensors_are_reused_unless_malloc_is_configured() -> None:
    def faults(**variables: str) -> list[int]:
        env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")}
        env |= {"CUDA_VISIBLE_DEVICES": "", **variables}
        result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=env, timeout=120)
        return [int(line) for line in result.stdout.split()][-3:]  # the first allocations may split freed blocks, with more faults

    pages = 12_000_000 * 4 // os.sysconf("SC_PAGE_SIZE")
    reused = max(faults())
    assert reused < 0.01 * pages
    assert min(faults(MALLOC_ARENA_MAX="8")) > reused


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ManualGC, "blocks", 0)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_garbage_is_collected_at_the_given_steps_only() -> None:
    Cycle.alive, thresholds = 0, gc.get_threshold()
    with ManualGC(5) as collector:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        for step in range(1, 5):
            Cycle()
            collector.collect_at(step)
            assert Cycle.alive == step
        collector.collect_at(5)
        assert Cycle.alive == 0
        old = Cycle()
        collector.collect_at(10)
        collector.collect_at(15)  # now in the oldest generation
        del old
        collector.collect_at(20)
        assert Cycle.alive == 1
        collector.collect_at(50)
        assert Cycle.alive == 0
    assert gc.isenabled() and gc.get_freeze_count() == 0 and gc.get_threshold() == thresholds


@pytest.mark.usefixtures("nothing_frozen")
def test_manual_gc_nests_none_does_nothing_and_zero_is_an_error() -> None:
    with ManualGC(None) as nothing, pytest.raises(ConfigError, match="every 0 steps"):
        nothing.collect_at(0)
        assert gc.isenabled() and gc.get_freeze_count() == 0
        ManualGC(0)
    with ManualGC(2):
        with ManualGC(3):
            pass
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0


class Nvml(ModuleType):
    """A fake driver with one GPU. Calls that contain a word of ``unsupported`` raise."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, uuid: str = "GPU-aaaa-bbbb", *unsupported: str, mask: int = 0) -> None:
        super().__init__("pynvml")
        self.uuid, self.unsupported, self.mask, self.joules, self.watts = uuid, unsupported, mask, 5000.0, 300.0

    def __getattr__(self, name: str) -> Any:
        values = {"Init": None, "HandleByUUID": "handle", "PowerUsage": self.watts * 1e3, "ClockInfo": 1980, "Temperature": 61}
        values |= {"TotalEnergyConsumption": self.joules * 1e3, "MemoryInfo": SimpleNamespace(used=7e9)}
        values["EnforcedPowerLimit"] = 350e3
        values |= dict.fromkeys(("CurrentClocksEventReasons", "CurrentClocksThrottleReasons"), self.mask)

        def call(*args: Any) -> Any:
            if any(word in name for word in self.unsupported) or (name.endswith("ByUUID") and args != (self.uuid,)):
                raise RuntimeError("not supported")
            assert name.endswith(("ByUUID", "Init")) or args[0] == "handle"
            return values[name.removeprefix("nvml").removeprefix("DeviceGet")]

        return call


def new_counters(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> GpuCounters:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: not installed
    set_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: pytest.fail("waited for the GPU"))
    return GpuCounters(CUDA)


def test_units_of_the_counters_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = new_counters(monkeypatch, nvml := Nvml())
    nvml.joules += 42
    expected = {"power_w": 300, "power_limit_w": 350, "energy_j": 42, "sm_clock_mhz": 1980, "temperature_c": 61, "throttled": 0}
    assert counters.read() == pytest.approx({**expected, "memory_gb": 3, "memory_used_gb": 7})


@pytest.mark.parametrize("unsupported", ["EventReasons", "ThrottleReasons"])
def test_throttled_means_power_or_heat_only(monkeypatch: pytest.MonkeyPatch, unsupported: str) -> None:
    for mask, throttled in ((0x1, 0.0), (0x2, 0.0), (0x4, 1.0), (0x20, 1.0), (0x40, 1.0), (0x81, 1.0)):
        assert new_counters(monkeypatch, Nvml("GPU-aaaa-bbbb", unsupported, mask=mask)).read()["throttled"] == throttled


def test_energy_is_integrated_from_the_power_without_an_energy_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0, 4.0))
    monkeypatch.setattr(host.time, "monotonic", lambda: next(clock))
    counters = new_counters(monkeypatch, nvml := Nvml("GPU-aaaa-bbbb", "TotalEnergy"))
    assert counters.read()["energy_j"] == 600.0
    nvml.watts = 100.0
    assert counters.read()["energy_j"] == 600.0 + 2 * 200.0


def test_unsupported_counters_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    slice_of_a_gpu = Nvml("MIG-aaaa-bbbb", "Power", "Energy", "Clock", "Temperature")
    assert new_counters(monkeypatch, slice_of_a_gpu).read() == {"memory_gb": 3.0, "memory_used_gb": 7.0}
    for nothing in (None, Nvml("GPU-aaaa-bbbb", "Init"), Nvml("GPU-of-another-job")):
        assert new_counters(monkeypatch, nothing).read() == {}
    assert GpuCounters(CPU).read() == {}


def test_a_power_limit_other_than_the_cap_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    new_counters(monkeypatch, Nvml())
    for watts in (350.0, None):
        host.check_power_cap(CUDA, watts)
    with pytest.raises(ConfigError, match="train.power_cap is 300 W, but GPU-aaaa-bbbb is limited to 350 W; set the limit by"):
        host.check_power_cap(CUDA, 300.0)
    new_counters(monkeypatch, Nvml("GPU-aaaa-bbbb", "PowerLimit"))
    with pytest.raises(ConfigError, match="NVML cannot read the enforced limit: not supported"):
        host.check_power_cap(CUDA, 300.0)


def test_warm_up_covers_every_group_and_does_nothing_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, created = list[Any](), list[Any]()

    def axis(name: str, size: int = 2) -> dist.Axis:
        dimension: Any = FakeDimension(created)
        return dist.Axis(name, size, 0, dimension)

    monkeypatch.setattr(host.torch_dist, "all_reduce", lambda tensor, group: groups.append(group))
    host.warm_up_collectives(dist.single_process(CPU))
    assert groups == []
    used, peers, batch_norm = (axis("replicate"), axis("depth")), axis("peers", 4), axis("replicate within 2s").init_group()
    mesh: Any = SimpleNamespace(world=4, device=CPU, used=used, peers=peers, model_parallel=axis("model_parallel"), created=created)
    host.warm_up_collectives(mesh)
    axes = (batch_norm, *used, peers)
    assert groups == [axis.dimension for axis in axes for _ in range(20)], "only the first group existed before"


class FakeDimension:  # it is its own group
    def __init__(self, created: list[Any]) -> None:
        self.created = created

    @property
    def group(self) -> "FakeDimension":
        if self not in self.created:
            self.created.append(self)
        return self
