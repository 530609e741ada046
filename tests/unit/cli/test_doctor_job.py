"""`hpcai doctor --ranks`: rules of findings, pairing of ranks, and the report of a rank."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcai import cli
from hpcai.cli.doctor import deadline, job, network, page, rank_report, storage
from hpcai.cli.doctor.findings import KINDS, Report, diagnose
from hpcai.cli.doctor.network import Link, Network, Pace
from hpcai.cli.doctor.rank_report import Gpu, RankReport
from hpcai.cli.doctor.storage import Folder, Folders
from hpcai.dist import RankInfo
from hpcai.dist.watchdog import Member
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json

# ---------------------------------------------------------------------------------------------------------- rules


def report_of(ranks: int = 4, per_node: int = 2, but: Mapping[int, dict[str, Any]] = {}, **common: Any) -> Report:
    """Return a report of ranks bound to two of eight CPUs each, with fields of all (``common``) and of some ranks (``but``)."""
    report = Report(**{name: common.pop(name) for name in ("network", "storage") if name in common})
    for rank in range(ranks):
        node, local = f"n{rank // per_node + 1}", rank % per_node
        fields = {"node": node, "machine": node, "launcher": "srun", "cpus": (2 * local, 2 * local + 1), "online": 8, "numa": (0,)}
        fields |= {"threads": 2, "versions": {"torch": "2.13.0"}, **common, **but.get(rank, {})}
        report.members.append(RankReport(rank, **fields | {"cpus": tuple(fields["cpus"])}))
    return report


def gpus(*uuids: str, **last: Any) -> dict[int, dict[str, Any]]:
    devices = {rank: Gpu(0, "A100", uuid, "0000:c1:00.0", 40.0) for rank, uuid in enumerate(uuids)}
    devices[len(uuids) - 1] = replace(devices[len(uuids) - 1], **last)
    return {rank: {"gpu": gpu} for rank, gpu in devices.items()}


def links(slow: Callable[[int, int], bool], ranks: int = 4) -> Network:
    pairs = [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    measured = [Link(*pair, 50e-6 if slow(*pair) else 10e-6 + 1e-8 * sum(pair), 2e9) for pair in pairs]
    return Network("gloo", links=measured, sums={8: 1e-3})


def pace(rates: Mapping[int, float] = {}, shares: Mapping[int, float] = {}) -> Network:
    return Network(paces={rank: Pace(rates.get(rank, 1e11), shares.get(rank, 1.0)) for rank in range(4)})


def folders(count: int = 4, **last: Any) -> Folders:
    by_rank = dict.fromkeys(range(count), Folder("/run", "lustre", 1 << 40, seen=True, write=1e9, read=2e9))
    return Folders(by_rank | {count - 1: replace(by_rank[0], **last)})


def read_report(fields: dict[str, Any]) -> Report:
    """Return the report of a row of ``doctor_findings.json``: ``gpus`` and ``folders`` hold arguments of the functions above."""
    but = {int(rank): changed for rank, changed in fields.pop("but", {}).items()}
    if "gpus" in fields:
        but |= gpus(*fields.pop("gpus"), **fields.pop("last_gpu", {}))
    storage = folders(**fields.pop("folders")) if "folders" in fields else Folders()
    return report_of(but=but, storage=storage, **fields)


CROWDED = {"per_node": 4, "cpus": (0, 1), "online": 2, "threads": 1}
RULES = [
    *((read_report(fields), text) for fields, text, *_ in load_json("doctor_findings")), (Report(), ""),
    (report_of(4, 4, network=links(lambda a, b: 2 in (a, b))),  # a slow rank instead of its links
     "warning: rank 2 on n1: has slow links to all others: 50 us, the others 10 us; look at its node's"),
    (report_of(6, 6, network=links(lambda a, b: (a, b) == (1, 4), 6)),
     "warning: rank 1 on n1: to rank 4 on n1: 50 us, other links 10 us; look at cables"),
    (report_of(8, 4, network=links(lambda a, b: a // 4 != b // 4, 8)), ""),  # links between nodes are compared apart
    (report_of(**CROWDED, network=links(lambda a, b: 2 in (a, b))), "warning: all 4 ranks: start 4 threads on 2 CPUs"),
    (report_of(**CROWDED, network=pace(shares=dict.fromkeys(range(4), 0.3))), "warning: all 4 ranks: start 4 threads on 2 CPUs"),
    (report_of(network=pace({3: 5e10})), "warning: rank 3 on n2: multiplies matrices at 50.0 GFLOP/s, the others at 100.0; "),
    (report_of(network=pace(shares={1: 0.5})), "warning: rank 1 on n1: had CPU time for its threads 50% of the time"),
    (report_of(storage=Folders({0: Folder("/run", seen=True)})), ""),  # a rank that does not measure
]  # fmt: skip


@pytest.mark.parametrize(("report", "text"), RULES)
def test_a_rule_reports_its_finding(report: Report, text: str) -> None:
    lines = [f"{finding.severity}: {finding.place}: {finding.text}" for finding in diagnose(report)]
    assert [line[: len(text)] for line in lines] == ([text] if text else [])


def test_each_cause_is_reported() -> None:
    findings = diagnose(report_of(cpus=(0,), threads=1))
    assert [(each.code, each.severity, each.ranks) for each in findings] == [
        ("cores", "error", (0, 1)), ("cores", "error", (2, 3)), ("threads", "warning", (0, 1)), ("threads", "warning", (2, 3))]
    two_of_five = links(lambda a, b: bool({2, 3} & {a, b}), 5)  # half of the links of each other rank are slow
    assert [finding.ranks for finding in diagnose(report_of(5, 5, network=two_of_five))] == [(2,), (3,)]
    crowded = {rank: {"cpus": (0, 1)} for rank in (0, 1)}  # explains slow links between these ranks alone
    findings = diagnose(report_of(but=crowded, network=links(lambda a, b: b == 3)))
    assert [(each.code, each.ranks) for each in findings] == [("threads", (0, 1)), ("links", (3,))]


def test_an_outlier_is_above_twice_the_median_and_five_deviations() -> None:
    assert network.slow_outliers({0: 1.0, 1: 1.1, 2: 0.9, 3: 2.2}, 2.0) == [3]
    assert network.slow_outliers({0: 1.0, 1: 1.1, 2: 0.9, 3: 1.9}, 2.0) == [], "not twice"
    assert network.slow_outliers({0: 1.0, 1: 3.0, 2: 2.0, 3: 5.1}, 2.0) == [], "the others differ as much"
    assert network.slow_outliers({0: 1.0, 1: 1.0, 2: 9.0}, 2.0) == [], "two other ranks are too few to decide"


def test_every_kind_of_finding_is_raised_by_a_rule() -> None:
    source = Path(diagnose.__code__.co_filename).read_text().partition("def diagnose")[2]
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []


# ------------------------------------------------------------------------------------------------------ the report


def test_a_report_groups_equal_nodes_and_ends_with_findings() -> None:
    other = {"versions": {"torch": "2.11.0"}, "files": 1024, "shm": 64 << 20}
    report = report_of(8, 4, but={5: other}, network=links(lambda a, b: False, 8))
    findings = diagnose(report)
    text = list(page.lines(report, findings))
    assert "ranks            all 8 ranks, 4 on each: 2 of 8 CPUs (0-1 | 2-3 | 4-5 | 6-7), 2 threads each, NUMA 0" in text
    assert text[-5:-3] == ["error: versions (1)", f"  rank 5 on n2: {findings[0].text}"]
    assert text[-1] == "FAILED: 1 error, 1 warning, 0 notes" and "links of a node  12 by gloo: 10 us" in "\n".join(text)


# ---------------------------------------------------------------------------------------------- rounds and links


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 64])
def test_a_tournament_pairs_all_players_once(count: int) -> None:
    rounds = list(zip(*(network.schedule(rank, ["n"] * count) for rank in range(count))))
    for row in rounds:
        assert all(other is None or row[other] == player for player, other in enumerate(row))
        assert sum(other is None for other in row) == count % 2
    assert all(sorted(row[p] for row in rounds if row[p] is not None) == [q for q in range(count) if q != p] for p in range(count))


def test_a_large_job_measures_one_rank_per_node() -> None:
    nodes = [f"n{rank // 4}" for rank in range(4 * 100)]
    schedules = [network.schedule(rank, nodes) for rank in range(len(nodes))]
    assert {len(row) for row in schedules[::4]} == {64} and not any(schedules[1::4])
    assert all(peer is None or schedules[peer][turn] == rank for rank, row in enumerate(schedules) for turn, peer in enumerate(row))
    assert len(set(schedules[4])) == 64 and network.first_ranks(["a", "b", "a"]) == [0, 1]


def measure_links(mesh: Any, seconds: float) -> list[Link]:
    channel = network.Channel(torch.device("cpu"), mesh.job.group, mesh.job)
    return network.measure_links(channel, mesh.rank, ["n"] * mesh.world, seconds)


def test_links_are_measured_once_and_skipped_after_the_time() -> None:
    by_rank = on_ranks({"replicate": 4}, measure_links, 10.0)
    measured = [link for local in by_rank for link in local]
    assert sorted((link.one, link.other) for link in measured) == [(a, b) for a in range(4) for b in range(a + 1, 4)]
    assert all(0 < link.latency < 1 and link.rate > 1e5 for link in measured)
    assert on_ranks({"replicate": 4}, measure_links, 0.0) == [[]] * 4


# ------------------------------------------------------------------------------------------ inspection of a rank


def test_a_rank_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in load_json("kernel_files").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(rank_report.os, "sched_getaffinity", lambda pid: {6, 7, 8})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "nid7")
    monkeypatch.setenv("HPCAI_TOKEN", "secret")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    report = rank_report.inspect_rank(RankInfo("srun", 3, 4, 1, 2), root=tmp_path)
    assert (report.node, report.machine, report.online, report.rdma) == ("nid7", "b00t", 16, True)
    assert (report.cpus, report.numa) == ((6, 7, 8), (0, 1))
    assert report.versions["NVIDIA driver"] == "570.86.15" and report.gpu_problem.startswith("the NVIDIA driver is there")
    assert report.variables["NCCL_ALGO"] == "Ring" and not {"HPCAI_TOKEN", "UCX_NET_DEVICES"} & set(report.variables)
    assert page.describe_cores([report]).startswith("3 of 16 CPUs (6-8), ") and ", NUMA 0-1" in page.describe_cores([report])
    assert report.usable == 2 and ", a quota of 2 CPUs" in page.describe_cores([report])


def test_a_gpu_is_found_with_its_address_and_numa_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": "A100", "uuid": "aaaa-bbbb", "total_memory": 40 << 30}
    properties |= {"pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    folder = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("3\n")
    gpu = Gpu(2, "A100", "aaaa-bbbb", "0000:c1:00.0", 40.0, 3)
    assert rank_report.find_gpu(RankInfo("srun", 6, 8, 2, 4), tmp_path) == (gpu, "")
    (folder / "numa_node").write_text("-1\n")
    detected, _ = rank_report.find_gpu(RankInfo("srun", 6, 8, 2, 4), tmp_path)
    assert detected is not None and detected.node is None
    detected, problem = rank_report.find_gpu(RankInfo("srun", 6, 8, 5, 6), tmp_path)
    assert detected is None and problem.startswith("local rank 5 finds only 4 visible GPUs")


def test_links_are_measured_between_gpus_if_each_rank_has_one() -> None:
    assert job.has_gpu_per_rank(report_of(but=gpus(*"abcd")).members) == torch.distributed.is_nccl_available()
    assert not job.has_gpu_per_rank(report_of(but=gpus(*"aacd")).members) and not job.has_gpu_per_rank(report_of().members)


def test_invalid_options_of_the_doctor_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCAI_TIMEOUT", "60")  # otherwise set by the command
    assert cli.main(["doctor", "--ranks", "--limit", "1"]) == 2
    assert capsys.readouterr().err == "hpcai doctor: --limit is 1 s, expected 5 or more\n"
    for thread in threading.enumerate():
        if thread.name == "hpcai-deadline":
            thread.join(5)
            assert not thread.is_alive(), "it would end this process later"


# -------------------------------------------------------------------------------------- folders, schedulers, limits


def test_a_folder_is_measured_and_left_unchanged(tmp_path: Path) -> None:
    result = storage.measure_folder(tmp_path, "t", 0, 0.05)
    assert result.free > 0 and result.write > 0 and result.read > 0 and result.problem == "" and result.kind
    result = storage.measure_folder(tmp_path, "t", 0, 1.5, iter([0, 1, 2, 2, 10, 12, 12]).__next__)  # write 32 MiB, read half
    assert (result.write, result.read) == (16 << 20, 8 << 20)
    with storage.marker_file(tmp_path, "t") as problem:
        (other := tmp_path / f"{storage.PREFIX}other").write_text("t")      # of another job
        assert problem == "" and storage.sees_marker(tmp_path, "t") and not storage.sees_marker(tmp_path, "other", 0.0)
        other.unlink()
    with pytest.raises(KeyboardInterrupt), storage.marker_file(tmp_path, "t"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    missing = tmp_path / "none"
    assert storage.measure_folder(missing, "t", 0, 0.05).problem == "No such file or directory"
    with storage.marker_file(missing, "t") as problem:
        assert problem == "No such file or directory"


def describe_lagging(answers: Sequence[str | None], world: int | None = None) -> str:
    statuses = {rank: Member(rank, f"rank {rank} on n{rank}", print, status=doing) for rank, doing in enumerate(answers)}
    return deadline.describe_lagging(statuses, world)


def test_lagging_ranks_are_named() -> None:
    assert describe_lagging(["3 clocks for 9 s", "3 clocks for 9 s", "2 inspection for 9 s"]) == (
        "rank 2 on n2 is still at inspection for 9 s, and the others wait for it")
    assert describe_lagging(["3 clocks for 9 s", None]).startswith("rank 1 on n1 does not respond: stopped, or blocked by")
    assert describe_lagging(["1 meeting for 9 s"], 4) == "ranks 1-3 did not connect; check their processes and nodes"
    assert describe_lagging(["3 links for 9 s"] * 2, 2) == "all ranks are at links for 9 s, and none lags; give more time (--limit)"
