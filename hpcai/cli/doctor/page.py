"""A doctor's visit as lines for a terminal, as a page of HTML that needs no network, and as JSON."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby
from typing import Any

from hpcai.cli.doctor.findings import CODES, Finding, Visit, groups, where
from hpcai.cli.doctor.member import Member, signal_names, told
from hpcai.cli.doctor.storage import Folder, Speed
from hpcai.dist.host import ranges
from hpcai.log import duration, size

_SHOWN = 8  # ranks of a matrix on a terminal
_WIDTH = 16
_ALIKE = 8  # findings of one code on a terminal


def lines(visit: Visit, findings: Sequence[Finding]) -> Iterator[str]:
    """The page for a terminal."""
    yield title(visit)
    yield ""
    for label, text in rows(visit):
        yield f"{label:<{_WIDTH}}{text}"
    if 2 < len(ranks := played(visit)) <= _SHOWN:
        yield ""
        yield "us one way above the diagonal, GB/s each way below it"
        for row in matrix(visit, ranks):
            yield "".join(f"{cell:>9}" for cell in row)
    yield ""
    for _, same in groupby(findings, lambda finding: (finding.level, finding.code)):
        some = list(same)
        yield from (f"{finding.level}: {finding.where}: {finding.text}" for finding in some[:_ALIKE])
        if len(some) > _ALIKE:
            yield f"and {len(some) - _ALIKE} more findings of {some[0].code}; --json FILE names all"
    yield verdict(visit, findings)


def title(visit: Visit) -> str:
    nodes, launcher = len(set(visit.nodes)), visit.members[0].launcher if visit.members else "no rank"
    ranks = f"{len(visit.members)} rank{'s' * (len(visit.members) != 1)} on {nodes} node{'s' * (nodes != 1)}"
    return f"hpcai doctor: {ranks}, {launcher}, {visit.seconds:.1f} s"


def verdict(visit: Visit, findings: Sequence[Finding]) -> str:
    wrong = sum(finding.level == "wrong" for finding in findings)
    fine, warned = _fine(visit, findings), len(findings) - wrong
    word = "WRONG" if wrong else "usable, with warnings" if findings else "fine"
    return f"{word}: {wrong} wrong, {warned} warning{'s' * (warned != 1)}; fine: {', '.join(fine) or 'nothing'}"


def _fine(visit: Visit, findings: Sequence[Finding]) -> list[str]:
    """What was looked at and gave no finding."""
    found = {finding.code for finding in findings}
    return [code for code in CODES if code not in found and _was_asked(code, visit)]


def _was_asked(code: str, visit: Visit) -> bool:
    asked = {
        "clocks": len(visit.network.clocks) > 1, "links": bool(visit.network.links), "limit": visit.left[1] is not None,
        "app": any(member.app for member in visit.members), "folder": bool(visit.storage.run), "rate": bool(visit.storage.run),
        "gpu": any(member.gpu for member in visit.members), "shared": len(visit.storage.run) > 1,
    }  # fmt: skip
    return bool(visit.members) and code != "silent" and asked.get(code, True)


def rows(visit: Visit) -> Iterator[tuple[str, str]]:
    """What was looked at: label and text."""
    if not visit.members:
        return
    for number, text in enumerate(places(visit)):
        yield ("ranks" if number == 0 else "", text)
    short = {name: value[:12] if "commit" in name else value.split(",")[0] for name, value in _most(visit, "versions")}
    yield "versions", ", ".join(f"{name} {value}" for name, value in short.items())
    yield from _network(visit)
    for label, folders in (("directory", visit.storage.run), ("scratch", visit.storage.scratch)):
        for number, text in enumerate(_folders(folders)):
            yield (label if number == 0 else "", text)
    if visit.left[0]:
        left = visit.left[1]
        yield "time left", f"{'not limited, or not told' if left is None else duration(left)} ({visit.left[0]})"
    for why, ranks in groups({member.rank: member.compiler or "" for member in visit.members}):
        yield "Triton kernels", (why or "can be compiled") + f": {where(ranks, visit.nodes)}"
    names = ", ".join(f"{name}={value}" for name, value in _most(visit, "network")) or "none of HF_HUB_OFFLINE and proxies"
    yield "offline", f"hpcai asks no network; set: {names}"
    first = visit.members[0]
    locked = "no limit" if first.locked is None else size(first.locked)
    yield "limits", f"{first.files:,} open files, locked memory {locked}, /dev/shm {size(first.shm[0])} ({size(first.shm[1])} free)"
    if not any(member.deaf for member in visit.members):
        yield "signals", f"{signal_names()} reach all ranks"
    yield from _app(visit)


def _most(visit: Visit, part: str) -> list[tuple[str, str]]:
    """Name and most frequent value of what the ranks told."""
    names = dict.fromkeys(name for member in visit.members for name in getattr(member, part))
    found = [(name, groups({m.rank: getattr(m, part).get(name, "") for m in visit.members})[0][0]) for name in names]
    return [(name, value) for name, value in found if value]


def places(visit: Visit) -> Iterator[str]:
    """The ranks, folded where nodes are alike: ``ranks 0-7 on 2 nodes (n1, n2), 4 on each: 16 of 64 CPUs ...``."""
    nodes: dict[str, list[Member]] = {}
    for member in visit.members:
        nodes.setdefault(member.node, []).append(member)
    found: dict[str, list[str]] = {}
    for node, members in nodes.items():
        found.setdefault(_place(members), []).append(node)
    for text, alike in found.items():
        ranks = [member.rank for node in alike for member in nodes[node]]
        many = f", {len(ranks) // len(alike)} on each node" if len(nodes) > 1 else ""
        yield f"{where(ranks, visit.nodes)}{many}: {text}"


def _place(members: Sequence[Member]) -> str:
    shapes = {(len(m.cpus), m.online, m.threads, m.gpu.name if m.gpu else "") for m in members}
    if len(members) == 1 or len(shapes) > 1:
        return "; ".join(told(member) for member in members)
    (cpus, online, threads, gpu), sets = shapes.pop(), list(dict.fromkeys(ranges(set(member.cpus)) for member in members))
    shown = " | ".join(sets[:8]) + (" | ..." if len(sets) > 8 else "")
    bound = f"the same {cpus} of {online} CPUs ({shown})" if len(sets) == 1 else f"{cpus} of {online} CPUs each ({shown})"
    text = f"{bound}, {threads} thread{'s' if threads > 1 else ''} each"
    return text + (f", {gpu} {' '.join(str(m.gpu.index) for m in members if m.gpu)}" if gpu else "")


def _network(visit: Visit) -> Iterator[tuple[str, str]]:
    net, nodes = visit.network, visit.nodes
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
        yield "sums", ", ".join(f"{size(count)} {_short(seconds)}" for count, seconds in net.sums.items())
    small = {rank: pace.small for rank, pace in net.paces.items() if pace.small}
    if small:
        least, most = min(small, key=lambda rank: small[rank]), max(small, key=lambda rank: small[rank])
        waits = f"{_short(small[least])} at rank {least} to {_short(small[most])} at rank {most}"
        late = f": the others wait for rank {least}" if small[most] > 2 * small[least] else ""
        yield "a sum of 8 B", waits + late
    if net.paces:
        rates = [pace.rate / 1e9 for pace in net.paces.values()]
        yield "pace", f"{statistics.median(rates):,.1f} GFLOP/s of a rank ({min(rates):,.1f} to {max(rates):,.1f})"


def _short(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _folders(folders: dict[int, Folder]) -> Iterator[str]:
    looked = {rank: folder for rank, folder in folders.items() if folder.kind or folder.free}
    for (path, kind, refused), ranks in groups({rank: (f.path, f.kind, bool(f.direct)) for rank, f in looked.items()}):
        those = [looked[rank] for rank in ranks]
        text = f"{path} ({kind or 'unknown'}): {size(min(folder.free for folder in those))} free"
        text += ", no O_DIRECT" if refused else ", O_DIRECT"
        for name, speeds in (("alone", [f.alone for f in those]), ("at once", [f.at_once for f in those])):
            if found := [speed for speed in speeds if speed is not None and speed.write]:
                text += f"; {name}: {_speed(found)}"
        seen = [folder.seen for folder in folders.values() if folder.path == path and folder.seen is not None]
        yield text + ("; seen by all ranks" if seen and all(seen) and len(folders) > 1 else "")


def _speed(speeds: Sequence[Speed]) -> str:
    parts = []
    for name in ("write", "read"):
        each = [getattr(speed, name) for speed in speeds]
        more = f" on each of {len(each)} nodes, {size(min(each))}/s the slowest" if len(each) > 1 else ""
        parts.append(f"{name} {size(statistics.median(each))}/s{more}")
    return ", ".join(parts)


def _app(visit: Visit) -> Iterator[tuple[str, str]]:
    needs = next((member.app for member in visit.members if member.app), None)
    if needs is not None:
        extras = f"extras {', '.join(needs.extras)}" if needs.extras else "no extras"
        found = "not there" if needs.entries is None else f"{needs.entries:,} entries"
        yield f"app {needs.name}"[: _WIDTH - 1], f"{extras}; data {needs.data}: {found}"


def played(visit: Visit) -> list[int]:
    """The ranks between which links were measured."""
    return sorted({rank for link in visit.network.links for rank in (link.one, link.other)})


def matrix(visit: Visit, ranks: Sequence[int]) -> Iterator[list[str]]:
    """Rows of text: us above the diagonal, GB/s below it."""
    found = {(link.one, link.other): link for link in visit.network.links}
    yield ["rank", *map(str, ranks)]
    for one in ranks:
        cells = [str(one)]
        for other in ranks:
            link = found.get((min(one, other), max(one, other)))
            cells.append("" if link is None else f"{link.latency * 1e6:,.0f}" if one < other else f"{link.rate / 1e9:.2f}")
        yield cells


def html(visit: Visit, findings: Sequence[Finding]) -> str:
    from hpcai.cli.report.document import STYLE, card, table

    told = [(finding.level, finding.where, finding.text) for finding in findings]
    ranks = played(visit)
    head, *cells = matrix(visit, ranks) if ranks else [[]]
    parts = [
        f'<header><h1>{escape(title(visit))}</h1></header><div class="faint">{escape(verdict(visit, findings))}</div>',
        card("Findings", table(("level", "where", "what"), told)) if told else "",
        card("What was looked at", table(("", ""), list(rows(visit)))),
        card("Links", table(head, cells, "numbers"), "us one way above the diagonal, GB/s each way below it") if cells else "",
        card("Ranks", table(("rank", "node", "place"), [(m.rank, m.node, told_of(m)) for m in visit.members])),
    ]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(title(visit))}</title><style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(filter(None, parts))
            + "\n</main></body></html>\n")


def told_of(member: Member) -> str:
    return told(member) if not member.gpu_problem else f"{told(member)}; {member.gpu_problem}"


def as_json(visit: Visit, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything, of which JSON can be made."""
    fine = [{"level": "fine", "code": code, "where": "all ranks"} for code in _fine(visit, findings)]
    return {
        "title": title(visit), "wrong": any(finding.level == "wrong" for finding in findings),
        "findings": [*map(asdict, findings), *fine], **asdict(visit),
    }  # fmt: skip
