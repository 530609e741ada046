"""Energy of processors, from an artificial sysfs."""

from pathlib import Path

import pytest

from hpcai.dist import energy
from hpcai.dist.energy import RaplCounters

RANGE = 262_143_328_850  # uJ, of most server processors
FOLDER = "sys/class/powercap"


def write_counter(root: Path, zone: str, name: str, value: int) -> Path:
    folder = root / FOLDER / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (folder / "energy_uj").write_text(f"{value}\n")
    return folder / "energy_uj"


def test_processors_and_memory_are_counted_once_and_across_a_wrap_around(tmp_path: Path) -> None:
    first = write_counter(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    second = write_counter(tmp_path, "intel-rapl:1", "package-1", RANGE - 2_000_000)
    memory = write_counter(tmp_path, "intel-rapl:0:0", "dram", 0)
    for zone, name in (("intel-rapl:0:1", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
        write_counter(tmp_path, zone, name, 0)
    counters = RaplCounters(tmp_path)
    for file in (tmp_path / FOLDER).glob("*/energy_uj"):
        if file not in (first, second, memory):
            file.write_text("999000000")
    assert counters.joules() == {"cpu": 0.0, "memory": 0.0} and counters.unreadable == ""
    first.write_text("4000000")
    second.write_text("1000000")  # wrapped around
    memory.write_text("500000")
    assert counters.joules() == {"cpu": pytest.approx(3.0 + 2.0 + 1.0), "memory": 0.5}
    second.write_text("1500000")
    assert counters.joules()["cpu"] == pytest.approx(6.5)


def test_a_counter_is_polled_before_it_wraps_around_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: now[0])
    file = write_counter(tmp_path, "intel-rapl:0", "package-0", 0)
    counters = RaplCounters(tmp_path)
    for second in range(0, 1000, 10):  # 200 kJ in each 100 s
        now[0] = float(second)
        file.write_text(str(second * 2_000_000_000 % RANGE))
        counters.poll()
    assert counters.joules()["cpu"] == pytest.approx(990 * 2000.0)


def test_an_unreadable_counter_is_omitted_and_named(tmp_path: Path) -> None:
    assert RaplCounters(tmp_path).joules() == {} and RaplCounters(tmp_path).unreadable == "", "a machine without counters"
    write_counter(tmp_path, "intel-rapl:0", "package-0", 0)
    memory = write_counter(tmp_path, "intel-rapl:0:0", "dram", 0)
    memory.unlink()
    memory.mkdir()  # root may read everything but this
    counters = RaplCounters(tmp_path)
    assert counters.joules() == {"cpu": 0.0}
    assert counters.unreadable == f"{memory}: Is a directory"
    (tmp_path / FOLDER / "intel-rapl:0/energy_uj").unlink()
    assert counters.joules() == {}
