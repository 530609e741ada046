"""The ranks of a job examine themselves and each other together; rank 0 judges and reports."""

import secrets
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.cli import findings
from hpcai.cli.doctor import network, page, storage
from hpcai.cli.doctor.deadline import Deadline
from hpcai.cli.doctor.findings import Report, judge
from hpcai.cli.doctor.member import Member, look
from hpcai.cli.findings import printable
from hpcai.dist import RankInfo, start, watchdog
from hpcai.dist.collectives import broadcast_object, all_gather_object, gather_to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.stop import ignore_broken_pipe

_RESERVE = 5.0  # seconds of the limit that are kept to report
_SHARES = {"links": 0.35, "sums": 0.15, "folders": 0.4}  # of the time that is left once the ranks have met
_AT_MOST = {"links": 15.0, "sums": 6.0, "folders": 12.0}


def examine(words: Namespace, deadline: Deadline, here: RankInfo, imports: float) -> int:
    """Return the exit code, the same on all ranks: 1 where something is wrong."""
    report, began = Report(), time.monotonic() - imports

    def expired(text: str) -> None:
        storage.clean()
        if here.rank:
            return
        report.silent, report.seconds = text, time.monotonic() - began
        show(words, report)

    def clean(reason: str) -> None:
        storage.clean()

    deadline.report = expired
    watchdog.set_status(deadline.status)
    watchdog.on_abort.append(clean)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # files of ours are deleted on the way
    deadline.at("meeting")
    try:
        with start({"replicate": -1}, device=torch.device("cpu")) as mesh:
            deadline.world = mesh.world
            _examine(words, deadline, replace(here, rank=mesh.rank, world=mesh.world), mesh, report)
            deadline.at("reporting")
            report.seconds = time.monotonic() - began
            return broadcast_object(show(words, report) if mesh.is_first else 0, mesh.job)
    finally:
        signal.signal(signal.SIGTERM, before)
        watchdog.on_abort.remove(clean)


def _examine(words: Namespace, deadline: Deadline, here: RankInfo, mesh: Mesh, report: Report) -> None:
    """Fill the report of rank 0."""
    job = mesh.job
    deadline.at("looking around")
    mine = look(here)
    deadline.at("waiting for all to look around")
    report.members = all_gather_object(mine, job)
    left = deadline.left()
    token, left = broadcast_object((secrets.token_hex(6), left - min(_RESERVE, left / 3)), job)
    seconds = {part: min(share * left, _AT_MOST[part]) for part, share in _SHARES.items()}
    own = _network(report.members, seconds, deadline, mesh)
    report.network = network.Network(own.backend, sums=own.sums)
    for each in gather_to_first(own, job):
        report.network.paces |= each.paces
        report.network.links += each.links
    for folders in gather_to_first(_storage(report.nodes, token, seconds["folders"], words, job, deadline), job):
        report.storage.run |= folders.run
        report.storage.scratch |= folders.scratch


def have_own_gpus(members: Sequence[Member]) -> bool:
    """Whether each rank has a GPU for itself, so that links are measured between GPUs."""
    owners = {(member.machine, member.gpu.uuid or member.gpu.pci) for member in members if member.gpu is not None}
    return len(owners) == len(members) and torch_dist.is_nccl_available()


def _network(members: Sequence[Member], seconds: dict[str, float], deadline: Deadline, mesh: Mesh) -> network.Network:
    """This rank's part of the network: the links that it measures, its pace."""
    rank, gpu = mesh.rank, members[mesh.rank].gpu
    where = torch.device("cuda", gpu.index) if have_own_gpus(members) and gpu else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if mesh.world == 1:
        return network.Network(paces={0: network.pace(where)})
    deadline.at("connections")
    group = torch_dist.new_group(backend="nccl") if where.type == "cuda" else mesh.job.group
    wire, own = network.Wire(where, group, mesh.job.group), network.Network("nccl" if where.type == "cuda" else "gloo")
    wire.sum(torch.zeros(1, device=where))  # NCCL wants all ranks to begin together
    deadline.at("links of this rank")
    own.links = network.links(wire, rank, [member.node for member in members], seconds["links"])
    deadline.at("waiting for all to measure links")
    wire.most()
    deadline.at("pace")
    own.paces[rank] = network.pace(where)
    deadline.at("sums")
    own.sums = network.sums(wire, seconds["sums"])
    return own


def _storage(
    nodes: Sequence[str], token: str, seconds: float, words: Namespace, job: Axis, deadline: Deadline
) -> storage.Folders:
    """The folders as this rank sees them; the first rank of each node measures those of the run and for scratch."""
    deadline.at("folders")
    folder: Path = words.directory
    if job.rank == 0:
        with storage.mark(folder, token) as problem:
            broadcast_object(problem, job)
            _meet(job, deadline)
        seen = None if problem else True
    else:
        problem = broadcast_object("", job)
        seen = None if problem else storage.sees(folder, token)
        _meet(job, deadline)
    found, rank = storage.Folders({job.rank: storage.Folder(str(folder), seen=seen)}), job.rank
    measures, each = rank in network.firsts(nodes), seconds / 4  # two folders, write and read
    if measures:
        found.run[rank] = replace(storage.measure(folder, token, rank, each), seen=seen)
    _meet(job, deadline)
    if measures:
        found.scratch[rank] = storage.measure(Path(tempfile.gettempdir()), token, rank, each)
    _meet(job, deadline)
    return found


def _meet(job: Axis, deadline: Deadline) -> None:
    deadline.at("waiting for all at the folders")
    if job.size > 1:
        torch_dist.all_reduce(torch.zeros(1), group=job.group)
    deadline.at("folders")


def show(words: Namespace, report: Report) -> int:
    """Print and write the report, and return the exit code."""
    found = judge(report)
    if report.members:
        ignore_broken_pipe(lambda: print(*map(printable, page.lines(report, found)), sep="\n"))
    try:
        if words.json is not None:
            content: dict[str, Any] = {"title": page.title(report), **findings.as_json(found), **asdict(report)}
            findings.write_json(words.json, content)
    except DataError as error:
        print(f"hpcai doctor: {error}", file=sys.stderr)
        return 1
    return int(findings.failed(found))
