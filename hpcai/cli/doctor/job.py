"""The ranks of a job look at themselves and at each other together; rank 0 judges and tells."""

import json
import secrets
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from hpcai.cli.doctor import network, page, scheduler, storage
from hpcai.cli.doctor.deadline import Deadline
from hpcai.cli.doctor.findings import Visit, judge
from hpcai.cli.doctor.member import Member, look, needs
from hpcai.dist import Place, start, watch
from hpcai.dist.collect import agree
from hpcai.dist.mesh import Axis, Mesh
from hpcai.stop import show_to_reader

T = TypeVar("T")

_RESERVE = 5.0  # seconds of the limit that are kept to tell what was found
_SHARES = {"links": 0.35, "sums": 0.15, "folders": 0.4}  # of the time that is left once the ranks have met
_AT_MOST = {"links": 15.0, "sums": 6.0, "folders": 12.0}


@dataclass(frozen=True)
class Plan:
    """What rank 0 has decided, alike on all ranks. ``nodes`` and ``machines`` are those of every rank, ``on_gpus`` tells whether
    each has one for itself, and ``seconds`` are those of each part."""

    token: str
    nodes: tuple[str, ...]
    machines: tuple[str, ...]
    on_gpus: bool
    seconds: dict[str, float]


def examine(words: Namespace, deadline: Deadline, here: Place, imports: float) -> int:
    """The exit code, the same on all ranks: 1 where something is wrong."""
    visit, began = Visit(), time.monotonic() - imports
    telling = _Telling(words, visit, began)
    deadline.tell, deadline.clean = telling.expired, storage.clean
    watch.say_doing(deadline.doing)
    watch.last_words.append(_clean)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # files of ours are deleted on the way
    deadline.at("meeting")
    try:
        with start({"replicate": -1}, on=torch.device("cpu")) as mesh:
            deadline.world = mesh.world
            _examine(words, deadline, replace(here, rank=mesh.rank, world=mesh.world), mesh, visit, imports)
            deadline.at("telling")
            code = agree(telling.ended() if mesh.is_first else 0, mesh.job)
    finally:
        signal.signal(signal.SIGTERM, before)
        watch.last_words.remove(_clean)
    return code


def _clean(reason: str) -> None:
    storage.clean()


def _examine(words: Namespace, deadline: Deadline, here: Place, mesh: Mesh, visit: Visit, imports: float) -> None:
    job = mesh.job
    deadline.at("looking around")
    app = needs(words.app, words.settings) if words.app else None
    mine = look(here, imports, app)
    deadline.at("waiting for all to look around")
    members = to_first(mine, job)
    if members is not None:
        visit.members = members
        visit.left = scheduler.left()
    plan = agree(make_plan(members, deadline.left()) if members is not None else None, job)
    assert plan is not None
    measured = _network(plan, deadline, mine, mesh)
    if (each := to_first(measured, job)) is not None:
        _join(visit.network, each)
    found = _storage(plan, words.directory, job, deadline)
    if (folders := to_first(found, job)) is not None:
        visit.storage.run = {rank: run for rank, (run, _) in enumerate(folders)}
        visit.storage.scratch = {rank: scratch for rank, (_, scratch) in enumerate(folders) if scratch is not None}


def to_first(value: T, axis: Axis) -> list[T] | None:
    """``value`` of every process of ``axis`` on its first, None on the others: small Python objects of ours."""
    if axis.size == 1:
        return [value]
    found: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    torch_dist.gather_object(value, found, group=axis.group, group_dst=0)
    return found


def make_plan(members: list[Member], left: float) -> Plan:
    """``left``: seconds to the limit."""
    left -= min(_RESERVE, left / 3)
    owners = {(member.machine, member.gpu.uuid or member.gpu.pci) for member in members if member.gpu is not None}
    on_gpus = len(owners) == len(members) and torch_dist.is_nccl_available()
    seconds = {part: min(share * left, _AT_MOST[part]) for part, share in _SHARES.items()}
    nodes, machines = tuple(member.node for member in members), tuple(member.machine for member in members)
    return Plan(secrets.token_hex(6), nodes, machines, on_gpus, seconds)


# ---- the parts that ranks do together


@dataclass(frozen=True)
class _Own:
    """What one rank has measured."""

    backend: str = ""
    clock: tuple[float, float] | None = None
    links: tuple[network.Link, ...] = ()
    played: int = 0
    rounds: int = 0
    sums: dict[int, float] | None = None
    pace: network.Pace | None = None


def _network(plan: Plan, deadline: Deadline, mine: Member, mesh: Mesh) -> _Own:
    where = torch.device("cuda", mine.gpu.index) if plan.on_gpus and mine.gpu else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if mesh.world == 1:
        return _Own(pace=network.pace(where))
    deadline.at("connections")
    group = torch_dist.new_group(backend="nccl") if where.type == "cuda" else mesh.job.group
    wire, rank = network.Wire(where, group, mesh.job.group), mesh.rank
    wire.sum(torch.zeros(1, device=where))  # NCCL wants all ranks to begin together
    deadline.at("clocks")
    hosts = network.firsts(plan.machines)
    clock = network.skew(wire, rank, hosts) if rank in hosts and len(hosts) > 1 else None
    deadline.at("links")
    wire.meet()
    deadline.at("links of this rank")
    links, played = network.links(wire, rank, plan.nodes, plan.seconds["links"])
    rounds = sum(1 for _ in network.schedule(rank, plan.nodes))
    deadline.at("waiting for all to measure links")
    wire.meet()
    deadline.at("pace")
    pace = network.pace(where)
    deadline.at("sums")
    sums = network.sums(wire, plan.seconds["sums"])
    pace = replace(pace, small=network.small_sum(wire))
    return _Own("nccl" if where.type == "cuda" else "gloo", clock, tuple(links), played, rounds, sums, pace)


def _join(into: network.Network, each: list[_Own]) -> None:
    into.backend, into.sums = each[0].backend, each[0].sums or {}
    into.clocks = {rank: own.clock for rank, own in enumerate(each) if own.clock is not None}
    into.links = [link for own in each for link in own.links]
    into.paces = {rank: own.pace for rank, own in enumerate(each) if own.pace is not None}
    into.rounds, into.played = max(own.rounds for own in each), min(own.played for own in each)


def _storage(plan: Plan, folder: Path, job: Axis, deadline: Deadline) -> tuple[storage.Folder, storage.Folder | None]:
    """The folder of the run, and on the first rank of each node the scratch folder."""
    first, rank = network.firsts(plan.nodes), job.rank
    seen = _shared(plan, folder, job, deadline)
    seconds = plan.seconds["folders"] / (8 if len(first) > 1 else 4)  # two folders, writing and reading, alone and at once
    run, scratch = storage.Folder(str(folder), seen=seen), None
    if rank in first:
        run = replace(storage.describe(folder, plan.token, rank), seen=seen)
        scratch = storage.describe(storage.scratch(), plan.token, rank)

    def speed(of: storage.Folder | None, ranks: Sequence[int]) -> storage.Speed | None:
        _meet(job, deadline)
        return storage.speed(of, plan.token, rank, seconds) if of is not None and rank in ranks else None

    both = len(first) > 1
    run = replace(run, alone=speed(run, [0]), at_once=speed(run, first if both else []))
    found = speed(scratch, [0]), speed(scratch, first if both else [])
    _meet(job, deadline)
    return run, None if scratch is None else replace(scratch, alone=found[0], at_once=found[1])


def _shared(plan: Plan, folder: Path, job: Axis, deadline: Deadline) -> bool | None:
    """Whether rank 0's file is seen; None where it could not be written."""
    if job.rank == 0:
        with storage.mark(folder, plan.token) as problem:
            agree(problem, job)
            _meet(job, deadline)
        return None if problem else True
    problem = agree("", job)
    seen = None if problem else storage.sees(folder, plan.token)
    _meet(job, deadline)
    return seen


def _meet(job: Axis, deadline: Deadline) -> None:
    deadline.at("waiting for all at the folders")
    if job.size > 1:
        torch_dist.all_reduce(torch.zeros(1), group=job.group)
    deadline.at("folders")


# ---- telling


class _Telling:
    """What rank 0 says, once."""

    def __init__(self, words: Namespace, visit: Visit, began: float) -> None:
        self.words, self.visit, self.began = words, visit, began

    def expired(self, text: str) -> None:
        """The limit is over: what is known by now."""
        self.visit.silent = text
        self.ended()

    def ended(self) -> int:
        """The exit code."""
        visit = self.visit
        visit.seconds = time.monotonic() - self.began
        findings = judge(visit)
        if visit.members:
            show_to_reader(lambda: print(*map(_printable, page.lines(visit, findings)), sep="\n"))
        written = self._write(self.words.json, lambda: json.dumps(page.as_json(visit, findings), indent=1) + "\n")
        written &= self._write(self.words.html, lambda: page.html(visit, findings))
        return int(not written or any(finding.level == "wrong" for finding in findings))

    def _write(self, path: Path | None, text: Callable[[], str]) -> bool:
        if path is None:
            return True
        try:
            path.write_text(text(), encoding="utf-8")
        except OSError as error:
            print(f"hpcai doctor: {path} cannot be written: {error.strerror}; name another", file=sys.stderr)
            return False
        return True


def _printable(text: str) -> str:
    """Names of folders and variables come from others."""
    encoding = sys.stdout.encoding or "ascii"
    plain = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return plain.encode(encoding, "backslashreplace").decode(encoding)
