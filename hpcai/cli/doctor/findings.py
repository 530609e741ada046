"""The kinds of findings about a job, and the rules that produce them, as pure functions of the reports of all ranks."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcai.cli import findings
from hpcai.cli.doctor.network import Network, slow_outliers, slow_ranks
from hpcai.cli.doctor.rank_report import RankReport
from hpcai.cli.doctor.storage import Folders
from hpcai.dist.host import format_ranges
from hpcai.log import format_bytes

KINDS = findings.read_kinds(Path(__file__).with_name("kinds.toml"))
CODES = tuple(dict.fromkeys(kind.partition("/")[0] for kind in KINDS))

MIN_FREE, MIN_SHM, MIN_LOCKED, MIN_SHARE = 10 << 30, 1 << 30, 1 << 30, 0.8
DRIVERS = ("NVIDIA driver", "C library")

Rule = Iterator[tuple[str, Sequence[int], dict[str, Any]]]
"""Kinds of findings, each with its ranks and the fields of its text."""


@dataclass(frozen=True)
class Finding(findings.Finding):
    """A fault of some ranks, named by ``place`` with their nodes; without ranks, of the whole job."""

    ranks: tuple[int, ...]


@dataclass
class Report:
    members: list[RankReport] = field(default_factory=list)
    network: Network = field(default_factory=Network)
    storage: Folders = field(default_factory=Folders)
    seconds: float = 0.0
    silent: str = ""

    @property
    def nodes(self) -> list[str]:
        return [member.node for member in self.members]

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Return ``ranks 0-3 on n1``, ``rank 2 on n1``, ``all 4 ranks`` or ``the job``."""
        if not ranks:
            return "the job"
        if len(ranks) == len(self.nodes) > 1:
            return f"all {len(self.nodes)} ranks"
        hosts = list(dict.fromkeys(self.nodes[rank] for rank in ranks))
        nodes = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes ({', '.join(hosts[:4])}{', ...' * (len(hosts) > 4)})"
        return f"rank{'s' * (len(ranks) > 1)} {format_ranges(set(ranks))} on {nodes}"


def diagnose(report: Report) -> list[Finding]:
    """Return all findings, errors first."""
    results = []
    for rule in (_unresponsive, _versions, _gpus, _cores, _compute_rates, _links, _folders, _limits):
        for kind, ranks, fields in rule(report):
            kwargs = findings.describe(KINDS, kind, **fields)
            results.append(Finding(**kwargs, place=report.describe_ranks(ranks), ranks=tuple(ranks)))
    return sorted(results, key=lambda finding: (findings.SEVERITIES.index(finding.severity), CODES.index(finding.code)))


def group_ranks(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Return the ranks of each value, most ranks first, and of equal groups the one with the lowest rank first."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks_of.setdefault(value, []).append(rank)
    return sorted(ranks_of.items(), key=lambda group: (-len(group[1]), group[1]))


def _unresponsive(report: Report) -> Rule:
    if report.silent:
        yield "silent", (), {"text": report.silent}


def _versions(report: Report) -> Rule:
    for part, kind in (("versions", "versions"), ("variables", "environment")):
        tables = {member.rank: getattr(member, part) for member in report.members}
        for name in dict.fromkeys(name for table in tables.values() for name in table):
            (expected, expected_ranks), *others = group_ranks({rank: table.get(name, "missing") for rank, table in tables.items()})
            for version, ranks in others:
                fields = {"name": name, "found": version, "want": expected, "most": report.describe_ranks(expected_ranks)}
                yield "versions/driver" if name in DRIVERS else kind, ranks, fields


def _gpus(report: Report) -> Rule:
    for problem, ranks in group_ranks({member.rank: member.gpu_problem for member in report.members if member.gpu_problem}):
        yield "gpu", ranks, {"why": problem}
    owners = {member.rank: (member.machine, member.gpu.uuid or member.gpu.pci) for member in report.members if member.gpu}
    for (_, gpu), ranks in group_ranks(owners):
        if len(ranks) > 1 and gpu:
            yield "gpu/shared", ranks, {"gpu": gpu}
    without = [member.rank for member in report.members if member.gpu is None and not member.gpu_problem]
    if owners and without:
        yield "gpu/some", without, {"others": report.describe_ranks(list(owners))}
    for member in report.members:
        gpu_node = member.gpu.node if member.gpu else None
        if gpu_node is not None and is_bound(member) and member.numa and gpu_node not in member.numa:
            yield "gpu/far", [member.rank], {"found": format_ranges(set(member.numa)), "want": gpu_node}


def is_bound(member: RankReport) -> bool:
    """Whether the launcher has bound this rank to some of the CPUs of its machine."""
    return 0 < len(member.cpus) < member.online


def _cores(report: Report) -> Rule:
    for _, ranks in group_ranks({member.rank: member.machine for member in report.members}):
        members = [report.members[rank] for rank in ranks]
        threads, cpus = sum(member.threads for member in members), set[int]().union(*(member.cpus for member in members))
        usable = min(len(cpus), *(member.usable for member in members))
        if len(members) > 1 and threads > usable > 0:
            per_rank = usable // len(members)
            advice = f"set OMP_NUM_THREADS={per_rank}" if per_rank else f"start at most {usable} ranks there"
            yield "threads", ranks, {"threads": threads, "cpus": usable, "advice": advice}
        sets = group_ranks({member.rank: member.cpus for member in members if is_bound(member)})
        for own, same in sets:
            if len(same) > 1 and len(own) == 1:
                yield "cores/one", same, {"cpus": own[0], "online": members[0].online}
            elif len(same) > 1 and len(sets) > 1:  # a set of all ranks is the job's allocation, without binding
                yield "cores", same, {"cpus": format_ranges(set(own))}
        mixed = [rank for own, same in sets for rank in same if any(set(own) & set(other) for other, _ in sets if other != own)]
        if mixed:
            yield "cores", sorted(mixed), {"cpus": "partly"}


def _oversubscribed(report: Report) -> set[int]:
    """Return the ranks that share cores. Their waiting is reported once, by the cause."""
    return {rank for _, ranks, _ in _cores(report) for rank in ranks}


def _compute_rates(report: Report) -> Rule:
    paces, crowded = report.network.paces, _oversubscribed(report)
    median = statistics.median(pace.rate for pace in paces.values()) if paces else 0
    for rank in slow_outliers({rank: 1 / pace.rate for rank, pace in paces.items()}, 1.5):
        yield "pace", [rank], {"found": f"{paces[rank].rate / 1e9:,.1f} GFLOP", "want": f"{median / 1e9:,.1f}"}
    starved = [rank for rank, pace in paces.items() if pace.share < MIN_SHARE and rank not in crowded]
    if starved:
        yield "share", starved, {"found": min(paces[rank].share for rank in starved)}


def _links(report: Report) -> Rule:
    """Check links within a node and links between nodes separately, latency and rate too."""
    nodes, crowded = report.nodes, _oversubscribed(report)
    for same_node in (True, False):
        links = [link for link in report.network.links if (nodes[link.one] == nodes[link.other]) == same_node]
        links = [link for link in links if not {link.one, link.other} <= crowded]
        latency = {(link.one, link.other): link.latency for link in links}
        inverse = {(link.one, link.other): 1 / link.rate for link in links}
        for times, text in ((latency, lambda time: f"{time * 1e6:,.0f} us"), (inverse, lambda time: f"{format_bytes(1 / time)}/s")):
            ranks, pairs = slow_ranks(times)
            median = text(statistics.median(times.values())) if times else ""
            for rank in ranks:
                own_median = statistics.median(value for pair, value in times.items() if rank in pair)
                other_median = statistics.median(value for pair, value in times.items() if rank not in pair)
                yield "links/rank", [rank], {"found": text(own_median), "want": text(other_median)}
            for pair in pairs:
                yield "links", [pair[0]], {"other": report.describe_ranks([pair[1]]), "found": text(times[pair]), "want": median}


def _folders(report: Report) -> Rule:
    run, scratch = report.storage.run, report.storage.scratch
    for folders in (run, scratch):
        for (path, problem), ranks in group_ranks({rank: (x.path, x.problem) for rank, x in folders.items() if x.problem}):
            yield "folder", ranks, {"path": path, "why": problem}
        usable = {rank: seen for rank, seen in folders.items() if seen.kind and not seen.problem}
        for (path, free), ranks in group_ranks({rank: (x.path, x.free) for rank, x in usable.items() if x.free < MIN_FREE}):
            yield "free", ranks, {"path": path, "found": format_bytes(free), "want": format_bytes(MIN_FREE)}
        for operation in ("write", "read"):
            rates = {rank: getattr(seen, operation) for rank, seen in usable.items() if getattr(seen, operation)}
            for rank in slow_outliers({rank: 1 / rate for rank, rate in rates.items()}, 2.0):
                median = format_bytes(statistics.median(rates.values()))
                fields = {"found": format_bytes(rates[rank]), "want": median, "do": operation}
                yield "rate", [rank], {"path": folders[rank].path, **fields}
    for path, ranks in group_ranks({rank: folder.path for rank, folder in run.items() if folder.seen is False}):
        yield "shared", ranks, {"path": path, "first": run[0].path}


def _limits(report: Report) -> Rule:
    members, world = report.members, len(report.members)
    if members and members[0].files < 8 * world + 1024:
        yield "limit/files", [0], {"found": members[0].files, "world": world, "want": 8 * world + 1024}
    limited = {m.rank: m.locked for m in members if (m.rdma or m.gpu) and m.locked is not None and m.locked < MIN_LOCKED}
    for locked, ranks in group_ranks(limited):
        yield "limit/locked", ranks, {"found": format_bytes(locked)}
    for total, ranks in group_ranks({member.rank: member.shm for member in members if member.shm < MIN_SHM}):
        yield "limit/shm", ranks, {"found": format_bytes(total), "want": format_bytes(MIN_SHM)}
