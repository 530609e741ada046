"""The report on a job as text for a terminal."""

import statistics
from collections.abc import Iterator, Sequence

from hpcai.cli import findings, tables
from hpcai.cli.doctor.findings import Finding, Report, group_ranks
from hpcai.cli.doctor.rank_report import RankReport
from hpcai.dist.host import format_ranges
from hpcai.log import format_bytes

_MAX_SHOWN = 8  # maximum number of core sets of a node, and of findings of a kind


def lines(report: Report, results: Sequence[Finding]) -> Iterator[str]:
    yield title(report)
    yield from tables.lines(rows(report))
    yield from findings.lines(results, shown=_MAX_SHOWN)
    yield f"{findings.verdict(results)}: {findings.counts(results)}"


def title(report: Report) -> str:
    """Return ``hpcai doctor: 4 ranks on 1 node, srun, 17.2 s``."""
    pluralize, launcher = findings.pluralize, report.members[0].launcher if report.members else "no launcher"
    ranks, nodes = len(report.members), len(set(report.nodes))
    return f"hpcai doctor: {pluralize(ranks, 'rank')} on {pluralize(nodes, 'node')}, {launcher}, {report.seconds:.1f} s"


def rows(report: Report) -> Iterator[tuple[str, str]]:
    """Yield label and text of each measurement."""
    if not report.members:
        return
    first, nodes = report.members[0], group_ranks({m.rank: m.node for m in report.members})
    cores = {ranks[0]: (describe_cores([report.members[rank] for rank in ranks]), ranks) for _, ranks in nodes}
    for text, same in group_ranks({rank: text for rank, (text, _) in cores.items()}):
        ranks = sorted(rank for lowest in same for rank in cores[lowest][1])
        yield "ranks", f"{report.describe_ranks(ranks)}{f', {len(ranks) // len(same)} on each' if len(same) > 1 else ''}: {text}"
    yield "versions", ", ".join(f"{name} {value.split(',')[0]}" for name, value in first.versions.items())
    yield from _network(report)
    for label, folders in (("directory", report.storage.run), ("scratch", report.storage.scratch)):
        for (path, kind), ranks in group_ranks({rank: (x.path, x.kind) for rank, x in folders.items() if x.kind}):
            parts = [f"{format_bytes(min(folders[rank].free for rank in ranks))} free"]
            for name in ("write", "read"):
                if rates := [rate for rank in ranks if (rate := getattr(folders[rank], name))]:
                    slowest = f" on each of {len(rates)} nodes, {format_bytes(min(rates))}/s the slowest" if len(rates) > 1 else ""
                    parts.append(f"{name} {format_bytes(statistics.median(rates))}/s{slowest}")
            if label == "directory" and all(folder.seen for folder in folders.values()):
                parts.append("seen by all ranks")
            yield label, f"{path} ({kind}): {', '.join(parts)}"
    locked = "no limit" if first.locked is None else format_bytes(first.locked)
    yield "limits", f"{first.files:,} open files, locked memory {locked}, /dev/shm {format_bytes(first.shm)}"


def describe_cores(members: Sequence[RankReport]) -> str:
    """Return the cores and GPUs of the ranks of one node."""
    first, sets = members[0], list(dict.fromkeys(format_ranges(set(member.cpus)) for member in members))
    shown = " | ".join(sets[:_MAX_SHOWN]) + (" | ..." if len(sets) > _MAX_SHOWN else "")
    text = f"{len(first.cpus)} of {first.online} CPUs ({shown}), {findings.pluralize(first.threads, 'thread')} each"
    if first.usable < len(first.cpus):
        text += f", a quota of {first.usable} CPUs"
    if numa := set[int]().union(*(member.numa for member in members)):
        text += f", NUMA {format_ranges(numa)}"
    gpus = [member.gpu for member in members if member.gpu]
    text += f", {gpus[0].name} {' '.join(str(gpu.index) for gpu in gpus)}" if gpus else ""
    return "; ".join([text, *dict.fromkeys(member.gpu_problem for member in members if member.gpu_problem)])


def _network(report: Report) -> Iterator[tuple[str, str]]:
    network, nodes = report.network, report.nodes
    for name, same_node in (("links of a node", True), ("between nodes", False)):
        links = [link for link in network.links if (nodes[link.one] == nodes[link.other]) == same_node]
        if links:
            times, rates = [link.latency * 1e6 for link in links], [link.rate for link in links]
            latency = f"{statistics.median(times):,.0f} us ({min(times):,.0f} to {max(times):,.0f})"
            rate = (f"{format_bytes(statistics.median(rates))}/s each way "
                    f"({format_bytes(min(rates))}/s to {format_bytes(max(rates))}/s)")  # fmt: skip
            yield name, f"{len(links)} by {network.backend}: {latency}, {rate}"
    for name, seconds_of in (("all-reduce", network.sums), ("all-to-all", network.all_to_all)):
        if seconds_of:
            yield name, ", ".join(f"{format_bytes(count)} {seconds * 1e3:,.3g} ms" for count, seconds in seconds_of.items())
    if network.paces:
        rates = [pace.rate / 1e9 for pace in network.paces.values()]
        yield "pace", f"{statistics.median(rates):,.1f} GFLOP/s of a rank ({min(rates):,.1f} to {max(rates):,.1f})"
