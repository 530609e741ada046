"""The choice of a reader: by the available memory, within the limits of cgroups, and logged."""

from pathlib import Path

import pytest

from hpcai import host_limits
from hpcai.data import open_reader, readers
from hpcai.data.readers import available_memory, choose_mode
from hpcai.errors import DataError
from tests.reference_data import load_json

GB = 1 << 30


def write_system_files(root: Path, free: int, cgroup: str = "", **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {free >> 10} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_cgroup_limits_of_both_versions_apply_and_the_page_cache_is_available_memory(tmp_path: Path) -> None:
    v2 = {
        "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": str(4 * GB),
        "sys/fs/cgroup/a/memory.current": str(3 * GB), "sys/fs/cgroup/a/memory.stat": f"anon 5\nfile {2 * GB}\n",
    }  # fmt: skip
    assert available_memory(write_system_files(tmp_path / "2", 8 * GB, "0::/a/b\n", **v2)) == 3 * GB
    base = "sys/fs/cgroup/memory/job"
    v1 = {
        f"{base}/memory.limit_in_bytes": str(2 * GB), f"{base}/memory.usage_in_bytes": str(1 * GB),
        f"{base}/memory.stat": f"cache 1\ntotal_cache {GB // 2}\n",
    }  # fmt: skip
    cgroup = "5:cpu,cpuacct:/\n4:memory:/job\n"
    assert available_memory(write_system_files(tmp_path / "1", 8 * GB, cgroup, **v1)) == 2 * GB - GB // 2
    assert available_memory(write_system_files(tmp_path / "full", GB, cgroup, **{f"{base}/memory.limit_in_bytes": "0"})) == 0


@pytest.mark.parametrize(("cgroup", "files", "expected"), load_json("cpu_quotas"))
def test_quotas_of_cpu_time_limit_the_number_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(host_limits, "allowed_cpus", lambda: set(range(8)))
    assert host_limits.count_cpus(write_system_files(tmp_path, GB, cgroup, **files)) == expected


def test_the_choice_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_system_files(tmp_path, 10 * GB)
    assert choose_mode(5 * GB, root) == ("buffered", "5.37 GB of samples fit into 6.44 GB of page cache: reads go through it")
    assert choose_mode(7 * GB, root) == ("auto", "7.52 GB of samples do not fit into 6.44 GB of page cache: reads go past it")
    caplog.set_level("INFO")
    with open_reader("auto", 1000, "train") as reader:
        assert reader.mode == "buffered"
    assert caplog.records[-1].message.startswith("train: 1 kB of samples fit into")
    with open_reader("auto", 1 << 60) as reader:
        assert reader.mode == "auto"
    for setting, mode in {"direct": "direct", "buffered": "buffered", "hdf5": "auto", "memory": "auto"}.items():
        with open_reader(setting, 1000) as reader:
            assert reader.mode == mode and not reader.memory.pin


def test_samples_that_do_not_fit_are_not_cached_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "available_memory", lambda: GB)
    with pytest.raises(DataError, match=r"train: data.reader=memory, but there are 1.07 GB of samples, and 644 MB of memory"):
        open_reader("memory", GB, "train")
