"""The report on a job as lines for a terminal and as a page of HTML that needs no network."""

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from hpcai.cli import findings
from hpcai.cli.doctor.findings import Finding, Report, groups
from hpcai.cli.doctor.member import Member
from hpcai.cli.doctor.storage import Folder
from hpcai.dist.host import ranges
from hpcai.log import duration, size

_SHOWN = 8  # ranks of a matrix on a terminal
_MATRIX = "us one way above the diagonal, GB/s each way below it"


def lines(report: Report, found: Sequence[Finding]) -> Iterator[str]:
    """Yield the page for a terminal."""
    yield title(report)
    yield from findings.grid(rows(report))
    if 2 < len(matrix(report)) - 1 <= _SHOWN:
        yield _MATRIX
        yield from findings.grid(matrix(report), right=True)
    yield from findings.lines(found, shown=_SHOWN)
    yield f"{findings.verdict(found)}: {findings.counts(found)}"


def html(report: Report, found: Sequence[Finding]) -> str:
    """Return the page."""
    from hpcai.cli.report import document

    head, *cells = matrix(report) or [[]]
    ranks = [(member.rank, member.node, place([member])) for member in report.members]
    parts = [
        f'<header><h1>{escape(title(report))}</h1></header><div class="faint">{findings.verdict(found)}</div>',
        document.card("Findings", document.table(("", "where", "what"), [(f.severity, f.place, f.text) for f in found])),
        document.card("Seen", document.table(("", ""), list(rows(report)))),
        document.card("Links", document.table(head, cells, "numbers"), _MATRIX) if cells else "",
        document.card("Ranks", document.table(("rank", "node", "place"), ranks)),
    ]
    return document.html(title(report), parts)


def title(report: Report) -> str:
    """Return ``hpcai doctor: 4 ranks on 1 node, srun, 17.2 s``."""
    many, launcher = findings.many, report.members[0].launcher if report.members else "no launcher"
    ranks, nodes = len(report.members), len(set(report.nodes))
    return f"hpcai doctor: {many(ranks, 'rank')} on {many(nodes, 'node')}, {launcher}, {report.seconds:.1f} s"


def rows(report: Report) -> Iterator[tuple[str, str]]:
    """Yield label and text of all that was looked at."""
    if not report.members:
        return
    first, nodes = report.members[0], groups({m.rank: m.node for m in report.members})
    places = {ranks[0]: (place([report.members[rank] for rank in ranks]), ranks) for _, ranks in nodes}
    for text, alike in groups({rank: text for rank, (text, _) in places.items()}):
        ranks = sorted(rank for one in alike for rank in places[one][1])
        yield "ranks", f"{report.where(ranks)}{f', {len(ranks) // len(alike)} on each' if len(alike) > 1 else ''}: {text}"
    yield "versions", ", ".join(f"{name} {value.split(',')[0]}" for name, value in first.versions.items())
    yield from _network(report)
    for label, folders in (("directory", report.storage.run), ("scratch", report.storage.scratch)):
        for (path, kind), ranks in groups({rank: (one.path, one.kind) for rank, one in folders.items() if one.kind}):
            seen = label == "directory" and all(folder.seen for folder in folders.values())
            yield label, f"{path} ({kind}): {_folder([folders[rank] for rank in ranks])}{', seen by all ranks' * seen}"
    if report.left is not None:
        yield "time left", duration(report.left)
    yield "Triton kernels", first.compiler or "can be compiled"
    locked = "no limit" if first.locked is None else size(first.locked)
    yield "limits", f"{first.files:,} open files, locked memory {locked}, /dev/shm {size(first.shm)}"


def place(members: Sequence[Member]) -> str:
    """Return the cores and GPUs of the ranks of one node."""
    first, sets = members[0], list(dict.fromkeys(ranges(set(member.cpus)) for member in members))
    shown = " | ".join(sets[:_SHOWN]) + (" | ..." if len(sets) > _SHOWN else "")
    text = f"{len(first.cpus)} of {first.online} CPUs ({shown}), {findings.many(first.threads, 'thread')} each"
    if numa := set[int]().union(*(member.numa for member in members)):
        text += f", NUMA {ranges(numa)}"
    gpus = [member.gpu for member in members if member.gpu]
    text += f", {gpus[0].name} {' '.join(str(gpu.index) for gpu in gpus)}" if gpus else ""
    return "; ".join([text, *dict.fromkeys(member.gpu_problem for member in members if member.gpu_problem)])


def _network(report: Report) -> Iterator[tuple[str, str]]:
    net, nodes = report.network, report.nodes
    if len(net.clocks) > 1:
        yield "clocks", f"within {max(abs(ahead) for ahead, _ in net.clocks.values()) * 1e3:,.2f} ms of rank 0's"
    for name, within in (("links of a node", True), ("between nodes", False)):
        those = [link for link in net.links if (nodes[link.one] == nodes[link.other]) == within]
        if those:
            times, rates = [link.latency * 1e6 for link in those], [link.rate for link in those]
            late = f"{statistics.median(times):,.0f} us ({min(times):,.0f} to {max(times):,.0f})"
            rate = f"{size(statistics.median(rates))}/s each way ({size(min(rates))}/s to {size(max(rates))}/s)"
            yield name, f"{len(those)} by {net.backend}: {late}, {rate}"
    if net.sums:
        yield "sums", ", ".join(f"{size(count)} {seconds * 1e3:,.3g} ms" for count, seconds in net.sums.items())
    if net.paces:
        rates = [pace.rate / 1e9 for pace in net.paces.values()]
        yield "pace", f"{statistics.median(rates):,.1f} GFLOP/s of a rank ({min(rates):,.1f} to {max(rates):,.1f})"


def _folder(folders: Sequence[Folder]) -> str:
    parts = [f"{size(min(folder.free for folder in folders))} free"]
    for name in ("write", "read"):
        rates = [getattr(folder, name) for folder in folders if getattr(folder, name)]
        if rates:
            slowest = f" on each of {len(rates)} nodes, {size(min(rates))}/s the slowest" if len(rates) > 1 else ""
            parts.append(f"{name} {size(statistics.median(rates))}/s{slowest}")
    return ", ".join(parts)


def matrix(report: Report) -> list[list[str]]:
    """Return rows of text with the links between ranks, first the ranks; empty where none was measured."""
    found = {(link.one, link.other): link for link in report.network.links}
    ranks = sorted({rank for pair in found for rank in pair})
    table = [["rank", *map(str, ranks)]] if ranks else []
    for one in ranks:
        links = [found.get((min(one, other), max(one, other))) for other in ranks]
        latencies = ["" if link is None else f"{link.latency * 1e6:,.0f}" for link in links]
        rates = ["" if link is None else f"{link.rate / 1e9:.2f}" for link in links]
        table.append([str(one), *(late if one < other else rate for other, late, rate in zip(ranks, latencies, rates))])
    return table
