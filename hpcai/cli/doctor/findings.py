"""What a doctor finds in a job, in words, and by which rules. Everything here is a function of what the ranks have told."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcai.cli.doctor.member import Member
from hpcai.cli.doctor.network import Network, slow, slow_ranks
from hpcai.cli.doctor.storage import Folders
from hpcai.dist.host import ranges
from hpcai.log import duration, size

Level = Literal["wrong", "warning"]

KINDS: dict[str, tuple[Level, str]] = {
    # A kind is CODE or CODE/CASE
    "silent": ("wrong", "{text}"),
    "versions": ("wrong", "{name} is {found}, expected {want} as on {most}; give all ranks the same modules and environment"),
    "versions/driver": ("warning", "{name} is {found}, {want} on {most}; ask the centre, or leave these nodes out"),
    "environment": ("warning", "{name} is {found}, expected {want} as on {most}; set it alike for all ranks"),
    "gpu": ("wrong", "{why}"),
    "gpu/shared": ("wrong", "use one GPU ({gpu}), expected one each; show every task all GPUs of its node (srun --gpus-per-node=N "
                            "--gpu-bind=none), or start fewer tasks on a node"),
    "gpu/some": ("wrong", "found no GPU, but {others} did; start as many tasks on a node as it has GPUs"),
    "gpu/far": ("warning", "cores are on NUMA node {found}, the GPU is at {want}; leave binding to hpcai (srun --cpu-bind=none), "
                           "or bind next to the GPU"),
    "cores/one": ("wrong", "are all bound to CPU {cpus} of {online}, expected cores of their own; srun --cpus-per-task=N "
                           "--cpu-bind=cores, mpiexec -bind-to core:N"),
    "cores": ("warning", "are bound to the same CPUs ({cpus}), expected cores of their own; srun --cpus-per-task=N "
                         "--cpu-bind=cores, mpiexec -bind-to core:N"),
    "threads/ranks": ("warning", "are {ranks} ranks on {cpus} CPUs, expected a CPU for each; start fewer on a node"),
    "threads": ("warning", "start {threads} threads on {cpus} CPUs, expected at most one on each; set OMP_NUM_THREADS={want}"),
    "share": ("warning", "had its threads run {found:.0%} of the time in which they could, expected all of it; look for other "
                         "programs there, or bind ranks apart"),
    "pace": ("warning", "multiplies {found} a second, the others {want}; look at clocks, heat and other programs there"),
    "clocks": ("warning", "clock is {found} rank 0's (known to {error:.3f} s), expected within {want:g} s; files and logs get "
                          "wrong times: have chrony or ntp run on it"),
    "clocks/far": ("wrong", "clock is {found} rank 0's (known to {error:.3f} s), expected within {want:g} s; logins, licences and "
                            "munge refuse it: have chrony or ntp run on it"),
    "links/rank": ("warning", "is slow to reach for all others: {found}, the others {want}; look at its node's network card, its "
                              "binding and what else runs there, or leave the node out"),
    "links": ("warning", "to {other}: {found}, other links {want}; look at cables and switches between them"),
    "links/time": ("warning", "{played} of {rounds} rounds of links were measured in time; give more (--limit)"),
    "folder": ("wrong", "{path} cannot be written: {why}; name another with --directory, and in report.directory"),
    "folder/scratch": ("wrong", "{path} cannot be written: {why}; set TMPDIR to a folder of the node"),
    "shared": ("wrong", "{path} does not show the file that rank 0 wrote in {first}; expected one folder of all nodes: name one on "
                        "a file system that they share with --directory, and in report.directory"),
    "direct": ("warning", "{path} ({system}) refuses O_DIRECT ({why}): reads go through the page cache, which is slower for sets "
                          "larger than memory; use another file system for data"),
    "free": ("warning", "{path}: {found} are free, expected {want} or more; delete what is not needed, or name another"),
    "rate": ("warning", "{path}: {found} when all nodes {do} at once, the others {want}; look at this node's link to the file "
                        "system"),
    "rate/none": ("warning", "{path} was not measured: {why}"),
    "limit": ("warning", "{found} of the job are left; a run saves and stops when it is asked to, and needs some minutes for it"),
    "compiler": ("warning", "{why}: without it torch's own operations stand in for kernels"),
    "caches": ("warning", "{path} cannot be written; set {name} to a folder that can"),
    "files": ("warning", "may open {found:,} files, and rank 0 of {world:,} needs {want:,}; raise ulimit -n (hard)"),
    "locked": ("warning", "may lock {found} of memory, expected no limit where networks read it by themselves (RDMA); ulimit -l "
                          "unlimited, before the scheduler's daemon starts"),
    "shm": ("warning", "/dev/shm has {found}, expected {want} or more for NCCL and worker processes; enlarge it (docker "
                       "--shm-size, apptainer --bind /dev/shm)"),
    "signals": ("warning", "{names} {verb} blocked, so a run cannot save when the scheduler asks it to stop; unblock what starts "
                           "it"),
    "imports": ("warning", "torch took {found:.0f} s to import, expected less than {want:.0f} s; install to a file system that is "
                           "fast for many small files, or put the environment into an image"),
    "app": ("warning", "{app} uses {missing}, not installed here; pip install 'hpcai-suite[{extras}]'"),
    "app/data": ("wrong", "{path} is not there, expected the data of {app}; make them (docs/data.md), or set data.directory"),
    "app/differs": ("wrong", "{path} has {found:,} entries, expected {want:,} as on {most}; expected one folder of all nodes, or "
                             "copies that are alike"),
}  # fmt: skip
CODES = tuple(dict.fromkeys(kind.partition("/")[0] for kind in KINDS))

SKEWS = (0.5, 60.0)
"""Seconds between clocks: from the first on it is a warning, from the second on wrong. Munge refuses at 300, most logins too."""
FREE, SHM, LEFT, IMPORTS, SHARE = 10 << 30, 1 << 30, 300.0, 20.0, 0.8
DRIVERS = ("NVIDIA driver", "C library")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, and the ranks that it concerns. ``where`` names them and their nodes."""

    level: Level
    code: str
    where: str
    text: str
    ranks: tuple[int, ...] = ()


@dataclass
class Visit:
    """All that the ranks of a job have told."""

    members: list[Member] = field(default_factory=list)
    network: Network = field(default_factory=Network)
    storage: Folders = field(default_factory=Folders)
    left: tuple[str, float | None] = ("", None)
    """who sets a limit of time to the job, and how many seconds are left"""
    seconds: float = 0.0
    silent: str = ""

    @property
    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [member.node for member in self.members]


def where(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """``ranks 0-3 on n1``, or ``n1, n2`` where it is all ranks of these nodes."""
    if not ranks:
        return "the job"
    hosts = list(dict.fromkeys(nodes[rank] for rank in ranks))
    if len(ranks) == len(nodes) > 1:
        return f"all {len(nodes)} ranks"
    name = f"rank{'s' if len(ranks) > 1 else ''} {ranges(set(ranks))}"
    some = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return f"{name} on {hosts[0]}" if len(hosts) == 1 else f"{name} on {len(hosts)} nodes ({some})"


def judge(visit: Visit) -> list[Finding]:
    """All findings, what is wrong first."""
    every: list[Finding] = []
    for rule in (_silent, _versions, _gpus, _cores, _paces, _clocks, _links, _folders, _rates, _surroundings, _app):
        every += rule(visit)
    return sorted(every, key=lambda finding: (finding.level != "wrong", CODES.index(finding.code)))


def _finding(visit: Visit, kind: str, ranks: Sequence[int], /, **words: Any) -> Finding:
    level, text = KINDS[kind]
    return Finding(level, kind.partition("/")[0], where(ranks, visit.nodes), text.format(**words), tuple(ranks))


def groups(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """The ranks of each value; first the value of most ranks, among equals that of the lowest."""
    found: dict[Any, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[1]))


def _silent(visit: Visit) -> Iterator[Finding]:
    if visit.silent:
        yield _finding(visit, "silent", (), text=visit.silent)


def _unlike(visit: Visit, name: str, values: Mapping[int, str], kind: str) -> Iterator[Finding]:
    (want, most), *others = groups(values)
    for found, ranks in others:
        word = where(most, visit.nodes)
        yield _finding(visit, kind, ranks, name=name, found=found or "missing", want=want or "missing", most=word)


def _versions(visit: Visit) -> Iterator[Finding]:
    for part, kind in (("versions", "versions"), ("shared", "environment")):
        tables = {member.rank: getattr(member, part) for member in visit.members}
        for name in dict.fromkeys(name for table in tables.values() for name in table):
            values = {rank: table.get(name, "") for rank, table in tables.items()}
            yield from _unlike(visit, name, values, "versions/driver" if name in DRIVERS else kind)


def _gpus(visit: Visit) -> Iterator[Finding]:
    for why, ranks in groups({member.rank: member.gpu_problem for member in visit.members}):
        if why:
            yield _finding(visit, "gpu", ranks, why=why)
    with_one = [member for member in visit.members if member.gpu is not None]
    for (_, gpu), ranks in groups({m.rank: (m.machine, m.gpu.uuid or m.gpu.pci) for m in with_one if m.gpu is not None}):
        if len(ranks) > 1 and gpu:
            yield _finding(visit, "gpu/shared", ranks, gpu=gpu)
    without = [member.rank for member in visit.members if member.gpu is None and not member.gpu_problem]
    if with_one and without:
        yield _finding(visit, "gpu/some", without, others=where([member.rank for member in with_one], visit.nodes))
    for member in with_one:
        home = member.gpu.node if member.gpu else None
        if home is not None and bound(member) and member.numa and home not in member.numa:
            yield _finding(visit, "gpu/far", [member.rank], found=ranges(set(member.numa)), want=home)


def bound(member: Member) -> bool:
    """Whether the launcher has given this rank some of its machine's CPUs."""
    return 0 < len(member.cpus) < member.online


def _cores(visit: Visit) -> Iterator[Finding]:
    machines: dict[str, list[Member]] = {}
    for member in visit.members:
        machines.setdefault(member.machine, []).append(member)
    for those in machines.values():
        threads, cpus = sum(member.threads for member in those), set[int]().union(*(member.cpus for member in those))
        if len(those) > 1 and threads > len(cpus) > 0:
            ranks, kind = [member.rank for member in those], "threads/ranks" if len(those) > len(cpus) else "threads"
            words = {"threads": threads, "want": len(cpus) // len(those), "ranks": len(those)}
            yield _finding(visit, kind, ranks, cpus=len(cpus), **words)
        sets = groups({member.rank: member.cpus for member in those if bound(member)})
        for own, ranks in sets:
            if len(ranks) > 1 and len(own) == 1:
                yield _finding(visit, "cores/one", ranks, cpus=own[0], online=those[0].online)
            elif len(ranks) > 1 and len(sets) > 1:  # one set for all is what the job has of the node, and the ranks are not bound
                yield _finding(visit, "cores", ranks, cpus=ranges(set(own)))
        mixed = [rank for own, ranks in sets for rank in ranks if any(set(own) & set(other) for other, _ in sets if other != own)]
        if mixed:
            yield _finding(visit, "cores", sorted(mixed), cpus="partly")


def _crowded(visit: Visit) -> set[int]:
    """Ranks whose cores are asked for by several: they wait for each other, which is told once, as what it comes from."""
    return {rank for finding in _cores(visit) for rank in finding.ranks}


def _paces(visit: Visit) -> Iterator[Finding]:
    paces = visit.network.paces
    for rank in slow({rank: 1 / pace.rate for rank, pace in paces.items()}, 1.5):
        others = statistics.median(pace.rate for other, pace in paces.items() if other != rank)
        yield _finding(visit, "pace", [rank], found=f"{paces[rank].rate / 1e9:,.1f} GFLOP", want=f"{others / 1e9:,.1f}")
    crowded = _crowded(visit)
    starved = [rank for rank, pace in paces.items() if pace.share < SHARE and rank not in crowded]
    if starved:
        yield _finding(visit, "share", starved, found=min(paces[rank].share for rank in starved))


def _clocks(visit: Visit) -> Iterator[Finding]:
    for rank, (ahead, error) in sorted(visit.network.clocks.items()):
        if abs(ahead) - error > SKEWS[0]:
            kind = "clocks/far" if abs(ahead) - error > SKEWS[1] else "clocks"
            found = f"{abs(ahead):,.3f} s {'ahead of' if ahead > 0 else 'behind'}"
            yield _finding(visit, kind, [rank], found=found, error=error, want=SKEWS[0])


def _links(visit: Visit) -> Iterator[Finding]:
    """Links of one node and links between nodes are judged apart, latency and rate too."""
    net, nodes, crowded = visit.network, visit.nodes, _crowded(visit)
    for within in (True, False):
        those = [link for link in net.links if (nodes[link.one] == nodes[link.other]) == within]
        those = [link for link in those if not {link.one, link.other} <= crowded]
        for name, times in (
            ("latency", {(link.one, link.other): link.latency for link in those}),
            ("rate", {(link.one, link.other): 1 / link.rate for link in those}),
        ):
            ranks, pairs = slow_ranks(times)
            for rank in ranks:
                own = [value for pair, value in times.items() if rank in pair]
                others = [value for pair, value in times.items() if rank not in pair]
                words = {"found": _time(name, statistics.median(own)), "want": _time(name, statistics.median(others))}
                yield _finding(visit, "links/rank", [rank], **words)
            for pair in pairs:
                other, want = where([pair[1]], nodes), _time(name, statistics.median(times.values()))
                yield _finding(visit, "links", [pair[0]], other=other, found=_time(name, times[pair]), want=want)
    if net.played < net.rounds:
        yield _finding(visit, "links/time", (), played=net.played, rounds=net.rounds)


def _time(name: str, value: float) -> str:
    return f"{value * 1e6:,.0f} us" if name == "latency" else f"{size(1 / value)}/s"


def _folders(visit: Visit) -> Iterator[Finding]:
    run = visit.storage.run
    for kind, folders in (("folder", run), ("folder/scratch", visit.storage.scratch)):
        for (path, why), ranks in groups({rank: (folder.path, folder.problem) for rank, folder in folders.items()}):
            if why:
                yield _finding(visit, kind, ranks, path=path, why=why)
        facts = {rank: (folder.path, folder.kind, folder.direct) for rank, folder in folders.items()}
        for (path, file_system, refused), ranks in groups(facts):
            if refused:
                yield _finding(visit, "direct", ranks, path=path, system=file_system or "unknown", why=refused)
        short = {rank: (folder.path, folder.free) for rank, folder in folders.items() if folder.free < FREE and not folder.problem}
        for (path, free), ranks in groups(short):
            if folders[ranks[0]].kind or free:  # those that have not looked have neither
                yield _finding(visit, "free", ranks, path=path, found=size(free), want=size(FREE))
    for path, ranks in groups({rank: folder.path for rank, folder in run.items() if folder.seen is False}):
        yield _finding(visit, "shared", ranks, path=path, first=run[0].path if 0 in run else "its folder")


def _rates(visit: Visit) -> Iterator[Finding]:
    for folders in (visit.storage.run, visit.storage.scratch):
        speeds = {rank: folder.at_once or folder.alone for rank, folder in folders.items()}
        for do in ("write", "read"):
            times = {rank: 1 / getattr(speed, do) for rank, speed in speeds.items() if speed and getattr(speed, do)}
            for rank in slow(times, 2.0):
                others = statistics.median(value for other, value in times.items() if other != rank)
                words = {"found": f"{do}s {size(1 / times[rank])}/s", "want": f"{size(1 / others)}/s", "do": do}
                yield _finding(visit, "rate", [rank], path=folders[rank].path, **words)
        problems = {rank: (folders[rank].path, speed.problem) for rank, speed in speeds.items() if speed and speed.problem}
        for (path, why), ranks in groups({rank: one for rank, one in problems.items() if not folders[rank].problem}):
            yield _finding(visit, "rate/none", ranks, path=path, why=why)


def _surroundings(visit: Visit) -> Iterator[Finding]:
    members, world = visit.members, len(visit.members)
    if visit.left[1] is not None and visit.left[1] < LEFT:
        yield _finding(visit, "limit", (), found=duration(visit.left[1]))
    for why, ranks in groups({member.rank: member.compiler for member in members if member.compiler and member.gpu}):
        yield _finding(visit, "compiler", ranks, why=why)
    caches = {(member.rank, name): (name, path) for member in members for name, path in member.caches.items()}
    for name, path in dict.fromkeys(caches.values()):
        ranks = [rank for (rank, _), found in caches.items() if found == (name, path)]
        yield _finding(visit, "caches", ranks, name=name, path=path)
    if members and members[0].files < 8 * world + 1024:
        yield _finding(visit, "files", [0], found=members[0].files, world=world, want=8 * world + 1024)
    tight = {m.rank: m.locked for m in members if (m.rdma or m.gpu) and m.locked is not None and m.locked < 1 << 30}
    for locked, ranks in groups(tight):
        yield _finding(visit, "locked", ranks, found=size(locked))
    for total, ranks in groups({member.rank: member.shm[0] for member in members if member.shm[0] < SHM}):
        yield _finding(visit, "shm", ranks, found=size(total), want=size(SHM))
    for names, ranks in groups({member.rank: member.deaf for member in members if member.deaf}):
        yield _finding(visit, "signals", ranks, names=", ".join(names), verb="are" if len(names) > 1 else "is")
    late = {member.rank: member.imports for member in members if member.imports > IMPORTS}
    if late:
        yield _finding(visit, "imports", sorted(late), found=max(late.values()), want=IMPORTS)


def _app(visit: Visit) -> Iterator[Finding]:
    needs = {member.rank: member.app for member in visit.members if member.app is not None}
    for (app, missing, extras), ranks in groups({rank: (need.name, need.missing, need.extras) for rank, need in needs.items()}):
        if missing:
            yield _finding(visit, "app", ranks, app=app, missing=", ".join(missing), extras=",".join(extras))
    for (app, path), ranks in groups({rank: (need.name, need.data) for rank, need in needs.items() if need.entries is None}):
        yield _finding(visit, "app/data", ranks, app=app, path=path)
    there = groups({rank: need.entries for rank, need in needs.items() if need.entries is not None})
    for found, ranks in there[1:]:
        want, most = there[0][0], where(there[0][1], visit.nodes)
        yield _finding(visit, "app/differs", ranks, path=needs[ranks[0]].data, found=found, want=want, most=most)
